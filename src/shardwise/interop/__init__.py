"""Launches and weights of other frameworks, in both directions.

A launch (model, job, layout, machines) is written as the configuration of a framework and read back from one (`launches`). The
weights of a model are written under the tensor names of a framework and read back box by box (`weights`). Each framework has
one set of tables (`frameworks`), which `export`, `read`, `convert` and `train --from` share. What serving engines are started
with is read and written in `serving`. Nothing that is read is executed.

Entry points: `launches.export_launch.export`, `read_launch.parse_launch`, `read_launch.price_launch`,
`frameworks.targets.TARGETS`, `serving.read_serving.read_serving`, `serving.export_serving.export_serving`,
`weights.convert.convert`, `weights.weight_formats.open_stored_model`, `weights.huggingface_folder.load_hf` and `save_hf`.

May import every room up to and with `run`; not `measure`, `book_formulas`, `verify` or `present`. Only `interop.weights`
imports PyTorch: the others work without it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

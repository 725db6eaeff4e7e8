"""Records of training runs as plain data: the folder of a run and its files, and logs of other frameworks.

Entry points: `run_folder.RunFolder` names the files of a run; `step_log`, `step_inspection` and
`run_summary` read and write them; `logs` reads logs of torchtitan, Megatron-LM, NeMo, nanotron and MaxText, TensorBoard and
W&B. Imports `values` and `sharding`, and no framework.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

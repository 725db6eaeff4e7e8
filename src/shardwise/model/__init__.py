"""Models as programs, and what a training job chooses.

A catalogue entry or a Hugging Face `config.json` becomes an `Architecture`. A model consists of units (embedding, block,
head): parts that are derived and priced once, however often the model has them. Each unit becomes a program of operations on
named tensors, from which the backward program, the optimizer's program and the counts of parameters and FLOPs follow. A job
chooses the batch, the optimizer and the recompute policy.

Entry points: `load.load_model`, the unit programs of `decoder`, `backward.transpose_program`,
`optimizer_program.build_optimizer_program`, `parameters_and_flops.num_params`, `job.Job`. May import: values, sharding.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

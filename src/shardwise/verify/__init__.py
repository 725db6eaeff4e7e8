"""Independent judges of derived programs and of the engine.

`product_runs` writes a sharded product as JAX or PyTorch source and runs it, `xla_compile` compares it with what XLA
makes of the same product, `training.plan_verification` trains small models on a plan's axes and compares them with one
process; `hlo_layout` reads how arrays of HLO lie in memory; `numpy_collectives` and `systolic_simulation` are NumPy
oracles. The room may import `run` and all rooms below it, torch and jax.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

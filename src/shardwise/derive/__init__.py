"""Derivation of a sharded program from a sharding scheme and a program.

`tensor_specs` says where each tensor rests and where it is used. `sharded_program` follows the operations in order and
inserts the collectives between the two; `ring_attention_and_matmul` makes one node, a `Ring`, of collectives and the
computations beside which they run block by block. A unit of a model (embedding, block or head) has three sharded programs:
forward, backward (with its recomputed slice) and update.

Entry points: `sharded_unit.derived_unit`, `sharded_program.shard_program`, `expression.shard_expression`. May import: values,
sharding, model, layout.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Sharded state of a model on one rank: parameters, gradients and optimizer state in flat arrays (data parallelism,
ZeRO), and every collective that the engine issues.

Entry points: `world.World`, `collectives.MeshCollectives`, `flat_parameters.build_flat_groups`,
`gradient_reducer.GradientReducer`, `sharded_optimizer.ShardedOptimizer`. May import `run.kernels`, `run.transport`,
`run.faults` and the rooms below `run`.
"""

"""The PyTorch engine: the instruction list of a unit becomes kernel calls, and these a model that runs forward and
backward.

`model_builder` makes a `model` from an instance; `unit_passes` has the passes of a unit as calls on numbered slots,
which `kernel_calls`, `fused_calls`, `collective_calls`, `rings` and `expert_parallel` make and `calls`
changes. Kernels come from `run.kernels`; collectives go through the protocol of `rank_coordinates`."""

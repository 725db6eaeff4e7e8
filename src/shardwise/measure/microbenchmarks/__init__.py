"""Micro-benchmarks of this machine: matrix products, memory, attention, collectives. `calibrate --bench` reads their lines.

`benchmark_lines` says what is measured and keeps the results; `timing` runs and times it. `machine_benchmark.measure_machine`
times the operations of training a small model in several processes at once: `benchmark_layers` has the sizes,
`engine_operations` the operations, `machine_fit` the constants and the cluster that they give. Only `timing`,
`engine_operations` and `machine_benchmark` import torch. The package may import `run` and all rooms below it.
"""

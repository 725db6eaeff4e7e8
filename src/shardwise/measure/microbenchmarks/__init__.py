"""Micro-benchmarks of this machine: matrix products, memory, attention, collectives; `calibrate --bench` reads them.

`benchmark_lines` lists what is measured and stores the results; `timing` runs and times it. The entry point
`machine_benchmark.measure_machine` times the operations of training a small model in several processes at once:
`benchmark_layers` has the sizes, `engine_operations` the operations, `machine_fit` the resulting constants and cluster.
Only `timing`, `engine_operations` and `machine_benchmark` import torch. May import `run`, `search` and all rooms below.
"""

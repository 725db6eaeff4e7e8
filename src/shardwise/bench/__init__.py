"""Micro-benchmarks of the machine at hand: products, memory, attention, collectives, each a line that `calibrate --bench` reads.

`shapes` says what is measured and needs no torch; `clock` times a kernel; `kernels` and `collectives` run them; `record` keeps
what was measured; `processes` starts several that exchange collectives. `machine` measures all at once and writes a cluster file.
"""

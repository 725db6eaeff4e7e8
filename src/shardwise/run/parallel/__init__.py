"""Data parallelism and ZeRO: flat groups of parameters, gathered and reduced, and the update of each process's part."""

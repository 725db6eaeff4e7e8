"""Transports: how collectives reach the other ranks of a run.

`interface` has the protocols. `process_groups` implements them with torch.distributed, `rank_threads` with threads of
one process, and `lone_rank` with nothing: one rank of a world issues its collectives and no data arrives. `current`
finds the transport of the calling rank. May import `run.faults`, `run.dispatch_mode` and `sharding`.
"""

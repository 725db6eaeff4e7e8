"""NCCL's words for what a collective reaches: its size, its algorithm bandwidth and its bus bandwidth.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from typing import Literal, get_args

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


def nccl_bytes(operation: Operation, num_bytes: float, num_devices: int) -> float:
    """NCCL's size S in bytes of a collective on an array of `num_bytes`.

    The whole array; of an AllToAll what one device sends, `num_bytes / N`.
    """
    return num_bytes / num_devices if operation == "all_to_all" else num_bytes


def busbw_factor(operation: Operation, num_devices: int) -> float:
    """What algbw is multiplied by to be compared with a link: 2(N-1)/N, (N-1)/N or 1.

    Differs: for reduction in the switch nccl-tests also names (N-1)/(N+1); here busbw is the same function of the time
    whatever the algorithm, so that algorithms can be compared, and may exceed the link's bandwidth when the switch reduces.
    """
    if operation in ("broadcast", "send_recv"):
        return 1.0
    return (num_devices - 1) / num_devices * (2.0 if operation == "all_reduce" else 1.0)


def algbw(operation: Operation, num_bytes: float, num_devices: int, time_s: float) -> float:
    """Algorithm bandwidth in bytes/s: S / t."""
    return nccl_bytes(operation, num_bytes, num_devices) / time_s


def busbw(operation: Operation, num_bytes: float, num_devices: int, time_s: float) -> float:
    """Bus bandwidth in bytes/s: algbw times `busbw_factor`, what a link of the ring would carry."""
    return algbw(operation, num_bytes, num_devices, time_s) * busbw_factor(operation, num_devices)


def received_bytes(operation: Operation, num_bytes: float, num_devices: int) -> float:
    """Bytes that one device receives, whatever lies between: S (N-1)/N, twice that for an AllReduce, S for a copy.

    Reduction in the switch and trees move other amounts. Source: S1, appendix on ring all-reduce.
    """
    return nccl_bytes(operation, num_bytes, num_devices) * busbw_factor(operation, num_devices)

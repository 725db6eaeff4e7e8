"""Which device each rank trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import InputError
from shardwise.train.flags import Device
from shardwise.train.peer import Peer


def visible_gpus(asked: Device) -> tuple[str, ...]:
    """The ids of the GPUs that this process sees, none where they are not wanted."""
    if asked == "cpu" or not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count()))


def device_of(asked: Device, peers: Sequence[Peer], here: Peer) -> torch.device:
    """The device of `here`, one of the ranks `peers`: with `auto` a GPU where every rank can have one of its own, else the CPU.

    On a host whose ranks all see its GPUs each has that of its local rank. Where a launcher lets each rank see GPUs of its own
    (CUDA_VISIBLE_DEVICES), each has the first that it sees. Raises `InputError` where `cuda` is asked for and some have none.
    """
    if asked == "cpu":
        return torch.device("cpu")
    hosts: dict[str, list[Peer]] = {}
    for peer in peers:
        hosts.setdefault(peer.host, []).append(peer)
    numbers = {host: _numbers(ranks) for host, ranks in hosts.items()}
    lacking = [host for host, found in numbers.items() if found is None]
    if lacking and asked == "cuda":
        ranks = hosts[lacking[0]]
        seen = {gpu for peer in ranks for gpu in peer.gpus}
        raise InputError(
            f"--device: found {len(ranks)} ranks on {lacking[0]}, which see {len(seen)} GPUs; a GPU for each rank is required, "
            "or --device cpu"
        )
    found = numbers[here.host]
    return torch.device("cpu") if lacking or found is None else torch.device("cuda", found[here.rank])


def _numbers(ranks: Sequence[Peer]) -> dict[int, int] | None:
    """Of each rank of a host the number of its GPU among those that it sees; None where two would share one."""
    for numbers in ({peer.rank: peer.local_rank for peer in ranks}, {peer.rank: 0 for peer in ranks}):
        if all(numbers[peer.rank] < len(peer.gpus) for peer in ranks):
            chosen = {peer.gpus[numbers[peer.rank]] for peer in ranks}
            if len(chosen) == len(ranks):
                return numbers
    return None

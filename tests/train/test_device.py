"""Which device each rank gets: a GPU of its own on every host, or the CPU for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.run.faults.rank_status import Peer
from shardwise.run.parallel.world import choose_device, visible_gpus
from shardwise.values.errors import InputError

ALL = tuple("abcdefgh")


def peers(*gpus: tuple[str, ...], hosts: int = 1) -> list[Peer]:
    """Ranks that see these GPUs, as many on each host."""
    per_host = len(gpus) // hosts
    return [
        Peer(rank, f"host{rank // per_host}", 100 + rank, rank % per_host, visible) for rank, visible in enumerate(gpus)
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (peers(*[ALL] * 8), [f"cuda:{rank}" for rank in range(8)]),  # torchrun: all see all
        (peers(*[ALL] * 3), ["cuda:0", "cuda:1", "cuda:2"]),
        (peers(*[(gpu,) for gpu in ALL]), ["cuda:0"] * 8),  # a launcher gives each its own
        (peers(("a", "b"), ("c", "d")), ["cuda:0", "cuda:1"]),  # two each: those of their numbers differ too
        (peers(("a",), ("b",), ("a",), ("b",), hosts=2), ["cuda:0"] * 4),
        (peers(*[("a", "b")] * 4, hosts=2), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (peers(("b", "a"), ("a", "b")), ["cuda:0"] * 2),  # each in an order of its own
        (peers(("a",), ("a",)), None),  # both see the same one
        (peers(("a", "b"), ("a", "b"), ("a", "b")), None),
        (peers((), ()), None),
        (peers(("a",), ("b",), (), (), hosts=2), None),  # NCCL on one host and gloo on the other would not meet
        (peers(ALL), ["cuda:0"]),
        (peers(()), None),
    ],
)
def test_each_rank_gets_a_gpu_or_all_run_on_the_cpu(ranks: list[Peer], expected: list[str] | None) -> None:
    devices = [str(choose_device("auto", ranks, peer)) for peer in ranks]
    assert devices == (expected or ["cpu"] * len(ranks))
    assert {str(choose_device("cpu", ranks, peer)) for peer in ranks} == {"cpu"}
    if expected:
        assert [str(choose_device("cuda", ranks, peer)) for peer in ranks] == expected
    else:
        with pytest.raises(InputError, match=r"--device: found \d ranks on host\d, which see \d GPUs; a GPU for each"):
            choose_device("cuda", ranks, ranks[0])


def test_visible_gpus_are_identified_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, number: int) -> None:
            self.uuid = f"GPU-{number}"

    fakes: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": Properties,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert visible_gpus("auto") == visible_gpus("cuda") == ("GPU-0", "GPU-1")
    assert visible_gpus("cpu") == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert visible_gpus("cuda") == ()

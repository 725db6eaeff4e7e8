"""The ranks of a run find each other, or the missing ones are named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from shardwise.run.faults.rank_status import LAUNCHER, LOST_KEY, PREFIX, LostRankError, Peer
from shardwise.run.faults.rendezvous import LEFT_KEY, Rendezvous, join_rendezvous

FOREVER = timedelta(seconds=600)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a launcher, and its environment of a world of three."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv(LAUNCHER, raising=False)
    return server


@contextmanager
def rank(number: int) -> Iterator[Peer]:
    """The environment of one of three ranks, as far as it is read."""
    before = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "3"}
    try:
        yield Peer.of_this_process(gpus=[f"GPU-{number}"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def test_all_ranks_know_each_other(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    meetings: dict[int, Rendezvous] = {}

    def rendezvous(url: str, timeout: timedelta) -> Iterator[tuple[TCPStore, int, int]]:
        yield TCPStore("localhost", store.port, is_master=False), int(threading.current_thread().name), 3

    def join() -> None:
        number = int(threading.current_thread().name)
        meetings[number] = join_rendezvous(Peer(number, "node", 100 + number, number, (f"GPU-{number}",)), FOREVER)

    monkeypatch.setattr("shardwise.run.faults.rendezvous.rendezvous", rendezvous)
    threads = [threading.Thread(target=join, name=str(number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(meetings) == [0, 1, 2]
    assert len({meeting.peers for meeting in meetings.values()}) == 1
    assert [peer.gpus for peer in meetings[0].peers] == [("GPU-0",), ("GPU-1",), ("GPU-2",)]
    keys = meetings[0].keys()
    assert [keys.get(f"beat/{number}")[:2] for number in range(3)] == [b"[0"] * 3
    assert keys.get("silent") == b"[]"


def test_entries_of_an_earlier_start_are_ignored(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agents keep their store when they start the ranks again, and there may be fewer."""

    def meetings(pids: Sequence[int]) -> dict[int, Rendezvous]:
        def rendezvous(url: str, timeout: timedelta) -> Iterator[tuple[TCPStore, int, int]]:
            yield TCPStore("localhost", store.port, is_master=False), int(threading.current_thread().name), len(pids)

        def join() -> None:
            number = int(threading.current_thread().name)
            time.sleep(0.2 * number)  # the first one finds the lines of those that have ended
            joined[number] = join_rendezvous(Peer(number, "node", pids[number], number), FOREVER)

        monkeypatch.setattr("shardwise.run.faults.rendezvous.rendezvous", rendezvous)
        joined: dict[int, Rendezvous] = {}
        threads = [threading.Thread(target=join, name=str(number)) for number in range(len(pids))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return joined

    for pids in ([100, 101, 102], [200, 201, 202], [300, 301]):
        joined = meetings(pids)
        assert [[peer.pid for peer in joined[number].peers] for number in range(len(pids))] == [pids] * len(pids)
        assert not joined[0].keys().check([LEFT_KEY])
        joined[0].keys().set(LEFT_KEY, "1")
        assert joined[1].keys().get(LEFT_KEY) == b"1"


@pytest.mark.parametrize("launcher", [True, False])
def test_ranks_that_do_not_come_are_named(store: TCPStore, launcher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if launcher:
        monkeypatch.setenv(LAUNCHER, "1")
    with rank(1) as peer, pytest.raises((LostRankError, SystemExit)) as ended:
        join_rendezvous(peer, timedelta(seconds=0.2))
    text = f"rank 1: ranks 0, 2 of 3 have not come to localhost:{store.port} in 0:00:00.200000"
    assert PrefixStore(PREFIX, store).get(LOST_KEY) == text.encode()
    assert str(ended.value) == ("4" if launcher else text)
    with rank(2) as peer, pytest.raises(SystemExit):  # says nothing: one has
        join_rendezvous(peer, timedelta(seconds=0.2))

"""The ranks of a run meet: each publishes who it is, and none continues before all have arrived."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from torch.distributed.rendezvous import rendezvous

from shardwise.run.faults.rank_status import (
    LOST_KEY,
    PREFIX,
    STEPS_KEY,
    HeartbeatMessage,
    LostRankError,
    Peer,
    activity,
    has_our_launcher,
    wait_for_ranks,
)
from shardwise.run.faults.torch_stores import PrefixStore, Store

MISSING_KEY, LEFT_KEY = "silent", "left"  # keys: missing ranks; exit code of the first rank that ended
POLL_S = 0.05  # seconds between two checks


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """All ranks, and the store that they share; `rank` is this one's number."""

    rank: int
    peers: tuple[Peer, ...]
    store: Store

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def store_owner(self) -> Peer | None:
        """The rank whose process has the store; None if the launcher has it (torch.distributed.rendezvous)."""
        return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else self.peers[0]

    def record_first_step(self) -> None:
        """Record that the steps begin: from now on a rank that is asked to stop has a checkpoint to write."""
        PrefixStore(PREFIX, self.store).set(STEPS_KEY, "1")

    def keys(self) -> Store:
        """Return a clone of the store under a prefix of ours, for use by another thread."""
        cloned: Store = PrefixStore(PREFIX, self.store).clone()  # type: ignore[attr-defined]
        return cloned


def join_rendezvous(local_peer: Peer, timeout: timedelta) -> Rendezvous:
    """Meet the other ranks, as the environment of torchrun describes them. Raises `LostRankError` that names the ranks
    that have not come before the timeout."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with wait_for_ranks(f"the other ranks at {address}"):
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        keys = PrefixStore(PREFIX, store)
        deadline = time.monotonic() + timeout.total_seconds()
        peers = _collect_peers(store, json.dumps(asdict(local_peer)), rank, size, deadline)
        if peers is None:
            missing = [peer_rank for peer_rank in range(size) if not keys.check([f"peer/{peer_rank}"])]
            absent = f"ranks {', '.join(map(str, missing))}" if missing else "some"
            exit_as_lost(keys, rank, f"{absent} of {size} have not come to {address} in {timeout}")
    return Rendezvous(rank, tuple(map(_parse_peer, json.loads(peers))), _store_of_this_start(store, peers))


def _collect_peers(store: Store, local_line: str, rank: int, size: int, deadline: float) -> str | None:
    """Return the lines of all ranks as a JSON list, once each rank has read its own in it; None after the deadline.

    The store may have lines and lists of an earlier start: torchrun's agents keep one store for all rounds of a
    rendezvous (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py of PyTorch 2.13, `next_rendezvous`). So the
    first rank writes the list again whenever another line has arrived, and a list counts once all ranks in it have
    answered.
    """
    keys = PrefixStore(PREFIX, store)
    keys.set(f"peer/{rank}", local_line)
    # Counts the lines of all starts: it grows with every line written, even if its text is the same.
    keys.add("arrivals", 1)
    names, num_seen, answered_list, start_store = [f"peer/{peer_rank}" for peer_rank in range(size)], 0, "", keys
    while time.monotonic() < deadline:
        if rank == 0 and (arrivals := keys.add("arrivals", 0)) > num_seen and keys.check(names):
            num_seen = arrivals
            keys.set("peers", json.dumps([text.decode() for text in keys.multi_get(names)]))
        peer_list = keys.get("peers").decode() if keys.check(["peers"]) else "[]"
        if peer_list != answered_list and local_line in json.loads(peer_list)[rank : rank + 1]:
            answered_list = peer_list
            start_store = PrefixStore(PREFIX, _store_of_this_start(store, peer_list))
            start_store.set(heartbeat_key(rank), HeartbeatMessage.of(0, activity(), time.monotonic()).dump())
            start_store.set(MISSING_KEY, "[]")
            start_store.add("met", 1)
        # `met` lies under a hash of the list, so that answers to an earlier list do not count.
        if peer_list == answered_list and start_store.add("met", 0) == size:
            return peer_list
        time.sleep(POLL_S)
    return None


def _store_of_this_start(store: Store, peers: str) -> Store:
    """Return the store without the keys of earlier starts; our launcher has a store for each start."""
    return store if has_our_launcher() else PrefixStore(hashlib.sha256(peers.encode()).hexdigest()[:16], store)


def exit_as_lost(keys: Store, rank: int, problem: str) -> NoReturn:
    """End a rank that lost others: the first such rank raises the problem, all others raise `SystemExit`. Under our
    launcher none raises: it reports, once it knows how each of them has ended."""
    text = f"rank {rank}: {problem}"
    if keys.compare_set(LOST_KEY, "", text) == text.encode() and not has_our_launcher():
        raise LostRankError(text)
    raise SystemExit(LostRankError.exit_code)


def heartbeat_key(rank: int) -> str:
    """Return the key of a rank's newest heartbeat."""
    return f"beat/{rank}"


def _parse_peer(text: str) -> Peer:
    payload = json.loads(text)
    return Peer(**{**payload, "gpus": tuple(payload["gpus"])})

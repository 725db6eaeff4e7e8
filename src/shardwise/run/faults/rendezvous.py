"""The ranks of a run meet: each says where it is, and none continues before all have arrived."""

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
    Beat,
    LostRankError,
    Peer,
    activity,
    launched_here,
    waits_for,
)
from shardwise.run.faults.torch_stores import PrefixStore, Store

SILENT, LEFT = "silent", "left"  # keys: ranks that give no sign of life; who left first, and how
LOOK_S = 0.05  # between two looks whether all have come


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks, and the store that they share; this one's number is `rank`."""

    rank: int
    peers: tuple[Peer, ...]
    store: Store

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def store_is_of(self) -> Peer | None:
        """The rank whose process has the store; None where the launcher has it (torch.distributed.rendezvous)."""
        return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else self.peers[0]

    def keys(self) -> Store:
        """The store, for another thread than the one that has it, under a prefix of ours."""
        cloned: Store = PrefixStore(PREFIX, self.store).clone()  # type: ignore[attr-defined]
        return cloned


def meet(here: Peer, timeout: timedelta) -> Meeting:
    """Meet the other ranks that the environment of torchrun names.

    Raises `LostRankError` that names the ranks that have not come by then.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with waits_for(f"the other ranks at {address}"):
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        keys = PrefixStore(PREFIX, store)
        until = time.monotonic() + timeout.total_seconds()
        peers = _gathered(store, json.dumps(asdict(here)), rank, size, until)
        if peers is None:
            missing = [other for other in range(size) if not keys.check([f"peer/{other}"])]
            who = f"ranks {', '.join(map(str, missing))}" if missing else "some"
            end_lost(keys, rank, f"{who} of {size} have not come to {address} in {timeout}")
    return Meeting(rank, tuple(map(_peer, json.loads(peers))), _of_start(store, peers))


def _gathered(store: Store, line: str, rank: int, size: int, until: float) -> str | None:
    """The lines of all ranks as a JSON list, once each of them has read its own in it; None where that lasts too long.

    The store may have lines and lists of an earlier start: torchrun's agents keep one store for all rounds of a rendezvous
    (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py of PyTorch 2.13, `next_rendezvous`). So the first rank writes the
    list again when another line has come, and a list counts once all in it have answered.
    """
    keys = PrefixStore(PREFIX, store)
    keys.set(f"peer/{rank}", line)
    keys.add("arrivals", 1)
    names, num_seen, answered, ours = [f"peer/{other}" for other in range(size)], 0, "", keys
    while time.monotonic() < until:
        if rank == 0 and (arrivals := keys.add("arrivals", 0)) > num_seen and keys.check(names):
            num_seen = arrivals
            keys.set("peers", json.dumps([text.decode() for text in keys.multi_get(names)]))
        found = keys.get("peers").decode() if keys.check(["peers"]) else "[]"
        if found != answered and line in json.loads(found)[rank : rank + 1]:
            answered = found
            ours = PrefixStore(PREFIX, _of_start(store, found))
            ours.set(beat_key(rank), Beat.of(0, activity(), time.monotonic()).dump())
            ours.set(SILENT, "[]")
            ours.add("met", 1)
        if found == answered and ours.add("met", 0) == size:
            return found
        time.sleep(LOOK_S)
    return None


def _of_start(store: Store, peers: str) -> Store:
    """The store without what ranks of an earlier start have left in it; our launcher has a store for each start."""
    return store if launched_here() else PrefixStore(hashlib.sha256(peers.encode()).hexdigest()[:16], store)


def end_lost(keys: Store, rank: int, problem: str) -> NoReturn:
    """End a rank that is lost: of all that are, the first one raises what is wrong, and others `SystemExit`.

    Where our launcher has started the ranks, it reports, once it knows how each of them has ended.
    """
    text = f"rank {rank}: {problem}"
    if keys.compare_set(LOST_KEY, "", text) == text.encode() and not launched_here():
        raise LostRankError(text)
    raise SystemExit(LostRankError.exit_code)


def beat_key(rank: int) -> str:
    """Where a rank's last sign of life is."""
    return f"beat/{rank}"


def _peer(text: str) -> Peer:
    payload = json.loads(text)
    return Peer(**{**payload, "gpus": tuple(payload["gpus"])})

"""The ranks of a run meet: each says where it is, and none continues before all have arrived."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from torch.distributed.rendezvous import rendezvous

from shardwise.train.parent import launched_here
from shardwise.train.peer import Peer
from shardwise.train.silence import Beat
from shardwise.train.store import PrefixStore, Store
from shardwise.train.waits import LOST_KEY, PREFIX, LostRankError, activity, waits_for

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
        keys.set(f"peer/{rank}", json.dumps(asdict(here)))
        keys.set(beat_key(rank), Beat.of(0, activity(), time.monotonic()).dump())
        keys.set(SILENT, "[]")
        keys.add("met", 1)
        until = time.monotonic() + timeout.total_seconds()
        while keys.add("met", 0) < size:
            if time.monotonic() > until:
                missing = [other for other in range(size) if not keys.check([f"peer/{other}"])]
                end_lost(
                    keys,
                    rank,
                    f"ranks {', '.join(map(str, missing))} of {size} have not come to {address} in {timeout}",
                )
            time.sleep(LOOK_S)
        found = keys.multi_get([f"peer/{other}" for other in range(size)])
    return Meeting(rank, tuple(map(_peer, found)), store)


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


def _peer(text: bytes) -> Peer:
    payload = json.loads(text)
    return Peer(**{**payload, "gpus": tuple(payload["gpus"])})

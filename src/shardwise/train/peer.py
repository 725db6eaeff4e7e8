"""A rank of a run, as others know it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank: its host and process, its number among those of the host, and the GPUs that it sees, by their ids."""

    rank: int
    host: str
    pid: int
    local_rank: int = 0
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, gpus: Sequence[str] = ()) -> Peer:
        """This process, by the environment of torchrun where there is one."""
        rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        return cls(rank, socket.gethostname(), os.getpid(), local, tuple(gpus))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

"""A rank ends with the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "SHARDWISE_LAUNCHER"  # in the environment of ranks that our launcher starts: its process id
RESTARTED = "SHARDWISE_RESTARTED"  # likewise: why it has started them again
PR_SET_PDEATHSIG = 1  # Linux, prctl(2); linux/prctl.h


def end_with_parent() -> None:
    """Have the system send this process SIGTERM when the process that started it ends (Linux): the run then ends in order.

    Elsewhere the rank's heartbeat sees that it has another parent (`train.heartbeat`).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        raise SystemExit(128 + signal.SIGTERM)  # it ended before this


def launched_here() -> bool:
    """Whether the process that started this one is our launcher, which reports how each rank has ended."""
    return LAUNCHER in os.environ


def restarted_after() -> str:
    """Why the ranks were started again, as far as whoever started them says; "" the first time."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torch.distributed.elastic, of each worker
    return os.environ.get(RESTARTED) or ("" if attempt == "0" else f"restart {attempt} of torchrun")

"""The transport of the rank that runs."""

from __future__ import annotations

import threading

from shardwise.run.transport import process_groups
from shardwise.run.transport.interface import Transport
from shardwise.run.transport.lone_rank import LoneRank


class _ThreadTransport(threading.local):
    """The transport of the calling thread, where that thread is a rank."""

    transport: Transport | None = None


_rank_thread = _ThreadTransport()


def set_thread_transport(transport: Transport | None) -> None:
    """Make the calling thread a rank with this transport; None: no rank any more."""
    _rank_thread.transport = transport


def current_transport() -> Transport:
    """Return the transport of this rank: its thread's, that of torch.distributed where it is initialised, or one process's."""
    if _rank_thread.transport is not None:
        return _rank_thread.transport
    return process_groups.ProcessTransport() if process_groups.is_initialized() else LoneRank()

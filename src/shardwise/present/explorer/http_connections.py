"""HTTP connections that are closed unless the head of a request arrives in time.

uvicorn limits how long a connection idles after a response, but not how long the line and headers of a request take: a client
that sends nothing, or a byte now and then, would hold its connection for ever (OWASP, Denial of Service Cheat Sheet: slow HTTP).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_S = 5.0  # until the head of a request is complete; a browser sends it in one piece
MAX_HALF_OPEN = 256  # connections that wait for a head; above it the oldest are closed (processes may open 1,024 files)


class HeadTimeoutProtocol(H11Protocol):
    """Connection with a deadline for the head of each request. `half_open` has those that wait for one, the oldest first."""

    def __init__(self, *arguments: Any, half_open: dict[HeadTimeoutProtocol, None], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.half_open = half_open
        self.head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Read data; the deadline of a head that is incomplete stays where it is."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(MAX_HEAD_S, self.transport.close)
            self.half_open[self] = None
            if len(self.half_open) > MAX_HALF_OPEN:
                next(iter(self.half_open)).transport.abort()

    def _stop_watching(self) -> None:
        self.half_open.pop(self, None)
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

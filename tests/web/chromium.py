"""A real Chromium, and an explorer that it opens."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from shardwise.present.explorer.background_search import Searches
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import Known
from shardwise.present.explorer.request_guard import allowed_hosts
from shardwise.present.explorer.web_server import application, bound

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)
WHY = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"

WAIT_MS = 120_000.0  # for what follows a search, on a machine that is busy with other tests; what is there already takes no time
expect.set_options(timeout=WAIT_MS)


class Seen(NamedTuple):
    """What a page did while it was looked at: requests, those that ended, messages of its console and errors."""

    requests: list[str]
    ended: list[Request]
    said: list[str]

    @property
    def transferred(self) -> int:
        """Bytes of all bodies, as they travelled."""
        return sum(request.sizes()["responseBodySize"] for request in self.ended)


@contextmanager
def browser() -> Iterator[Browser]:
    """The browser; it runs as any user does, in a container too."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def explorer(known: Known | None = None) -> Iterator[str]:
    """The address of an explorer on loopback, with its searches."""
    address, searches = bound("127.0.0.1", 0), Searches()
    app = application(Explorer(known or Known(), searches), allowed_hosts("127.0.0.1", address.socket.getsockname()[1]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]}, daemon=True)
    thread.start()
    try:
        yield address.url
    finally:
        server.should_exit = True
        thread.join(10)
        searches.close()


def watched(page: Page) -> Seen:
    """Note what a page does from now on."""
    seen = Seen([], [], [])
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfinished", lambda request: seen.ended.append(request))
    page.on("console", lambda message: seen.said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.said.append(str(error)))
    return seen

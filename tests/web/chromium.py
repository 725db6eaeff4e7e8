"""A real Chromium, and an explorer that it opens."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from shardwise.present.explorer.answer_workers import AnswerWorkers
from shardwise.present.explorer.background_search import Searches
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.web_server import bind_address, server_config

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = next((path for name in NAMES if (path := shutil.which(name))), None)
WHY = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"

WAIT_MS = 120_000.0  # for what follows a search, on a machine that is busy with other tests; what is there already takes no time
expect.set_options(timeout=WAIT_MS)


class Activity(NamedTuple):
    """What a page did while it was watched: requests, those that ended, messages of its console and errors."""

    requests: list[str]
    ended: list[Request]
    messages: list[str]

    @property
    def transferred(self) -> int:
        """Bytes of all bodies, as they travelled."""
        return sum(request.sizes()["responseBodySize"] for request in self.ended)


@contextmanager
def browser() -> Iterator[Browser]:
    """The browser; it runs as any user does, in a container too."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def explorer(resolver: NameResolver | None = None, searches: Searches | None = None) -> Iterator[str]:
    """The address of an explorer on loopback, with its searches."""
    address, searches = bind_address("127.0.0.1", 0), searches or Searches()
    workers = AnswerWorkers(resolver or NameResolver(), searches, num_workers=1)
    server = uvicorn.Server(server_config(workers, address))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]}, daemon=True)
    thread.start()
    try:
        yield address.url
    finally:
        server.should_exit = True
        thread.join(10)
        workers.close()
        searches.close()


def watch_page(page: Page) -> Activity:
    """Note what a page does from now on."""
    activity = Activity([], [], [])
    page.on("request", lambda request: activity.requests.append(request.url))
    page.on("requestfinished", lambda request: activity.ended.append(request))
    page.on(
        "console",
        lambda message: activity.messages.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: activity.messages.append(str(error)))
    return activity

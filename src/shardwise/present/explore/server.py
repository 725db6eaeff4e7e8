"""The explorer's routes: the page, its modules, and one address for each question."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shardwise.present.explore.explorer import QUESTIONS, Explorer
from shardwise.present.explore.guard import Guard, refusal
from shardwise.present.explore.pages import Page, pages
from shardwise.values import ShardwiseError, format_problems
from shardwise.values.errors import SCHEMA

COMPRESSION = 4  # of gzip: a third of the time of 9, 5% more bytes
MOST_WAITING = 32  # questions at a time; a page asks a handful


class Server:
    """One explorer behind its routes. Questions are answered one after the other, beside the server's own loop."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer, self.waiting = explorer, 0
        self.one = anyio.CapacityLimiter(1)

    async def page(self, request: Request) -> Response:
        """The page, a module or a style: only what the package has."""
        found: Page | None = pages().get(request.url.path)
        if found is None:
            return refusal(404, f"path: found {request.url.path[:80]!r}; the page is at /")
        return Response(found.text, media_type=found.kind)

    async def question(self, request: Request) -> Response:
        """The answer to a question about the state that the query is."""
        name, query = request.path_params["question"], request.url.query
        if name not in QUESTIONS:
            return refusal(404, f"question: found {name[:60]!r}; one of {', '.join(QUESTIONS)} is required")
        if self.waiting >= MOST_WAITING:
            return refusal(429, "busy: too many questions at a time; ask again")
        self.waiting += 1
        try:
            text, status = await anyio.to_thread.run_sync(partial(self.answer, name, query), limiter=self.one)
        finally:
            self.waiting -= 1
        return Response(text, status_code=status, media_type="application/json")

    def answer(self, name: str, query: str) -> tuple[str, int]:
        """The text of an answer and its status: 422 for a state that cannot be, which says why."""
        try:
            return dumped(self.explorer.answer(name, query)), 200
        except ShardwiseError as error:
            return format_problems(error.problems, error.exit_code, as_json=True), 422
        except (ArithmeticError, MemoryError, RecursionError):  # sizes of which no number comes
            return format_problems(
                ["query: sizes whose costs are not finite; smaller ones are required"], 2, as_json=True
            ), 422


def dumped(payload: Any) -> str:
    """A payload as JSON; a number that is none is an error, as JSON has no word for it."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":"))


def application(explorer: Explorer, hosts: Collection[str], token: str | None = None) -> ASGIApp:
    """The explorer as an ASGI application for requests to some hosts."""
    server = Server(explorer)
    routes = [Route("/ask/{question}", server.question), Route("/{path:path}", server.page)]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=512, compresslevel=COMPRESSION)])
    return Guard(app, hosts=hosts, token=token)


__all__ = ["SCHEMA", "Server", "application", "dumped"]

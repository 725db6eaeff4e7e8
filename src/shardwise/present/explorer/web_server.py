"""Web server of the explorer: sockets, routes and responses."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shardwise.present.explorer.explorer import QUESTIONS, Explorer
from shardwise.present.explorer.page_files import Page, pages
from shardwise.present.explorer.page_wording import page_wording
from shardwise.present.explorer.request_guard import Guard, allowed_hosts, is_loopback, refusal
from shardwise.values import InputError, ShardwiseError, format_problems

__all__ = [
    "LOG",
    "MAX_CONNECTIONS",
    "MAX_HEAD",
    "Address",
    "Server",
    "application",
    "bind_address",
    "dump_payload",
    "serve",
]


COMPRESSION = 4  # of gzip: a third of the time of 9, 5% more bytes
MAX_WAITING = 32  # questions at a time; a page asks a handful


class Server:
    """Routes of an explorer. Questions are answered one after the other, in a thread next to the event loop."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer, self.waiting = explorer, 0
        self.limiter = anyio.CapacityLimiter(1)

    async def page(self, request: Request) -> Response:
        """Return the page, a module or a style of the package."""
        file: Page | None = pages().get(request.url.path)
        if file is None:
            return refusal(404, f"path: found {request.url.path[:80]!r}; the page is at /")
        return Response(file.text, media_type=file.kind)

    async def question(self, request: Request) -> Response:
        """Return the answer to a question about the state in the query."""
        name, query = request.path_params["question"], request.url.query
        if name not in QUESTIONS:
            return refusal(404, f"question: found {name[:60]!r}; one of {', '.join(QUESTIONS)} is required")
        if self.waiting >= MAX_WAITING:
            return refusal(429, "busy: too many questions at a time; ask again")
        self.waiting += 1
        try:
            text, status = await anyio.to_thread.run_sync(partial(self.answer, name, query), limiter=self.limiter)
        finally:
            self.waiting -= 1
        return Response(text, status_code=status, media_type="application/json")

    def answer(self, name: str, query: str) -> tuple[str, int]:
        """Return the text of an answer and its status: 422 with the problems for an invalid state."""
        try:
            return dump_payload(self.explorer.answer(name, query)), 200
        except ShardwiseError as error:
            return format_problems(
                [page_wording(problem) for problem in error.problems], error.exit_code, as_json=True
            ), 422
        except (ArithmeticError, MemoryError, RecursionError):  # sizes that overflow
            return format_problems(
                ["query: sizes whose costs are not finite; smaller ones are required"], 2, as_json=True
            ), 422


def dump_payload(payload: Any) -> str:
    """Return a payload as JSON. Raises `ValueError` for a number that is not finite, which JSON lacks."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":"))


def application(explorer: Explorer, hosts: Collection[str], token: str | None = None) -> ASGIApp:
    """Return the explorer as an ASGI application for requests to some hosts."""
    server = Server(explorer)
    routes = [Route("/ask/{question}", server.question), Route("/{path:path}", server.page)]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=512, compresslevel=COMPRESSION)])
    return Guard(app, hosts=hosts, token=token)


LOG = "critical"  # requests are not logged
MAX_CONNECTIONS = 64
MAX_HEAD = 32_768  # bytes of a request's line and headers


class Address(NamedTuple):
    """Address of an explorer: its socket, its URL, the token that it requires (None: on loopback), and its Host headers."""

    socket: socket.socket
    url: str
    token: str | None
    hosts: tuple[str, ...]


def bind_address(host: str, port: int) -> Address:
    """Bind a socket to a host and port (0: any that is free). Raises `InputError` if it is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm; otherwise an answer of two writes waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--port: cannot listen on {host}:{port}: {reason}; choose another, or --port 0 for any"
        ) from None
    bound_port = listener.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    url_host = f"[{host}]" if ":" in host else host
    url = f"http://{url_host}:{bound_port}/" + (f"?token={token}" if token else "")
    return Address(listener, url, token, allowed_hosts(host, bound_port))


def serve(explorer: Explorer, address: Address, query: str = "") -> None:
    """Answer until Ctrl-C; `query` is the state that is opened first."""
    app = application(explorer, address.hosts, address.token)
    config = uvicorn.Config(
        app, log_level=LOG, access_log=False, server_header=False, lifespan="off", limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD, timeout_graceful_shutdown=1,
    )  # fmt: skip
    threading.Thread(target=_warm_up, args=(explorer, query), daemon=True).start()
    uvicorn.Server(config).run(sockets=[address.socket])


def _warm_up(explorer: Explorer, query: str) -> None:
    """Answer the first question, and begin its search, before the page asks: deriving a block takes 0.1 s."""
    with suppress(ShardwiseError):
        explorer.answer("overview", query)

"""Web server of the explorer: sockets, routes and responses."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from functools import partial
from typing import NamedTuple, cast

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shardwise.present.explorer.answer_workers import Answers
from shardwise.present.explorer.explorer import QUESTIONS
from shardwise.present.explorer.http_connections import HeadTimeoutProtocol
from shardwise.present.explorer.page_files import Page, pages
from shardwise.present.explorer.request_guard import WILDCARDS, Guard, Hosts, allowed_hosts, is_loopback, refusal
from shardwise.values import InputError

COMPRESSION = 4  # of gzip: a third of the time of 9, 5% more bytes
MAX_WAITING = 32  # questions at a time; a page asks a handful


class Server:
    """Routes of an explorer. Threads next to the event loop wait for answers."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.waiting = answers, 0
        self.limiter = anyio.CapacityLimiter(MAX_WAITING)

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
            text, status = await anyio.to_thread.run_sync(
                partial(self.answers.answer, name, query), limiter=self.limiter
            )
        finally:
            self.waiting -= 1
        return Response(text, status_code=status, media_type="application/json")


def application(answers: Answers, hosts: Hosts, token: str | None = None) -> ASGIApp:
    """Return the explorer as an ASGI application for requests to some hosts."""
    server = Server(answers)
    routes = [Route("/ask/{question}", server.question), Route("/{path:path}", server.page)]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=512, compresslevel=COMPRESSION)])
    return Guard(app, hosts=hosts, token=token)


LOG = "critical"  # requests are not logged
BACKLOG = 128  # connections that wait to be accepted
MAX_HEAD = 32_768  # bytes of a request's line and headers


class Address(NamedTuple):
    """Address of an explorer: its socket, its URL, the token that it requires (None: on loopback), and its Host headers."""

    socket: socket.socket
    url: str
    token: str | None
    hosts: Hosts


def bind_address(host: str, port: int) -> Address:
    """Listen on a host and port (0: any that is free). Raises `InputError` if it is not available.

    Clients may connect from now on, and wait for `serve`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm; otherwise an answer of two writes waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--port: cannot listen on {host}:{port}: {reason}; choose another, or --port 0 for any"
        ) from None
    bound_port = listener.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    reachable = outgoing_address(family) if host in WILDCARDS else host
    url_host = f"[{reachable}]" if ":" in reachable else reachable
    url = f"http://{url_host}:{bound_port}/" + (f"?token={token}" if token else "")
    return Address(listener, url, token, allowed_hosts(host, bound_port))


def outgoing_address(family: socket.AddressFamily) -> str:
    """Return the address of this machine that others reach it by; its name without a route to them."""
    # Connecting a UDP socket sends nothing; it chooses the route to an address that documentation reserves (RFC 5737, RFC 3849).
    elsewhere = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address


def server_config(answers: Answers, address: Address) -> uvicorn.Config:
    """Return the configuration of a server that answers at an address."""
    protocol = cast("type[asyncio.Protocol]", partial(HeadTimeoutProtocol, half_open={}))  # is only called
    return uvicorn.Config(
        application(answers, address.hosts, address.token), log_level=LOG, access_log=False, server_header=False, lifespan="off",
        http=protocol, ws="none", h11_max_incomplete_event_size=MAX_HEAD, timeout_graceful_shutdown=1,
    )  # fmt: skip


def serve(answers: Answers, address: Address, query: str = "") -> None:
    """Answer until Ctrl-C; `query` is the state that is opened first."""
    # The first question begins its search before the page asks, and derives a block, which takes 0.1 s.
    threading.Thread(target=answers.answer, args=("overview", query), daemon=True).start()
    uvicorn.Server(server_config(answers, address)).run(sockets=[address.socket])

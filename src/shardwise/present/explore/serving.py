"""The explorer on a port: its socket, its address, the server that runs until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
import threading
from typing import NamedTuple

import uvicorn

from shardwise.present.explore.explorer import Explorer
from shardwise.present.explore.guard import allowed_hosts, is_loopback
from shardwise.present.explore.server import application
from shardwise.values import InputError

LOG = "critical"  # a request leaves no line
MOST_CONNECTIONS = 64
MOST_HEAD = 32_768  # bytes of a request's line and headers


class Address(NamedTuple):
    """Where an explorer is: its socket, its URL, and the token that it asks for (None: on loopback)."""

    socket: socket.socket
    url: str
    token: str | None
    hosts: tuple[str, ...]


def bound(host: str, port: int) -> Address:
    """A socket on a host and port (0: any that is free). Raises `InputError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm; otherwise an answer of two writes waits 40 ms for an ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"--port: cannot listen on {host}:{port}: {why}; choose another, or --port 0 for any"
        ) from None
    number = found.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    shown = f"[{host}]" if ":" in host else host
    return Address(
        found, f"http://{shown}:{number}/" + (f"?token={token}" if token else ""), token, allowed_hosts(host, number)
    )


def serve(explorer: Explorer, address: Address) -> None:
    """Answer until Ctrl-C."""
    app = application(explorer, address.hosts, address.token)
    config = uvicorn.Config(
        app, log_level=LOG, access_log=False, server_header=False, lifespan="off", limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HEAD, timeout_graceful_shutdown=1,
    )  # fmt: skip
    threading.Thread(target=_warmed, args=(explorer,), daemon=True).start()
    uvicorn.Server(config).run(sockets=[address.socket])


def _warmed(explorer: Explorer) -> None:
    """Have the first answer ready before it is asked for: the derivation of a model's block takes a tenth of a second."""
    from shardwise.values import ShardwiseError

    try:
        explorer.answer("overview", "")
    except ShardwiseError:
        return

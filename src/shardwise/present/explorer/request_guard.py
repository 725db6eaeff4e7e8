"""Checks of a request: this host and origin, a GET, short, with the token if one is required.

A page of another origin, and a name that an attacker points at this machine (DNS rebinding), get nothing: the Host header must
be an address that the explorer was started on. Source of the rules: OWASP, Cross-Site Request Forgery Prevention; RFC 9110, 15.5.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.present.explorer.state import MOST_CHARACTERS
from shardwise.values.errors import SCHEMA

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WILDCARDS = ("0.0.0.0", "::")  # addresses of all interfaces
COOKIE = "shardwise-token"
MOST_HEADERS = 16_384  # bytes
METHODS = ("GET", "HEAD")
# Scripts, styles and data of this origin alone; no frames, no forms, no plug-ins. Source: W3C, Content Security Policy Level 3.
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY", "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin", "cross-origin-opener-policy": "same-origin",
}  # fmt: skip


class Hosts(NamedTuple):
    """Host headers that are answered: addresses with their port; with `names`, any IP address and these names at any port.

    A name that points at this machine by DNS rebinding is neither.
    """

    addresses: Collection[str]
    names: Collection[str] | None = None

    def allows(self, host: str) -> bool:
        """Return if a Host header is answered."""
        if host in self.addresses:
            return True
        if self.names is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or _is_ip_address(name)

    def __str__(self) -> str:
        names = () if self.names is None else ("an IP address of this machine", *sorted(self.names))
        return ", ".join([*sorted(self.addresses), *names])


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def refusal(status: int, problem: str) -> Response:
    """Return the response to a request that is not answered."""
    return JSONResponse({"schema": SCHEMA, "error": {"problems": [problem], "exit_code": 2}}, status_code=status)


class Guard:
    """ASGI middleware that refuses requests of other hosts and origins, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, *, hosts: Hosts, token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                security = [(name.encode(), value.encode()) for name, value in SECURITY.items()]
                message["headers"] = [*message["headers"], *security]
            await send(message)

        response = self.refuse(scope)
        await (response or self.app)(scope, receive, send_secured)

    def refuse(self, scope: Scope) -> Response | None:
        """Return the response to a request that is refused; None for a request that is answered."""
        headers, query = Headers(scope=scope), scope["query_string"]
        host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site", "none")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            return refusal(431, f"headers: at most {MOST_HEADERS:,} bytes are read")
        if len(headers.getlist("host")) != 1 or not self.hosts.allows(host):
            return refusal(421, f"Host: found {host[:80]!r}; one of {self.hosts} is required")
        if origin is not None and origin != f"http://{host}":
            return refusal(403, f"Origin: found {origin[:80]!r}; this page's own is required")
        if site not in ("same-origin", "none") and scope["path"] != "/":
            return refusal(403, f"Sec-Fetch-Site: found {site[:80]!r}; same-origin is required")
        if scope["method"] not in METHODS:
            return refusal(405, f"method: found {scope['method'][:20]!r}; GET is required")
        if len(query) > MOST_CHARACTERS:
            return refusal(414, f"query: found {len(query):,} characters; at most {MOST_CHARACTERS:,} are required")
        return self._refuse_without_token(scope, headers) if self.token else None

    def _refuse_without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """Refuse a request without the token, which is in the page's first address and then in a cookie."""
        assert self.token is not None
        if _same(_cookie(headers.get("cookie", "")), self.token):
            return None
        query = scope["query_string"].decode("latin-1")
        offered, state = _split_token(query)
        if scope["path"] == "/" and _same(offered, self.token):
            redirect = RedirectResponse(f"/?{state}" if state else "/", status_code=303)
            redirect.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return redirect
        return refusal(401, "token: missing or wrong; open the address that `shardwise explore` printed")


def _cookie(text: str) -> str:
    try:
        morsel = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _split_token(query: str) -> tuple[str, str]:
    """Return the token of a query, and the query without it."""
    pairs = query.split("&")
    tokens = [value for pair in pairs for key, value in parse_qsl(pair) if key == "token"]
    return (tokens[0] if len(tokens) == 1 else ""), "&".join(
        pair for pair in pairs if pair.partition("=")[0] != "token"
    )


def _same(offered: str, token: str) -> bool:
    return secrets.compare_digest(offered.encode("utf-8", "replace"), token.encode())


def allowed_hosts(host: str, port: int) -> Hosts:
    """Return the Host headers of an address: the names of this machine's loopback, or the address itself.

    On all interfaces, where a port may be forwarded too, they are any IP address and the names of this machine.
    """
    if host in WILDCARDS:
        return Hosts((), {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()})
    names = LOOPBACK if is_loopback(host) else (f"[{host}]" if ":" in host else host.lower(),)
    return Hosts(tuple(f"{name}:{port}" for name in names))


def is_loopback(host: str) -> bool:
    """Return if only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")

"""Checks of a request: this host and origin, a GET, short, with the token if one is required.

A page of another origin, and a name that an attacker points at this machine (DNS rebinding), get nothing: the Host header must
be an address that the explorer was started on. Source of the rules: OWASP, Cross-Site Request Forgery Prevention; RFC 9110, 15.5.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.present.explorer.state import MOST_CHARACTERS
from shardwise.values.errors import SCHEMA

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
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


def refusal(status: int, problem: str) -> Response:
    """Return the response to a request that is not answered."""
    return JSONResponse({"schema": SCHEMA, "error": {"problems": [problem], "exit_code": 2}}, status_code=status)


class Guard:
    """ASGI middleware that refuses requests of other hosts and origins, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, frozenset(hosts), token

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
        if len(headers.getlist("host")) != 1 or host not in self.hosts:
            return refusal(421, f"Host: found {host[:80]!r}; one of {', '.join(sorted(self.hosts))} is required")
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
        if scope["path"] == "/" and _same(query.partition("token=")[2], self.token):
            redirect = RedirectResponse("/", status_code=303)
            redirect.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return redirect
        return refusal(401, "token: missing or wrong; open the address that `shardwise explore` printed")


def _cookie(text: str) -> str:
    try:
        morsel = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _same(offered: str, token: str) -> bool:
    return secrets.compare_digest(offered.encode("utf-8", "replace"), token.encode())


def allowed_hosts(host: str, port: int) -> tuple[str, ...]:
    """Return the Host headers of an address: the names of this machine's loopback, or the address itself."""
    names = LOOPBACK if is_loopback(host) else (f"[{host}]" if ":" in host else host,)
    return tuple(f"{name}:{port}" for name in names)


def is_loopback(host: str) -> bool:
    """Return if only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")

"""Who may ask the dashboard: the checks before every answer, and the headers of it.

A page of somebody else must not read runs through this browser. So the Host must be a name of this machine (another
site can let its own name point here: DNS rebinding), and an Origin, where a browser sends one, must be the same. When
others can reach the port, every request for data needs the token, in the Authorization header or in the cookie that
`POST /login` sets.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

COOKIE = "trainshed_dash"
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_OPEN_PATHS = ("/", "/login", "/favicon.ico")
_OPEN_PREFIX = "/static/"
"""The page itself holds no data."""

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class AccessRules:
    """What is checked of every request."""

    host: str = "127.0.0.1"
    token: str | None = None
    names: Collection[str] = field(default_factory=frozenset)
    """More names under which the page may be asked for."""

    def refusal(self, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None where it is welcome."""
        host = _host_name(headers.get("host", ""))
        if not self._is_ours(host):
            return 421, "this name is not one of the dashboard's: --allow-host NAME adds one"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return 403, "asked for by another site"
        if headers.get("sec-fetch-site") == "cross-site" and path not in _OPEN_PATHS:
            return 403, "asked for by another site"
        if self.token is None or path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return None
        return None if self.admits(_shown_token(headers)) else (401, "the token is missing or wrong")

    def admits(self, token: str) -> bool:
        """Whether a token is the right one."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def _is_ours(self, host: str) -> bool:
        if host in _LOOPBACK_NAMES or host in self.names or is_loopback(host):
            return True
        if is_loopback(self.host):
            return False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return host in (self.host, socket.gethostname().lower(), socket.getfqdn().lower())
        return True  # an address cannot be made to point elsewhere


def _host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _shown_token(headers: Mapping[str, str]) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


class AccessChecks:
    """Puts the rules before an ASGI app, and the headers on everything it answers."""

    def __init__(self, app: _App, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: _Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1")
            if key == "host" and key in headers:
                headers[key] = ""  # two of them: whoever stands between us may have believed the other
            else:
                headers[key] = value.decode("latin-1")
        refusal = self._rules.refusal(scope["path"], headers)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, reason = refusal
        body = reason.encode() + b"\n"
        content = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": content})
        await send_with_headers({"type": "http.response.body", "body": body})

"""The web server of `trainshed dash`: it reads, and nothing that is asked of it changes anything."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.observe.dash.access import COOKIE, AccessChecks, AccessRules, is_loopback
from trainshed.observe.dash.page_files import page_file, static_files
from trainshed.observe.dash.views import Dashboard, to_json
from trainshed.signals import StopSignals

_TOKEN_BYTES = 24
_LONGEST_LOGIN = 1024
_CLOSING_SECONDS = 2
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class DashSettings:
    """Where the page is served, and for whom."""

    host: str = "127.0.0.1"
    port: int = 6007
    token: str | None = None
    names: Collection[str] = field(default_factory=frozenset)

    def with_token(self) -> DashSettings:
        """Return these settings with a token where others can reach the port."""
        if self.token is not None and not self.token.isascii():
            raise InputError("a token is sent in a header, and has only ASCII characters", where="--token")
        if self.token is not None and not self.token.strip():
            raise InputError("the token is empty", where="--token", hint="write one, or leave it out")
        if self.token is not None or is_loopback(self.host):
            return self
        return DashSettings(self.host, self.port, secrets.token_urlsafe(_TOKEN_BYTES), self.names)


def build_app(dashboard: Dashboard, rules: AccessRules) -> ASGIApp:
    """Return the web application."""
    files = static_files()

    def index(request: Request) -> Response:
        return Response(page_file("index.html"), media_type="text/html")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        content, kind = files[name]
        return Response(content, headers={"content-type": kind, "cache-control": "no-cache"})

    def icon(request: Request) -> Response:
        content, kind = files["icon.svg"]
        return Response(content, headers={"content-type": kind})

    def runs(request: Request) -> Response:
        return _answer(dashboard.runs)

    def view(request: Request) -> Response:
        key, name = request.path_params["key"], request.path_params["view"]
        return _answer(lambda: dashboard.view(key, name, request.query_params))

    async def login(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_LOGIN:
                return Response("too long\n", 413, media_type="text/plain")
        token = bytes(body).decode(errors="replace").strip()
        if not rules.admits(token):
            return Response("the token is wrong\n", 401, media_type="text/plain")
        answer = Response(status_code=204)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
        return answer

    routes = [
        Route("/", index),
        Route("/favicon.ico", icon),
        Route("/login", login, methods=["POST"]),
        Route("/static/{name}", static),
        Route("/api/runs", runs),
        Route("/api/runs/{key}/{view}", view),
    ]
    compressed = Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)
    return AccessChecks(Starlette(routes=routes, middleware=[compressed]), rules)


def _answer(make: Callable[[], dict]) -> Response:
    headers = {"cache-control": "no-store"}
    try:
        return Response(to_json(make()), media_type="application/json", headers=headers)
    except TrainshedError as error:
        status = 404 if isinstance(error, NotFound) else 400 if isinstance(error, InputError) else 500
        body = {"what": error.what, "where": error.where, "hint": error.hint}
        return Response(to_json(body), status, media_type="application/json", headers=headers)


@contextmanager
def running_server(dashboard: Dashboard, settings: DashSettings) -> Iterator[str]:
    """Serve inside this context, in a thread; yields the address. `settings` has its token already."""
    rules = AccessRules(settings.host, settings.token, frozenset(name.lower() for name in settings.names))
    with _listen(settings.host, settings.port) as listener:
        config = uvicorn.Config(
            build_app(dashboard, rules),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # addresses and headers of requests are nobody's business
            server_header=False,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="dash", daemon=True)
        thread.start()
        try:
            yield _address(listener, settings.host)
        finally:
            server.should_exit = True
            thread.join()


def serve_dash(dashboard: Dashboard, settings: DashSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address."""
    stopped = threading.Event()
    with (
        StopSignals((signal.SIGTERM, signal.SIGINT), on_signal=lambda number: stopped.set()),
        running_server(dashboard, settings) as address,
    ):
        on_ready(address)
        # Waiting without a limit would hold a signal back until something else wakes this thread.
        while not stopped.wait(_LOOK_SECONDS):
            pass


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is not a port", hint="write a number from 0 (any that is free) to 65535")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = "write another --port, or --port 0 for any that is free" if port else None
        raise InputError(f"cannot listen at {host}, port {port}: {why}", where="--host", hint=hint) from None


def _address(listener: socket.socket, host: str) -> str:
    """The address that a browser here can open."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"

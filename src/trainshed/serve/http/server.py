"""The life of the server: bind, load, serve, drain.

uvicorn runs in a thread of its own. So the port answers probes while the main thread loads, signals are ours (uvicorn
takes them in the main thread only), and an error of loading ends the process with its own exit code.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from trainshed.errors import InputError, TrainshedError
from trainshed.reporting import Reporter
from trainshed.serve.http.app import build_app
from trainshed.serve.http.server_state import LoadProgress, ServedModel, ServerState
from trainshed.signals import StopSignals, exit_code_of

LINGER_SECONDS = 5.0
"""How long new requests are still accepted after SIGTERM: a load balancer notices late that a server is not ready."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s of usual load balancers, so that they and not we close idle connections."""
_CLOSING_SECONDS = 5
_UNLOADING_SECONDS = 5.0
"""How long loading may take to end after a signal; running reads cannot be interrupted."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ServerSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    grace_seconds: float = 30.0
    """How long running requests may still take after a signal."""
    max_requests: int = 256
    """Running and waiting together; more are refused with 429."""
    api_key: str | None = None


def serve_http(load: Callable[[Reporter], ServedModel], settings: ServerSettings, reporter: Reporter) -> int:
    """Serve what `load` returns until SIGTERM or SIGINT; the port is bound before it is called."""
    state = ServerState(max_requests=settings.max_requests)
    app = build_app(state, api_key=settings.api_key, reporter=reporter)
    with (
        _ServerSignals() as signals,
        bind_socket(settings.host, settings.port) as listener,
        run_in_thread(app, listener) as outputs,
    ):
        where = listener_url(listener)
        reporter.note(f"listening at {where}; /ready says when the model is loaded")
        try:
            with signals.raised():
                model = load(LoadProgress(reporter, state))
        except _StoppedBySignal:
            reporter.note("stopped while the model was being loaded")
            return 0
        try:
            state.loaded(model)
            reporter.note(f"serving {', '.join(model.all_names)} at {where}")
            number = signals.wait(outputs.is_alive)
            _drain(state, settings.grace_seconds, number, reporter)
        finally:
            model.generator.close()
    return 0


def _drain(state: ServerState, grace_seconds: float, number: int, reporter: Reporter) -> None:
    """Stop being ready, finish running requests, cancel those that take longer than the grace."""
    state.draining = True
    ends = time.monotonic() + grace_seconds
    reporter.note(f"{signal.Signals(number).name}: finishing running answers, for at most {grace_seconds:g} s")
    if number == signal.SIGTERM:
        # There is no load balancer before a server in a terminal: Ctrl-C need not wait.
        time.sleep(min(LINGER_SECONDS, grace_seconds / 2))
    state.closed = True
    while state.busy and time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
    if state.busy:
        reporter.warn(f"answers were cut short: they took longer than {grace_seconds:g} s after the signal")
        state.cancel_all()


@contextmanager
def bind_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket; connections wait until the server runs."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is not a port", hint="write a number from 0 (any that is free) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        hint = "write another --port, or --port 0 for any that is free" if port else None
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InputError(f"cannot listen at {host}, port {port}: {why}", hint=hint) from None
    with listener:
        yield listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def run_in_thread(app: ASGIApp, listener: socket.socket) -> Iterator[threading.Thread]:
    """Run the app inside this context, in the thread that is yielded."""
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()


class _StoppedBySignal(BaseException):
    """A signal came while the model was being loaded; no `except Exception` on the way may swallow it."""


class _ServerSignals(StopSignals):
    """SIGTERM and SIGINT of a server: the first asks to stop, the second ends the process at once."""

    def __init__(self) -> None:
        super().__init__((signal.SIGTERM, signal.SIGINT), on_signal=self._stop)
        # Unlike an Event, a SimpleQueue may be filled by a signal handler that interrupts its own reader.
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_stopping = self._raise_on_signal = False
        self._kill_timer = threading.Timer(_UNLOADING_SECONDS, os._exit, (0,))
        self._kill_timer.daemon = True

    def __exit__(self, *_: object) -> None:
        """Put the earlier handlers back; nobody is killed any more."""
        self._kill_timer.cancel()
        super().__exit__()

    def wait(self, is_well: Callable[[], bool]) -> int:
        """Wait for the first signal and return its number, while `is_well`."""
        while is_well():
            with suppress(queue.Empty):
                return self._queue.get(timeout=1)
        raise TrainshedError("the HTTP server ended by itself", hint="this is a fault of Trainshed: please report it")

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise `_StoppedBySignal` on a signal inside this context."""
        self._raise_on_signal = True
        try:
            if self.first is not None:
                raise _StoppedBySignal
            yield
        finally:
            self._raise_on_signal = False

    def _stop(self, number: int) -> None:
        if self._is_stopping:
            sys.stderr.flush()
            os._exit(exit_code_of(number))
        self._is_stopping = True
        self._queue.put(number)
        if self._raise_on_signal:
            self._kill_timer.start()
            raise _StoppedBySignal

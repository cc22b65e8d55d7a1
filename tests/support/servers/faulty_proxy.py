"""An HTTP proxy before a real object store that fails some of its requests, and goes away now and then.

Faults are drawn from a seed. Each is one that stores and networks have: an answer 503, a connection that is closed
before the request is passed on, an answer that is lost after the store has done what was asked, an answer that is cut.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from urllib.parse import urlsplit

FAULTS = ("503", "not passed on", "answer lost", "answer cut")


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to `target`; `rate` of them fail."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: str, *, rate: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        parts = urlsplit(target)
        self.target = (parts.hostname or "", parts.port or 80)
        self.rate = rate
        self.is_away = threading.Event()
        """While it is set, nobody answers."""
        self.requests = 0
        self.faults: Counter[str] = Counter()
        self._random, self._lock = Random(seed), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self) -> str | None:
        """What happens to the next request."""
        with self._lock:
            self.requests += 1
            if self.is_away.is_set():
                fault: str | None = "away"
            else:
                fault = self._random.choice(FAULTS) if self._random.random() < self.rate else None
            if fault is not None:
                self.faults[fault] += 1
            return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed leaves its connection: that is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass_on(self) -> None:
        body = self._body()
        fault = self.server.next_fault()
        if fault in ("away", "not passed on"):
            return self._drop()
        if fault == "503":
            text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            head = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(text)
            self.wfile.write(head + (b"" if self.command == "HEAD" else text))
            return None
        connection = http.client.HTTPConnection(*self.server.target, timeout=60)
        try:
            # The signature of a request covers its headers: they are passed on as they came.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            if fault == "answer lost":
                answer.read()
                return self._drop()
            return self._answer(answer, cut=fault == "answer cut")
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length")
        return self.rfile.read(int(length)) if length else None

    def _answer(self, answer: http.client.HTTPResponse, *, cut: bool) -> None:
        content = answer.read()
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        lines += [
            f"{name}: {value}"
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "content-length")
        ]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        lines += [f"Content-Length: {length}"] if length is not None else []
        self.wfile.write("\r\n".join([*lines, "", ""]).encode())
        if cut:
            self.wfile.write(content[: len(content) // 2])
            return self._drop()
        self.wfile.write(content)
        return None

    def _drop(self) -> None:
        """Close the connection where it is."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `faults`, not at lines."""


@contextmanager
def faulty(target: str, *, rate: float = 0.05, seed: int = 0) -> Iterator[FaultyProxy]:
    """Start a proxy before a store."""
    proxy = FaultyProxy(target, rate=rate, seed=seed)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()

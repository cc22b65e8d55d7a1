"""A TCP proxy that cuts connections in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class CuttingProxy:
    """Forwards to `target`; the next `cuts` connections end after `after` bytes of answers."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self.after = 0
        self.done = 0

    def cut(self, connections: int, after: int) -> None:
        with self._lock:
            self.cuts, self.after = connections, after

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        with source, sink, suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                passed += len(data)
                if answers and self._cut_now(passed):
                    for end in (source, sink):  # closing alone would wait for the other direction's recv
                        end.shutdown(socket.SHUT_RDWR)
                    return
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _cut_now(self, passed: int) -> bool:
        with self._lock:
            if self.cuts and passed >= self.after:
                self.cuts -= 1
                self.done += 1
                return True
            return False


@contextmanager
def cutting(target: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()

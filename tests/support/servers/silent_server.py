"""Servers on this machine that keep their clients waiting, each in its own way."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_HEADERS = (
    'ETag: "1"\r\nLast-Modified: Sun, 01 Nov 2026 00:00:00 GMT\r\n'
    "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
_RANGE = re.compile(rb"range: bytes=(\d+)-", re.IGNORECASE)


@contextmanager
def serving(body: bytes = b"", *, sent: int | None = None, pause_seconds: float = 0.0) -> Iterator[str]:
    """Accept every connection. Without a body, never answer; of a body send the first `sent` bytes and then nothing,
    or all of it, byte after byte with a pause between them.
    """
    over = threading.Event()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        stack.callback(over.set)

        def answer(client: socket.socket) -> None:
            with client, suppress(OSError):
                request = client.recv(65536)
                if not body:
                    over.wait()
                start = int(found[1]) if (found := _RANGE.search(request)) else 0
                status = "HTTP/1.1 200 OK\r\n"
                if found:
                    last = len(body) - 1
                    status = f"HTTP/1.1 206 Partial\r\nContent-Range: bytes {start}-{last}/{len(body)}\r\n"
                client.sendall((status + _HEADERS.format(length=len(body) - start)).encode())
                if request.startswith(b"HEAD"):
                    return
                for number in range(start, len(body) if sent is None else sent):
                    client.sendall(body[number : number + 1])
                    over.wait(pause_seconds)
                if sent is not None:
                    over.wait()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=answer, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        # A thread that waits in `accept` is woken by this, not by closing.
        stack.callback(_shut_down, listener)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _shut_down(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def dropping() -> Iterator[str]:
    """Drop whoever connects, as a firewall does: the queue of this listener is full, and nobody takes from it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"

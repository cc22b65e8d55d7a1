"""A webhook on this machine that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

PATH = "/services/planted0secret"


@dataclass
class Webhook:
    """Where it is, and the messages it got."""

    address: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200

    @property
    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.messages]


@contextmanager
def webhook_server() -> Iterator[Webhook]:
    """Serve until the block ends."""
    webhook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == PATH
            assert self.headers["Content-Type"] == "application/json"
            webhook.messages.append(orjson.loads(body))
            self.send_response(webhook.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        webhook.address = f"http://127.0.0.1:{server.server_address[1]}{PATH}"
        yield webhook
        server.shutdown()
        thread.join()

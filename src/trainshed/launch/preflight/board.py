"""A board that the nodes of a job write on and read from while nothing else connects them yet.

Node 0 keeps it in memory and serves it by TCP, one line of JSON for a request and one for its answer; nothing that is
received is ever executed. A request names the run and its attempt: another job's node that has the wrong port is
turned away. Reading waits for what is not there yet, so nobody polls.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from trainshed.errors import TrainshedError

_MOST_BYTES = 16 * 2**20
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 30.0  # for a line to come back, besides what was asked to be waited for


class BoardServer:
    """The board on node 0; a context manager."""

    def __init__(self, port: int, token: str) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()
        board = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _ANSWER_SECONDS

            def handle(self) -> None:
                try:
                    request = orjson.loads(self.rfile.readline(_MOST_BYTES))
                    answer = board._answer(request, self.client_address[0], token)
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, TimeoutError):
                    return  # not one of ours
                self.wfile.write(orjson.dumps(answer) + b"\n")

        self._server = _Server(port, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.socket.getsockname()[1]

    def __enter__(self) -> BoardServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: dict[str, Any], peer: str, token: str) -> dict[str, Any]:
        if request["token"] != token:
            return {"error": "this board belongs to another run or attempt"}
        if "put" in request:
            with self._changed:
                self._values[request["put"]] = request["value"]
                self._changed.notify_all()
        keys = request.get("get", [])
        deadline = time.monotonic() + float(request.get("seconds", 0))
        with self._changed:
            while not all(key in self._values for key in keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            found = {key: self._values[key] for key in keys if key in self._values}
        return {"found": found, "time": time.time(), "peer": peer.removeprefix("::ffff:")}


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), handler)

    def server_bind(self) -> None:
        """Take IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A node that went away in the middle is missed where it is waited for."""


@dataclass(frozen=True)
class Board:
    """A node's view of the board; `address` is node 0's."""

    address: tuple[str, int]
    token: str
    connect_seconds: float = 120.0

    def put(self, key: str, value: Any) -> None:
        """Write."""
        self._ask({"put": key, "value": value})

    def get(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Wait until all keys are there, at most so long; return those that are."""
        return self._ask({"get": list(keys), "seconds": seconds}, seconds)["found"]

    def own_address(self) -> str:
        """Return the address that node 0 sees this node under."""
        return self._ask({})["peer"]

    def clock_offset_seconds(self) -> float:
        """Return how far node 0's clock is ahead of ours, from the quickest of a few answers."""
        tries = []
        for _ in range(3):
            before = time.time()
            theirs = self._ask({})["time"]
            after = time.time()
            tries.append((after - before, theirs - (before + after) / 2))
        return min(tries)[1]

    def _ask(self, request: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        line = orjson.dumps({"token": self.token, **request}) + b"\n"
        deadline = time.monotonic() + self.connect_seconds
        while True:
            try:
                # Names of pods are known a little after the pods are.
                with socket.create_connection(self.address, timeout=_ANSWER_SECONDS) as connection:
                    connection.settimeout(seconds + _ANSWER_SECONDS)
                    connection.sendall(line)
                    answer = connection.makefile("rb").readline(_MOST_BYTES)
                if answer:
                    break
            except OSError:
                pass
            if time.monotonic() > deadline:
                host, port = self.address
                raise TrainshedError(
                    f"node 0 did not answer for {self.connect_seconds:.0f} s",
                    where=f"{host}:{port}",
                    hint="is it running, and may nodes reach each other on this port?",
                )
            time.sleep(_RETRY_SECONDS)
        found = orjson.loads(answer)
        if "error" in found:
            raise TrainshedError(found["error"], where=f"{self.address[0]}:{self.address[1]}")
        return found

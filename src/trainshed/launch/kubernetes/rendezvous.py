"""How the pods of a PyTorchJob agree on a name for their start: node 0 gives out its own.

The operator of PyTorchJobs restarts containers one by one and tells them nothing about it. Node 0 makes a name of
its pod's uid and of how often its container has started, and sends it to every other pod. A pod that restarts
alone waits until node 0 restarts too.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from trainshed.errors import TrainshedError

RENDEZVOUS_SECONDS = 900.0
_CONNECT_SECONDS = 2.0
_MAX_MESSAGE_BYTES = 256


def next_start(folder: Path, uid: str) -> str:
    """Return a name for this start; the folder outlives the container and not the pod."""
    counter = folder / "starts"
    count = int(counter.read_text()) + 1 if counter.exists() else 0
    counter.write_text(str(count))
    return f"{uid}-{count}"


def publish_start(port: int, pods: int, start: str, *, seconds: float = RENDEZVOUS_SECONDS) -> None:
    """Hand a name to all other pods; one that comes twice has lost it and gets it again."""
    served: set[int] = set()
    deadline = time.monotonic() + seconds
    with socket.create_server(("", port)) as server:
        while len(served) < pods - 1:
            missing = [str(rank) for rank in range(1, pods) if rank not in served]
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise TrainshedError(
                    f"pods {', '.join(missing[:8])} of {pods} did not come within {seconds:g} s",
                    hint="are they placed? `trainshed status RUN` says what they wait for",
                ) from None
            with connection:
                try:
                    connection.settimeout(_CONNECT_SECONDS)
                    rank = connection.recv(_MAX_MESSAGE_BYTES).decode("ascii", "replace").strip()
                    if rank.isdecimal() and 0 < int(rank) < pods:
                        connection.sendall(start.encode())
                        served.add(int(rank))
                except OSError:
                    continue  # it comes again


def fetch_start(address: str, port: int, rank: int, *, seconds: float = RENDEZVOUS_SECONDS) -> str:
    """Ask node 0 for the name of this start until it answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
                connection.sendall(f"{rank}\n".encode())
                start = connection.recv(_MAX_MESSAGE_BYTES).decode("ascii", "replace")
            if start:
                return start
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise TrainshedError(
                f"node 0 ({address}:{port}) did not say which start this is within {seconds:g} s",
                hint="did its container start? its log says why not",
            )
        time.sleep(min(_CONNECT_SECONDS, seconds / 10))

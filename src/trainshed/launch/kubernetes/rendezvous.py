"""How the pods of a PyTorchJob agree on a name for their start: node 0 gives out its own.

The operator of PyTorchJobs restarts containers one by one and tells them nothing about it. Node 0 makes a name from
its pod's uid and from how often its container has started, and serves it to every other pod by the key-value store of
`launch/rendezvous.py`. The store closes once all pods have the name, so a pod that restarts alone waits until node 0
restarts too.
"""

from __future__ import annotations

from pathlib import Path

from trainshed.errors import TrainshedError
from trainshed.launch.rendezvous import KeyValueClient, KeyValueServer

RENDEZVOUS_SECONDS = 900.0
_TOKEN = "start of a PyTorchJob"
_START_KEY = "start"


def next_start(folder: Path, uid: str) -> str:
    """Return a name for this start; the folder outlives the container and not the pod."""
    counter = folder / "starts"
    count = int(counter.read_text()) + 1 if counter.exists() else 0
    counter.write_text(str(count))
    return f"{uid}-{count}"


def publish_start(port: int, pods: int, start: str, *, seconds: float = RENDEZVOUS_SECONDS) -> None:
    """Serve a name until all other pods have it; one that asks twice gets it twice."""
    with KeyValueServer(port, _TOKEN) as server:
        store = KeyValueClient(("127.0.0.1", server.port), _TOKEN)
        store.put(_START_KEY, start)
        served = store.get([_served_key(rank) for rank in range(1, pods)], seconds)
    missing = [str(rank) for rank in range(1, pods) if _served_key(rank) not in served]
    if missing:
        raise TrainshedError(
            f"pods {', '.join(missing[:8])} of {pods} did not come within {seconds:g} s",
            hint="are they placed? `trainshed status RUN` says what they wait for",
        )


def fetch_start(address: str, port: int, rank: int, *, seconds: float = RENDEZVOUS_SECONDS) -> str:
    """Ask node 0 for the name of this start until it answers."""
    store = KeyValueClient((address, port), _TOKEN, connect_seconds=seconds)
    try:
        # In one request: node 0 may restart, with another name, between two.
        return store.put_and_get(_served_key(rank), True, [_START_KEY], seconds)[_START_KEY]
    except (TrainshedError, KeyError):
        raise TrainshedError(
            f"node 0 ({address}:{port}) did not say which start this is within {seconds:g} s",
            hint="did its container start? its log says why not",
        ) from None


def _served_key(rank: int) -> str:
    return f"served/{rank}"

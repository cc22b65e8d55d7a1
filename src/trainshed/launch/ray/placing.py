"""Room for a stage on a Ray cluster: all its nodes at once, or a sentence that says what is missing.

One placement group holds one bundle for each node, spread strictly: Ray gives all of them or none, and no two on one
node. With a group for each node, two jobs could each hold half of the cluster, and two groups could share a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.launch.ray.resources import fits, named

READY_SECONDS = 300.0
"""How long a stage waits for its nodes."""
_LOOK_SECONDS = 1.0
_SAY_AFTER_SECONDS = 5.0


class Stopped(Exception):
    """Somebody asked the job to stop while it waited."""


@contextmanager
def reserved(
    nodes: int,
    bundle: Mapping[str, float],
    *,
    stopped: Callable[[], bool],
    on_wait: Callable[[str], None],
    seconds: float = READY_SECONDS,
) -> Generator[Any]:
    """Hold a placement group with one bundle on each of so many nodes; `on_wait` is told why it takes long."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle)] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "STRICT_PACK")
    try:
        began, said = time.monotonic(), False
        while not group.wait(_LOOK_SECONDS):
            waited = time.monotonic() - began
            if stopped():
                raise Stopped
            if waited >= seconds:
                raise no_room(nodes, bundle, seconds)
            if not said and waited >= _SAY_AFTER_SECONDS:
                said = True
                on_wait(shortage(nodes, bundle))
        yield group
    finally:
        remove_placement_group(group)


def no_room(nodes: int, bundle: Mapping[str, float], seconds: float) -> TrainshedError:
    """Return the error of a stage that found no room in time."""
    return TrainshedError(
        f"no room after {seconds:.0f} s: {shortage(nodes, bundle)}",
        hint="add nodes, end what holds them (`ray status` shows it), or ask for fewer: --nodes",
    )


def shortage(nodes: int, bundle: Mapping[str, float]) -> str:
    """Say what is missing for so many nodes of this size, from what the cluster has just now."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    large_enough = sum(fits(bundle, resources) for resources in alive)
    asked = f"{nodes} {'nodes' if nodes > 1 else 'node'} with {named(bundle)}"
    if large_enough < nodes:
        return f"it takes {asked}, and {large_enough} of the cluster's {len(alive)} nodes are that large"
    free = ray.available_resources()
    left = named({name: free.get(name, 0.0) for name in bundle})
    return f"it takes {asked}; the cluster has them, but others hold them: {left} are free in all"

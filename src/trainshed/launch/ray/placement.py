"""What a stage asks of each node in Ray's words, and its placement: all its nodes at once, or what is missing.

One placement group holds one bundle for each node, spread strictly: Ray gives all of them or none, and no two on one
node. With a group for each node, two jobs could each hold half of the cluster, and two groups could share a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.launch.job import Stage

CPU = "CPU"
GPU = "GPU"
MEMORY = "memory"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)}


def stage_bundle(stage: Stage, gpu_resource: str) -> dict[str, float]:
    """Return what one node must have for a stage.

    A rank takes one CPU and one GPU, whatever Ray calls it; on a cluster that trains on processors, one CPU.
    """
    if stage.gpus_per_node or (stage.nodes * stage.ranks_per_node > 1):
        count = float(stage.gpus_per_node or stage.ranks_per_node)
        return {CPU: count} if gpu_resource == CPU or not stage.gpus_per_node else {CPU: count, gpu_resource: count}
    bundle = {CPU: float(stage.cpus or 1)}
    return bundle | ({MEMORY: float(parse_quantity(stage.memory))} if stage.memory else {})


def bundle_fits(bundle: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    """Whether a node with these resources could hold a bundle."""
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def format_bundle(bundle: Mapping[str, float]) -> str:
    """Write a bundle for people: `8 CPU and 8 GPU`."""
    words = [
        f"{amount / 2**30:.3g} GiB of memory" if name == MEMORY else f"{amount:g} {name}"
        for name, amount in bundle.items()
    ]
    return " and ".join(words)


def parse_quantity(text: str) -> int:
    """Read a size as Kubernetes writes it: `250Gi`."""
    number = text.rstrip("KMGTPki")
    return int(float(number) * _UNITS[text[len(number) :]])


READY_SECONDS = 300.0
"""How long a stage waits for its nodes."""
_LOOK_SECONDS = 1.0
_SAY_AFTER_SECONDS = 5.0


class StopRequestedWhileWaiting(Exception):
    """Somebody asked the job to stop while it waited."""


@contextmanager
def reserve_nodes(
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
                raise StopRequestedWhileWaiting
            if waited >= seconds:
                raise no_room_error(nodes, bundle, seconds)
            if not said and waited >= _SAY_AFTER_SECONDS:
                said = True
                on_wait(describe_shortage(nodes, bundle))
        yield group
    finally:
        remove_placement_group(group)


def no_room_error(nodes: int, bundle: Mapping[str, float], seconds: float) -> TrainshedError:
    """Return the error of a stage that found no room in time."""
    return TrainshedError(
        f"no room after {seconds:.0f} s: {describe_shortage(nodes, bundle)}",
        hint="add nodes, end what holds them (`ray status` shows it), or ask for fewer: --nodes",
    )


def describe_shortage(nodes: int, bundle: Mapping[str, float]) -> str:
    """Say what is missing for so many nodes of this size, from what the cluster has just now."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    large_enough = sum(bundle_fits(bundle, resources) for resources in alive)
    asked = f"{nodes} {'nodes' if nodes > 1 else 'node'} with {format_bundle(bundle)}"
    if large_enough < nodes:
        return f"it takes {asked}, and {large_enough} of the cluster's {len(alive)} nodes are that large"
    free = ray.available_resources()
    left = format_bundle({name: free.get(name, 0.0) for name in bundle})
    return f"it takes {asked}; the cluster has them, but others hold them: {left} are free in all"

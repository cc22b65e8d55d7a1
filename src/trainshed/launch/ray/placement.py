"""What a stage needs of each node as one of Ray's bundles, and the placement of all its nodes at once.

One placement group holds one bundle per node, spread strictly: Ray gives all of them or none, and no two on one node.
With a group for each node, two jobs could each hold half of the cluster, and two groups could share a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping
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

    A rank takes one CPU and one GPU, under Ray's name for it; on a cluster that trains on processors, one CPU.
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
    amounts = [
        f"{amount / 2**30:.3g} GiB of memory" if name == MEMORY else f"{amount:g} {name}"
        for name, amount in bundle.items()
    ]
    return " and ".join(amounts)


def parse_quantity(text: str) -> int:
    """Read a size as Kubernetes writes it: `250Gi`."""
    number = text.rstrip("KMGTPki")
    return int(float(number) * _UNITS[text[len(number) :]])


READY_SECONDS = 300.0
"""How long a stage waits for its nodes."""
_POLL_SECONDS = 1.0
_REPORT_AFTER_SECONDS = 5.0
_NODE_ID_LABEL = "ray.io/node-id"


class StopRequestedWhileWaiting(Exception):
    """Somebody asked the job to stop while it waited."""


@contextmanager
def reserve_nodes(
    nodes: int,
    bundle: Mapping[str, float],
    *,
    avoided_nodes: Collection[str] = (),
    is_stopping: Callable[[], bool],
    on_wait: Callable[[str], None],
    seconds: float = READY_SECONDS,
) -> Generator[Any]:
    """Hold a placement group with one bundle on each of `nodes` nodes.

    `avoided_nodes` are Ray's ids of nodes to leave out. `on_wait` is called with the reason when it takes long.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    options: dict[str, Any] = {"strategy": "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"}
    if avoided_nodes:
        selector = {_NODE_ID_LABEL: f"!in({','.join(sorted(avoided_nodes))})"}
        options["bundle_label_selector"] = [selector] * nodes
    group = placement_group([dict(bundle)] * nodes, **options)
    try:
        wait_for_room(group.wait, nodes, bundle, is_stopping=is_stopping, on_wait=on_wait, seconds=seconds)
        yield group
    finally:
        remove_placement_group(group)


def wait_for_room(
    wait: Callable[[float], bool],
    nodes: int,
    bundle: Mapping[str, float],
    *,
    is_stopping: Callable[[], bool],
    on_wait: Callable[[str], None],
    seconds: float = READY_SECONDS,
) -> None:
    """Call `wait` until it returns whether Ray has found room; raises after `seconds` and after a request to stop."""
    began, reported = time.monotonic(), False
    while not wait(_POLL_SECONDS):
        waited = time.monotonic() - began
        if is_stopping():
            raise StopRequestedWhileWaiting
        if waited >= seconds:
            raise TrainshedError(
                f"no room after {seconds:.0f} s: {describe_shortage(nodes, bundle)}",
                hint="add nodes, end what holds them (`ray status` shows it), or ask for fewer: --nodes",
            )
        if not reported and waited >= _REPORT_AFTER_SECONDS:
            reported = True
            on_wait(describe_shortage(nodes, bundle))


def count_fitting_nodes(bundle: Mapping[str, float], avoided_nodes: Collection[str] = ()) -> int:
    """Return how many living nodes could hold a bundle if nothing else ran."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided_nodes]
    return sum(bundle_fits(bundle, node["Resources"]) for node in nodes)


def describe_shortage(nodes: int, bundle: Mapping[str, float]) -> str:
    """Describe what the cluster lacks now for `nodes` nodes of this size."""
    import ray

    needed = f"{nodes} {'nodes' if nodes > 1 else 'node'} with {format_bundle(bundle)}"
    large_enough = count_fitting_nodes(bundle)
    if large_enough < nodes:
        alive = sum(node["Alive"] for node in ray.nodes())
        return f"it takes {needed}, and {large_enough} of the cluster's {alive} nodes are that large"
    free = ray.available_resources()
    left = format_bundle({name: free.get(name, 0.0) for name in bundle})
    return f"it takes {needed}; the cluster has them, but others hold them: {left} are free in all"

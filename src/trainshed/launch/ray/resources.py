"""What a stage asks of each node, in Ray's words."""

from __future__ import annotations

from collections.abc import Mapping

from trainshed.launch.job import Stage

CPU = "CPU"
GPU = "GPU"
MEMORY = "memory"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)}


def bundle_of(stage: Stage, gpu_resource: str) -> dict[str, float]:
    """Return what one node must have for a stage.

    A rank takes one CPU and one GPU, whatever Ray calls it; on a cluster that trains on processors, one CPU.
    """
    if stage.gpus_per_node or (stage.nodes * stage.ranks_per_node > 1):
        count = float(stage.gpus_per_node or stage.ranks_per_node)
        return {CPU: count} if gpu_resource == CPU or not stage.gpus_per_node else {CPU: count, gpu_resource: count}
    bundle = {CPU: float(stage.cpus or 1)}
    return bundle | ({MEMORY: float(quantity_bytes(stage.memory))} if stage.memory else {})


def fits(bundle: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    """Whether a node with these resources could hold a bundle."""
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def named(bundle: Mapping[str, float]) -> str:
    """Write a bundle for people: `8 CPU and 8 GPU`."""
    words = [
        f"{amount / 2**30:.3g} GiB of memory" if name == MEMORY else f"{amount:g} {name}"
        for name, amount in bundle.items()
    ]
    return " and ".join(words)


def quantity_bytes(text: str) -> int:
    """Read a size as Kubernetes writes it: `250Gi`."""
    number = text.rstrip("KMGTPki")
    return int(float(number) * _UNITS[text[len(number) :]])

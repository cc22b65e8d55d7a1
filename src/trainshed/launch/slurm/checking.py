"""Whether a cluster could ever take a job: asked before anything is submitted.

Slurm itself takes a job for nine nodes on a partition of four and leaves it pending for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainshed.errors import TrainshedError
from trainshed.launch.job import Job, Stage
from trainshed.launch.slurm.client import SlurmClient
from trainshed.launch.slurm.fields import fields_of
from trainshed.launch.slurm.secrets import exported_names

_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass(frozen=True)
class Partition:
    """A partition as `scontrol` describes it."""

    name: str
    state: str
    nodes: int
    max_nodes: int | None
    max_seconds: int | None


def refusals(client: SlurmClient, job: Job) -> Iterator[str]:
    """Say why a cluster could never run a job; nothing where it could."""
    yield from _missing_secrets(client, job)
    slurm = job.cluster.on_slurm
    for stage in job.stages:
        trains = stage.name == "train"
        name = slurm.partition if stage.gpus_per_node or trains else slurm.cpu_partition or slurm.partition
        try:
            partition = _partition(client, name)
        except TrainshedError:
            known = ", ".join(_partitions(client))
            yield f"{stage.name}: there is no partition `{name}`; there are {known}"
            continue
        if partition is None:
            yield f"{stage.name}: no partition is the default one; write slurm.partition, one of " + ", ".join(
                _partitions(client)
            )
            continue
        yield from _too_much(job, stage, partition)
        if stage.gpus_per_node and slurm.gpus is not None:
            yield from _no_such_gpus(client, stage, partition, slurm.gpus)


def _missing_secrets(client: SlurmClient, job: Job) -> Iterator[str]:
    for name in exported_names(job.cluster):
        if client.attempt("sh", "-c", f'[ -n "${{{name}:+x}}" ]').returncode:
            there = "on the login node" if client.is_remote else "here"
            yield f"the secret {name} is not set {there}, and jobs would be without it"


def _too_much(job: Job, stage: Stage, partition: Partition) -> Iterator[str]:
    asked = stage.nodes + stage.spares
    spare = f" ({stage.spares} of them spare)" if stage.spares else ""
    if partition.state != "UP":
        yield f"{stage.name}: the partition {partition.name} is {partition.state}"
    if asked > partition.nodes:
        yield f"{stage.name} asks for {asked} nodes{spare}, and the partition {partition.name} has {partition.nodes}"
    elif partition.max_nodes is not None and asked > partition.max_nodes:
        yield (
            f"{stage.name} asks for {asked} nodes{spare}, and the partition {partition.name} gives a job "
            f"{partition.max_nodes} at most"
        )
    hours = job.cluster.limits.hours if stage.name == "train" or stage.serving is not None else None
    if hours is not None and partition.max_seconds is not None and hours * 3600 > partition.max_seconds:
        yield (
            f"{stage.name} asks for {hours:g} hours, and the partition {partition.name} gives "
            f"{partition.max_seconds / 3600:g} (limits.hours)"
        )


def _no_such_gpus(client: SlurmClient, stage: Stage, partition: Partition, gpus: str) -> Iterator[str]:
    printed = client.run("sinfo", "--noheader", "--Node", f"--partition={partition.name}", "--format=%N %G")
    offers = [line.partition(" ")[2].strip() for line in printed.splitlines() if line.strip()]
    fitting = sum(_offers(offer, gpus) >= stage.gpus_per_node for offer in offers)
    if fitting == 0:
        yield (
            f"{stage.name} asks for {gpus}:{stage.gpus_per_node} on each node, and the partition {partition.name} has "
            f"{', '.join(sorted(set(offers))) or 'none'} (slurm.gpus)"
        )
    elif fitting < stage.nodes + stage.spares <= partition.nodes:
        yield (
            f"{stage.name} asks for {stage.nodes + stage.spares} nodes with {gpus}:{stage.gpus_per_node}, and the "
            f"partition {partition.name} has {fitting}"
        )


def _offers(offer: str, wanted: str) -> int:
    """How many of a kind of GPU a node has, from `gpu:h100:8(S:0-1),gpu:a100:2`."""
    found = 0
    for part in offer.split(","):
        kind, _, count = re.sub(r"\(.*?\)", "", part).rpartition(":")
        if count.isdecimal() and (kind == wanted or kind.startswith(f"{wanted}:")):
            found += int(count)
    return found


def _partitions(client: SlurmClient) -> list[str]:
    return sorted({line.strip() for line in client.run("sinfo", "--noheader", "--format=%R").splitlines() if line})


def _partition(client: SlurmClient, name: str | None) -> Partition | None:
    if name is None:
        printed = client.run("scontrol", "--oneliner", "show", "partition")
        found = [each for each in map(fields_of, printed.splitlines()) if each.get("Default") == "YES"]
        return _read(found[0]) if found else None
    return _read(fields_of(client.run("scontrol", "--oneliner", "show", "partition", name)))


def _read(found: dict[str, str]) -> Partition:
    most = found.get("MaxNodes", "")
    return Partition(
        found["PartitionName"],
        found.get("State", "UP"),
        int(found.get("TotalNodes", "0")),
        None if most in _UNLIMITED else int(most),
        seconds_of(found.get("MaxTime", "")),
    )


def seconds_of(limit: str) -> int | None:
    """Read a time limit as Slurm prints it (`1-12:00:00`, `30:00`); None for no limit."""
    if limit in _UNLIMITED:
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    while len(parts) < 3:
        parts.insert(0, 0)
    return (int(days) if dash else 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]

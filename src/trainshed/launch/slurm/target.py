"""Slurm as a target: render, check, submit exactly what was rendered, and report on it afterwards.

`check` asks whether the cluster could ever take a job before anything is submitted: Slurm itself accepts a job
for nine nodes on a partition of four and leaves it pending for ever.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.launch.job import Job, Stage
from trainshed.launch.slurm.client import SlurmClient, parse_scontrol
from trainshed.launch.slurm.render import FIRST_COMMAND, render, serving_port
from trainshed.launch.slurm.sbatch_options import dependency_line, exported_names, logs_folder
from trainshed.launch.slurm.status import serving_state, stage_state
from trainshed.launch.target import StageState, SubmitRequest, SubmittedJob
from trainshed.recipe import Cluster

_FOLLOW_SECONDS, _REMOTE_FOLLOW_SECONDS = 0.5, 5.0


class SlurmTarget:
    """A Slurm cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = SlurmClient(cluster)

    def render(self, job: Job) -> SubmitRequest:
        """Turn a job into sbatch scripts."""
        return render(job)

    def check(self, job: Job) -> Sequence[str]:
        """Say why the cluster could never take the job."""
        return list(unschedulable_reasons(self._client, job))

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Send the scripts; where one is refused, those before it are taken back."""
        store = posixpath.dirname(posixpath.dirname(posixpath.dirname(job.run)))
        for path, data in request.uploads.items():
            self._client.put(f"{store}/{path}", data)
        self._client.make_folder(logs_folder(job.run))
        ids: dict[str, str] = {}
        for part in request.parts:
            assert part.stage is not None
            try:
                ids[part.stage] = self._sbatch(fill_dependency_ids(part.text, ids))
            except TrainshedError as error:
                for id in ids.values():
                    self._client.attempt("scancel", id)
                hint = "nothing is left in the queue" if ids else "nothing was submitted"
                raise TrainshedError(f"{part.stage} was refused: {error.what}", where=error.where, hint=hint) from None
        served = next((stage.serving for stage in job.stages if stage.serving is not None), None)
        if served is None:
            return SubmittedJob(request.job, job.run, "slurm", ids)
        port = serving_port(served, ids["serve"])
        return SubmittedJob(request.job, job.run, "slurm", ids, serve_port=port, serve_ready=served.ready)

    def _sbatch(self, script: str) -> str:
        printed = self._client.submit(script).strip()
        id = printed.splitlines()[-1].split(";")[0] if printed else ""
        if not id.isdecimal():
            raise TrainshedError(f"sbatch answered `{printed}`, which is no id of a job")
        return id

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Say how each stage stands and why."""
        states = (stage_state(self._client, submitted.run, stage, id) for stage, id in submitted.ids.items())
        return tuple(
            serving_state(self._client, state, submitted.serve_port, submitted.serve_ready)
            if state.stage == "serve" and submitted.serve_port is not None
            else state
            for state in states
        )

    def logs(
        self,
        submitted: SubmittedJob,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the lines of a stage's log: what its script printed, or one rank's of training."""
        path = self._log(submitted, stage, rank, attempt)
        seconds = _REMOTE_FOLLOW_SECONDS if self._client.is_remote else _FOLLOW_SECONDS
        read, kept = 0, b""
        while True:
            # Asked before reading: what was written before the end is read after it.
            goes_on = follow and self._is_running(submitted, stage)
            new = self._client.read(path, read) or b""
            read += len(new)
            *lines, kept = (kept + new).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace") + "\n"
            if not goes_on:
                break
            time.sleep(seconds)
        if kept:
            yield kept.decode(errors="replace")

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """End every stage that has not ended."""
        states = self.status(submitted)
        ended = [state.stage for state in states if state.state in ("waiting", "running", "serving")]
        # The last first: a stage that is told to end must not set the next one free.
        for stage in reversed(ended):
            self._client.run("scancel", submitted.ids[stage])
        return tuple(ended)

    def _is_running(self, submitted: SubmittedJob, stage: str) -> bool:
        state = stage_state(self._client, submitted.run, stage, submitted.ids[stage])
        return state.state in ("waiting", "running")

    def _log(self, submitted: SubmittedJob, stage: str, rank: int | None, attempt: int | None) -> str:
        if stage not in submitted.ids:
            raise InputError(f"this run has no stage `{stage}`", hint=f"it has {', '.join(submitted.ids)}")
        if stage == "train" and (rank is not None or attempt is not None):
            found = self._client.files(f"{submitted.run}/logs", f"attempt-*/rank-{rank or 0:05d}.log")
            wanted = [path for path in found if attempt is None or f"/attempt-{attempt:04d}/" in path]
        else:
            found = self._client.files(logs_folder(submitted.run), f"{stage}-{submitted.ids[stage]}[._]*")
            wanted = sorted(found, key=_by_number)[rank or 0 :][:1]
        if not wanted:
            raise NotFound(
                f"{stage} has written no log yet",
                where=f"{submitted.run}/logs",
                hint="`trainshed status` says how it stands",
            )
        return wanted[-1]


def fill_dependency_ids(script: str, ids: dict[str, str]) -> str:
    """Fill in the id of the stage before, in the one line that asks for it; everything else stays as it is."""
    # Only among the script's own first lines: the files inside it may say anything.
    options, begin, rest = script.partition(FIRST_COMMAND)
    for stage, id in ids.items():
        options = options.replace(f"{dependency_line(f'<id of {stage}>')}\n", f"{dependency_line(id)}\n")
    return options + begin + rest


def _by_number(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", posixpath.basename(path))]


_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass(frozen=True)
class SlurmPartition:
    """A partition as `scontrol` describes it."""

    name: str
    state: str
    nodes: int
    max_nodes: int | None
    max_seconds: int | None


def unschedulable_reasons(client: SlurmClient, job: Job) -> Iterator[str]:
    """Say why a cluster could never run a job; nothing where it could."""
    yield from _missing_secrets(client, job)
    slurm = job.cluster.on_slurm
    for stage in job.stages:
        trains = stage.name == "train"
        name = slurm.partition if stage.gpus_per_node or trains else slurm.cpu_partition or slurm.partition
        try:
            partition = _find_partition(client, name)
        except TrainshedError:
            known = ", ".join(_partition_names(client))
            yield f"{stage.name}: there is no partition `{name}`; there are {known}"
            continue
        if partition is None:
            yield f"{stage.name}: no partition is the default one; write slurm.partition, one of " + ", ".join(
                _partition_names(client)
            )
            continue
        yield from _exceeded_limits(job, stage, partition)
        if stage.gpus_per_node and slurm.gpus is not None:
            yield from _missing_gpus(client, stage, partition, slurm.gpus)


def _missing_secrets(client: SlurmClient, job: Job) -> Iterator[str]:
    for name in exported_names(job.cluster):
        if client.attempt("sh", "-c", f'[ -n "${{{name}:+x}}" ]').returncode:
            there = "on the login node" if client.is_remote else "here"
            yield f"the secret {name} is not set {there}, and jobs would be without it"


def _exceeded_limits(job: Job, stage: Stage, partition: SlurmPartition) -> Iterator[str]:
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


def _missing_gpus(client: SlurmClient, stage: Stage, partition: SlurmPartition, gpus: str) -> Iterator[str]:
    printed = client.run("sinfo", "--noheader", "--Node", f"--partition={partition.name}", "--format=%N %G")
    offers = [line.partition(" ")[2].strip() for line in printed.splitlines() if line.strip()]
    fitting = sum(_gpu_count(offer, gpus) >= stage.gpus_per_node for offer in offers)
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


def _gpu_count(offer: str, wanted: str) -> int:
    """How many of a kind of GPU a node has, from `gpu:h100:8(S:0-1),gpu:a100:2`."""
    found = 0
    for part in offer.split(","):
        kind, _, count = re.sub(r"\(.*?\)", "", part).rpartition(":")
        if count.isdecimal() and (kind == wanted or kind.startswith(f"{wanted}:")):
            found += int(count)
    return found


def _partition_names(client: SlurmClient) -> list[str]:
    return sorted({line.strip() for line in client.run("sinfo", "--noheader", "--format=%R").splitlines() if line})


def _find_partition(client: SlurmClient, name: str | None) -> SlurmPartition | None:
    if name is None:
        printed = client.run("scontrol", "--oneliner", "show", "partition")
        found = [each for each in map(parse_scontrol, printed.splitlines()) if each.get("Default") == "YES"]
        return _parse_partition(found[0]) if found else None
    return _parse_partition(parse_scontrol(client.run("scontrol", "--oneliner", "show", "partition", name)))


def _parse_partition(found: dict[str, str]) -> SlurmPartition:
    most = found.get("MaxNodes", "")
    return SlurmPartition(
        found["PartitionName"],
        found.get("State", "UP"),
        int(found.get("TotalNodes", "0")),
        None if most in _UNLIMITED else int(most),
        parse_time_limit(found.get("MaxTime", "")),
    )


def parse_time_limit(limit: str) -> int | None:
    """Read a time limit as Slurm prints it (`1-12:00:00`, `30:00`); None for no limit."""
    if limit in _UNLIMITED:
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    while len(parts) < 3:
        parts.insert(0, 0)
    return (int(days) if dash else 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]

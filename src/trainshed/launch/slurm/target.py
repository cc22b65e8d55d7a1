"""Slurm as a target: render, check, submit exactly what was rendered, and report on it afterwards.

`check` asks whether the cluster could ever run a job before anything is submitted: Slurm itself accepts a job
for nine nodes on a partition of four and leaves it pending for ever.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.launch.attempt import growing_lines
from trainshed.launch.job import Job, Stage
from trainshed.launch.slurm.client import SlurmClient, parse_scontrol
from trainshed.launch.slurm.render import FIRST_COMMAND, render, serving_port
from trainshed.launch.slurm.sbatch_options import dependency_line, exported_names, logs_folder
from trainshed.launch.slurm.status import serving_state, stage_state
from trainshed.launch.target import StageState, SubmitRequest, SubmittedJob
from trainshed.recipe import Cluster
from trainshed.run_folder import LOGS, attempt_name, node_name, rank_name, store_address

_FOLLOW_SECONDS, _REMOTE_FOLLOW_SECONDS = 0.5, 5.0


class SlurmTarget:
    """A Slurm cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = SlurmClient(cluster)

    def render(self, job: Job) -> SubmitRequest:
        """Turn a job into sbatch scripts."""
        return render(job)

    def check(self, job: Job) -> Sequence[str]:
        """Return why the cluster could never run the job."""
        return list(unschedulable_reasons(self._client, job))

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Submit the scripts; if one is refused, those before it are cancelled."""
        store = store_address(job.run)
        for path, data in request.uploads.items():
            self._client.upload_file(f"{store}/{path}", data)
        ids: dict[str, str] = {}
        for part in request.parts:
            if part.stage is None:
                self._client.run("bash", "-s", input=part.text.encode())
                continue
            try:
                ids[part.stage] = self._sbatch(fill_dependency_ids(part.text, ids))
            except TrainshedError as error:
                for id in ids.values():
                    self._client.run_unchecked("scancel", id)
                hint = "nothing is left in the queue" if ids else "nothing was submitted"
                raise TrainshedError(f"{part.stage} was refused: {error.what}", where=error.where, hint=hint) from None
        serving = next((stage.serving for stage in job.stages if stage.serving is not None), None)
        if serving is None:
            return SubmittedJob(request.job, job.run, "slurm", ids)
        port = serving_port(serving, ids["serve"])
        return SubmittedJob(request.job, job.run, "slurm", ids, serve_port=port, serve_ready=serving.ready)

    def _sbatch(self, script: str) -> str:
        printed = self._client.submit(script).strip()
        id = printed.splitlines()[-1].split(";")[0] if printed else ""
        if not id.isdecimal():
            raise TrainshedError(f"sbatch answered `{printed}`, which is not an id of a job")
        return id

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Return the state of each stage, in order, and why."""
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
        """Yield the lines of a stage's log: the output of its script, or the log of one rank of the training."""
        path = self._log_path(submitted, stage, rank, attempt)
        seconds = _REMOTE_FOLLOW_SECONDS if self._client.is_remote else _FOLLOW_SECONDS
        yield from growing_lines(
            lambda offset: self._client.read(path, offset) or b"",
            lambda: follow and self._is_active(submitted, stage),
            seconds,
        )

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """End every stage that has not ended."""
        states = self.status(submitted)
        cancelled = [state.stage for state in states if state.state in ("waiting", "running", "serving")]
        # The last stage first: the end of a stage must not start the next one.
        for stage in reversed(cancelled):
            self._client.run("scancel", submitted.ids[stage])
        return tuple(cancelled)

    def _is_active(self, submitted: SubmittedJob, stage: str) -> bool:
        state = stage_state(self._client, submitted.run, stage, submitted.ids[stage])
        return state.state in ("waiting", "running")

    def _log_path(self, submitted: SubmittedJob, stage: str, rank: int | None, attempt: int | None) -> str:
        if stage not in submitted.ids:
            raise InputError(f"this run has no stage `{stage}`", hint=f"it has {', '.join(submitted.ids)}")
        if stage == "train" and (rank is not None or attempt is not None):
            wanted_rank = submitted.losses_rank if rank is None else rank
            folder, node = f"{submitted.run}/{LOGS}", wanted_rank // submitted.ranks_per_node
            files = self._client.find_files(folder, f"attempt-*/{rank_name(wanted_rank)}.log")
            # A foreign engine has one log per node.
            files = files or self._client.find_files(folder, f"attempt-*/{node_name(node)}.log")
            wanted = [path for path in files if attempt is None or f"/{attempt_name(attempt)}/" in path]
        else:
            files = self._client.find_files(logs_folder(submitted.run), f"{stage}-{submitted.ids[stage]}[._]*")
            wanted = sorted(files, key=_by_number)[rank or 0 :][:1]
        if not wanted:
            raise NotFound(
                f"{stage} has written no log yet",
                where=f"{submitted.run}/logs",
                hint="`trainshed status` says how it stands",
            )
        return wanted[-1]


def fill_dependency_ids(script: str, ids: dict[str, str]) -> str:
    """Fill in the id of the previous stage in the dependency line; everything else stays as it is."""
    # Only in the options: a command may contain the same words.
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
    """Yield why a cluster could never run a job."""
    yield from _missing_secrets(client, job)
    slurm = job.cluster.on_slurm
    for stage in job.stages:
        is_training = stage.name == "train"
        name = slurm.partition if stage.gpus_per_node or is_training else slurm.cpu_partition or slurm.partition
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
        if client.run_unchecked("sh", "-c", f'[ -n "${{{name}:+x}}" ]').returncode:
            place = "on the login node" if client.is_remote else "here"
            yield f"the secret {name} is not set {place}, and jobs would be without it"


def _exceeded_limits(job: Job, stage: Stage, partition: SlurmPartition) -> Iterator[str]:
    wanted_nodes = stage.nodes + stage.spares
    spare = f" ({stage.spares} of them spare)" if stage.spares else ""
    if partition.state != "UP":
        yield f"{stage.name}: the partition {partition.name} is {partition.state}"
    if wanted_nodes > partition.nodes:
        yield (
            f"{stage.name} asks for {wanted_nodes} nodes{spare}, "
            f"and the partition {partition.name} has {partition.nodes}"
        )
    elif partition.max_nodes is not None and wanted_nodes > partition.max_nodes:
        yield (
            f"{stage.name} asks for {wanted_nodes} nodes{spare}, and the partition {partition.name} gives a job "
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
    total = 0
    for part in offer.split(","):
        kind, _, count = re.sub(r"\(.*?\)", "", part).rpartition(":")
        if count.isdecimal() and (kind == wanted or kind.startswith(f"{wanted}:")):
            total += int(count)
    return total


def _partition_names(client: SlurmClient) -> list[str]:
    return sorted({line.strip() for line in client.run("sinfo", "--noheader", "--format=%R").splitlines() if line})


def _find_partition(client: SlurmClient, name: str | None) -> SlurmPartition | None:
    if name is None:
        printed = client.run("scontrol", "--oneliner", "show", "partition")
        defaults = [fields for fields in map(parse_scontrol, printed.splitlines()) if fields.get("Default") == "YES"]
        return _parse_partition(defaults[0]) if defaults else None
    return _parse_partition(parse_scontrol(client.run("scontrol", "--oneliner", "show", "partition", name)))


def _parse_partition(fields: dict[str, str]) -> SlurmPartition:
    max_nodes = fields.get("MaxNodes", "")
    return SlurmPartition(
        fields["PartitionName"],
        fields.get("State", "UP"),
        int(fields.get("TotalNodes", "0")),
        None if max_nodes in _UNLIMITED else int(max_nodes),
        parse_time_limit(fields.get("MaxTime", "")),
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

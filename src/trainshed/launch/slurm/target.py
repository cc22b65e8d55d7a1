"""The Slurm target: render, check, submit, and answer for what was submitted."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterator, Sequence

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.slurm.checking import refusals
from trainshed.launch.slurm.client import SlurmClient
from trainshed.launch.slurm.header import dependency_line, logs_folder
from trainshed.launch.slurm.render import FIRST_COMMAND, port_of, render
from trainshed.launch.slurm.serving import serving_state
from trainshed.launch.slurm.status import stage_state
from trainshed.launch.target import Request, StageState, Submitted
from trainshed.recipe import Cluster

_FOLLOW_SECONDS, _REMOTE_FOLLOW_SECONDS = 0.5, 5.0


class SlurmTarget:
    """A Slurm cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = SlurmClient(cluster)

    def render(self, job: Job) -> Request:
        """Turn a job into sbatch scripts."""
        return render(job)

    def check(self, job: Job) -> Sequence[str]:
        """Say why the cluster could never take the job."""
        return list(refusals(self._client, job))

    def submit(self, request: Request, job: Job) -> Submitted:
        """Send the scripts; where one is refused, those before it are taken back."""
        store = posixpath.dirname(posixpath.dirname(posixpath.dirname(job.run)))
        for path, data in request.uploads.items():
            self._client.put(f"{store}/{path}", data)
        self._client.make_folder(logs_folder(job.run))
        ids: dict[str, str] = {}
        for part in request.parts:
            assert part.stage is not None
            try:
                ids[part.stage] = self._sbatch(with_ids(part.text, ids))
            except TrainshedError as error:
                for id in ids.values():
                    self._client.attempt("scancel", id)
                hint = "nothing is left in the queue" if ids else "nothing was submitted"
                raise TrainshedError(f"{part.stage} was refused: {error.what}", where=error.where, hint=hint) from None
        served = next((stage.serving for stage in job.stages if stage.serving is not None), None)
        if served is None:
            return Submitted(request.job, job.run, "slurm", ids)
        port = port_of(served, ids["serve"])
        return Submitted(request.job, job.run, "slurm", ids, serve_port=port, serve_ready=served.ready)

    def _sbatch(self, script: str) -> str:
        printed = self._client.submit(script).strip()
        id = printed.splitlines()[-1].split(";")[0] if printed else ""
        if not id.isdecimal():
            raise TrainshedError(f"sbatch answered `{printed}`, which is no id of a job")
        return id

    def status(self, submitted: Submitted) -> tuple[StageState, ...]:
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
        submitted: Submitted,
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

    def cancel(self, submitted: Submitted) -> tuple[str, ...]:
        """End every stage that has not ended."""
        states = self.status(submitted)
        ended = [state.stage for state in states if state.state in ("waiting", "running", "serving")]
        # The last first: a stage that is told to end must not set the next one free.
        for stage in reversed(ended):
            self._client.run("scancel", submitted.ids[stage])
        return tuple(ended)

    def _is_running(self, submitted: Submitted, stage: str) -> bool:
        state = stage_state(self._client, submitted.run, stage, submitted.ids[stage])
        return state.state in ("waiting", "running")

    def _log(self, submitted: Submitted, stage: str, rank: int | None, attempt: int | None) -> str:
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


def with_ids(script: str, ids: dict[str, str]) -> str:
    """Fill in the id of the stage before, in the one line that asks for it; everything else stays as it is."""
    # Only among the script's own first lines: the files inside it may say anything.
    options, begin, rest = script.partition(FIRST_COMMAND)
    for stage, id in ids.items():
        options = options.replace(f"{dependency_line(f'<id of {stage}>')}\n", f"{dependency_line(id)}\n")
    return options + begin + rest


def _by_number(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", posixpath.basename(path))]

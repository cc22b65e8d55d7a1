"""Who starts the runs of a sweep: processes of this machine, or jobs of a cluster.

Here every run is a `trainshed run` of its own, so that one that dies takes nothing with it. It stops after a checkpoint
when the sweep is killed. A run that somebody else works on, an earlier start of the sweep for example, is followed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.attempt import has_gpu_driver
from trainshed.launch.local import run_holder
from trainshed.launch.ranks import with_parent_death_signal
from trainshed.launch.stage_state import StageState
from trainshed.launch.stored_run import exists, local_path, stored_run_status
from trainshed.launch.submissions import Submission, find_submission, record_submission
from trainshed.launch.target import target_of
from trainshed.recipe import to_yaml
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import PREPARED_FILE, sweep_log
from trainshed.storage import Store
from trainshed.this_machine import usable_cpus
from trainshed.workflow.sweeps.results import is_finished
from trainshed.workflow.sweeps.sweep import (
    PlannedSweep,
    PointState,
    SweepOutcome,
    SweepPoint,
    plan_sweep,
    run_sweep,
)

RUNS_AT_ONCE = 4
"""Jobs of a sweep on a cluster, where nobody says how many."""
_LONGEST_ERROR = 500


def sweep_runner(sweep: PlannedSweep, parallel: int) -> LocalSweepRunner | ClusterSweepRunner:
    """Return who starts the runs of a sweep; refuses more at once than this machine has GPUs for."""
    if parallel < 1:
        raise InputError(f"{parallel} runs at once are none", where="--parallel", hint="write 1 or more")
    return LocalSweepRunner(sweep, parallel) if sweep.is_here else ClusterSweepRunner(sweep)


def sweep(
    recipe: str,
    overrides: Sequence[str],
    *,
    on: str = "local",
    draws: int | None = None,
    seed: int = 0,
    parallel: int | None = None,
    reporter: Reporter = SILENT,
) -> SweepOutcome:
    """Plan and carry out a sweep: what `trainshed sweep --yes` does, for programs; see `plan_sweep` and `run_sweep`."""
    planned = plan_sweep(recipe, overrides, on=on, draws=draws, seed=seed, reporter=reporter)
    at_once = runs_at_once(planned, parallel)
    return run_sweep(planned, sweep_runner(planned, at_once), parallel=at_once, reporter=reporter)


def runs_at_once(planned: PlannedSweep, parallel: int | None) -> int:
    """Return how many runs go on together: as asked, or one here and some on a cluster."""
    return parallel if parallel is not None else 1 if planned.is_here else RUNS_AT_ONCE


@dataclass
class _StartedRun:
    process: subprocess.Popen[bytes]
    slot: int


class LocalSweepRunner:
    """Runs as processes of this machine; with several at once each has its share of the cores and GPUs."""

    look_seconds = 0.5

    def __init__(self, sweep: PlannedSweep, parallel: int) -> None:
        self._sweep, self._parallel = sweep, parallel
        self._started: dict[str, _StartedRun] = {}
        self._gpus = _gpu_shares(parallel) if parallel > 1 else []
        if self._gpus:
            share = len(self._gpus[0])
            largest = max(sweep.points, key=lambda point: point.gpus)
            if largest.gpus > share:
                raise InputError(
                    f"with {parallel} runs at once each has {share} GPUs, and {largest.text} takes {largest.gpus}",
                    where="--parallel",
                    hint="write fewer at once, or a smaller layout",
                )

    def start(self, point: SweepPoint) -> None:
        """Start `trainshed run` with the point's keys; what it says goes into the sweep's folder."""
        taken = {started.slot for started in self._started.values()}
        slot = next(number for number in range(self._parallel) if number not in taken)
        command = [sys.executable, "-P", "-m", "trainshed", "run", self._sweep.recipe, *point.overrides]
        command += ["--on", self._sweep.on, *(["--id", point.id] if point.own_id else [])]
        log = self._log(point)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                with_parent_death_signal(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment(point, slot)},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks the runs to stop
            )
        self._started[point.run] = _StartedRun(process, slot)

    def look(self, point: SweepPoint) -> tuple[PointState, str]:
        """Return how a run stands: by its process, or by its folder where another process works on it."""
        started = self._started.get(point.run)
        if started is not None and started.process.poll() is None:
            return "running", ""
        store = self._store(point)
        folder = local_path(store)
        if folder is not None and run_holder(folder) is not None:
            return "running", "another process works on it"
        if started is None:
            return self._stored_state(point, store)
        code = started.process.returncode
        del self._started[point.run]
        if code == 0:
            return "done", ""
        if code > 128 or code < 0:
            return "stopped", f"a signal has stopped it ({code - 128 if code > 128 else -code})"
        return "failed", _last_error(self._log(point)) or f"it ended with {code}: {self._log(point)}"

    def _stored_state(self, point: SweepPoint, store: Store) -> tuple[PointState, str]:
        """How a run stands that this process did not start, and nobody works on."""
        if is_finished(store, point.recipe, point.steps):
            return "done", ""
        if not exists(store):
            return "waiting", ""
        status = stored_run_status(store, point.steps)
        return ("failed", status.progress.last_error or status.reason) if status.state == "failed" else ("waiting", "")

    def is_prepared(self, point: SweepPoint) -> bool:
        """Whether tokens, tokenizer and base weights are there."""
        return self._store(point).head(PREPARED_FILE) is not None

    def stop(self, points: Sequence[SweepPoint]) -> None:
        """Ask the runs to stop, and wait until they have written their checkpoints."""
        for started in self._started.values():
            if started.process.poll() is None:
                started.process.terminate()
        while any(started.process.poll() is None for started in self._started.values()):
            time.sleep(self.look_seconds)

    def _store(self, point: SweepPoint) -> Store:
        store = self._sweep.run_store(point)
        assert store is not None, "a run of this machine is on its disk"
        return store

    def _log(self, point: SweepPoint) -> Path:
        return Path(self._sweep.home) / sweep_log(point.id)

    def _environment(self, point: SweepPoint, slot: int) -> dict[str, str]:
        if self._parallel == 1:
            return {}
        variables = {}
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // self._parallel // point.gpus))
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[slot])
        return variables


def _gpu_shares(parallel: int) -> list[list[str]]:
    """Return the GPUs of each of the runs at once; empty where this machine has none."""
    if not has_gpu_driver():
        return []
    from trainshed.engines.torch.rank_env import gpu_count

    count = gpu_count()
    written = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = written.split(",") if written else [str(number) for number in range(count)]
    if not count:
        return []
    if count < parallel:
        raise InputError(f"{parallel} runs at once, and this machine has {count} GPUs", where="--parallel")
    share = count // parallel
    return [devices[slot * share : (slot + 1) * share] for slot in range(parallel)]


def _last_error(log: Path) -> str | None:
    """Return the error that a command ended with, from what it wrote."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return None
    return " ".join(line.strip() for line in lines[starts[-1] :]).removeprefix("error: ")[:_LONGEST_ERROR]


class ClusterSweepRunner:
    """Runs as jobs of a cluster, which go on whether the sweep is watched or not."""

    look_seconds = 5.0

    def __init__(self, sweep: PlannedSweep, *, look_seconds: float | None = None) -> None:
        self._sweep = sweep
        self._stages: dict[str, tuple[StageState, ...]] = {}
        if look_seconds is not None:
            self.look_seconds = look_seconds

    def start(self, point: SweepPoint) -> None:
        """Submit a run's job, exactly as `trainshed submit` does."""
        job = point.job
        assert job is not None, "a run on a cluster is planned with its job"
        target = target_of(point.cluster)
        request = target.render(job)
        refusals = target.check(job)
        if refusals:
            raise InputError("; ".join(refusals), where=point.cluster.where("name"))
        submitted = target.submit(request, job)
        train = job.stage("train")
        kept = replace(submitted, ranks_per_node=train.ranks_per_node, losses_rank=job.losses_rank)
        name, id = job.run.rsplit("/", 2)[1:]
        record_submission(name, id, job.steps, kept, to_yaml(job.cluster), job.cluster.plugin_sources)

    def look(self, point: SweepPoint) -> tuple[PointState, str]:
        """Return how a run stands, by its scheduler, or by its folder where that has forgotten it."""
        submission = self._submission(point)
        if submission is None:
            return "waiting", ""
        try:
            stages = target_of(submission.cluster).status(submission.submitted)
        except TrainshedError as error:  # a scheduler that does not answer now may answer later
            return "running", f"{submission.cluster.target} cannot be asked: {error.what}"
        self._stages[point.run] = stages
        kinds = {stage.state for stage in stages}
        for kind, state in _STATES.items():
            if kind in kinds:
                return state, next((stage.reason for stage in stages if stage.state == kind), "")
        if kinds == {"done"}:
            return "done", ""
        store = self._sweep.run_store(point)
        if store is not None and is_finished(store, point.recipe, point.steps):
            return "done", ""
        return "waiting", "the scheduler does not know its job any more"

    def is_prepared(self, point: SweepPoint) -> bool:
        """Whether the stages before training have ended."""
        stages = self._stages.get(point.run, ())
        return any(stage.stage == "prepare" and stage.state == "done" for stage in stages)

    def stop(self, points: Sequence[SweepPoint]) -> None:
        """Leave the jobs alone: the same command follows them again."""

    def _submission(self, point: SweepPoint) -> Submission | None:
        assert point.job is not None, "a run on a cluster is planned with its job"
        try:
            submission = find_submission(point.job.name)
        except TrainshedError:
            return None
        return submission if submission.submitted.run == point.job.run else None


_STATES: Mapping[str, PointState] = {
    "failed": "failed",
    "cancelled": "stopped",
    "running": "running",
    "waiting": "running",
    "serving": "done",
}
"""Of a job by those of its stages: the first that one of them has."""

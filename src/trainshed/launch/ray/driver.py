"""The driver: runs inside a Ray cluster and carries a job through its stages, one after the other.

It is the entrypoint of a Ray job or of a RayJob on Kubernetes. Nothing is decided here that the job's files do not say.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trainshed.errors import InputError, MissingExtra, TrainshedError
from trainshed.launch.agent.training import version_problem
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ranks import STOP_SIGNALS, RanksResult
from trainshed.launch.ray.cpu_stage import run_cpu_stage
from trainshed.launch.ray.placing import Stopped
from trainshed.launch.ray.proof import Unproven
from trainshed.launch.ray.stage_lines import StageLine
from trainshed.launch.ray.training import Training
from trainshed.launch.ray.work import Work
from trainshed.recipe import load_cluster
from trainshed.reporting import SILENT, Reporter

Watching = Callable[[JobFile], AbstractContextManager[Callable[[dict[str, Any]], None]]]
"""Opens what is told every event of a training."""


def drive(
    folder: Path,
    only: str | None = None,
    *,
    reporter: Reporter = SILENT,
    watching: Watching = lambda _: nullcontext(lambda _: None),
) -> int:
    """Run all stages of the job in a folder, or one; returns the exit code: 0, or 128 + signal after a requested stop.

    Whatever fails is raised, with the end of the log that explains it reported before.
    """
    job = JobFile.read(folder)
    if (problem := version_problem(job)) is not None:
        hint = "submit with the version that the nodes have, or let the code travel with the job"
        raise InputError(problem, where=str(folder), hint=hint)
    stages = [stage for stage in job.stages if only in (None, stage.name)]
    if not stages:
        raise InputError(
            f"the job has no stage '{only}'",
            where=str(folder),
            hint=f"its stages are {', '.join(stage.name for stage in job.stages)}",
        )
    work = Work(job, folder, load_cluster(folder / "cluster.yaml"), reporter)
    with ExitStack() as stack:
        stack.enter_context(_connected())
        stack.enter_context(_heeding_signals(work))
        for stage in stages:
            try:
                code = _run(work, stage, watching)
            except Stopped:
                code = 128 + (work.asked or signal.SIGTERM)
            if code:
                return code
            reporter.note(str(StageLine(stage.name, "done")))
    return 0


def _run(work: Work, stage: Stage, watching: Watching) -> int:
    if work.asked is not None:
        return 128 + work.asked
    if not work.is_gang(stage):
        return run_cpu_stage(work, stage).exit_code
    on_event = watching(work.job) if stage.script is None else nullcontext(lambda _: None)
    with on_event as listener:
        return _with_restarts(work, stage, listener)


def _with_restarts(work: Work, stage: Stage, listener: Callable[[dict[str, Any]], None]) -> int:
    """Train; a failure that another start might not have is given as many more as the stage allows."""
    for left in range(stage.restarts, -1, -1):
        try:
            result: RanksResult = Training(work, stage, listener).run()
            return result.exit_code
        except (InputError, Unproven):
            raise  # it would only happen again
        except TrainshedError as error:
            if not left or work.asked is not None:
                raise
            work.reporter.warn(f"{error}\nstarting again, {left} of {stage.restarts} restarts left")
    raise AssertionError("unreachable")


@contextmanager
def _connected() -> Generator[None]:
    try:
        import ray
    except ImportError:
        raise MissingExtra.named("ray", "a Ray job") from None
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise InputError(
            f"no Ray cluster here: {error}",
            hint="`trainshed ray-driver` is the entrypoint of a Ray job: submit it with `trainshed submit`",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _heeding_signals(work: Work) -> Generator[None]:
    """Note requests to stop; after `ray.init`, which puts a handler of its own in the way of TERM."""
    before = {each: signal.signal(each, lambda number, _: work.ask_to_stop(number)) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

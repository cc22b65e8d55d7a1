"""A stage on CPUs: each of its parts is one process in an actor of its own, which Ray starts when there is room."""

from __future__ import annotations

import time
from typing import Any

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import Stage
from trainshed.launch.ranks import RanksResult
from trainshed.launch.ray.crew import Crew, Member
from trainshed.launch.ray.host import Host, HostPlace, HostTask
from trainshed.launch.ray.placing import READY_SECONDS, Stopped, no_room, shortage
from trainshed.launch.ray.resources import bundle_of
from trainshed.launch.ray.work import Work, actor_options

_LOOK_SECONDS = 1.0
_SAY_AFTER_SECONDS = 5.0


def run_cpu_stage(work: Work, stage: Stage) -> RanksResult:
    """Run all parts of a stage; raises what failed, unless somebody asked for a stop."""
    import ray

    bundle = bundle_of(stage, work.gpu_resource)
    actors: dict[int, Any] = {
        part: ray.remote(Host).options(**actor_options(bundle)).remote() for part in range(stage.parts)
    }
    try:
        first = _first_place(work, stage, actors, bundle)
        work.says_runs(stage, [first.address])
        members = {part: Member(actor, None, _task(work, stage, part)) for part, actor in actors.items()}
        result = Crew(members, failure_grace_seconds=0.0).see_through(lambda: work.asked)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if result.failed:
        raise _failure(work, stage, result)
    return result


def _first_place(work: Work, stage: Stage, actors: dict[int, Any], bundle: dict[str, float]) -> HostPlace:
    """Wait until one part has its place; the others follow as there is room."""
    import ray

    places = [actor.place.remote() for actor in actors.values()]
    began, said = time.monotonic(), False
    while True:
        done, _ = ray.wait(places, num_returns=1, timeout=_LOOK_SECONDS)
        if work.stopped():
            raise Stopped
        if done:
            return ray.get(done[0])
        waited = time.monotonic() - began
        if waited >= READY_SECONDS:
            raise no_room(1, bundle, READY_SECONDS)
        if not said and waited >= _SAY_AFTER_SECONDS:
            said = True
            work.says_waits(stage, shortage(1, bundle))


def _task(work: Work, stage: Stage, part: int) -> HostTask:
    logs = str(work.run_folder / "logs" / stage.name)
    secrets = work.cluster.secrets
    if stage.script is not None:
        arguments = (str(work.folder / stage.script),)
        return HostTask(
            arguments, part, logs, stage.environment, "bash", work.site_setup, secrets=secrets, log=_log(part)
        )
    arguments = ("-P", "-m", "trainshed", "worker", stage.name, "--job", str(work.folder))
    arguments += ("--part", f"{part}/{stage.parts}") if stage.parts > 1 else ()
    return HostTask(arguments, part, logs, stage.environment, prologue=work.site_setup, secrets=secrets, log=_log(part))


def _log(part: int) -> str:
    return f"part-{part:04d}.log"


def _failure(work: Work, stage: Stage, result: RanksResult) -> TrainshedError:
    first = result.failed[0]
    what = stage.name if stage.parts == 1 else f"part {first.rank} of {stage.name}"
    work.says_log(first, what)
    kind = InputError if first.exit_code == InputError.exit_code else TrainshedError
    return kind(f"{what} {first.how}", where=str(work.run_folder / "logs" / stage.name / _log(first.rank)))

"""The driver: runs inside a Ray cluster and carries a job through its stages, one after the other.

It is the entrypoint of a Ray job or of a RayJob on Kubernetes. Nothing is decided here that the job's files do not say.
A CPU stage is one process in an actor for each of its parts, which Ray starts when there is room. A stage whose
processes run together has an actor for each rank, or for each node where a foreign engine's script runs there.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, MissingExtra, TrainshedError
from trainshed.launch.attempt import explain_failure, logs_folder, read_job_plan, write_plan
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import JobFile, Stage, setup_script, version_problem
from trainshed.launch.ranks import STOP_SIGNALS, RankFailure, RanksResult, rank_environment
from trainshed.launch.ray.actors import (
    DEVICE_VARIABLES,
    FAILURE_GRACE_SECONDS,
    ActorGroup,
    ActorGroupMember,
    ActorLocation,
    ActorTask,
    PreflightTask,
    ProcessActor,
    actor_death_reason,
    visible_devices_environment,
)
from trainshed.launch.ray.placement import (
    CPU,
    GPU,
    MEMORY,
    READY_SECONDS,
    StopRequestedWhileWaiting,
    describe_shortage,
    no_room_error,
    reserve_nodes,
    stage_bundle,
)
from trainshed.launch.ray.status import StageLogLine
from trainshed.observe.event_log import EventFollower
from trainshed.observe.health import health_folder
from trainshed.recipe import Cluster, load_cluster
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

_ACTOR_CONCURRENCY = 4  # methods of an actor: a stop must get through while `run` waits


class RayJobContext:
    """One job under way."""

    def __init__(self, job: JobFile, folder: Path, cluster: Cluster, reporter: Reporter) -> None:
        self.job, self.folder, self.cluster, self.reporter = job, folder, cluster, reporter
        self.run_folder = Path(job.run)
        self.asked: int | None = None
        """The first signal that asked for a stop."""

    @property
    def gpu_resource(self) -> str:
        """Ray's name for one GPU; a RayJob's pods bring Ray's own."""
        return self.cluster.ray.gpu_resource if self.cluster.ray is not None else GPU

    @property
    def site_setup(self) -> tuple[str, ...]:
        """The cluster file's `setup`, as a process of a stage runs it before anything else."""
        script = setup_script(self.cluster)
        return () if script is None else (script,)

    def ask_to_stop(self, signum: int) -> None:
        """Have everything stop; called from a signal handler."""
        if self.asked is None:
            self.asked = signum

    def stopped(self) -> bool:
        """Whether somebody asked for a stop."""
        return self.asked is not None

    def is_gang(self, stage: Stage) -> bool:
        """Whether a stage's processes run together, on GPUs or on several nodes, or train."""
        return stage.name == "train" or stage.nodes > 1 or stage.gpus_per_node > 0

    def says_waits(self, stage: Stage, why: str) -> None:
        """Say that a stage waits, and for what."""
        self.reporter.note(str(StageLogLine(stage.name, "waits", why)))

    def says_runs(self, stage: Stage, nodes: Sequence[str]) -> None:
        """Say that a stage runs, and where."""
        self.reporter.note(str(StageLogLine(stage.name, "runs", " ".join(dict.fromkeys(nodes)))))

    def says_log(self, failure: RankFailure, what: str) -> None:
        """Say the end of the log of whatever failed first."""
        tail = failure.log_tail.strip()
        self.reporter.warn(
            f"{what} {failure.end_text}; the end of its log:\n{tail}" if tail else f"{what} {failure.end_text}"
        )


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """How an actor that takes so much is asked of Ray."""
    known = {CPU: "num_cpus", GPU: "num_gpus", MEMORY: "memory"}
    options: dict[str, Any] = {known[name]: amount for name, amount in bundle.items() if name in known}
    others = {name: amount for name, amount in bundle.items() if name not in known}
    return options | {"resources": others, "max_restarts": 0, "max_concurrency": _ACTOR_CONCURRENCY}


_LOOK_SECONDS = 1.0
_SAY_AFTER_SECONDS = 5.0


def run_cpu_stage(work: RayJobContext, stage: Stage) -> RanksResult:
    """Run all parts of a stage; raises what failed, unless somebody asked for a stop."""
    import ray

    bundle = stage_bundle(stage, work.gpu_resource)
    actors: dict[int, Any] = {
        part: ray.remote(ProcessActor).options(**actor_options(bundle)).remote() for part in range(stage.parts)
    }
    try:
        first = _wait_for_first_part(work, stage, actors, bundle)
        work.says_runs(stage, [first.address])
        members = {part: ActorGroupMember(actor, None, _part_task(work, stage, part)) for part, actor in actors.items()}
        result = ActorGroup(members, failure_grace_seconds=0.0).see_through(lambda: work.asked)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if result.failed:
        raise _part_failure(work, stage, result)
    return result


def _wait_for_first_part(
    work: RayJobContext, stage: Stage, actors: dict[int, Any], bundle: dict[str, float]
) -> ActorLocation:
    """Wait until one part has its place; the others follow as there is room."""
    import ray

    places = [actor.place.remote() for actor in actors.values()]
    began, said = time.monotonic(), False
    while True:
        done, _ = ray.wait(places, num_returns=1, timeout=_LOOK_SECONDS)
        if work.stopped():
            raise StopRequestedWhileWaiting
        if done:
            return ray.get(done[0])
        waited = time.monotonic() - began
        if waited >= READY_SECONDS:
            raise no_room_error(1, bundle, READY_SECONDS)
        if not said and waited >= _SAY_AFTER_SECONDS:
            said = True
            work.says_waits(stage, describe_shortage(1, bundle))


def _part_task(work: RayJobContext, stage: Stage, part: int) -> ActorTask:
    logs = str(work.run_folder / "logs" / stage.name)
    secrets = work.cluster.secrets
    if stage.script is not None:
        arguments = (str(work.folder / stage.script),)
        return ActorTask(
            arguments, part, logs, stage.environment, "bash", work.site_setup, secrets=secrets, log=_part_log(part)
        )
    arguments = ("-P", "-m", "trainshed", "worker", stage.name, "--job", str(work.folder))
    arguments += ("--part", f"{part}/{stage.parts}") if stage.parts > 1 else ()
    return ActorTask(
        arguments, part, logs, stage.environment, prologue=work.site_setup, secrets=secrets, log=_part_log(part)
    )


def _part_log(part: int) -> str:
    return f"part-{part:04d}.log"


def _part_failure(work: RayJobContext, stage: Stage, result: RanksResult) -> TrainshedError:
    first = result.failed[0]
    what = stage.name if stage.parts == 1 else f"part {first.rank} of {stage.name}"
    work.says_log(first, what)
    kind = InputError if first.exit_code == InputError.exit_code else TrainshedError
    return kind(f"{what} {first.end_text}", where=str(work.run_folder / "logs" / stage.name / _part_log(first.rank)))


_PREFLIGHT_POLL_SECONDS = 0.5


class PreflightRefused(TrainshedError):
    """Nodes or the network between them are not what they should be; the same ones would fail again."""


def preflight_nodes(
    work: RayJobContext,
    stage: Stage,
    attempt: int,
    first_actors: Sequence[tuple[Any, ActorLocation]],
    devices: Sequence[Mapping],
) -> None:
    """Check every node and all together; raises `PreflightRefused` with the sentence that names the bad ones."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    leader, place = first_actors[0]
    board = (place.address, ray.get(leader.free_port.remote()))
    gpus = 0 if work.gpu_resource == CPU else stage.gpus_per_node
    pending = {}
    for node, (actor, where) in enumerate(first_actors):
        task = PreflightTask(
            str(work.folder / "cluster.yaml"),
            work.job.run,
            attempt,
            stage.nodes,
            gpus,
            node,
            board,
            where.address,
            dict(devices[node]),
        )
        pending[actor.prove.remote(task)] = where
    verdict = None
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=_PREFLIGHT_POLL_SECONDS)
        if work.stopped():
            raise StopRequestedWhileWaiting
        for reference in done:
            where = pending.pop(reference)
            try:
                verdict = ray.get(reference)
            except RayActorError as error:
                raise TrainshedError(f"preflight: the check of {actor_death_reason(str(error), where)}") from None
            except RayTaskError as error:
                what = error.cause.what if isinstance(error.cause, TrainshedError) else str(error.cause)
                raise TrainshedError(f"preflight on {where.address}: {what}") from None
    assert verdict is not None, "there is a node"
    if verdict.outcome in ("replace", "fail"):
        raise PreflightRefused(
            f"preflight: {verdict.sentence}",
            where=str(work.run_folder / "health" / f"attempt-{attempt:04d}" / "preflight"),
            hint="take the named nodes out of the Ray cluster (`ray stop` there) and submit again; "
            "`preflight: false` in the cluster file skips the proof",
        )
    (work.reporter.note if verdict.outcome == "pass" else work.reporter.warn)(f"preflight: {verdict.sentence}")


_SCRIPT_GRACE_SECONDS = 5.0  # foreign engines leave no flight records of ours
PlacedActor = tuple[Any, ActorLocation]
"""An actor, and where it is."""


class RayTraining:
    """One attempt; `run` once."""

    def __init__(self, work: RayJobContext, stage: Stage, listener: Callable[[dict[str, Any]], None]) -> None:
        self._work, self._stage, self._listener = work, stage, listener
        self._per_node = 1 if stage.script is not None else stage.ranks_per_node

    def run(self) -> RanksResult:
        """Place the actors, run their processes, and raise what ended them, unless somebody asked for a stop."""
        work, stage = self._work, self._stage
        bundle = stage_bundle(stage, work.gpu_resource)
        with reserve_nodes(
            stage.nodes, bundle, stopped=work.stopped, on_wait=lambda why: work.says_waits(stage, why)
        ) as group:
            nodes = self._placed(group, bundle)
            attempt = take_attempt(LocalStore(work.run_folder), "").number
            if stage.script is None:
                layout, reasons = read_job_plan(work.folder)
                write_plan(LocalStore(work.run_folder), attempt, layout, reasons)
            self._keep_hosts(attempt, nodes)
            if stage.preflight:
                devices = [visible_devices_environment([each for _, each in node]) for node in nodes]
                preflight_nodes(work, stage, attempt, [node[0] for node in nodes], devices)
            members = self._members(nodes, attempt)
            grace = FAILURE_GRACE_SECONDS if stage.script is None else _SCRIPT_GRACE_SECONDS
            crew = ActorGroup(members, failure_grace_seconds=grace)
            result = crew.see_through(lambda: work.asked, self._following())
        if result.failed:
            raise self._failure(attempt, result, len(members))
        return result

    def _placed(self, group: Any, bundle: dict[str, float]) -> list[list[PlacedActor]]:
        """Start the actors, and put them in the order of their ranks: by node, and on a node by GPU."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {name: amount / self._per_node for name, amount in bundle.items()}
        actors = []
        for node in range(self._stage.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            made = ray.remote(ProcessActor).options(**actor_options(share), scheduling_strategy=strategy)
            actors += [made.remote() for _ in range(self._per_node)]
        # When the driver ends, however it does, Ray kills its actors, and the kernel their processes with them.
        places = ray.get([actor.place.remote() for actor in actors])
        placed = sorted(zip(actors, places, strict=True), key=lambda each: _rank_order(each[1]))
        return [list(each) for _, each in groupby(placed, key=lambda each: each[1].node)]

    def _members(self, nodes: Sequence[Sequence[PlacedActor]], attempt: int) -> dict[int, ActorGroupMember]:
        import ray

        first, place = nodes[0][0]
        master = (place.address, ray.get(first.free_port.remote()))
        members = {}
        for number, node in enumerate(nodes):
            devices = visible_devices_environment([each for _, each in node])
            for local, (actor, where) in enumerate(node):
                task = self._task(number, local, attempt, master)
                members[task.rank] = ActorGroupMember(
                    actor, where, replace(task, environment={**task.environment, **devices}, hidden=self._hidden())
                )
        return members

    def _task(self, node: int, local: int, attempt: int, master: tuple[str, int]) -> ActorTask:
        work, stage = self._work, self._stage
        rank = node * self._per_node + local
        places = {
            **stage.environment,
            "TRAINSHED_ATTEMPT": str(attempt),
            "NODE_RANK": str(node),
            "NNODES": str(stage.nodes),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
        if stage.script is None:
            sizes = {"ranks": self._per_node, "world_size": stage.world_size}
            places |= rank_environment(rank, local, **sizes, master=master)
            arguments = ("-P", "-m", "trainshed", "worker", "train", "--run", work.job.run, "--attempt", str(attempt))
            arguments += ("--on", str(work.folder / "cluster.yaml"))
        else:
            arguments = (str(work.folder / stage.script),)
        return ActorTask(
            arguments,
            rank,
            str(logs_folder(work.run_folder, attempt)),
            places,
            program=None if stage.script is None else "bash",
            prologue=self._prologue(),
            secrets=work.cluster.secrets,
            precision=work.job.precision,
            grace_seconds=work.job.grace_seconds,
        )

    def _prologue(self) -> tuple[str, ...]:
        """What a node runs before a rank: the site's lines, and what its fabric needs besides; pods have that."""
        cluster, own = self._work.cluster, self._work.site_setup
        if cluster.target != "ray":
            return own
        setup = fabric_setup(cluster, nodes=self._stage.nodes)
        if setup.profile_script is None and not setup.library_path and not own:
            return ()
        return own + replace(setup, environment={**setup.environment, **cluster.environment}).shell_prologue()

    def _hidden(self) -> tuple[str, ...]:
        """Ray blanks these for actors that take no "GPU", also where GPUs have another name there."""
        other_name = self._work.gpu_resource not in (CPU, GPU)
        return DEVICE_VARIABLES if other_name and self._stage.gpus_per_node else ()

    def _keep_hosts(self, attempt: int, nodes: Sequence[Sequence[PlacedActor]]) -> None:
        """Keep and say which node has which ranks."""
        self._work.says_runs(self._stage, [node[0][1].address for node in nodes])
        listed = []
        for number, node in enumerate(nodes):
            first = number * self._per_node
            place = node[0][1]
            listed.append(
                {
                    "node": number,
                    "host": place.address,
                    "hostname": place.hostname,
                    "ray_node": place.node,
                    "ranks": list(range(first, first + len(node))),
                    "processes": [each.process for _, each in node],
                }
            )
            last = first + len(node) - 1
            ranks = f"rank {first}" if last == first else f"ranks {first}-{last}"
            self._work.reporter.note(f"attempt {attempt}: {ranks} on {place.address} ({place.hostname})")
        folder = health_folder(self._work.run_folder, attempt)
        LocalStore(folder).put("hosts.json", orjson.dumps({"nodes": listed}, option=orjson.OPT_INDENT_2) + b"\n")

    def _following(self) -> Callable[[], None]:
        follower = EventFollower(self._work.run_folder)
        follower.poll()  # what earlier attempts wrote is no news

        def follow() -> None:
            for event in follower.poll():
                self._listener(event)

        return follow

    def _failure(self, attempt: int, result: RanksResult, world_size: int) -> TrainshedError:
        first = result.failed[0]
        if self._stage.script is None:
            self._work.says_log(first, f"rank {first.rank}")
            failed = [each.rank for each in result.failed]
            return explain_failure(
                self._work.run_folder, attempt, world_size, rank_ends=result.ends, failed_ranks=failed
            )
        self._work.says_log(first, f"node {first.rank}")
        kind = InputError if first.exit_code == InputError.exit_code else TrainshedError
        log = logs_folder(self._work.run_folder, attempt) / f"rank-{first.rank:05d}.log"
        return kind(f"{self._stage.name} failed: node {first.rank} {first.end_text}", where=str(log))


def _rank_order(place: ActorLocation) -> tuple[int, str, tuple[int, ...], int]:
    """Nodes by address as numbers, alike at every start; on a node by GPU."""
    gpus = tuple(int(gpu) if gpu.isdecimal() else 0 for gpu in place.gpus)
    return int(ipaddress.ip_address(place.address)), place.node, gpus, place.process


EventListenerFactory = Callable[[JobFile], AbstractContextManager[Callable[[dict[str, Any]], None]]]
"""Opens what is told every event of a training."""


def drive(
    folder: Path,
    only: str | None = None,
    *,
    reporter: Reporter = SILENT,
    watching: EventListenerFactory = lambda _: nullcontext(lambda _: None),
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
    work = RayJobContext(job, folder, load_cluster(folder / "cluster.yaml"), reporter)
    with ExitStack() as stack:
        stack.enter_context(_connect_to_ray())
        stack.enter_context(_note_stop_signals(work))
        for stage in stages:
            try:
                code = _run_stage(work, stage, watching)
            except StopRequestedWhileWaiting:
                code = 128 + (work.asked or signal.SIGTERM)
            if code:
                return code
            reporter.note(str(StageLogLine(stage.name, "done")))
    return 0


def _run_stage(work: RayJobContext, stage: Stage, watching: EventListenerFactory) -> int:
    if work.asked is not None:
        return 128 + work.asked
    if not work.is_gang(stage):
        return run_cpu_stage(work, stage).exit_code
    on_event = watching(work.job) if stage.script is None else nullcontext(lambda _: None)
    with on_event as listener:
        return _train_with_restarts(work, stage, listener)


def _train_with_restarts(work: RayJobContext, stage: Stage, listener: Callable[[dict[str, Any]], None]) -> int:
    """Train; a failure that another start might not have is given as many more as the stage allows."""
    for left in range(stage.restarts, -1, -1):
        try:
            result: RanksResult = RayTraining(work, stage, listener).run()
            return result.exit_code
        except (InputError, PreflightRefused):
            raise  # it would only happen again
        except TrainshedError as error:
            if not left or work.asked is not None:
                raise
            work.reporter.warn(f"{error}\nstarting again, {left} of {stage.restarts} restarts left")
    raise AssertionError("unreachable")


@contextmanager
def _connect_to_ray() -> Generator[None]:
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
def _note_stop_signals(work: RayJobContext) -> Generator[None]:
    """Note requests to stop; after `ray.init`, which puts a handler of its own in the way of TERM."""
    before = {each: signal.signal(each, lambda number, _: work.ask_to_stop(number)) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

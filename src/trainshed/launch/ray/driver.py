"""The driver: runs inside a Ray cluster and takes a job through its stages, one after the other.

It is the entrypoint of a Ray job, and of a RayJob on Kubernetes. It places actors, starts a process in each and notices
when an actor dies; the job's files decide everything else. A CPU stage has one actor per part, which Ray starts when
there is room. Training has one actor per node, and its process is the node agent (`launch/agent`), as on every other
target. A foreign engine's script takes the agent's place; the agent runs before it where preflight is on.

    <run>/starts/<start>/ray.json           where each actor runs
    <run>/starts/<start>/agent-00001.log    what the agent of a node prints
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, MissingExtra, TrainshedError, error_with_exit_code
from trainshed.launch.agent.main import part_log, start_of_part
from trainshed.launch.agent.notices import notify_of_job
from trainshed.launch.agent.records import AttemptRecords, NodeRecord
from trainshed.launch.attempt import LogEcho, explain_failure
from trainshed.launch.job import CPU_STAGE_RETRIES, JobFile, Stage, version_problem
from trainshed.launch.ranks import RankFailure, RanksResult, read_log_tail
from trainshed.launch.ray.actors import (
    ActorGroup,
    ActorGroupMember,
    ActorLocation,
    ActorTask,
    LostActor,
    ProcessActor,
    read_secrets,
)
from trainshed.launch.ray.context import (
    PlacedActor,
    RayJobContext,
    actor_options,
    locate,
    node_prologue,
    unset_device_variables,
)
from trainshed.launch.ray.engine_scripts import run_scripts
from trainshed.launch.ray.placement import (
    StopRequestedWhileWaiting,
    count_fitting_nodes,
    reserve_nodes,
    stage_bundle,
    wait_for_room,
)
from trainshed.launch.ray.status import StageLogLine
from trainshed.launch.rendezvous import AgentOrder, AgentTimeouts, Rendezvous, port_of_start
from trainshed.recipe import load_cluster
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CLUSTER_FILE
from trainshed.signals import STOP_SIGNALS, StopSignals
from trainshed.storage import LocalStore

_AGENT_MARGIN_SECONDS = 30.0  # an agent kills its ranks itself when the grace is over, and records it
_END_SECONDS = 15.0  # for the agents to read that the start is over
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_FIRST_RETRY_SECONDS = 10.0  # as a Job of Kubernetes waits, and twice as long each time
_GOOD_EXIT_CODES = frozenset({0, *(128 + number for number in STOP_SIGNALS)})


def drive(folder: Path, only: str | None = None, *, reporter: Reporter = SILENT) -> int:
    """Run all stages of the job in a folder, or one; returns the exit code: 0, or 128 + signal after a requested stop.

    A failure is raised, after the end of the log that explains it has been reported.
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
    with ExitStack() as stack:
        stack.enter_context(_connect_to_ray())
        # After `ray.init`, which sets a handler of its own for TERM.
        stop = stack.enter_context(StopSignals())
        context = RayJobContext(job, folder, load_cluster(folder / CLUSTER_FILE), reporter, stop)
        for stage in stages:
            try:
                code = stop.exit_code or _run_stage(context, stage)
            except StopRequestedWhileWaiting:
                code = stop.exit_code
            if code:
                return code
            reporter.note(str(StageLogLine(stage.name, "done")))
    return 0


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


def _run_stage(context: RayJobContext, stage: Stage) -> int:
    if stage.name == "train" or stage.nodes > 1 or stage.gpus_per_node > 0:
        return _train_with_restarts(context, stage)
    return _run_cpu_stage_with_retries(context, stage)


def _run_cpu_stage_with_retries(context: RayJobContext, stage: Stage) -> int:
    """Run a stage without GPUs; retry failures that may pass, such as a bucket that does not answer."""
    for retry in range(CPU_STAGE_RETRIES + 1):
        try:
            return run_cpu_stage(context, stage).exit_code
        except InputError:
            raise  # it would only happen again
        except TrainshedError as error:
            if retry == CPU_STAGE_RETRIES or context.is_stopping():
                raise
            seconds = _FIRST_RETRY_SECONDS * 2**retry
            left = f"{CPU_STAGE_RETRIES - retry} of {CPU_STAGE_RETRIES} retries left"
            context.reporter.warn(f"{error}\nstarting again in {seconds:g} s, {left}")
            end = time.monotonic() + seconds
            while time.monotonic() < end and not context.is_stopping():
                time.sleep(0.2)
    raise AssertionError("unreachable")


def _train_with_restarts(context: RayJobContext, stage: Stage) -> int:
    """Train; after a failure that another start might not have, start again as often as the stage allows."""
    bad_nodes: set[str] = set()
    for left in range(stage.restarts, -1, -1):
        training = RayTraining(context, stage, frozenset(bad_nodes))
        try:
            return training.run()
        except InputError:
            raise  # it would only happen again
        except TrainshedError as error:
            if not left or context.is_stopping():
                raise
            bad_nodes |= training.bad_nodes
            enough = count_fitting_nodes(training.bundle, bad_nodes) >= training.nodes
            if training.refused and not (training.bad_nodes and enough):
                raise  # the same nodes would be refused again
            if bad_nodes and not enough:
                context.reporter.warn("too few nodes are left to avoid the bad ones")
                bad_nodes.clear()
            context.reporter.warn(f"{error}\nstarting again, {left} of {stage.restarts} restarts left")
    raise AssertionError("unreachable")


def run_cpu_stage(context: RayJobContext, stage: Stage) -> RanksResult:
    """Run all parts of a stage; raises what failed, unless somebody asked for a stop."""
    import ray

    bundle = stage_bundle(stage, context.gpu_resource)
    start = context.next_start()
    actors: dict[int, Any] = {
        part: ray.remote(ProcessActor).options(**actor_options(bundle)).remote() for part in range(stage.parts)
    }
    try:
        locations = [actor.location.remote() for actor in actors.values()]
        # The other parts follow as there is room.
        wait_for_room(
            lambda seconds: bool(ray.wait(locations, num_returns=1, timeout=seconds)[0]),
            1,
            bundle,
            is_stopping=context.is_stopping,
            on_wait=lambda reason: context.report_waiting(stage, reason),
        )
        (first,) = locate(ray.wait(locations, num_returns=1)[0], stage)
        context.report_running(stage, [first.address])
        members = {
            part: ActorGroupMember(actor, None, _part_task(context, stage, start, part))
            for part, actor in actors.items()
        }
        result = ActorGroup(members, failure_grace_seconds=0.0).run(lambda: context.stop.first)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if result.failed:
        raise _part_failure(context, stage, start, result.failed[0])
    return result


def _part_task(context: RayJobContext, stage: Stage, start: str, part: int) -> ActorTask:
    task = ActorTask(
        (),
        part,
        part_log(context.run_folder, stage, part),
        stage.environment,
        prologue=context.site_setup,
        secrets=context.cluster.secrets,
        grace_seconds=context.job.grace_seconds + _AGENT_MARGIN_SECONDS,
    )
    if stage.script is not None:
        return replace(task, arguments=(str(context.folder / stage.script),), program="bash")
    arguments = _agent_arguments(context, stage)
    arguments += ("--part", f"{part}/{stage.parts}") if stage.parts > 1 else ()
    folder = Rendezvous(context.run_folder, start_of_part(stage, start, part)).folder
    environment = {**stage.environment, "TRAINSHED_START": start}
    return replace(task, arguments=arguments, environment=environment, log=_agent_log(folder, 0))


def _part_failure(context: RayJobContext, stage: Stage, start: str, failure: RankFailure) -> TrainshedError:
    name = stage.name if stage.parts == 1 else f"part {failure.rank} of {stage.name}"
    log = part_log(context.run_folder, stage, failure.rank)
    context.report_log(f"{name} {failure.end_text}", read_log_tail(log) or failure.log_tail)
    order = Rendezvous(context.run_folder, start_of_part(stage, start, failure.rank)).latest_order()
    if order is not None and not isinstance(failure, LostActor):
        return order.error()
    return error_with_exit_code(failure.exit_code, f"{name} {failure.end_text}", where=str(log))


def _agent_arguments(context: RayJobContext, stage: Stage) -> tuple[str, ...]:
    # -P: a file of the user's named like one of Python's modules must not be taken for it.
    return ("-P", "-m", "trainshed", "agent", stage.name, "--job", str(context.folder))


def _agent_log(folder: Path, slot: int) -> Path:
    return folder / f"agent-{slot:05d}.log"


class RayTraining:
    """One start of a training; call `run` once."""

    def __init__(self, context: RayJobContext, stage: Stage, avoided_nodes: frozenset[str]) -> None:
        self._context, self._stage, self._avoided_nodes = context, stage, avoided_nodes
        self.bundle = stage_bundle(stage, context.gpu_resource)
        self.nodes = stage.nodes + (stage.spares if stage.script is None else 0)
        self.refused = False
        """Whether preflight refused the nodes."""
        self.bad_nodes: frozenset[str] = frozenset()
        """Ray's ids of the nodes that caused the end."""

    def run(self) -> int:
        """Place the actors and run their processes; raises what ended them, unless somebody asked for a stop."""
        context, stage = self._context, self._stage
        attempt = None
        with reserve_nodes(
            self.nodes,
            self.bundle,
            avoided_nodes=self._avoided_nodes,
            is_stopping=context.is_stopping,
            on_wait=lambda reason: context.report_waiting(stage, reason),
        ) as group:
            if stage.script is None or stage.preflight:
                agents = AgentGroup(context, stage, self._start_actors(group))
                try:
                    code = agents.run()
                finally:
                    self.refused, self.bad_nodes, attempt = agents.refused, agents.bad_nodes, agents.attempt
                if code or stage.script is None:
                    return code
            return run_scripts(context, stage, self._start_actors(group), attempt)

    def _start_actors(self, group: Any) -> list[PlacedActor]:
        """Start one actor per node, in the order of the node ranks."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actors: list[Any] = []
        for node in range(self.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            remote_class = ray.remote(ProcessActor)
            options = actor_options(self.bundle)
            actors.append(remote_class.options(**options, scheduling_strategy=strategy).remote())
        # When the driver ends, however it does, Ray kills its actors, and the kernel their processes with them.
        locations = locate([actor.location.remote() for actor in actors], self._stage)
        placed = [PlacedActor(actor, location) for actor, location in zip(actors, locations, strict=True)]
        placed.sort(key=lambda node: _node_order(node.location))
        self._context.report_running(self._stage, [node.location.address for node in placed])
        return placed


def _node_order(location: ActorLocation) -> tuple[int, str]:
    """Nodes by address as a number: the same order at every start."""
    return int(ipaddress.ip_address(location.address)), location.node


class AgentGroup:
    """The node agents of one start, each in an actor. They decide; only an actor's death is seen here first."""

    def __init__(self, context: RayJobContext, stage: Stage, nodes: Sequence[PlacedActor]) -> None:
        self._context, self._stage, self._nodes = context, stage, nodes
        self._start = context.next_start()
        self._rendezvous = Rendezvous(context.run_folder, self._start)
        self._timeouts = AgentTimeouts.from_environment()
        members = {
            slot: ActorGroupMember(node.actor, node.location, self._task(slot)) for slot, node in enumerate(nodes)
        }
        self._group = ActorGroup(
            members, failure_grace_seconds=self._timeouts.failure_grace_seconds, survives=self._survives
        )
        self._echoes = [LogEcho(member.task.log, context.reporter.note) for member in members.values()]
        self._order: AgentOrder | None = None  # the latest that began an attempt
        self._lost: dict[int, str] = {}  # how the agents ended that ended too early, by slot

    @property
    def attempt(self) -> int | None:
        """The latest attempt."""
        return self._order.attempt if self._order is not None else None

    @property
    def refused(self) -> bool:
        """Whether preflight refused the nodes of the latest attempt."""
        return any(record.what for record in self._records())

    @property
    def bad_nodes(self) -> frozenset[str]:
        """Ray's ids of the nodes that caused the end."""
        hosts = self._rendezvous.bad_nodes()
        return frozenset(node.location.node for node in self._nodes if node.location.address in hosts)

    def run(self) -> int:
        """Wait for the end; returns 0, or 128 + the signal of a requested stop; raises a failure."""
        self._write_locations()
        result = self._group.run(lambda: self._context.stop.first, self._poll)
        self._echo(at_once=True)
        end = self._rendezvous.latest_order()
        if end is None or end.exit_code is None:
            error = self._leader_failure(result.failed[0])
            self._tell_failure(error)
            raise error
        if end.exit_code in _GOOD_EXIT_CODES:
            return end.exit_code
        for record in self._records():
            if record.ended == "failed" and record.log_tail:
                self._context.report_log(f"rank {record.failed[0].rank} {record.failed[0].how}", record.log_tail)
                break
        raise end.error()

    def _task(self, slot: int) -> ActorTask:
        context, stage, location = self._context, self._stage, self._nodes[slot].location
        unset = unset_device_variables(context, stage)
        if _THREADS_VARIABLE not in {**context.cluster.environment, **stage.environment}:
            unset += (_THREADS_VARIABLE,)  # Ray sets it to the CPUs of the whole node, and each rank would take it
        return ActorTask(
            _agent_arguments(context, stage),
            slot,
            _agent_log(self._rendezvous.folder, slot),
            {
                **stage.environment,
                "TRAINSHED_START": self._start,
                "TRAINSHED_NODE_RANK": str(slot),
                "TRAINSHED_HOST": location.address,
                "MASTER_ADDR": self._nodes[0].location.address,
                "MASTER_PORT": str(port_of_start(self._start)),
            },
            prologue=node_prologue(context, stage),
            unset=unset,
            secrets=context.cluster.secrets,
            grace_seconds=context.job.grace_seconds + _AGENT_MARGIN_SECONDS,
        )

    def _write_locations(self) -> None:
        nodes = [
            {
                "slot": slot,
                "host": node.location.address,
                "hostname": node.location.hostname,
                "ray_node": node.location.node,
                "process": node.location.process,
            }
            for slot, node in enumerate(self._nodes)
        ]
        body = orjson.dumps({"nodes": nodes}, option=orjson.OPT_INDENT_2) + b"\n"
        LocalStore(self._rendezvous.folder).put("ray.json", body)

    def _poll(self) -> None:
        order = self._rendezvous.latest_order()
        if order is not None and order.exit_code is not None:
            self._group.end_within(self._timeouts.failure_grace_seconds + _END_SECONDS)
        elif order is not None:
            self._order = order
            self._record_lost_nodes(order)
        self._echo()

    def _echo(self, *, at_once: bool = False) -> None:
        """Show what the first agent decides, and what rank 0 prints: the agent beside it repeats that."""
        for slot in {0, *(self._order.slots[:1] if self._order is not None else ())}:
            self._echoes[slot].poll(at_once=at_once)

    def _survives(self, slot: int, failure: RankFailure) -> bool:
        """Whether the other agents go on without one that has ended: the first one decides how, if it is there."""
        order = self._rendezvous.latest_order()
        if order is not None and order.exit_code is not None:
            return slot != 0
        self._lost[slot] = (
            failure.end_text if isinstance(failure, LostActor) else f"was lost: its node agent {failure.end_text}"
        )
        if not isinstance(failure, LostActor):
            self._context.report_log(f"the agent of node {slot} {failure.end_text}", failure.log_tail)
        # Without an attempt the first agent would wait for a node that never joins.
        return slot != 0 and order is not None

    def _record_lost_nodes(self, order: AgentOrder) -> None:
        """Write the records of agents that are gone, so that the others need not wait for their missing heartbeats."""
        assert order.attempt is not None
        records = AttemptRecords(self._context.run_folder, order.attempt)
        for slot, text in self._lost.items():
            if slot in order.slots and records.read_node(order.slots.index(slot)) is None:
                records.write_lost_node(
                    order.slots.index(slot),
                    slot,
                    self._nodes[slot].location.address,
                    self._stage.ranks_per_node,
                    ranks_text=text,
                    node_text=text,
                )

    def _leader_failure(self, failure: RankFailure) -> TrainshedError:
        """Explain a start whose first agent has not: it is gone, or no attempt had begun."""
        slot, text = next(iter(sorted(self._lost.items())), (failure.rank, failure.end_text))
        order, per_node = self._order, self._stage.ranks_per_node
        if order is None or order.attempt is None or slot not in order.slots:
            log = _agent_log(self._rendezvous.folder, slot)
            return error_with_exit_code(failure.exit_code, f"node {slot} {text}", where=str(log))
        node = order.slots.index(slot)
        ends = dict.fromkeys(range(node * per_node, (node + 1) * per_node), text)
        world_size = len(order.slots) * per_node
        return explain_failure(
            self._context.run_folder, order.attempt, world_size, rank_ends=ends, failed_ranks=list(ends)
        )

    def _tell_failure(self, error: TrainshedError) -> None:
        """Send the message of a failure to `notify`, since the first agent, which would send it, is gone."""
        context = self._context
        try:
            secrets = read_secrets(context.cluster.secrets)
        except InputError:  # they are on the nodes of the agents only
            secrets = {}
        with notify_of_job(context.job, context.folder, secrets) as notifier:
            notifier.fail(error.what)

    def _records(self) -> list[NodeRecord]:
        if self._order is None or self._order.attempt is None:
            return []
        records = AttemptRecords(self._context.run_folder, self._order.attempt)
        return [record for node in range(len(self._order.slots)) if (record := records.read_node(node)) is not None]

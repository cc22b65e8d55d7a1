"""A foreign engine's training on Ray: its script once per node, and what copies its checkpoints beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainshed.errors import error_with_exit_code
from trainshed.launch.agent.main import part_log
from trainshed.launch.attempt import logs_folder
from trainshed.launch.engine_events import EngineEvents
from trainshed.launch.job import Stage
from trainshed.launch.ranks import read_log_tail
from trainshed.launch.ray.actors import ActorGroup, ActorGroupMember, ActorTask, ProcessActor
from trainshed.launch.ray.context import (
    PlacedActor,
    RayJobContext,
    actor_options,
    node_prologue,
    unset_device_variables,
)
from trainshed.launch.ray.placement import CPU
from trainshed.launch.rendezvous import port_of_start
from trainshed.observe.health import diagnose, health_folder, read_flight_records
from trainshed.run_folder import rank_name
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

_SCRIPT_GRACE_SECONDS = 20.0  # for the flight recorder of NCCL, which takes some seconds to write itself
_UPLOADER_STARTS = 10  # a copy that fails so often fails for a reason that stays


def run_scripts(context: RayJobContext, stage: Stage, nodes: Sequence[PlacedActor], attempt: int | None) -> int:
    """Run a foreign engine's script once per node; `attempt` is that of its preflight, None: it takes one."""
    assert stage.script is not None
    attempt = attempt or take_attempt(LocalStore(context.run_folder), "").number
    logs = logs_folder(context.run_folder, attempt)
    environment = {
        **stage.environment,
        "TRAINSHED_ATTEMPT": str(attempt),
        "NNODES": str(stage.nodes),
        "MASTER_ADDR": nodes[0].location.address,
        "MASTER_PORT": str(port_of_start(context.next_start())),
    }
    members = {}
    for number, node in enumerate(nodes):
        task = ActorTask(
            (str(context.folder / stage.script),),
            number,
            logs / f"{rank_name(number)}.log",
            {**environment, "NODE_RANK": str(number)},
            program="bash",
            prologue=node_prologue(context, stage),
            precision=context.job.precision,
            unset=unset_device_variables(context, stage),
            secrets=context.cluster.secrets,
            grace_seconds=context.job.grace_seconds,
        )
        members[number] = ActorGroupMember(node.actor, node.location, task)
        context.reporter.note(f"attempt {attempt}: node {number} on {node.location.address} ({node.location.hostname})")
    group = ActorGroup(members, failure_grace_seconds=_SCRIPT_GRACE_SECONDS)
    with EngineEvents(context.run_folder, attempt) as events, CheckpointUploader(context, stage) as uploader:

        def poll() -> None:
            events.poll()
            uploader.poll()

        result = group.run(lambda: context.stop.first, poll)
        if not result.failed:
            events.end(result.exit_code)
            return result.exit_code
        first = result.failed[0]
        what = f"{stage.name} failed: node {first.rank} {first.end_text}"
        if records := read_flight_records(health_folder(context.run_folder, attempt)):
            what += f"; {diagnose(records, stage.world_size).sentence}"
        events.fail(what)
    context.report_log(f"node {first.rank} {first.end_text}", first.log_tail)
    raise error_with_exit_code(first.exit_code, what, where=str(members[first.rank].task.log))


class CheckpointUploader:
    """A process beside a training that copies what its engine commits to the bucket; started again when it ends."""

    def __init__(self, context: RayJobContext, stage: Stage) -> None:
        self._context, self._wanted = context, stage.uploads
        self._actor: Any = None
        self._end: Any = None
        self._failures = 0

    def __enter__(self) -> CheckpointUploader:
        """Start it, where the stage asks for it."""
        if self._wanted:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it: the stage after training sends the rest."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)

    def poll(self) -> None:
        """Start it again if it has ended by itself."""
        import ray

        if self._end is None or not ray.wait([self._end], timeout=0)[0]:
            return
        self._failures += 1
        log = read_log_tail(self._log)
        self._context.report_log("the copying of checkpoints to the bucket has ended", log)
        ray.kill(self._actor)
        self._actor = self._end = None
        if self._failures < _UPLOADER_STARTS:
            self._start()
        else:
            self._context.reporter.warn("checkpoints get to the bucket only after training")

    @property
    def _log(self) -> Path:
        return part_log(self._context.run_folder, Stage("upload"), 0)

    def _start(self) -> None:
        import ray

        context = self._context
        task = ActorTask(
            ("-P", "-m", "trainshed", "worker", "upload", "--follow", "--job", str(context.folder)),
            0,
            self._log,
            prologue=context.site_setup,
            secrets=context.cluster.secrets,
        )
        # It takes nothing that ranks may wait for.
        remote_class: Any = ray.remote(ProcessActor)
        self._actor = remote_class.options(**actor_options({CPU: 0.0})).remote()
        self._end = self._actor.run.remote(task)

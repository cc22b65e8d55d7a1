"""The nodes of an attempt proven before its ranks start (`launch/preflight`), by one actor on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.launch.job import Stage
from trainshed.launch.ray.crew import cause_of_death
from trainshed.launch.ray.host import HostPlace
from trainshed.launch.ray.placing import Stopped
from trainshed.launch.ray.resources import CPU
from trainshed.launch.ray.work import Work

_POLL_SECONDS = 0.5


class Unproven(TrainshedError):
    """Nodes or the network between them are not what they should be; the same ones would fail again."""


@dataclass(frozen=True)
class ProofTask:
    """What an actor must know to prove its node."""

    cluster_file: str
    run: str
    attempt: int
    nodes: int
    gpus: int
    node: int
    board: tuple[str, int]
    """Where node 0 serves what all nodes tell each other."""
    host: str
    environment: Mapping[str, str]


def prove(
    work: Work, stage: Stage, attempt: int, first_actors: Sequence[tuple[Any, HostPlace]], devices: Sequence[Mapping]
) -> None:
    """Check every node and all together; raises `Unproven` with the sentence that names the bad ones."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    leader, place = first_actors[0]
    board = (place.address, ray.get(leader.free_port.remote()))
    gpus = 0 if work.gpu_resource == CPU else stage.gpus_per_node
    pending = {}
    for node, (actor, where) in enumerate(first_actors):
        task = ProofTask(
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
        done, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)
        if work.stopped():
            raise Stopped
        for reference in done:
            where = pending.pop(reference)
            try:
                verdict = ray.get(reference)
            except RayActorError as error:
                raise TrainshedError(f"preflight: the check of {cause_of_death(str(error), where)}") from None
            except RayTaskError as error:
                what = error.cause.what if isinstance(error.cause, TrainshedError) else str(error.cause)
                raise TrainshedError(f"preflight on {where.address}: {what}") from None
    assert verdict is not None, "there is a node"
    if verdict.outcome in ("replace", "fail"):
        raise Unproven(
            f"preflight: {verdict.sentence}",
            where=str(work.run_folder / "health" / f"attempt-{attempt:04d}" / "preflight"),
            hint="take the named nodes out of the Ray cluster (`ray stop` there) and submit again; "
            "`preflight: false` in the cluster file skips the proof",
        )
    (work.reporter.note if verdict.outcome == "pass" else work.reporter.warn)(f"preflight: {verdict.sentence}")

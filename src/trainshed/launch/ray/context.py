"""One job that runs on Ray, as its driver sees it, and what all of its actors have in common."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import JobFile, Stage, setup_script
from trainshed.launch.ray.actors import ActorLocation
from trainshed.launch.ray.placement import CPU, GPU, MEMORY
from trainshed.launch.ray.status import StageLogLine
from trainshed.recipe import Cluster
from trainshed.reporting import Reporter
from trainshed.signals import StopSignals

_ACTOR_CONCURRENCY = 4  # methods of an actor: a stop must get through while `run` waits
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class RayJobContext:
    """One job that is running."""

    def __init__(self, job: JobFile, folder: Path, cluster: Cluster, reporter: Reporter, stop: StopSignals) -> None:
        self.job, self.folder, self.cluster, self.reporter, self.stop = job, folder, cluster, reporter, stop
        self.run_folder = Path(job.run)
        self._id = uuid.uuid4().hex[:8]
        self._starts = 0

    def next_start(self) -> str:
        """Return a name for a start of a stage, which is never used again."""
        self._starts += 1
        return f"ray-{self._id}-{self._starts}"

    @property
    def gpu_resource(self) -> str:
        """Ray's name for one GPU; the pods of a RayJob have Ray's own."""
        return self.cluster.ray.gpu_resource if self.cluster.ray is not None else GPU

    @property
    def site_setup(self) -> tuple[str, ...]:
        """The cluster file's `setup`, which a process of a stage runs before anything else."""
        script = setup_script(self.cluster)
        return () if script is None else (script,)

    def is_stopping(self) -> bool:
        """Whether somebody asked for a stop."""
        return self.stop.first is not None

    def report_waiting(self, stage: Stage, reason: str) -> None:
        """Report that a stage waits, and for what."""
        self.reporter.note(str(StageLogLine(stage.name, "waits", reason)))

    def report_running(self, stage: Stage, nodes: Sequence[str]) -> None:
        """Report that a stage runs, and where."""
        self.reporter.note(str(StageLogLine(stage.name, "runs", " ".join(dict.fromkeys(nodes)))))

    def report_log(self, subject: str, log_tail: str) -> None:
        """Report the end of the log of whatever failed first; `subject` says how it failed."""
        tail = log_tail.strip()
        self.reporter.warn(f"{subject}; the end of its log:\n{tail}" if tail else subject)


@dataclass(frozen=True)
class PlacedActor:
    """An actor, and where it runs."""

    actor: Any
    location: ActorLocation


def locate(references: Sequence[Any], stage: Stage) -> list[ActorLocation]:
    """Return what `ProcessActor.location` says of placed actors; raises where one has died before it could say so."""
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(list(references))
    except RayActorError as error:
        last = str(error).strip().splitlines()[-1]
        raise TrainshedError(f"an actor of {stage.name} was lost before it ran: {last}") from None


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """Return the options of an actor that takes these resources."""
    options = {CPU: "num_cpus", GPU: "num_gpus", MEMORY: "memory"}
    known: dict[str, Any] = {options[name]: amount for name, amount in bundle.items() if name in options}
    others = {name: amount for name, amount in bundle.items() if name not in options}
    return known | {"resources": others, "max_restarts": 0, "max_concurrency": _ACTOR_CONCURRENCY}


def node_prologue(context: RayJobContext, stage: Stage) -> tuple[str, ...]:
    """What a node runs first: the site's lines, then those of its fabric; pods have the latter already."""
    cluster, site_setup = context.cluster, context.site_setup
    if cluster.target != "ray":
        return site_setup
    setup = fabric_setup(cluster, nodes=stage.nodes)
    if setup.profile_script is None and not setup.library_path and not site_setup:
        return ()
    # Ray has joined a PYTHONPATH of the cluster file with the folder of our code: written again it would hide that.
    again = {name: value for name, value in cluster.environment.items() if name != "PYTHONPATH"}
    return site_setup + replace(setup, environment={**setup.environment, **again}).shell_prologue()


def unset_device_variables(context: RayJobContext, stage: Stage) -> tuple[str, ...]:
    """Ray sets these to nothing for actors that take no "GPU", also where GPUs have another name."""
    other_name = context.gpu_resource not in (CPU, GPU)
    return _DEVICE_VARIABLES if other_name and stage.gpus_per_node else ()

"""What the driver's stages share: the job, its cluster file, and whether somebody asked for a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ranks import RankFailure
from trainshed.launch.ray.resources import CPU, GPU, MEMORY
from trainshed.launch.ray.stage_lines import StageLine
from trainshed.launch.site_setup import setup_script
from trainshed.recipe import Cluster
from trainshed.reporting import Reporter

_BESIDE_EACH_OTHER = 4  # methods of an actor: a stop must get through while `run` waits


class Work:
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
        self.reporter.note(str(StageLine(stage.name, "waits", why)))

    def says_runs(self, stage: Stage, nodes: Sequence[str]) -> None:
        """Say that a stage runs, and where."""
        self.reporter.note(str(StageLine(stage.name, "runs", " ".join(dict.fromkeys(nodes)))))

    def says_log(self, failure: RankFailure, what: str) -> None:
        """Say the end of the log of whatever failed first."""
        tail = failure.log_tail.strip()
        self.reporter.warn(f"{what} {failure.how}; the end of its log:\n{tail}" if tail else f"{what} {failure.how}")


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """How an actor that takes so much is asked of Ray."""
    known = {CPU: "num_cpus", GPU: "num_gpus", MEMORY: "memory"}
    options: dict[str, Any] = {known[name]: amount for name, amount in bundle.items() if name in known}
    others = {name: amount for name, amount in bundle.items() if name not in known}
    return options | {"resources": others, "max_restarts": 0, "max_concurrency": _BESIDE_EACH_OTHER}

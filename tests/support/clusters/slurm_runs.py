"""Small recipes submitted to a real Slurm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from support.clusters.slurm_cluster import SlurmCluster
from support.recipes.small_recipes import recipe_text
from trainshed.launch.job import CodeArchive, Job, Stage
from trainshed.launch.slurm.target import SlurmTarget
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.recipe import Cluster, load_cluster, load_recipe
from trainshed.workflow.submit import build_job

VENV = Path(sys.prefix)
NO_CODE = CodeArchive("none", "0" * 64, b"")


class SlurmRuns:
    """Submits small recipes, and cancels what is left of them."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self._submitted: list[SubmittedJob] = []

    def cluster(self, **changed: Any) -> Cluster:
        return load_cluster(write_cluster(self.folder, **changed))

    def job(self, *overrides: str, code: bool = False, **changed: Any) -> Job:
        """A recipe's job; its nodes run what is installed here unless `code` travels too."""
        file = self.folder / "recipe.yaml"
        file.write_text(recipe_text("dense"))
        job = build_job(load_recipe(str(file), overrides), self.cluster(**changed), code=None if code else NO_CODE)
        return job if code else replace(job, code=None)

    def script_job(self, *stages: tuple[Stage, str], **changed: Any) -> Job:
        """A job whose stages run scripts in place of the agent."""
        named = [(replace(stage, script=f"{stage.name}.sh"), text) for stage, text in stages]
        files = {f"{stage.name}.sh": text for stage, text in named}
        run = str(self.folder / "store" / "runs" / "scripts" / "1")
        made = tuple(stage for stage, _ in named)
        return Job(
            name="scripts-1",
            run=run,
            cluster=self.cluster(**changed),
            stages=made,
            files=files,
            code=None,
            grace_seconds=60,
        )

    def submit(self, job: Job) -> SlurmRun:
        target = SlurmTarget(job.cluster)
        submitted = target.submit(target.render(job), job)
        self.keep(submitted)
        return SlurmRun(self.slurm, target, submitted)

    def keep(self, submitted: SubmittedJob) -> None:
        """Remember a job that was submitted otherwise, to cancel what is left of it."""
        self._submitted.append(submitted)

    def end(self) -> None:
        for submitted in self._submitted:
            for id in submitted.ids.values():
                self.slurm.run("scancel", "--quiet", id)


class SlurmRun:
    """A submitted run."""

    def __init__(self, slurm: SlurmCluster, target: SlurmTarget, submitted: SubmittedJob) -> None:
        self.slurm, self.target, self.submitted = slurm, target, submitted
        self.folder = Path(submitted.run)

    def id(self, stage: str = "train") -> str:
        return self.submitted.ids[stage]

    def states(self) -> dict[str, StageState]:
        return {state.stage: state for state in self.target.status(self.submitted)}

    def wait(self, stage: str = "train", seconds: float = 300) -> StageState:
        """Wait until a stage has ended."""
        return self.until(lambda: self._ended(stage), f"{stage} to end", seconds)

    def until(self, ask: Callable[[], Any], what: str, seconds: float = 300) -> Any:
        end = time.monotonic() + seconds
        while not (found := ask()):
            assert time.monotonic() < end, f"waited for {what}\n{self.states()}\n{self.all_logs()}"
            time.sleep(0.1)
        return found

    def until_saved(self) -> None:
        """Wait for the first checkpoint."""
        self.until(lambda: list(self.folder.glob("checkpoints/*/manifest.json")), "a checkpoint")

    def all_logs(self) -> str:
        return "\n".join(f"{file}\n{file.read_text()[-3000:]}" for file in self.folder.rglob("*.log"))

    def _ended(self, stage: str) -> StageState | None:
        state = self.states()[stage]
        return state if state.state not in ("waiting", "running") else None


def write_cluster(folder: Path, **changed: Any) -> Path:
    """A cluster file of the test's Slurm: ranks on processors, in the Python that runs the tests."""
    body: dict[str, Any] = {
        "trainshed": 1,
        "name": "virtual",
        "target": "slurm",
        "machine": "cpu",
        "store": str(folder / "store"),
        "nodes": {"default": 2},
        "preflight": False,
        "limits": {"grace_seconds": 60, "restarts": 2, "cpu_stage_cpus": 1, "cpu_stage_memory": "500Mi"},
        "slurm": {"venv": str(VENV), "gpus": None},
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TRAINSHED_LOOK_SECONDS": "0.2",
            "TRAINSHED_ROLL_CALL_SECONDS": "5",
            "TRAINSHED_FAILURE_GRACE_SECONDS": "5",
        },
    }
    for key, value in changed.items():
        body[key] = body.get(key, {}) | value if isinstance(value, dict) else value
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(body, sort_keys=False))
    return file

"""Jobs of the seeds, submitted to pods that run here: started, waited for, and what their engine printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.clusters.pod_cluster import make_service_account, running_pods
from support.clusters.pod_runner import PodRunner
from trainshed.errors import TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.launch.target import SubmittedJob
from trainshed.observe.event_log import read_steps
from trainshed.storage import LocalStore

WAIT_SECONDS = 1500.0


@contextmanager
def seed_pods(folder: Path) -> Iterator[PodRunner]:
    """Pods of a cluster that has Kubeflow's training operator; `folder`/config is the kubeconfig."""
    (folder / "account").mkdir()
    with running_pods(make_service_account(folder / "account"), folder) as runner:
        runner.server.kinds["/apis/kubeflow.org/v1"] = ["PyTorchJob"]
        yield runner


def submit(job: Job) -> SubmittedJob:
    """Send what `render` prints."""
    target = KubernetesTarget(job.cluster)
    return target.submit(target.render(job), job)


def wait_for(pods: PodRunner, job: Job, submitted: SubmittedJob, what: str, done: Callable[[], bool]) -> None:
    """Run the pods until something is there; a stage that fails ends the test."""

    def look() -> bool:
        try:
            states = KubernetesTarget(job.cluster).status(submitted)
        except TrainshedError as error:
            if "does not answer" not in error.what:
                raise
            return False  # the server is a thread of this process, and the machine may have much to do
        failed = [state.reason for state in states if state.state == "failed"]
        assert not failed, f"{failed}\n{pods.logs()}"
        return done()

    pods.until(look, what, seconds=WAIT_SECONDS)


def run_to_the_end(pods: PodRunner, job: Job) -> None:
    """Submit a job, and run its stages."""
    wait_for_end(pods, job, submit(job))


def wait_for_end(pods: PodRunner, job: Job, submitted: SubmittedJob) -> None:
    """Run the pods until every stage is done."""

    def is_done() -> bool:
        return all(state.state == "done" for state in KubernetesTarget(job.cluster).status(submitted))

    wait_for(pods, job, submitted, "the job to end", is_done)


def run_folder(job: Job, pods: PodRunner) -> Path:
    """The run's folder on the volume of the cluster."""
    (mount,) = [volume.mount for volume in job.cluster.volumes]
    return pods.shared / Path(job.run).relative_to(mount)


def step_losses(run: Path) -> dict[int, float]:
    """The loss of each step of our own engine; a later attempt wins."""
    return {event["step"]: event["loss"] for event in read_steps(LocalStore(run), "")}


def latest_iteration(run: Path) -> int:
    """The newest checkpoint of Megatron-LM, 0 where it has none."""
    file = run / "checkpoints-megatron" / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def printed_losses(run: Path) -> dict[int, str]:
    """The loss of each step as Megatron-LM prints it, of whichever node does; a later attempt wins."""
    texts = [log.read_text() for log in sorted(run.glob("logs/attempt-*/node-*.log"))]
    lines = [match for text in texts for match in re.finditer(r"iteration +(\d+)/.*lm loss: (\S+)", text)]
    return {int(line[1]): line[2] for line in lines}

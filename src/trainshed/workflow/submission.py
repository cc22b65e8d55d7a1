"""A recipe's job on a cluster: rendered, checked and sent; nothing is decided after `render_job`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainshed.errors import InputError
from trainshed.launch.job import Job
from trainshed.launch.submissions import record_submission as keep_record
from trainshed.launch.target import SubmitRequest, SubmittedJob, target_of
from trainshed.recipe import Cluster, Recipe, to_yaml
from trainshed.workflow.submit import build_job


@dataclass(frozen=True)
class RenderedJob:
    """A job, and byte for byte what is sent for it."""

    job: Job
    request: SubmitRequest

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before nodes are paid for."""
        return (*self.job.notes, *self.request.notes)

    @property
    def files(self) -> dict[str, str]:
        """The scripts or manifests by name."""
        return {part.name: part.text for part in self.request.parts}

    def text(self) -> str:
        """Everything in one text, as `trainshed render` prints it."""
        return self.request.text()

    def __str__(self) -> str:
        return self.text()


def render_job(
    recipe: Recipe,
    cluster: Cluster,
    *,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    despite_memory: bool = False,
    offline: bool = False,
) -> RenderedJob:
    """Decide the job, and render it; the scheduler is not asked yet."""
    target = target_of(cluster)  # first: a cluster without a scheduler is refused before any planning
    job = build_job(recipe, cluster, id=id, nodes=nodes, gpus=gpus, despite_memory=despite_memory, offline=offline)
    return RenderedJob(job, target.render(job))


def send_job(rendered: RenderedJob, confirm: Callable[[Job], bool] = lambda job: True) -> SubmittedJob | None:
    """Let the scheduler check a job, send exactly what was rendered and keep a record of it.

    Raises `InputError` where the scheduler could not run it; None where `confirm` says no.
    """
    job = rendered.job
    target = target_of(job.cluster)
    refusals = target.check(job)
    if refusals:
        raise InputError("; ".join(refusals), where=job.cluster.where("name"), hint="nothing was submitted")
    if not confirm(job):
        return None
    submitted = target.submit(rendered.request, job)
    record_submission(job, submitted)
    return submitted


def record_submission(job: Job, submitted: SubmittedJob) -> str:
    """Remember what a scheduler took, and return the run's name as people write it."""
    name, id = job.run.rsplit("/", 2)[1:]
    train = job.stage("train")
    kept = replace(submitted, ranks_per_node=train.ranks_per_node, losses_rank=job.losses_rank)
    keep_record(name, id, job.steps, kept, to_yaml(job.cluster), job.cluster.plugin_sources)
    return f"{name}/{id}"

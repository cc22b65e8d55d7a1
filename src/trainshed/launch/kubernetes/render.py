"""A job as the manifests that are applied, in order. Nothing is decided here that the job does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainshed.launch.fabric import FabricSetup, fabric_setup
from trainshed.launch.job import Job, Stage
from trainshed.launch.kubernetes.kinds import Object, kind_of
from trainshed.launch.kubernetes.manifests.content import content
from trainshed.launch.kubernetes.manifests.cpu_job import cpu_job
from trainshed.launch.kubernetes.manifests.deployment import deployment, service
from trainshed.launch.kubernetes.manifests.driver_objects import DRIVER, driver_objects
from trainshed.launch.kubernetes.manifests.environment import fabric_script
from trainshed.launch.kubernetes.manifests.jobset import jobset
from trainshed.launch.kubernetes.manifests.naming import is_driven, is_training
from trainshed.launch.kubernetes.manifests.plain_job import headless_service, plain_job, plain_job_notes
from trainshed.launch.kubernetes.manifests.pod import Planned, fabric_file, planned
from trainshed.launch.kubernetes.manifests.pre_pull import pre_pull
from trainshed.launch.kubernetes.manifests.pytorchjob import pytorchjob, pytorchjob_notes
from trainshed.launch.kubernetes.manifests.rayjob import rayjob
from trainshed.launch.kubernetes.manifests.trainjob import trainjob, trainjob_notes
from trainshed.launch.kubernetes.manifests.yaml_text import to_documents
from trainshed.launch.site_setup import SETUP_FILE, setup_script
from trainshed.launch.target import Part, Request

_TRAINING: dict[str, Callable[[Planned], Object]] = {
    "jobset": jobset,
    "pytorchjob": pytorchjob,
    "trainjob": trainjob,
    "rayjob": rayjob,
    "job": plain_job,
}
_NOTES: dict[str, Callable[[Planned], tuple[str, ...]]] = {
    "pytorchjob": pytorchjob_notes,
    "trainjob": trainjob_notes,
    "job": plain_job_notes,
}


def render(job: Job) -> Request:
    """Turn a job into manifests; the same job gives the same bytes.

    With several stages, theirs lie in the driver's ConfigMap: `kubectl apply` of everything starts the driver alone.
    """
    plans, objects = _plans(job)
    kubernetes = job.cluster.on_kubernetes
    parts = [Part("content.yaml", None, to_documents(objects))]
    gangs = [plan for plan in plans if is_training(plan.stage)]
    if kubernetes.pre_pull and gangs:
        parts.append(Part("pre-pull.yaml", None, to_documents([pre_pull(job, gangs[0].stage)])))
    stages = {plan.stage.name: stage_objects(plan) for plan in plans}
    if not is_driven(_ids(stages)):
        parts += [Part(f"{name}.yaml", name, to_documents(found)) for name, found in stages.items()]
    else:
        parts.append(Part(f"{DRIVER}.yaml", None, to_documents(driver_objects(job, plans[0].content, stages))))
    notes = [note for plan in gangs for note in plan.fabric.notes]
    notes += [note for plan in gangs for note in _NOTES.get(kubernetes.kind, _no_notes)(plan)]
    return Request("kubernetes", job.name, tuple(parts), notes=tuple(dict.fromkeys(notes)))


def _no_notes(plan: Planned) -> tuple[str, ...]:
    return ()


def stage_objects(plan: Planned) -> list[Object]:
    """Return the objects of a stage; its own is the last, and stands for it."""
    if plan.stage.serving is not None:
        return [service(plan), deployment(plan)]
    kind = plan.job.cluster.on_kubernetes.kind
    make = _TRAINING[kind] if is_training(plan.stage) else cpu_job
    beside = [
        {**found, "metadata": {**plan.metadata, **found["metadata"], "labels": plan.labels}}
        for found in plan.needs.objects
    ]
    if is_training(plan.stage) and kind == "job":
        beside.append(headless_service(plan))
    return [*beside, make(plan)]


def stage_ids(job: Job) -> dict[str, str]:
    """Return what stands for each stage, as Kind/name."""
    plans, _ = _plans(job)
    return _ids({plan.stage.name: stage_objects(plan) for plan in plans})


def _ids(stages: Mapping[str, Sequence[Object]]) -> dict[str, str]:
    own = {stage: found[-1] for stage, found in stages.items()}
    return {stage: f"{kind_of(each).name}/{each['metadata']['name']}" for stage, each in own.items()}


def _plans(job: Job) -> tuple[list[Planned], tuple[Object, ...]]:
    fabrics = {stage.name: _fabric(job, stage) for stage in job.stages}
    scripts = {
        fabric_file(stage): script
        for stage in job.stages
        if (script := fabric_script(fabrics[stage.name], job.cluster, stage)) is not None
    }
    site = setup_script(job.cluster)
    scripts |= {SETUP_FILE: site} if site is not None else {}
    carried = content(replace(job, files=dict(job.files) | scripts))
    plans = [
        planned(job, stage, carried, fabrics[stage.name], has_fabric_script=fabric_file(stage) in scripts)
        for stage in job.stages
    ]
    return plans, carried.objects


def _fabric(job: Job, stage: Stage) -> FabricSetup:
    """What the network between a gang's nodes needs; a CPU stage has none."""
    return fabric_setup(job.cluster, nodes=stage.nodes + stage.spares if is_training(stage) else 1)

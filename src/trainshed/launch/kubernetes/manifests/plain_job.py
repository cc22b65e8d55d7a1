"""Training as a plain Job, where nothing is installed that knows gangs: an Indexed Job and a headless Service.

Kubernetes gives each pod of an Indexed Job a rank and a hostname, and the Service makes that a name in DNS. A pod that
fails ends them all (`backoffLimit: 0`). What a Job cannot do is start all of its pods again: the driver deletes it and
makes it anew, `limits.restarts` times, and the new one's uid names the new start.
"""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import JOB, SERVICE, Object, new_object
from trainshed.launch.kubernetes.manifests.jobset import START, fail_on_wrong_input
from trainshed.launch.kubernetes.manifests.naming import COMPONENT, INSTANCE, MOST_RESTARTS, metadata
from trainshed.launch.kubernetes.manifests.pod import (
    KEPT_SECONDS,
    MASTER_PORT,
    Container,
    Planned,
    pod_template,
)


def plain_job(plan: Planned) -> Object:
    """Return the object of a gang."""
    stage, limits = plan.stage, plan.job.cluster.limits
    container = Container(stage.name, {"MASTER_ADDR": f"{plan.name}-0.{plan.name}"}, (START,))
    template = pod_template(plan, container)
    template["spec"] = {"subdomain": plan.name} | template["spec"]
    spec: Object = {"suspend": True} if plan.where.suspended else {}
    spec |= {
        "completionMode": "Indexed",
        "completions": plan.pods,
        "parallelism": plan.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name)]},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
    }
    if limits.hours is not None:
        spec["activeDeadlineSeconds"] = int(limits.hours * 3600)
    found = plan.metadata
    found["annotations"] = found.get("annotations", {}) | {MOST_RESTARTS: str(stage.restarts)}
    return new_object(JOB, found, spec=spec | {"template": template})


def headless_service(plan: Planned) -> Object:
    """Return what gives the pods their names, before they are ready: they meet to become that."""
    spec: Object = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: plan.job.name, COMPONENT: plan.stage.name},
        "ports": [{"name": "rendezvous", "port": MASTER_PORT, "targetPort": MASTER_PORT, "protocol": "TCP"}],
    }
    return new_object(SERVICE, metadata(plan.job, plan.name, plan.stage.name), spec=spec)


def plain_job_notes(plan: Planned) -> tuple[str, ...]:
    """Say what a plain Job does otherwise."""
    return (
        "a plain Job is started again by the driver, a small pod on CPUs: without it a training that fails stays so; "
        "all pods of a gang have their nodes at once only where a queue or a JobSet sees to it",
    )

"""Training as a PyTorchJob (Kubeflow's training operator v1): a master, workers, and our own ranks inside.

The operator says RANK and means the pod; the agent makes ranks of processes of it. It starts containers again one by
one, so that a restart of the whole is as many restarts as there are pods.
"""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import PYTORCH_JOB, Object, new_object
from trainshed.launch.kubernetes.manifests.pod import KEPT_SECONDS, MASTER_PORT, Container, Planned, pod_template

# Names that the operator looks for.
_CONTAINER = "pytorch"
_PORT = "pytorchjob-port"


def pytorchjob(plan: Planned) -> Object:
    """Return the object of a gang."""
    stage, limits = plan.stage, plan.job.cluster.limits
    policy: Object = {
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        # The operator gives up when so many restarts have happened, not when one more would be needed.
        "backoffLimit": stage.restarts * plan.pods + 1 if stage.restarts else 0,
    }
    if limits.hours is not None:
        policy["activeDeadlineSeconds"] = int(limits.hours * 3600)
    if plan.where.suspended:
        policy["suspend"] = True
    replicas: Object = {"Master": _replicas(plan, 1)}
    if plan.pods > 1:
        replicas["Worker"] = _replicas(plan, plan.pods - 1)
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return new_object(PYTORCH_JOB, plan.metadata, spec=spec)


def pytorchjob_notes(plan: Planned) -> tuple[str, ...]:
    """Say what a PyTorchJob does otherwise."""
    if not plan.stage.restarts:
        return ()
    return ("a PyTorchJob is started again whatever ended it, wrong input too; a JobSet tells these apart",)


def _replicas(plan: Planned, count: int) -> Object:
    restart_policy = "OnFailure" if plan.stage.restarts else "Never"
    # The operator sets MASTER_ADDR and MASTER_PORT; no two starts of pods that it makes have a name in common.
    meet = {"TRAINSHED_MEET": str(plan.pods)} if plan.pods > 1 and plan.stage.script is None else {}
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    template = pod_template(plan, Container(_CONTAINER, meet, (uid,) if meet else ()), restart_policy=restart_policy)
    container = template["spec"]["containers"][0]
    container["ports"] = [{"name": _PORT, "containerPort": MASTER_PORT}]
    container["env"] = [each for each in container["env"] if each["name"] != "MASTER_PORT"]
    del template["spec"]["restartPolicy"]  # the operator takes it from beside the template
    return {"replicas": count, "restartPolicy": restart_policy, "template": template}

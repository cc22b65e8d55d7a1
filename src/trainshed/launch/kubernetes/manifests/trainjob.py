"""Training as a TrainJob (Kubeflow Trainer v2): the runtime has the pods, we patch in what they lack.

A patch cannot add init containers or change the network, so that fabrics which need them are refused. What the
trainer asks for per node takes the place of the runtime's own resources: devices of the fabric must stand there too
(NVIDIA/aicr#2275: EFA devices were lost that way).
"""

from __future__ import annotations

from trainshed.errors import InputError
from trainshed.launch.kubernetes.kinds import TRAIN_JOB, Object, new_object
from trainshed.launch.kubernetes.manifests.jobset import START
from trainshed.launch.kubernetes.manifests.pod import Container, Planned, pod_template

# Of the replicated job that trains, and of its container, in the runtimes that Kubeflow ships.
_NODE = "node"
_MANAGER = "trainshed.io/launch"


def trainjob(plan: Planned) -> Object:
    """Return the object of a gang."""
    _refuse_what_patches_cannot(plan)
    cluster = plan.job.cluster
    first = f"{plan.name}-{_NODE}-0-0.{plan.name}"
    template = pod_template(plan, Container(_NODE, {"MASTER_ADDR": first}, (START,)))
    spec, container = template["spec"], template["spec"]["containers"][0]
    patch: Object = {"name": _NODE, "volumeMounts": container["volumeMounts"]}
    if "securityContext" in container:
        patch["securityContext"] = container["securityContext"]
    patched = {key: spec[key] for key in _PATCHED if key in spec} | {"containers": [patch]}
    pods = {"metadata": template["metadata"], "spec": patched}
    jobs = [{"name": _NODE, "template": {"spec": {"template": pods}}}]
    body: Object = {"suspend": True} if plan.where.suspended else {}
    body |= {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": cluster.on_kubernetes.runtime,
        },
        "trainer": {
            "numNodes": plan.pods,
            "image": container["image"],
            "command": container["command"],
            "args": container["args"],
            "env": container["env"],
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        ],
    }
    if cluster.limits.hours is not None:
        body["activeDeadlineSeconds"] = int(cluster.limits.hours * 3600)
    return new_object(TRAIN_JOB, plan.metadata, spec=body)


def trainjob_notes(plan: Planned) -> tuple[str, ...]:
    """Say what a TrainJob does otherwise."""
    runtime = plan.job.cluster.on_kubernetes.runtime
    return (f"how often a TrainJob is started again is the business of its runtime ({runtime}), not of this file",)


_PATCHED = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)


def _refuse_what_patches_cannot(plan: Planned) -> None:
    needs, cluster = plan.needs, plan.job.cluster
    lacking = [
        word
        for word, needed in (
            ("init containers", needs.init_containers),
            ("the node's network", needs.host_network or cluster.on_kubernetes.host_network),
            ("resource claims", needs.resource_claims),
        )
        if needed
    ]
    if lacking:
        raise InputError(
            f"{plan.fabric.fabric or plan.fabric.name} needs {' and '.join(lacking)}, which a TrainJob cannot ask for",
            where=cluster.where("kubernetes.kind"),
            hint="write `kind: jobset`",
        )

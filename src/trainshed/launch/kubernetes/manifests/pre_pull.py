"""The image on every GPU node before the job needs it: a DaemonSet whose pods pull it and then only wait."""

from __future__ import annotations

from trainshed.launch.job import Job, Stage
from trainshed.launch.kubernetes.kinds import DAEMON_SET, Object, new_object
from trainshed.launch.kubernetes.manifests.naming import COMPONENT, INSTANCE, fitted, labels, metadata
from trainshed.launch.kubernetes.manifests.placement import placement
from trainshed.launch.kubernetes.manifests.pod import image_of

PRE_PULL = "pre-pull"
_PAUSE = "registry.k8s.io/pause:3.10"
_SMALL = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}


def pre_pull(job: Job, stage: Stage) -> Object:
    """Return the DaemonSet for a stage's image, on the nodes that the stage may run on."""
    kubernetes = job.cluster.on_kubernetes
    puller = {"name": "pull", "image": image_of(job, stage), "command": ["true"], "resources": _SMALL}
    spec: Object = {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    spec |= placement(job.cluster, stage).pod
    spec["initContainers"] = [puller]
    spec["containers"] = [{"name": "wait", "image": _PAUSE, "resources": _SMALL}]
    selected = {INSTANCE: job.name, COMPONENT: PRE_PULL}
    return new_object(
        DAEMON_SET,
        metadata(job, fitted(job.name, f"-{PRE_PULL}"), PRE_PULL),
        spec={
            "selector": {"matchLabels": selected},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": labels(job, PRE_PULL)}, "spec": spec},
        },
    )

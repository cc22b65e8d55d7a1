"""The kinds of objects that we create or read, and the names, labels and annotations that we give them.

The driver runs in any image that has Python (`driver_program.py`), so this file needs the standard library of Python
3.8 only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    KubeObject = dict[str, Any]
else:
    KubeObject = dict
"""A Kubernetes object, or a part of one, as a plain dict."""


@dataclass(frozen=True)
class KubeKind:
    """One kind of object."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def base(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str, name: str | None = None) -> str:
        """Path of all objects of the kind, or of one."""
        folder = (
            f"{self.base}/namespaces/{namespace}/{self.plural}" if self.namespaced else f"{self.base}/{self.plural}"
        )
        return folder if name is None else f"{folder}/{name}"


CONFIG_MAP = KubeKind("v1", "ConfigMap", "configmaps")
POD = KubeKind("v1", "Pod", "pods")
NODE = KubeKind("v1", "Node", "nodes", namespaced=False)
SERVICE = KubeKind("v1", "Service", "services")
EVENT = KubeKind("v1", "Event", "events")
NAMESPACE = KubeKind("v1", "Namespace", "namespaces", namespaced=False)
SERVICE_ACCOUNT = KubeKind("v1", "ServiceAccount", "serviceaccounts")
CLAIM = KubeKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
VOLUME = KubeKind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
JOB = KubeKind("batch/v1", "Job", "jobs")
DAEMON_SET = KubeKind("apps/v1", "DaemonSet", "daemonsets")
DEPLOYMENT = KubeKind("apps/v1", "Deployment", "deployments")
ROLE = KubeKind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = KubeKind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
STORAGE_CLASS = KubeKind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
JOB_SET = KubeKind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets")
PYTORCH_JOB = KubeKind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")
TRAIN_JOB = KubeKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs")
RAY_JOB = KubeKind("ray.io/v1", "RayJob", "rayjobs")
COMPUTE_DOMAIN = KubeKind("resource.nvidia.com/v1beta1", "ComputeDomain", "computedomains")
KUEUE = "kueue.x-k8s.io"
LOCAL_QUEUE = KubeKind(f"{KUEUE}/v1beta1", "LocalQueue", "localqueues")
CLUSTER_QUEUE = KubeKind(f"{KUEUE}/v1beta1", "ClusterQueue", "clusterqueues", namespaced=False)
PRIORITY_CLASS = KubeKind(f"{KUEUE}/v1beta1", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
WORKLOAD = KubeKind(f"{KUEUE}/v1beta1", "Workload", "workloads")

TRAINING_KINDS = {"jobset": JOB_SET, "pytorchjob": PYTORCH_JOB, "trainjob": TRAIN_JOB, "rayjob": RAY_JOB, "job": JOB}
"""The kind that trains, by `kubernetes.kind` of the cluster file."""
CREATED_KINDS = (
    CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, DAEMON_SET, COMPUTE_DOMAIN,
    *TRAINING_KINDS.values(),
    SERVICE, DEPLOYMENT, CLAIM, VOLUME, STORAGE_CLASS,
)  # fmt: skip
_KINDS_BY_NAME = {(kind.api_version, kind.name): kind for kind in CREATED_KINDS}


def kind_of(obj: Mapping[str, Any]) -> KubeKind:
    """Return the kind of an object that we create."""
    return _KINDS_BY_NAME[obj["apiVersion"], obj["kind"]]


def kind_named(name: str) -> KubeKind:
    """Return the kind with a name, as in `SubmittedJob.ids`."""
    return next(kind for kind in CREATED_KINDS if kind.name == name)


DRIVER = "driver"
STAGES_FILE = "stages.json"
"""Beside the manifests that the driver applies: which stage each is, and the names of its objects."""

MAX_NAME_LENGTH = 63
# A pod of a JobSet is <name>-train-0-<four digits>-<five letters>, and JobSet refuses names that would not fit.
MAX_TRAINING_NAME_LENGTH = 44
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
QUEUE_LABEL = f"{KUEUE}/queue-name"
PRIORITY_LABEL = f"{KUEUE}/priority-class"
MAX_RUN_SECONDS_ANNOTATION = f"provreq.{KUEUE}/maxRunDurationSeconds"
MAX_RESTARTS_ANNOTATION = "trainshed.io/most-restarts"
"""On a training that the driver recreates if it fails: how often at most."""
RESTARTS_ANNOTATION = "trainshed.io/restarts"
"""How often it was recreated; on its Service, which outlives it, and on the training itself for `status`."""
RESTARTED_UID_ANNOTATION = "trainshed.io/restarted"
"""On its Service: the uid of the last training that was recreated, so that a restarted driver counts it only once."""


def fit_name(name: str, suffix: str = "", max_length: int = MAX_NAME_LENGTH) -> str:
    """Return a name with its suffix in at most `max_length` characters; a truncated name ends in a hash."""
    room = max_length - len(suffix)
    if len(name) <= room:
        return name + suffix
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: room - len(digest) - 1].rstrip('-.')}-{digest}{suffix}"


def needs_driver(ids: Mapping[str, str]) -> bool:
    """Whether a driver creates the stages (as Kind/name): there are several, or a plain Job that it recreates."""
    return len(ids) > 1 or ids.get("train", "").startswith(f"{JOB.name}/")


def driver_name(job: str) -> str:
    """Return the name of the driver's job, and of its account and role."""
    return fit_name(job, f"-{DRIVER}", MAX_NAME_LENGTH - 11)


def split_documents(text: str) -> list[str]:
    """Split a text into its objects without changing a byte of them; inside an object no line begins with `---`."""
    return [document for document in re.split(r"(?m)^(?=---\n)", text) if document]

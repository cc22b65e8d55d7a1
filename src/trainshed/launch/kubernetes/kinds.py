"""The kinds of objects we create or ask for, and where the API serves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object in Kubernetes' own words."""


@dataclass(frozen=True)
class Kind:
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


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
SERVICE = Kind("v1", "Service", "services")
EVENT = Kind("v1", "Event", "events")
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
JOB = Kind("batch/v1", "Job", "jobs")
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
STORAGE_CLASS = Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
JOB_SET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets")
PYTORCH_JOB = Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")
TRAIN_JOB = Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs")
RAY_JOB = Kind("ray.io/v1", "RayJob", "rayjobs")
COMPUTE_DOMAIN = Kind("resource.nvidia.com/v1beta1", "ComputeDomain", "computedomains")
KUEUE = "kueue.x-k8s.io"
LOCAL_QUEUE = Kind(f"{KUEUE}/v1beta1", "LocalQueue", "localqueues")
CLUSTER_QUEUE = Kind(f"{KUEUE}/v1beta1", "ClusterQueue", "clusterqueues", namespaced=False)
PRIORITY_CLASS = Kind(f"{KUEUE}/v1beta1", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
WORKLOAD = Kind(f"{KUEUE}/v1beta1", "Workload", "workloads")

TRAINING = {"jobset": JOB_SET, "pytorchjob": PYTORCH_JOB, "trainjob": TRAIN_JOB, "rayjob": RAY_JOB, "job": JOB}
"""What training becomes, by the word in the cluster file."""
CREATED = (
    CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, DAEMON_SET, COMPUTE_DOMAIN,
    *TRAINING.values(),
    SERVICE, DEPLOYMENT, CLAIM, VOLUME, STORAGE_CLASS,
)  # fmt: skip
_BY_NAME = {(kind.api_version, kind.name): kind for kind in CREATED}


def new_object(kind: Kind, metadata: Object, **body: Any) -> Object:
    """Return an object of a kind."""
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata} | body


def kind_of(found: Mapping[str, Any]) -> Kind:
    """Return the kind of an object that we made."""
    return _BY_NAME[found["apiVersion"], found["kind"]]


def kind_named(name: str) -> Kind:
    """Return the kind with a name, as it stands in `Submitted.ids`."""
    return next(kind for kind in CREATED if kind.name == name)

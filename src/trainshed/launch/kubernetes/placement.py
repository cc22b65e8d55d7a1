"""Where pods may run and under which terms: selectors, taints, Kueue's labels, spot and reserved nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshed.catalog import find_gpu, find_machine
from trainshed.errors import InputError
from trainshed.launch.job import Stage
from trainshed.launch.kubernetes.objects import (
    MAX_RUN_SECONDS_ANNOTATION,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    KubeObject,
    is_training,
)
from trainshed.recipe import Cluster

CloudProvider = Literal["google", "aws", "azure"]
_GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
_SPOT_LABELS: dict[CloudProvider, tuple[str, str]] = {
    "google": ("cloud.google.com/gke-spot", "true"),
    "aws": ("eks.amazonaws.com/capacityType", "SPOT"),
    "azure": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
_RESERVATION_LABELS: dict[CloudProvider, str] = {
    "google": "cloud.google.com/reservation-name",
    "aws": "karpenter.k8s.aws/capacity-reservation-id",
}


@dataclass(frozen=True)
class PodPlacement:
    """What a stage says about its nodes; `labels` and `annotations` are the object's, not the pods'."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    suspended: bool = False
    """Kueue starts it; without that, pods would exist before they are admitted."""
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod: KubeObject = field(default_factory=dict)
    """Keys of the pod's spec."""


def pod_placement(cluster: Cluster, stage: Stage) -> PodPlacement:
    """Return where a stage runs."""
    kubernetes = cluster.on_kubernetes
    gang = is_training(stage)
    among_gpus = gang or stage.gpus_per_node > 0
    queue = kubernetes.queue if among_gpus else kubernetes.cpu_queue
    labels: dict[str, str] = {}
    if queue is not None:
        labels[QUEUE_LABEL] = queue
        if kubernetes.priority is not None:
            labels[PRIORITY_LABEL] = kubernetes.priority
    annotations: dict[str, str] = {}
    pod_annotations: dict[str, str] = {}
    selector = dict(kubernetes.node_selector if among_gpus else kubernetes.cpu_node_selector)
    tolerations = [each.model_dump(exclude_none=True) for each in kubernetes.tolerations]
    if gang:
        # An autoscaler that tidies up must not take a node from under a training.
        pod_annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] = "false"
        if kubernetes.topology is not None:
            need = "required" if kubernetes.topology.required else "preferred"
            pod_annotations[f"kueue.x-k8s.io/podset-{need}-topology"] = kubernetes.topology.level
        annotations |= _flex_start(cluster)
    if among_gpus:
        key, taint = _capacity_terms(cluster)
        selector |= key
        tolerations = [*_gpu_tolerations(cluster, stage), *taint, *tolerations]
    pod: KubeObject = {}
    if selector:
        pod["nodeSelector"] = selector
    if tolerations:
        pod["tolerations"] = tolerations
    if kubernetes.avoid_nodes:
        pod["affinity"] = _avoid_nodes(kubernetes.avoid_nodes)
    return PodPlacement(labels, annotations, queue is not None, pod_annotations, pod)


def gpu_resource(cluster: Cluster) -> str:
    """Return the name under which nodes offer their GPUs."""
    if cluster.gpu_machine is None:
        raise InputError(
            "the machine is not named, so nobody knows what its GPUs are called",
            where=cluster.where("machine"),
            hint="write `machine: NAME`, for example a3-mega",
        )
    return _GPU_RESOURCES[find_gpu(find_machine(cluster.gpu_machine).gpu).vendor]


def cloud_provider(cluster: Cluster) -> CloudProvider | None:
    """Return whose machines these are, by their instance types; None where nobody rents them out."""
    names = find_machine(cluster.gpu_machine).names if cluster.gpu_machine is not None else ()
    if any(name.startswith("Standard_") for name in names):
        return "azure"
    if any("xlarge" in name for name in names):
        return "aws"
    return "google" if any(name.startswith(("a2-", "a3-", "a4-", "a4x-")) for name in names) else None


def _gpu_tolerations(cluster: Cluster, stage: Stage) -> list[KubeObject]:
    if not stage.gpus_per_node:
        return []
    tolerations: list[KubeObject] = [{"key": gpu_resource(cluster), "operator": "Exists"}]
    if cloud_provider(cluster) == "google" and stage.serving is None:
        # GKE marks a node before it takes it down; a training saves and leaves by itself.
        tolerations.append({"key": "cloud.google.com/impending-node-termination", "operator": "Exists"})
    return tolerations


def _flex_start(cluster: Cluster) -> dict[str, str]:
    hours = cluster.capacity.flex_start_hours
    if hours is None:
        return {}
    where = cluster.where("capacity.flex_start_hours")
    if cloud_provider(cluster) != "google":
        raise InputError("flex start is Google's", where=where, hint="delete it")
    if cluster.on_kubernetes.queue is None:
        raise InputError("Kueue asks for such nodes, and there is no queue", where=where, hint="kubernetes: {queue: …}")
    return {MAX_RUN_SECONDS_ANNOTATION: str(int(hours * 3600))}


def _capacity_terms(cluster: Cluster) -> tuple[dict[str, str], list[KubeObject]]:
    """Labels of nodes under the cluster's terms, and the taints that such nodes have."""
    cloud = cloud_provider(cluster)
    if cluster.capacity.spot:
        if cloud is None:
            raise _unknown_terms(cluster, "capacity.spot", "spot")
        label, value = _SPOT_LABELS[cloud]
        return {label: value}, [{"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}]
    reservation = cluster.capacity.reservation
    if reservation is None:
        return {}, []
    if cloud not in _RESERVATION_LABELS:
        raise _unknown_terms(cluster, "capacity.reservation", "reserved")
    return {_RESERVATION_LABELS[cloud]: reservation}, []


def _unknown_terms(cluster: Cluster, key: str, word: str) -> InputError:
    return InputError(
        f"it is not known how {word} nodes of {cluster.machine or 'this cluster'} are labelled",
        where=cluster.where(key),
        hint="delete it and write kubernetes: {node_selector: {LABEL: VALUE}}",
    )


def _avoid_nodes(nodes: tuple[str, ...]) -> KubeObject:
    term = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    terms = [{"matchExpressions": [term]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}

"""On which nodes pods may run: selectors, tolerations, Kueue's labels, spot and reserved nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshed.catalog import find_gpu, find_machine
from trainshed.errors import InputError
from trainshed.launch.job import Stage
from trainshed.launch.kubernetes.kinds import MAX_RUN_SECONDS_ANNOTATION, PRIORITY_LABEL, QUEUE_LABEL, KubeObject
from trainshed.launch.kubernetes.objects import is_training
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
    """On which nodes a stage runs; `labels` and `annotations` are those of the object, not of its pods."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    suspend: bool = False
    """The object is created suspended, and Kueue starts it: otherwise pods would exist before they are admitted."""
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_spec: KubeObject = field(default_factory=dict)
    """Keys of the pod's spec."""


def pod_placement(cluster: Cluster, stage: Stage) -> PodPlacement:
    """Return where a stage runs."""
    kubernetes = cluster.on_kubernetes
    training = is_training(stage)
    needs_gpu_node = training or stage.gpus_per_node > 0
    queue = kubernetes.queue if needs_gpu_node else kubernetes.cpu_queue
    labels: dict[str, str] = {}
    if queue is not None:
        labels[QUEUE_LABEL] = queue
        if kubernetes.priority is not None:
            labels[PRIORITY_LABEL] = kubernetes.priority
    annotations: dict[str, str] = {}
    pod_annotations: dict[str, str] = {}
    selector = dict(kubernetes.node_selector if needs_gpu_node else kubernetes.cpu_node_selector)
    tolerations: list[KubeObject] = []
    if training:
        # An autoscaler that removes underused nodes must not evict a training.
        pod_annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] = "false"
        if kubernetes.topology is not None:
            need = "required" if kubernetes.topology.required else "preferred"
            pod_annotations[f"kueue.x-k8s.io/podset-{need}-topology"] = kubernetes.topology.level
        annotations |= _flex_start(cluster)
    if needs_gpu_node:
        capacity_labels, capacity_tolerations = _capacity_terms(cluster)
        selector |= capacity_labels
        tolerations = [*_gpu_tolerations(cluster, stage), *capacity_tolerations]
    pod_spec = _node_choice(cluster, selector, tolerations)
    return PodPlacement(labels, annotations, queue is not None, pod_annotations, pod_spec)


def cpu_node_choice(cluster: Cluster) -> KubeObject:
    """Return where a pod without GPUs runs that is not a stage: the driver, and what submits to Ray."""
    return _node_choice(cluster, dict(cluster.on_kubernetes.cpu_node_selector), [])


def _node_choice(cluster: Cluster, selector: dict[str, str], tolerations: list[KubeObject]) -> KubeObject:
    kubernetes = cluster.on_kubernetes
    written = [toleration.model_dump(exclude_none=True) for toleration in kubernetes.tolerations]
    tolerations = [*tolerations, *(toleration for toleration in written if toleration not in tolerations)]
    return {
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        **({"affinity": _avoid_nodes(kubernetes.avoid_nodes)} if kubernetes.avoid_nodes else {}),
    }


def gpu_resource(cluster: Cluster) -> str:
    """Return the resource name of a node's GPUs."""
    if cluster.gpu_machine is None:
        raise InputError(
            "the machine is not named, so nobody knows what its GPUs are called",
            where=cluster.where("machine"),
            hint="write `machine: NAME`, for example a3-mega",
        )
    return _GPU_RESOURCES[find_gpu(find_machine(cluster.gpu_machine).gpu).vendor]


def cloud_provider(cluster: Cluster) -> CloudProvider | None:
    """Return which cloud the machines belong to, by their instance types; None if they belong to none."""
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
        # GKE taints a node before it takes it down; a training saves and ends by itself.
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
    """Return the labels of spot or reserved nodes, and the tolerations for their taints."""
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

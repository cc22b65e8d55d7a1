"""Volumes of the cluster file: how pods mount them, and how `trainshed storage up` creates them.

A volume that we create is a StorageClass and a claim with `Retain`, so that no job deletes it. `kind: claim` is a claim
alone, on a StorageClass that the cluster has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from trainshed.catalog import storage_tier
from trainshed.errors import InputError
from trainshed.launch.kubernetes.kinds import CLAIM, STORAGE_CLASS, VOLUME, KubeObject, fit_name
from trainshed.launch.kubernetes.objects import new_object, to_documents, trainshed_labels
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import Volume
from trainshed.recipe.cluster.schema import NewVolume

GCS_FUSE_DRIVER = "gcsfuse.csi.storage.gke.io"
# Presets of Google's gpu-recipes (gcs-fuse storage chart): metadata of data that nobody changes is cached for as long
# as the pod lives; checkpoints are written as a stream and read in parallel.
_GCS_FUSE_CACHES = (
    "metadata-cache:negative-ttl-secs:0",
    "metadata-cache:stat-cache-max-size-mb:-1",
    "metadata-cache:type-cache-max-size-mb:-1",
)
GCS_FUSE_DATA_OPTIONS = ("implicit-dirs", "metadata-cache:ttl-secs:-1", *_GCS_FUSE_CACHES)
# Nodes of a run read what others have written (heartbeats, orders, checkpoints): an older version may be seen for
# seconds, far less than the 30 s between two heartbeats.
GCS_FUSE_CHECKPOINT_OPTIONS = (
    "implicit-dirs",
    "metadata-cache:ttl-secs:5",
    *_GCS_FUSE_CACHES,
    "write:enable-streaming-writes:true",
    "file-cache:max-size-mb:-1",
    "file-cache:cache-file-for-range-read:true",
    "file-cache:enable-parallel-downloads:true",
)
# 0: no limit for the sidecar; its default limits make checkpoints slow.
_GCS_FUSE_ANNOTATIONS = {
    "gke-gcsfuse/volumes": "true",
    "gke-gcsfuse/cpu-limit": "0",
    "gke-gcsfuse/memory-limit": "0",
    "gke-gcsfuse/ephemeral-storage-limit": "0",
}
# On the node's network the sidecar asks the node's metadata server, which knows no service account of the pod: GKE from
# 1.33.3 on hands it the account's token (Cloud Storage FUSE CSI driver, "Configure host network Pods").
_HOST_NETWORK_ATTRIBUTES = {"hostNetworkPodKSA": "true"}
_PARALLELSTORE_ANNOTATIONS = {
    "gke-parallelstore/volumes": "true",
    "gke-parallelstore/cpu-limit": "0",
    "gke-parallelstore/memory-limit": "0",
}


@dataclass(frozen=True)
class PodVolumes:
    """Volumes, their mounts, and the annotations that the pod needs for them."""

    volumes: tuple[KubeObject, ...]
    mounts: tuple[KubeObject, ...]
    annotations: dict[str, str]


def pod_volumes(cluster: Cluster, *, host_network: bool = False) -> PodVolumes:
    """Return the cluster's volumes for any of its pods."""
    volumes: list[KubeObject] = []
    mounts: list[KubeObject] = []
    annotations: dict[str, str] = {}
    for number, volume in enumerate(cluster.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name} | _pod_volume(volume, host_network))
        mounts.append({"name": name, "mountPath": volume.mount} | ({"readOnly": True} if volume.read_only else {}))
        created_kind = volume.create.kind if volume.create is not None else None
        if volume.bucket is not None or created_kind == "gcs-fuse":
            annotations |= _GCS_FUSE_ANNOTATIONS
        if created_kind == "parallelstore":
            annotations |= _PARALLELSTORE_ANNOTATIONS
    return PodVolumes(tuple(volumes), tuple(mounts), annotations)


def shared_memory_volume(size: str) -> tuple[KubeObject, KubeObject]:
    """Return /dev/shm as volume and mount: by default it has 64 MiB, and NCCL and data loaders need more."""
    volume: KubeObject = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return volume, {"name": "shared-memory", "mountPath": "/dev/shm"}


def gcs_fuse_options(*, read_only: bool) -> tuple[str, ...]:
    """Return the mount options that are used if the cluster file names none."""
    return GCS_FUSE_DATA_OPTIONS if read_only else GCS_FUSE_CHECKPOINT_OPTIONS


def _pod_volume(volume: Volume, host_network: bool) -> KubeObject:
    if volume.pvc is not None:
        claim: KubeObject = {"claimName": volume.pvc}
        return {"persistentVolumeClaim": claim | ({"readOnly": True} if volume.read_only else {})}
    if volume.bucket is not None:
        options = volume.options or gcs_fuse_options(read_only=volume.read_only)
        attributes = {"bucketName": volume.bucket, "mountOptions": ",".join(options)}
        if host_network:
            attributes |= _HOST_NETWORK_ATTRIBUTES
        return {"csi": {"driver": GCS_FUSE_DRIVER, "readOnly": volume.read_only, "volumeAttributes": attributes}}
    return {"hostPath": {"path": volume.host, "type": "DirectoryOrCreate"}}


# From Azure's ai-infrastructure-on-azure (blob-shared-storage chart and its documentation on checkpoints).
_BLOBFUSE_OPTIONS = (
    "-o allow_other",
    "--use-attr-cache=true",
    "--cancel-list-on-mount-seconds=10",
    "-o attr_timeout=120",
    "-o entry_timeout=120",
    "-o negative_timeout=120",
    "--log-level=LOG_WARNING",
    "--file-cache-timeout-in-seconds=120",
    "--block-cache",
    "--block-cache-block-size=32",
    "--block-cache-parallelism=80",
)
_TIB_PER_UNIT = {"Gi": 1 / 1024, "Ti": 1.0, "Pi": 1024.0}


def storage_objects(cluster: Cluster) -> list[KubeObject]:
    """Return the objects of every volume of a cluster file that has `create`."""
    objects: list[KubeObject] = []
    for number, volume in enumerate(cluster.volumes):
        if volume.create is not None:
            objects += _VOLUME_BUILDERS[volume.create.kind](cluster, volume, volume.create, f"volumes.{number}")
    if not objects:
        raise InputError(
            "no volume of this cluster says how it is made",
            where=cluster.where("volumes"),
            hint="volumes: [{mount: /data, pvc: NAME, create: {kind: amlfs, size: 16Ti}}]",
        )
    return objects


def storage_text(cluster: Cluster) -> str:
    """Return what `storage up` applies."""
    return to_documents(storage_objects(cluster))


def apply_storage(cluster: Cluster) -> list[str]:
    """Create the volumes; returns what was created, as Kind/name."""
    from trainshed.launch.kubernetes.api import connect

    with connect(cluster) as api:
        return [api.apply(to_documents([obj])) for obj in storage_objects(cluster)]


def _amlfs(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    sku = new_volume.sku or "AMLFS-Durable-Premium-125"
    throughput = re.search(r"-(\d+)$", sku)
    if throughput is None:
        raise InputError(
            f"`{sku}` is not a product of Azure Managed Lustre",
            where=cluster.where(f"{key}.create.sku"),
            hint="write AMLFS-Durable-Premium-40, -125, -250 or -500",
        )
    _check_size(cluster, new_volume, f"amlfs-{throughput[1]}", key)
    parameters = {
        "sku-name": sku,
        "zone": new_volume.zone or "1",
        "maintenance-day-of-week": "Sunday",
        "maintenance-time-of-day-utc": "02:00",
    }
    return _storage_class_and_claim(
        cluster, volume, new_volume, "azurelustre.csi.azure.com", parameters, ("noatime", "flock")
    )


def _blob(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    parameters = {"skuName": new_volume.sku or "Standard_LRS", "protocol": "fuse2"}
    objects = _storage_class_and_claim(cluster, volume, new_volume, "blob.csi.azure.com", parameters, _BLOBFUSE_OPTIONS)
    objects[0]["allowVolumeExpansion"] = True
    return objects


def _fsx(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    missing = [name for name in ("subnetId", "securityGroupIds") if name not in new_volume.parameters]
    if missing:
        raise InputError(
            f"FSx for Lustre must be told {' and '.join(missing)}",
            where=cluster.where(f"{key}.create"),
            hint="write parameters: {subnetId: subnet-…, securityGroupIds: sg-…}",
        )
    throughput = new_volume.sku or "250"
    gib = re.fullmatch(r"([0-9]+)Gi", new_volume.size)
    if gib is None or (int(gib[1]) != 1200 and int(gib[1]) % 2400):
        raise InputError(
            f"FSx for Lustre is not sold in {new_volume.size}",
            where=cluster.where(f"{key}.create.size"),
            hint="write 1200Gi, 2400Gi, or a multiple of 2400Gi",
        )
    parameters = {
        "deploymentType": "PERSISTENT_2",
        "perUnitStorageThroughput": throughput,
        "dataCompressionType": "LZ4",
        "fileSystemTypeVersion": "2.15",
    }
    return _storage_class_and_claim(cluster, volume, new_volume, "fsx.csi.aws.com", parameters, ("flock",))


def _parallelstore(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    _check_size(cluster, new_volume, "parallelstore", key)
    # A node that writes checkpoints must not cache them: other nodes read them.
    return _storage_class_and_claim(
        cluster, volume, new_volume, "parallelstore.csi.storage.gke.io", {}, ("disable-caching",)
    )


def _lustre(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    throughput = new_volume.sku or "1000"
    _check_size(cluster, new_volume, f"managed-lustre-{throughput}", key)
    parameters = {"perUnitStorageThroughput": throughput}
    return _storage_class_and_claim(cluster, volume, new_volume, "lustre.csi.storage.gke.io", parameters, ())


def _gcs_fuse(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    """No StorageClass creates a bucket: a PersistentVolume represents it, and a claim is bound to that."""
    bucket = new_volume.parameters.get("bucketName")
    if bucket is None:
        raise InputError(
            "which bucket?", where=cluster.where(f"{key}.create"), hint="write parameters: {bucketName: NAME}"
        )
    name = volume.pvc or ""
    size = {"storage": new_volume.size}
    options = volume.options or gcs_fuse_options(read_only=volume.read_only)
    attributes = {"gcsfuseMetadataPrefetchOnMount": "true", "skipCSIBucketAccessCheck": "true"}
    if cluster.on_kubernetes.host_network:
        attributes |= _HOST_NETWORK_ATTRIBUTES
    bound = {"name": name, "namespace": cluster.on_kubernetes.namespace}
    spec: KubeObject = {
        "accessModes": ["ReadWriteMany"],
        "capacity": size,
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "gcs-fuse-storage",
        "claimRef": bound,
        "mountOptions": list(options),
        "csi": {"driver": GCS_FUSE_DRIVER, "volumeHandle": bucket, "volumeAttributes": attributes},
    }
    claim = _claim(cluster, volume, new_volume, "gcs-fuse-storage")
    claim["spec"]["volumeName"] = fit_name(name, "-gcs-fuse")
    metadata = {"name": fit_name(name, "-gcs-fuse"), "labels": _storage_labels(cluster)}
    return [new_object(VOLUME, metadata, spec=spec), claim]


def _claim_alone(cluster: Cluster, volume: Volume, new_volume: NewVolume, key: str) -> list[KubeObject]:
    """What becomes of the data when the claim is deleted is up to the class; all nodes must be able to mount it."""
    return [_claim(cluster, volume, new_volume, new_volume.storage_class)]


_VOLUME_BUILDERS: dict[str, Callable[[Cluster, Volume, NewVolume, str], list[KubeObject]]] = {
    "amlfs": _amlfs,
    "blob": _blob,
    "fsx": _fsx,
    "gcs-fuse": _gcs_fuse,
    "parallelstore": _parallelstore,
    "lustre": _lustre,
    "claim": _claim_alone,
}


def _storage_class_and_claim(
    cluster: Cluster,
    volume: Volume,
    new_volume: NewVolume,
    provisioner: str,
    parameters: dict[str, str],
    options: tuple[str, ...],
) -> list[KubeObject]:
    name = fit_name(volume.pvc or "", f"-{new_volume.kind}")
    storage_class = new_object(
        STORAGE_CLASS,
        {"name": name, "labels": _storage_labels(cluster)},
        provisioner=provisioner,
        parameters=parameters | new_volume.parameters,
        reclaimPolicy="Retain",
        volumeBindingMode="Immediate",
    )
    mount_options = volume.options or options
    if mount_options:
        storage_class["mountOptions"] = list(mount_options)
    return [storage_class, _claim(cluster, volume, new_volume, name)]


def _claim(cluster: Cluster, volume: Volume, new_volume: NewVolume, class_name: str | None) -> KubeObject:
    metadata: KubeObject = {
        "name": volume.pvc,
        "namespace": cluster.on_kubernetes.namespace,
        "labels": _storage_labels(cluster),
    }
    spec: KubeObject = {
        "accessModes": ["ReadWriteMany"],
        **({"storageClassName": class_name} if class_name is not None else {}),
        "resources": {"requests": {"storage": new_volume.size}},
    }
    return new_object(CLAIM, metadata, spec=spec)


def _storage_labels(cluster: Cluster) -> dict[str, str]:
    """Return the labels of storage, without a job's name: `cancel` selects by that, and must not delete storage."""
    return cluster.on_kubernetes.labels | trainshed_labels("storage")


def _check_size(cluster: Cluster, new_volume: NewVolume, tier: str, key: str) -> None:
    """Refuse sizes that the cloud does not sell: it would round them up, or refuse them an hour later."""
    try:
        sizes = storage_tier(tier).size_tib
    except InputError as error:
        raise InputError(error.what, where=cluster.where(f"{key}.create.sku"), hint=error.hint) from None
    match = re.fullmatch(r"([0-9.]+)(Gi|Ti|Pi)", new_volume.size)
    where = cluster.where(f"{key}.create.size")
    if match is None:
        raise InputError(
            f"`{new_volume.size}` is not a size of a file system", where=where, hint="write it in Gi, Ti or Pi"
        )
    size = float(match[1]) * _TIB_PER_UNIT[match[2]]
    if sizes is not None and not sizes.fits(size):
        raise InputError(f"{tier} is not sold in {new_volume.size}", where=where, hint=f"it is sold {sizes}")

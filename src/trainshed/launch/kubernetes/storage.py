"""Volumes of the cluster file: how pods mount them, and how `trainshed storage up` creates them.

A volume that we create is a StorageClass and a claim with `Retain`, so that no job deletes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from trainshed import __version__
from trainshed.catalog import storage_tier
from trainshed.errors import InputError
from trainshed.launch.kubernetes.objects import (
    CLAIM,
    STORAGE_CLASS,
    VOLUME,
    KubeObject,
    fit_name,
    new_object,
    to_documents,
)
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import Volume
from trainshed.recipe.cluster.schema import NewVolume

GCS_FUSE_DRIVER = "gcsfuse.csi.storage.gke.io"
# Presets of Google's gpu-recipes (gcs-fuse storage chart): metadata is cached for as long as the pod lives, as nobody
# else writes beside a run; checkpoints are written as a stream and read in parallel.
GCS_FUSE_DATA_OPTIONS = (
    "implicit-dirs",
    "metadata-cache:ttl-secs:-1",
    "metadata-cache:negative-ttl-secs:0",
    "metadata-cache:stat-cache-max-size-mb:-1",
    "metadata-cache:type-cache-max-size-mb:-1",
)
GCS_FUSE_CHECKPOINT_OPTIONS = (
    *GCS_FUSE_DATA_OPTIONS,
    "write:enable-streaming-writes:true",
    "file-cache:max-size-mb:-1",
    "file-cache:cache-file-for-range-read:true",
    "file-cache:enable-parallel-downloads:true",
)
# 0: the sidecar takes what it needs; its defaults starve a node that writes a checkpoint.
_GCS_FUSE_ANNOTATIONS = {
    "gke-gcsfuse/volumes": "true",
    "gke-gcsfuse/cpu-limit": "0",
    "gke-gcsfuse/memory-limit": "0",
    "gke-gcsfuse/ephemeral-storage-limit": "0",
}
_PARALLELSTORE_ANNOTATIONS = {
    "gke-parallelstore/volumes": "true",
    "gke-parallelstore/cpu-limit": "0",
    "gke-parallelstore/memory-limit": "0",
}


@dataclass(frozen=True)
class PodVolumes:
    """Volumes, where they are mounted, and what the pod must say about them."""

    volumes: tuple[KubeObject, ...]
    mounts: tuple[KubeObject, ...]
    annotations: dict[str, str]


def pod_volumes(cluster: Cluster) -> PodVolumes:
    """Return the cluster's volumes for any of its pods."""
    volumes: list[KubeObject] = []
    mounts: list[KubeObject] = []
    annotations: dict[str, str] = {}
    for number, volume in enumerate(cluster.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name} | _pod_volume(volume))
        mounts.append({"name": name, "mountPath": volume.mount} | ({"readOnly": True} if volume.read_only else {}))
        made = volume.create.kind if volume.create is not None else None
        if volume.bucket is not None or made == "gcs-fuse":
            annotations |= _GCS_FUSE_ANNOTATIONS
        if made == "parallelstore":
            annotations |= _PARALLELSTORE_ANNOTATIONS
    return PodVolumes(tuple(volumes), tuple(mounts), annotations)


def shared_memory_volume(size: str) -> tuple[KubeObject, KubeObject]:
    """Return /dev/shm of a size as volume and mount: a container's own has 64 MiB, and NCCL and loaders need more."""
    volume: KubeObject = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return volume, {"name": "shared-memory", "mountPath": "/dev/shm"}


def gcs_fuse_options(*, read_only: bool) -> tuple[str, ...]:
    """Return the mount options where the cluster file names none."""
    return GCS_FUSE_DATA_OPTIONS if read_only else GCS_FUSE_CHECKPOINT_OPTIONS


def _pod_volume(volume: Volume) -> KubeObject:
    if volume.pvc is not None:
        claim: KubeObject = {"claimName": volume.pvc}
        return {"persistentVolumeClaim": claim | ({"readOnly": True} if volume.read_only else {})}
    if volume.bucket is not None:
        options = volume.options or gcs_fuse_options(read_only=volume.read_only)
        attributes = {"bucketName": volume.bucket, "mountOptions": ",".join(options)}
        return {"csi": {"driver": GCS_FUSE_DRIVER, "readOnly": volume.read_only, "volumeAttributes": attributes}}
    return {"hostPath": {"path": volume.host, "type": "DirectoryOrCreate"}}


# Of Azure's ai-infrastructure-on-azure (blob-shared-storage chart and its documentation on checkpoints).
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
    """Return the objects of every volume of a cluster file that says how it is made."""
    found: list[KubeObject] = []
    for number, volume in enumerate(cluster.volumes):
        if volume.create is not None:
            found += _VOLUME_BUILDERS[volume.create.kind](cluster, volume, volume.create, f"volumes.{number}")
    if not found:
        raise InputError(
            "no volume of this cluster says how it is made",
            where=cluster.where("volumes"),
            hint="volumes: [{mount: /data, pvc: NAME, create: {kind: amlfs, size: 16Ti}}]",
        )
    return found


def storage_text(cluster: Cluster) -> str:
    """Return what `storage up` applies."""
    return to_documents(storage_objects(cluster))


def apply_storage(cluster: Cluster) -> list[str]:
    """Make the volumes; says what was made, as Kind/name."""
    from trainshed.launch.kubernetes.api import connect

    with connect(cluster) as api:
        return [api.apply(to_documents([found])) for found in storage_objects(cluster)]


def _amlfs(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    sku = new.sku or "AMLFS-Durable-Premium-125"
    speed = re.search(r"-(\d+)$", sku)
    if speed is None:
        raise InputError(
            f"`{sku}` is no product of Azure Managed Lustre",
            where=cluster.where(f"{key}.create.sku"),
            hint="write AMLFS-Durable-Premium-40, -125, -250 or -500",
        )
    _check_size(cluster, new, f"amlfs-{speed[1]}", key)
    parameters = {
        "sku-name": sku,
        "zone": new.zone or "1",
        "maintenance-day-of-week": "Sunday",
        "maintenance-time-of-day-utc": "02:00",
    }
    return _storage_class_and_claim(cluster, volume, new, "azurelustre.csi.azure.com", parameters, ("noatime", "flock"))


def _blob(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    parameters = {"skuName": new.sku or "Standard_LRS", "protocol": "fuse2"}
    found = _storage_class_and_claim(cluster, volume, new, "blob.csi.azure.com", parameters, _BLOBFUSE_OPTIONS)
    found[0]["allowVolumeExpansion"] = True
    return found


def _fsx(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    missing = [name for name in ("subnetId", "securityGroupIds") if name not in new.parameters]
    if missing:
        raise InputError(
            f"FSx for Lustre must be told {' and '.join(missing)}",
            where=cluster.where(f"{key}.create"),
            hint="write parameters: {subnetId: subnet-…, securityGroupIds: sg-…}",
        )
    speed = new.sku or "250"
    gib = re.fullmatch(r"([0-9]+)Gi", new.size)
    if gib is None or (int(gib[1]) != 1200 and int(gib[1]) % 2400):
        raise InputError(
            f"FSx for Lustre is not sold in {new.size}",
            where=cluster.where(f"{key}.create.size"),
            hint="write 1200Gi, 2400Gi, or a multiple of 2400Gi",
        )
    parameters = {
        "deploymentType": "PERSISTENT_2",
        "perUnitStorageThroughput": speed,
        "dataCompressionType": "LZ4",
        "fileSystemTypeVersion": "2.15",
    }
    return _storage_class_and_claim(cluster, volume, new, "fsx.csi.aws.com", parameters, ("flock",))


def _parallelstore(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    _check_size(cluster, new, "parallelstore", key)
    # Whoever writes checkpoints must not cache: other nodes read them.
    return _storage_class_and_claim(cluster, volume, new, "parallelstore.csi.storage.gke.io", {}, ("disable-caching",))


def _lustre(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    speed = new.sku or "1000"
    _check_size(cluster, new, f"managed-lustre-{speed}", key)
    parameters = {"perUnitStorageThroughput": speed}
    return _storage_class_and_claim(cluster, volume, new, "lustre.csi.storage.gke.io", parameters, ())


def _gcs_fuse(cluster: Cluster, volume: Volume, new: NewVolume, key: str) -> list[KubeObject]:
    """A bucket is not made by a class: a volume stands for it, and a claim for the volume."""
    bucket = new.parameters.get("bucketName")
    if bucket is None:
        raise InputError(
            "which bucket?", where=cluster.where(f"{key}.create"), hint="write parameters: {bucketName: NAME}"
        )
    name = volume.pvc or ""
    size = {"storage": new.size}
    options = volume.options or gcs_fuse_options(read_only=volume.read_only)
    attributes = {"gcsfuseMetadataPrefetchOnMount": "true", "skipCSIBucketAccessCheck": "true"}
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
    claim = _claim(cluster, volume, new, "gcs-fuse-storage")
    claim["spec"]["volumeName"] = fit_name(name, "-gcs-fuse")
    metadata = {"name": fit_name(name, "-gcs-fuse"), "labels": _storage_labels(cluster)}
    return [new_object(VOLUME, metadata, spec=spec), claim]


_VOLUME_BUILDERS: dict[str, Callable[[Cluster, Volume, NewVolume, str], list[KubeObject]]] = {
    "amlfs": _amlfs,
    "blob": _blob,
    "fsx": _fsx,
    "gcs-fuse": _gcs_fuse,
    "parallelstore": _parallelstore,
    "lustre": _lustre,
}


def _storage_class_and_claim(
    cluster: Cluster,
    volume: Volume,
    new: NewVolume,
    provisioner: str,
    parameters: dict[str, str],
    options: tuple[str, ...],
) -> list[KubeObject]:
    name = fit_name(volume.pvc or "", f"-{new.kind}")
    found = new_object(
        STORAGE_CLASS,
        {"name": name, "labels": _storage_labels(cluster)},
        provisioner=provisioner,
        parameters=parameters | new.parameters,
        reclaimPolicy="Retain",
        volumeBindingMode="Immediate",
    )
    mounted = volume.options or options
    if mounted:
        found["mountOptions"] = list(mounted)
    return [found, _claim(cluster, volume, new, name)]


def _claim(cluster: Cluster, volume: Volume, new: NewVolume, class_name: str) -> KubeObject:
    metadata: KubeObject = {
        "name": volume.pvc,
        "namespace": cluster.on_kubernetes.namespace,
        "labels": _storage_labels(cluster),
    }
    spec: KubeObject = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": class_name,
        "resources": {"requests": {"storage": new.size}},
    }
    return new_object(CLAIM, metadata, spec=spec)


def _storage_labels(cluster: Cluster) -> dict[str, str]:
    """No job's name: `cancel` selects by it, and this is nobody's to take away."""
    return cluster.on_kubernetes.labels | {
        "app.kubernetes.io/name": "trainshed",
        "app.kubernetes.io/component": "storage",
        "app.kubernetes.io/managed-by": "trainshed",
        "app.kubernetes.io/version": __version__,
    }


def _check_size(cluster: Cluster, new: NewVolume, tier: str, key: str) -> None:
    """Refuse sizes that are not sold, which the cloud would round up or refuse an hour later."""
    try:
        sizes = storage_tier(tier).size_tib
    except InputError as error:
        raise InputError(error.what, where=cluster.where(f"{key}.create.sku"), hint=error.hint) from None
    number = re.fullmatch(r"([0-9.]+)(Gi|Ti|Pi)", new.size)
    where = cluster.where(f"{key}.create.size")
    if number is None:
        raise InputError(f"`{new.size}` is no size of a file system", where=where, hint="write it in Gi, Ti or Pi")
    size = float(number[1]) * _TIB_PER_UNIT[number[2]]
    if sizes is not None and not sizes.fits(size):
        raise InputError(f"{tier} is not sold in {new.size}", where=where, hint=f"it is sold {sizes}")

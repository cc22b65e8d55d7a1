"""Storage of the cluster file as volumes of a pod."""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.launch.kubernetes.kinds import Object
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import Volume

GCS_FUSE = "gcsfuse.csi.storage.gke.io"
# Presets of Google's gpu-recipes (gcs-fuse storage chart): metadata is cached for as long as the pod lives, as nobody
# else writes beside a run; checkpoints are written as a stream and read in parallel.
GCS_FUSE_DATA = (
    "implicit-dirs",
    "metadata-cache:ttl-secs:-1",
    "metadata-cache:negative-ttl-secs:0",
    "metadata-cache:stat-cache-max-size-mb:-1",
    "metadata-cache:type-cache-max-size-mb:-1",
)
GCS_FUSE_CHECKPOINTS = (
    *GCS_FUSE_DATA,
    "write:enable-streaming-writes:true",
    "file-cache:max-size-mb:-1",
    "file-cache:cache-file-for-range-read:true",
    "file-cache:enable-parallel-downloads:true",
)
# 0: the sidecar takes what it needs; its defaults starve a node that writes a checkpoint.
_GCS_FUSE_POD = {
    "gke-gcsfuse/volumes": "true",
    "gke-gcsfuse/cpu-limit": "0",
    "gke-gcsfuse/memory-limit": "0",
    "gke-gcsfuse/ephemeral-storage-limit": "0",
}
_PARALLELSTORE_POD = {
    "gke-parallelstore/volumes": "true",
    "gke-parallelstore/cpu-limit": "0",
    "gke-parallelstore/memory-limit": "0",
}


@dataclass(frozen=True)
class PodStorage:
    """Volumes, where they are mounted, and what the pod must say about them."""

    volumes: tuple[Object, ...]
    mounts: tuple[Object, ...]
    annotations: dict[str, str]


def pod_storage(cluster: Cluster) -> PodStorage:
    """Return the cluster's volumes for any of its pods."""
    volumes: list[Object] = []
    mounts: list[Object] = []
    annotations: dict[str, str] = {}
    for number, volume in enumerate(cluster.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name} | _volume(volume))
        mounts.append({"name": name, "mountPath": volume.mount} | ({"readOnly": True} if volume.read_only else {}))
        made = volume.create.kind if volume.create is not None else None
        if volume.bucket is not None or made == "gcs-fuse":
            annotations |= _GCS_FUSE_POD
        if made == "parallelstore":
            annotations |= _PARALLELSTORE_POD
    return PodStorage(tuple(volumes), tuple(mounts), annotations)


def shared_memory(size: str) -> tuple[Object, Object]:
    """Return /dev/shm of a size as volume and mount: a container's own has 64 MiB, and NCCL and loaders need more."""
    volume: Object = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return volume, {"name": "shared-memory", "mountPath": "/dev/shm"}


def gcs_fuse_options(*, read_only: bool) -> tuple[str, ...]:
    """Return the mount options where the cluster file names none."""
    return GCS_FUSE_DATA if read_only else GCS_FUSE_CHECKPOINTS


def _volume(volume: Volume) -> Object:
    if volume.pvc is not None:
        claim: Object = {"claimName": volume.pvc}
        return {"persistentVolumeClaim": claim | ({"readOnly": True} if volume.read_only else {})}
    if volume.bucket is not None:
        options = volume.options or gcs_fuse_options(read_only=volume.read_only)
        attributes = {"bucketName": volume.bucket, "mountOptions": ",".join(options)}
        return {"csi": {"driver": GCS_FUSE, "readOnly": volume.read_only, "volumeAttributes": attributes}}
    return {"hostPath": {"path": volume.host, "type": "DirectoryOrCreate"}}

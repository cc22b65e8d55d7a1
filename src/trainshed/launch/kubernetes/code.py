"""How our code reaches pods: from the image, from the store, or from ConfigMaps; never inside the job's own objects.

image        the image has this version of Trainshed installed; nothing is sent.
store        the archive is in the bucket that pods mount as their store, under its hash. `submit` puts it there.
configmaps   the archive is in ConfigMaps that are named by its hash, which all jobs of a namespace share. For stores
             that only the cluster can write, such as a claim.

`entry.sh` compares the archive with its hash before it unpacks it. The driver needs none of this: it is a program of
its own (`driver_program.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainshed.errors import InputError
from trainshed.launch.job import CodeArchive, Job
from trainshed.launch.kubernetes.kinds import CONFIG_MAP, KubeObject
from trainshed.launch.kubernetes.objects import CODE_FOLDER, new_object, trainshed_labels
from trainshed.recipe import Cluster
from trainshed.run_folder import store_address

CodeTransport = Literal["image", "store", "configmaps"]
CODE_COMPONENT = "code"
CODE_LABEL = "trainshed.io/code"
"""On ConfigMaps of the code and on those of jobs that use it: the beginning of its hash."""
CODE_PIECE_BYTES = 150 * 1024
"""The size of the code in one ConfigMap: `kubectl apply` keeps a copy of each object in an annotation of 256 KiB."""
MAX_CODE_BYTES = 4 * 1024 * 1024
"""Of all pieces together: our package has a quarter of it; a plugin that ships data belongs into the image."""
_BAKE_IN_HINT = "bake it into the image (`trainshed image build`) and write `kubernetes: {code: image}`"


@dataclass(frozen=True)
class CodeDelivery:
    """What is sent for our code, and how pods find it."""

    transport: CodeTransport
    objects: tuple[KubeObject, ...] = ()
    """ConfigMaps."""
    volume: KubeObject | None = None
    mount: KubeObject | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What `entry.sh` reads."""
    uploads: Mapping[str, bytes] = field(default_factory=dict)
    """Files that must be in the store, by their path there."""


def code_delivery(job: Job) -> CodeDelivery:
    """Return how the code of a job reaches its pods."""
    if job.code is None:
        return CodeDelivery("image")
    environment = {"TRAINSHED_CODE_SHA256": job.code.sha256}
    if code_transport(job) == "store":
        path = f"code/{job.code.sha256}/{job.code.name}"
        environment["TRAINSHED_CODE"] = f"{store_address(job.run)}/{path}"
        return CodeDelivery("store", environment=environment, uploads={path: job.code.data})
    pieces = tuple(_code_config_maps(job, job.code))
    sources = [{"configMap": {"name": piece["metadata"]["name"]}} for piece in pieces]
    return CodeDelivery(
        "configmaps",
        pieces,
        volume={"name": "code", "projected": {"sources": sources}},
        mount={"name": "code", "mountPath": CODE_FOLDER, "readOnly": True},
        environment={**environment, "TRAINSHED_CODE": CODE_FOLDER},
    )


def code_transport(job: Job) -> CodeTransport:
    """Return which way the code goes: what the cluster file says, or the store where this machine can write it."""
    chosen = job.cluster.on_kubernetes.code
    if chosen == "store" and bucket_of_store(job) is None:
        raise InputError(
            f"the store of {job.cluster.name} is a volume that only its pods can write",
            where=job.cluster.where("kubernetes.code"),
            hint="write `code: configmaps`, or leave it out",
        )
    return chosen or ("store" if bucket_of_store(job) is not None else "configmaps")


def bucket_of_store(job: Job) -> str | None:
    """Return the address of the store as this machine reaches it; None if it is not a bucket."""
    return job.cluster.bucket_address(store_address(job.run))


def code_labels(cluster: Cluster, code: CodeArchive) -> dict[str, str]:
    """Return the labels of the code, without a job's name: other jobs use it too."""
    return dict(sorted(cluster.on_kubernetes.labels.items())) | trainshed_labels(CODE_COMPONENT) | code_label(code)


def code_label(code: CodeArchive | None) -> dict[str, str]:
    """Return the label by which a job names the code that it uses."""
    return {CODE_LABEL: code.sha256[:12]} if code is not None else {}


def _code_config_maps(job: Job, code: CodeArchive) -> Iterator[KubeObject]:
    if len(code.data) > MAX_CODE_BYTES:
        raise InputError(
            f"the code has {len(code.data) // 1024} KiB, and ConfigMaps carry {MAX_CODE_BYTES // 1024} at most",
            where=job.cluster.where("image"),
            hint=_BAKE_IN_HINT,
        )
    for number, start in enumerate(range(0, len(code.data), CODE_PIECE_BYTES)):
        metadata = {
            "name": f"trainshed-code-{code.sha256[:12]}-{number}",
            "namespace": job.cluster.on_kubernetes.namespace,
            "labels": code_labels(job.cluster, code),
        }
        piece = base64.b64encode(code.data[start : start + CODE_PIECE_BYTES]).decode()
        yield new_object(CONFIG_MAP, metadata, immutable=True, binaryData={f"piece-{number:03d}": piece})

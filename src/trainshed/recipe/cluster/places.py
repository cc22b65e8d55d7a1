"""Where things lie that a job reaches: stores by endpoint, secrets by reference, volumes by mount."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from trainshed.recipe.section import PATH_PATTERN, PositiveFloat, PositiveInt, Problem, Quantity, Section, Text, wrong

MountPath = Annotated[str, Field(pattern=PATH_PATTERN)]
"""An absolute path inside a job."""


class StoreEndpoint(Section):
    """How to reach a store that is not where its scheme says."""

    endpoint: Text | None = Field(None, description="URL of the server", examples=["http://minio.default.svc:9000"])
    region: Text | None = Field(None, description="Region the server expects")
    anonymous: bool = Field(False, description="Read without credentials")
    addressing: Literal["path", "virtual"] | None = Field(
        None,
        description="Where the bucket's name stands in the URL; left out: path where an endpoint is given",
    )

    def problems(self) -> Iterator[Problem]:
        """An endpoint is a URL."""
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            yield Problem(("endpoint",), f"`{self.endpoint}` has no scheme", f"write https://{self.endpoint}")


class SecretReference(Section):
    """Where a secret is found when it is needed: exactly one of the keys."""

    env: Text | None = Field(None, description="Name of an environment variable")
    file: Text | None = Field(None, description="Path of a file that holds it")
    k8s: Text | None = Field(None, description="A Kubernetes secret, as name/key")

    def problems(self) -> Iterator[Problem]:
        """One reference."""
        if sum(value is not None for value in (self.env, self.file, self.k8s)) != 1:
            yield Problem((), "needs exactly one of env, file and k8s", "write for example {env: HF_TOKEN}")
        if self.k8s is not None and not re.match(r"^[^/]+/[^/]+$", self.k8s):
            yield Problem(("k8s",), "names no key of a secret", "write name/key")


def refuse_literal(value: Any) -> Any:
    """Refuse a secret that is written out; the value itself is not repeated."""
    if not isinstance(value, dict | SecretReference):
        raise wrong(
            "a secret is never written into a file: cluster files are shared and kept with every run",
            "write where to find it: {env: NAME}, {file: PATH} or {k8s: name/key}",
        )
    return value


class ClusterStorage(Section):
    """The storage that checkpoints and tokens lie on, as the planner must know it."""

    tier: Text = Field(description="Kind of storage, by its name in the catalog", examples=["amlfs-250"])
    size_tib: PositiveFloat | None = Field(None, description="How much of it there is, where its speed depends on that")
    servers: PositiveInt | None = Field(None, description="How many servers it stands on, where that decides its speed")


class NewVolume(Section):
    """A volume that `trainshed storage up` makes; it is kept (Retain) whatever becomes of the jobs."""

    kind: Literal["amlfs", "blob", "fsx", "gcs-fuse", "parallelstore", "lustre"] = Field(
        description="Azure Managed Lustre, Azure Blob by BlobFuse, FSx for Lustre, GCS FUSE, Parallelstore, GKE Lustre"
    )
    size: Quantity = Field(description="Its size", examples=["16Ti"])
    sku: Text | None = Field(
        None, description="Product or tier", examples=["AMLFS-Durable-Premium-125", "Standard_LRS"]
    )
    zone: Text | None = Field(None, description="Zone it lies in", examples=["1"])
    parameters: dict[str, Text] = Field(
        default_factory=dict,
        description="Further parameters of its StorageClass",
        examples=[{"subnetId": "subnet-0123", "securityGroupIds": "sg-0123"}],
    )


class Volume(Section):
    """Storage mounted into every job: exactly one of `pvc`, `bucket`, `host`, `path` says what it is."""

    mount: MountPath = Field(description="Where jobs see it", examples=["/data"])
    pvc: Text | None = Field(None, description="A PersistentVolumeClaim", examples=["shared-storage"])
    create: NewVolume | None = Field(None, description="How `trainshed storage up` makes that claim")
    bucket: Text | None = Field(None, description="A bucket mounted by GCS FUSE", examples=["my-bucket"])
    host: MountPath | None = Field(None, description="A folder of the node (local SSD)")
    path: MountPath | None = Field(None, description="A folder of the shared disk (Slurm)")
    read_only: bool = Field(False, description="Jobs may not write there")
    options: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        (), description="Options of the mount", examples=[["implicit-dirs"]]
    )

    def problems(self) -> Iterator[Problem]:
        """One kind of volume; only claims are made."""
        kinds = [key for key in ("pvc", "bucket", "host", "path") if getattr(self, key) is not None]
        if len(kinds) != 1:
            yield Problem((), "needs exactly one of pvc, bucket, host and path", "write {mount: /data, pvc: NAME}")
        if self.create is not None and self.pvc is None:
            yield Problem(("create",), "makes a claim, and `pvc` names none", "write `pvc: NAME` beside it")

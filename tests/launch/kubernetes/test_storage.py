"""Volumes that are made once and kept."""

from __future__ import annotations

from typing import Any

import pytest

from support.clusters.kubernetes_jobs import CLUSTERS, cluster_of
from support.clusters.kubernetes_schemas import check
from support.recipes.golden_files import check_golden
from trainshed.errors import InputError
from trainshed.launch.kubernetes.storage import storage_objects, storage_text
from trainshed.recipe import load_cluster

FSX = {"subnetId": "subnet-0123", "securityGroupIds": "sg-0123"}
NEW = {
    "amlfs": {"kind": "amlfs", "size": "8Ti", "sku": "AMLFS-Durable-Premium-250", "zone": "2"},
    "blob": {"kind": "blob", "size": "100Ti"},
    "fsx": {"kind": "fsx", "size": "4800Gi", "sku": "500", "parameters": FSX},
    "gcs-fuse": {"kind": "gcs-fuse", "size": "2048Gi", "parameters": {"bucketName": "corpus"}},
    "parallelstore": {"kind": "parallelstore", "size": "12Ti"},
    "lustre": {"kind": "lustre", "size": "9000Gi", "parameters": {"network": "default"}},
    "claim": {"kind": "claim", "size": "600Gi", "storage_class": "multinode"},
}


def made(create: dict[str, Any], **volume: Any) -> list[dict[str, Any]]:
    return storage_objects(cluster_of({"volumes": [{"mount": "/data", "pvc": "shared", "create": create} | volume]}))


@pytest.mark.parametrize("kind", NEW)
def test_every_kind_of_volume_is_valid_and_kept(kind: str) -> None:
    body = {"volumes": [{"mount": "/data", "pvc": "shared", "create": NEW[kind]}]}
    objects = storage_objects(cluster_of(body))
    for found in objects:
        check(found)
        assert found.get("reclaimPolicy", "Retain") == "Retain"
        assert found.get("spec", {}).get("persistentVolumeReclaimPolicy", "Retain") == "Retain"
    assert objects[-1]["kind"] == "PersistentVolumeClaim"
    assert "Retain" in storage_text(cluster_of(body)) or kind == "claim"
    check_golden(f"kubernetes/storage-{kind}.yaml", storage_text(cluster_of(body)))


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name.startswith(("aks", "eks", "minio"))])
def test_shipped_clusters_make_what_they_mount(name: str) -> None:
    cluster = load_cluster(name)
    claims = [found["metadata"]["name"] for found in storage_objects(cluster) if "Claim" in found["kind"]]
    assert claims == [volume.pvc for volume in cluster.volumes]


def test_options_of_the_cluster_file_win() -> None:
    assert made(NEW["amlfs"], options=["noatime"])[0]["mountOptions"] == ["noatime"]
    assert "--block-cache" in made(NEW["blob"])[0]["mountOptions"]
    assert made(NEW["fsx"])[0]["parameters"]["perUnitStorageThroughput"] == "500"


@pytest.mark.parametrize(
    ("create", "what", "hint"),
    [
        (
            {"kind": "amlfs", "size": "10Ti"},
            "amlfs-125 is not sold in 10Ti",
            "it is sold from 16 TiB in steps of 16 to 4096",
        ),
        (
            {"kind": "amlfs", "size": "16Ti", "sku": "Premium"},
            "`Premium` is not a product of Azure Managed Lustre",
            "write AMLFS-Durable-Premium-40, -125, -250 or -500",
        ),
        (
            {"kind": "amlfs", "size": "16000000"},
            "`16000000` is not a size of a file system",
            "write it in Gi, Ti or Pi",
        ),
        (
            {"kind": "fsx", "size": "1200Gi"},
            "FSx for Lustre must be told subnetId and securityGroupIds",
            "write parameters: {subnetId: subnet-…, securityGroupIds: sg-…}",
        ),
        (
            {"kind": "fsx", "size": "1Ti", "parameters": FSX},
            "FSx for Lustre is not sold in 1Ti",
            "write 1200Gi, 2400Gi, or a multiple of 2400Gi",
        ),
        ({"kind": "gcs-fuse", "size": "1Ti"}, "which bucket?", "write parameters: {bucketName: NAME}"),
    ],
)
def test_what_is_not_sold_is_refused_before_anything_is_made(create: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        made(create)
    assert (caught.value.what, caught.value.hint) == (what, hint)
    assert "volumes" in (caught.value.where or "")


def test_a_cluster_that_makes_nothing_says_how() -> None:
    with pytest.raises(InputError, match="no volume of this cluster says how it is made"):
        storage_objects(load_cluster("gke-a3-mega"))

"""The sidecar that copies checkpoints of a foreign engine to a bucket while it trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.clusters.kubernetes_jobs import cluster_of, job_of, stages_of
from support.clusters.kubernetes_schemas import check
from trainshed.launch.job import Stage
from trainshed.launch.kubernetes.render import plan_stages, render, stage_objects

UPLOAD = (Stage("upload", cpus=8, memory="32Gi"),)


def training(kind: str, *, engine: str = "megatron", upload: bool = True) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The object of a training, and what is said about the job."""
    cluster = cluster_of({"kubernetes": {"kind": kind}, "store": "/data", "volumes": [{"mount": "/data", "pvc": "x"}]})
    stages = stages_of(cluster, engine, nodes=2)
    if upload:
        stages = tuple(replace(stage, uploads=stage.name == "train") for stage in stages) + UPLOAD
    job = job_of(cluster, stages=stages)
    (plan,) = [plan for plan in plan_stages(job)[0] if plan.stage.name == "train"]
    body = stage_objects(plan)[-1]
    check(body)
    return body, render(job).notes


def pods(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs of an object's pods, the first node's first."""
    spec = body["spec"]
    match body["kind"]:
        case "PyTorchJob":
            return [spec["pytorchReplicaSpecs"][name]["template"]["spec"] for name in ("Master", "Worker")]
        case "JobSet":
            return [spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
        case "RayJob":
            cluster = spec["rayClusterSpec"]
            return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [spec["template"]["spec"]]


@pytest.mark.parametrize("kind", ["jobset", "job", "pytorchjob", "rayjob"])
def test_the_first_node_has_a_sidecar_with_our_code_in_our_image(kind: str) -> None:
    body, _ = training(kind)
    first, *others = pods(body)
    (sidecar,) = [container for container in first["initContainers"] if container["name"] == "upload"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["image"] == "registry/trainshed:1"
    assert sidecar["args"][-4:] == ["upload", "--follow", "--job", "/etc/trainshed/job"]
    mounted = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert {"job", "code", "volume-0"} <= mounted <= {volume["name"] for volume in first["volumes"]}
    # The engine's own container gets nothing of it.
    assert "code" not in {mount["name"] for mount in first["containers"][0]["volumeMounts"]}
    assert not [pod for pod in others if "initContainers" in pod]


@pytest.mark.parametrize(("engine", "upload"), [("megatron", False), ("torch", False)])
def test_without_a_bucket_there_is_none(engine: str, upload: bool) -> None:
    body, notes = training("jobset", engine=engine, upload=upload)
    assert "initContainers" not in pods(body)[0]
    assert not [note for note in notes if "bucket" in note]

"""The seeds of this target, from their shipped recipe and cluster: every object valid, and the chart the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.clusters.helm_program import charted_objects, templated
from support.clusters.kubernetes_jobs import CODE
from support.clusters.kubernetes_schemas import all_objects, check
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.helm import write_chart
from trainshed.launch.kubernetes.render import render
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

SEEDS = [
    ("gke-llama3-70b", "gke-a3-mega"),
    ("gke-llama3-70b", "gke-a3-ultra"),
    ("aks-gpt-175b", "aks-nd-h100-v5"),
    ("eks-llama2-7b-cpt", "eks-p4d"),
    ("minio-llama3-1-70b-cpt", "minio-mi300x-ray"),
]


def seed_job(recipe: str, cluster: str) -> Job:
    job = build_job(load_recipe(recipe), load_cluster(cluster), offline=True, code=CODE)
    return replace(job, files=dict(job.files) | {"provenance.json": "{}\n"})


@pytest.mark.parametrize(("recipe", "cluster"), SEEDS)
def test_every_object_of_a_seed_is_valid_and_no_stage_on_cpus_holds_gpus(recipe: str, cluster: str) -> None:
    job = seed_job(recipe, cluster)
    objects = all_objects(render(job))
    for found in objects:
        check(found)
    pods = [found["spec"]["template"]["spec"] for found in objects if found["kind"] in ("Job", "DaemonSet")]
    assert pods
    assert not [pod for pod in pods for container in pod["containers"] if ".com/gpu" in str(container["resources"])]
    assert objects[-1]["metadata"]["labels"]["app.kubernetes.io/instance"] == job.name


@pytest.mark.parametrize(
    ("recipe", "cluster"), [SEEDS[0], *(pytest.param(*seed, marks=pytest.mark.full) for seed in SEEDS[1:])]
)
def test_the_chart_of_a_seed_is_the_same(recipe: str, cluster: str, tmp_path: Path) -> None:
    job = seed_job(recipe, cluster)
    request = render(job)
    write_chart(job, request, tmp_path / "chart")
    assert templated(tmp_path / "chart") == charted_objects(request)


def test_a_job_says_where_checkpoints_get_to_the_bucket_only_after_training() -> None:
    recipe = load_recipe("minio-llama3-1-70b-cpt")
    for kind, when in (("trainjob", "after training"), ("rayjob", "while it trains")):
        cluster = load_cluster("minio-mi300x-ray", [f"kubernetes.kind={kind}"])
        job = build_job(recipe, cluster, offline=True, code=CODE)
        assert [note for note in job.notes if f"copied to s3://default-bucket/experiments/megatron-lm {when}" in note]
        assert job.stage("train").uploads == (kind == "rayjob")

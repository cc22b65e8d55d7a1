"""The five seeds, from their shipped recipe and cluster to what is submitted, byte for byte."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import yaml

from support.recipes.golden_files import check_golden
from trainshed.launch.job import CodeArchive, Job
from trainshed.launch.target import target_of
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-stub.tar.xz", hashlib.sha256(b"stub").hexdigest(), b"stub", "0")
SEEDS = {
    "gke-llama3-70b": ("gke-a3-mega", ()),
    "gke-llama3-70b-ultra": ("gke-a3-ultra", ()),
    "aks-gpt-175b": ("aks-nd-h100-v5", ()),
    "aks-gpt-175b-sharp": ("aks-nd-h100-v5", ("sharp=true",)),
    "eks-llama2-7b-cpt": ("eks-p4d", ()),
    "minio-llama3-1-70b-cpt": ("minio-mi300x-ray", ()),
    "soperator-llama3-3-70b": ("soperator-h100", ()),
    "soperator-llama3-3-70b-lora": ("soperator-h100", ()),
    "soperator-llama3-3-70b-torch": ("soperator-h100", ()),
    "soperator-llama3-3-70b-lora-torch": ("soperator-h100", ()),
}
IMAGE = "image=registry.example/trainshed@sha256:" + "1" * 64


def seed_job(name: str) -> Job:
    cluster_name, overrides = SEEDS[name]
    recipe = load_recipe(name.removesuffix("-ultra").removesuffix("-sharp"))
    image = () if cluster_name.startswith("soperator") or any("image=" in each for each in overrides) else (IMAGE,)
    job = build_job(recipe, load_cluster(cluster_name, (*image, *overrides)), offline=True, code=CODE)
    # Where this checkout stands is not a part of what is proven here, nor is its version.
    files = dict(job.files) | {"provenance.json": "{}\n"}
    return replace(job, files=files)


@pytest.mark.parametrize("name", SEEDS)
def test_what_a_seed_submits_is_held_still(name: str) -> None:
    job = seed_job(name)
    check_golden(f"seeds/{name}.txt", target_of(job.cluster).render(job).text())


def test_only_training_and_serving_ask_for_gpus_in_every_seed() -> None:
    for name in SEEDS:
        job = seed_job(name)
        served = {"serve"} if name.startswith("minio") else set()
        assert {stage.name for stage in job.stages if stage.gpus_per_node} == {"train"} | served


def test_the_gke_seed_trains_what_its_recipe_says() -> None:
    job = seed_job("gke-llama3-70b")
    config = yaml.safe_load(job.files["nemo.yaml"])
    assert config["trainer"]["max_steps"] == 50
    model = config["model"]
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == (4, 4)
    assert (model["virtual_pipeline_model_parallel_size"], model["context_parallel_size"]) == (5, 2)
    assert (model["micro_batch_size"], model["global_batch_size"], model["encoder_seq_length"]) == (1, 1024, 8192)
    assert model["fp8"] is True
    assert job.stage("train").nodes == 16


def test_only_who_saves_is_told_how_long_a_checkpoint_takes() -> None:
    told = {name: "a checkpoint in" in seed_job(name).notes[0] for name in ("gke-llama3-70b", "aks-gpt-175b")}
    assert told == {"gke-llama3-70b": False, "aks-gpt-175b": True}

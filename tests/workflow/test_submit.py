"""A recipe on a cluster becomes a job, or is refused before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from support.recipes.small_recipes import recipe_text
from trainshed.errors import InputError, RecipeError
from trainshed.launch.job import CodeArchive, Job, JobFile
from trainshed.recipe import Cluster, Recipe, load_cluster, load_recipe, run_id
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")
LARGE = ("train.precision=bf16", "model.config=null", "model.preset=llama3-70b", "data.sequence_length=8192")
LAPTOPS = """\
name: laptops
target: slurm
machine: cpu
store: /shared/store
nodes: {default: 2, max: 4}
limits: {restarts: 5}
"""


def recipe_file(folder: Path, *overrides: str, text: str | None = None) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(text or recipe_text("dense"))
    return load_recipe(str(file), overrides)


def cluster_file(folder: Path, text: str = LAPTOPS, *overrides: str) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return load_cluster(file, overrides)


def job_of(folder: Path, *overrides: str, cluster: str = LAPTOPS, **asked: int) -> Job:
    return build_job(recipe_file(folder, *overrides), cluster_file(folder, cluster), code=CODE, **asked)


def test_a_recipe_becomes_stages_that_ask_for_gpus_only_to_train(tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path, "data.sequence_length=8192", "train.precision=bf16", "model.config.max_positions=8192"
    )
    job = build_job(recipe, load_cluster("slurm-h100", ["storage={tier: s3}"]), code=CODE)
    assert [(stage.name, stage.gpus_per_node) for stage in job.stages] == [("prepare", 0), ("train", 8)]
    assert job.stage("train").world_size == 16
    assert job.name == f"proof-{run_id(recipe)}"
    assert job.run == f"/shared/trainshed/runs/proof/{run_id(recipe)}"


def test_the_layout_that_the_planner_chose_and_what_it_predicts_travel_with_the_job(tmp_path: Path) -> None:
    job = build_job(recipe_file(tmp_path, "train.precision=bf16"), load_cluster("slurm-h100"), code=CODE, gpus=4)
    plan = orjson.loads(job.files["plan.json"])
    assert plan["layout"]["dp"] * plan["layout"]["tp"] * plan["layout"]["pp"] * plan["layout"]["cp"] == 4
    assert plan["predicted"]["step_seconds"] > 0
    assert plan["reasons"]
    assert any(note.startswith("planned: ") for note in job.notes)
    assert job.stage("train").nodes == 1
    assert job.stage("train").gpus_per_node == 4


def test_a_cluster_without_gpus_runs_the_layout_that_is_written(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layout={dp: 4, tp: 2}")
    train = job.stage("train")
    assert (train.nodes, train.ranks_per_node, train.gpus_per_node, train.restarts) == (2, 4, 0, 5)


def test_a_port_for_prometheus_travels_where_others_can_read_it_and_is_said_where_not(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layout={dp: 2}", "observe.prometheus={port: 9401, host: 0.0.0.0}")
    assert [stage.metrics_port for stage in job.stages] == [None, 9401]
    (tmp_path / "job.json").write_text(job.files["job.json"])
    assert JobFile.read(tmp_path).stage("train").metrics_port == 9401
    alone = job_of(tmp_path, "layout={dp: 2}", "observe.prometheus=true")
    assert alone.stage("train").metrics_port is None
    assert any("`host: 0.0.0.0` opens it" in note for note in alone.notes)


def test_who_a_foreign_engine_cannot_tell_is_said(tmp_path: Path) -> None:
    text = LAPTOPS + "notify: [{command: [page]}]\n"
    assert not any("notify" in note for note in job_of(tmp_path, "layout={dp: 2}", cluster=text).notes)
    cluster = load_cluster("slurm-h100", ["notify=[{command: [page]}]"])
    job = build_job(recipe_file(tmp_path, "train.precision=bf16", "engine=megatron"), cluster, code=CODE, offline=True)
    assert any("megatron runs without our agent" in note for note in job.notes)
    with pytest.raises(RecipeError, match="needs the secret HOOK, and the cluster slurm-h100 has none") as caught:
        build_job(
            recipe_file(tmp_path, "train.precision=bf16"),
            load_cluster("slurm-h100", ["notify=[{webhook: {secret: HOOK}}]"]),
            code=CODE,
        )
    assert "notify" in str(caught.value.where)


def test_grace_is_twice_the_planned_save_and_a_minute_unless_the_cluster_says_otherwise(tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path,
        "train.precision=bf16",
        "model.config=null",
        "model.preset=llama3-70b",
        "data.sequence_length=8192",
        "train.global_batch=128",
    )
    cluster = load_cluster("slurm-h100", ["storage={tier: fsx-lustre-250, size_tib: 1.2}"])
    planned = orjson.loads(build_job(recipe, cluster, code=CODE, nodes=8).files["plan.json"])["predicted"]["checkpoint"]
    job = build_job(recipe, cluster, code=CODE, nodes=8)
    assert job.grace_seconds == pytest.approx(2 * planned["write_seconds"] + 60, abs=1)
    assert job.grace_seconds > 600
    said = load_cluster("slurm-h100", ["limits.grace_seconds=90"])
    assert build_job(recipe_file(tmp_path, "train.precision=bf16"), said, code=CODE).grace_seconds == 90


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ("{hours: 1, grace_seconds: 3600}", "a job of 1 hours would be asked to save 3,600 seconds before its end"),
        ("{hours: 0.1}", "a job of 0.1 hours would be asked to save 600 seconds before its end: it would never train"),
        ("{grace_seconds: 70000}", "Slurm warns a job at most 65,535 seconds before its end, and 70,000 are wanted"),
    ],
)
def test_a_time_to_save_that_leaves_none_to_train_is_refused(tmp_path: Path, limits: str, what: str) -> None:
    cluster = load_cluster("slurm-h100", [f"limits={limits}"])
    with pytest.raises(InputError) as caught:
        build_job(recipe_file(tmp_path, "train.precision=bf16"), cluster, code=CODE)
    assert what in str(caught.value)
    assert "limits." in str(caught.value)


@pytest.mark.parametrize(
    ("elastic", "what"),
    [
        ("{min_nodes: 3}", "the run has 2 nodes, and would not train with fewer than 3"),
        ("{min_nodes: 1, spares: 3}", "5 nodes, and the cluster slurm-h100 has 4 at most"),
    ],
)
def test_a_run_that_waits_for_nodes_it_cannot_get_is_refused(tmp_path: Path, elastic: str, what: str) -> None:
    cluster = load_cluster("slurm-h100", ["nodes={default: 2, max: 4}"])
    recipe = recipe_file(tmp_path, "train.precision=bf16", f"elastic={elastic}")
    with pytest.raises(InputError) as caught:
        build_job(recipe, cluster, code=CODE)
    assert what in str(caught.value)
    assert "elastic." in str(caught.value)


def test_the_job_that_a_node_reads_is_the_job_that_was_built(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layout={dp: 2}", "elastic={min_nodes: 1, spares: 1}", "export={}")
    (tmp_path / "job.json").write_text(job.files["job.json"])
    read = JobFile.read(tmp_path)
    assert (read.name, read.run, read.stages, read.min_nodes) == (job.name, job.run, job.stages, 1)
    assert [stage.name for stage in read.stages] == ["prepare", "train", "export"]
    assert read.stage("train").spares == 1


def test_building_a_job_again_gives_the_same_bytes(tmp_path: Path) -> None:
    assert job_of(tmp_path, "layout={dp: 2}") == job_of(tmp_path, "layout={dp: 2}")


def test_base_weights_are_fetched_and_text_is_tokenised_in_parts_before_training(tmp_path: Path) -> None:
    text = (
        recipe_text("dense")
        .replace("init: random", "from: /models/tiny")
        .replace("data:\n  synthetic: true\n", "tokenizer: /models/tiny\ndata:\n  train: [{path: /corpus/*.jsonl}]\n")
    )
    recipe = recipe_file(tmp_path, "layout={dp: 2}", text=text)
    job = build_job(recipe, cluster_file(tmp_path, LAPTOPS.replace("restarts: 5", "prepare_parts: 4")), code=CODE)
    assert [(stage.name, stage.parts) for stage in job.stages] == [
        ("fetch", 1),
        ("tokenise", 4),
        ("prepare", 1),
        ("train", 1),
    ]


def test_scripts_beside_the_recipe_travel_with_it(tmp_path: Path) -> None:
    (tmp_path / "make").mkdir()
    (tmp_path / "make" / "text.py").write_text("print('hello')\n")
    text = (
        recipe_text("dense")
        .replace(
            "data:\n  synthetic: true\n",
            "tokenizer: {train: {vocab_size: 300}}\ndata:\n  train: [{script: make/text.py}]\n",
        )
        .replace("vocab_size: 61", "vocab_size: 300")
    )
    job = build_job(recipe_file(tmp_path, "layout={dp: 2}", text=text), cluster_file(tmp_path), code=CODE)
    assert job.files["make/text.py"] == "print('hello')\n"


@pytest.mark.parametrize(
    ("overrides", "asked", "what"),
    [
        (["layout={dp: 2}"], {"nodes": 9}, "9 nodes, and the cluster laptops has 4 at most"),
        (["layout={dp: 4}"], {"nodes": 3}, "the 4 ranks of .* do not fill 3 nodes evenly"),
        (["layout={tp: 8}"], {"nodes": 1}, "tp: 8"),
        (["layout={dp: 2}", "store=s3://bucket/x"], {}, "is not a path that every node mounts"),
    ],
)
def test_what_could_not_run_there_is_refused_before_it_is_submitted(
    overrides: list[str], asked: dict[str, int], what: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=what):
        job_of(tmp_path, *overrides, **asked)


def test_a_foreign_engine_must_be_told_how_many_steps(tmp_path: Path) -> None:
    text = recipe_text("dense").replace(
        "data:\n  synthetic: true\n", "tokenizer: /models/tiny\ndata:\n  train: [{path: /corpus/*.jsonl}]\n"
    )
    overrides = ("layout={dp: 2}", "engine=megatron", "train.steps=null", "train.epochs=1.0", "train.precision=bf16")
    with pytest.raises(RecipeError, match="must be told how many steps"):
        build_job(recipe_file(tmp_path, *overrides, text=text), cluster_file(tmp_path), code=CODE)


def test_a_layout_that_does_not_fit_is_refused_unless_one_insists(tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path,
        "train.precision=bf16",
        "model.config=null",
        "model.preset=llama3-70b",
        "layout={dp: 16, shard: none}",
        "train.global_batch=16",
    )
    cluster = load_cluster("slurm-h100")
    with pytest.raises(RecipeError, match="GiB on its fullest GPU, which has 80") as caught:
        build_job(recipe, cluster, code=CODE)
    assert "--despite-memory" in (caught.value.hint or "")
    assert build_job(recipe, cluster, code=CODE, despite_memory=True).stage("train").world_size == 16


def test_adapters_are_planned_as_what_they_train_and_refused_where_even_that_does_not_fit() -> None:
    name, cluster = "soperator-llama3-3-70b-lora", load_cluster("soperator-h100")
    job = build_job(load_recipe(name), cluster, code=CODE, offline=True)
    assert any("0.28% of the weights are trained" in note for note in job.notes)
    too_much = ["layout.recompute=none", "layout.micro_batch=64", "train.global_batch=1024"]
    with pytest.raises(RecipeError, match="GiB on its fullest GPU"):
        build_job(load_recipe(name, too_much), cluster, code=CODE, offline=True)


def test_variables_that_do_not_belong_to_the_fabric_are_refused_with_the_reason(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, "train.precision=bf16")
    cluster = load_cluster("eks-p5", ["image=registry/x", "environment={NCCL_SOCKET_IFNAME: eth0}"])
    with pytest.raises(InputError, match="NCCL_SOCKET_IFNAME") as caught:
        build_job(recipe, cluster, code=CODE)
    assert "environment" in (caught.value.where or "")


def test_a_path_of_this_machine_is_refused_with_the_key_that_names_it(tmp_path: Path) -> None:
    text = recipe_text("dense").replace("init: random", "from: models/tiny")
    with pytest.raises(RecipeError, match="relative to this machine's folder") as caught:
        build_job(recipe_file(tmp_path, "layout={dp: 2}", text=text), cluster_file(tmp_path), code=CODE)
    assert "model.from" in (caught.value.where or "")


def test_pods_need_a_volume_under_the_store(tmp_path: Path) -> None:
    cluster = "name: pods\ntarget: kubernetes\nmachine: cpu\nstore: /data\nvolumes: [{mount: /other, pvc: x}]\n"
    with pytest.raises(RecipeError, match="lies on no volume that pods mount"):
        job_of(tmp_path, "layout={dp: 1}", cluster=cluster)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["engine=nemo"], "checkpoints of nemo are not converted here"),
        (["engine=megatron", "layout.shard=full"], r"Megatron's FSDP \(shard: full\)"),
    ],
)
def test_an_export_that_would_fail_after_the_training_is_refused_before_it(
    overrides: list[str], what: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=what):
        job_of(tmp_path, "layout={dp: 2}", "export={}", *overrides)


def test_a_recipe_cannot_bring_its_own_image_where_the_image_is_locked(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="`image` is locked"):
        job_of(
            tmp_path, "layout={dp: 2}", "engine={name: megatron, image: mine}", cluster=LAPTOPS + "locked: [image]\n"
        )

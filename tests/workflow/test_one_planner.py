"""One planner: `plan`, `render` and `run` give a recipe the same layout and the same seconds, calibrated or not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest

from trainshed.catalog.gpus import find_gpu
from trainshed.cli import run_cli
from trainshed.errors import InputError
from trainshed.plan.auto_layout import auto_layout_for_gpus, local_hardware
from trainshed.plan.planner import make_plan
from trainshed.recipe import Cluster, load_cluster, load_recipe
from trainshed.recipe.load import shipped_recipes
from trainshed.shipped import shipped_folder
from trainshed.workflow.layout import plan_on_cluster, planned_model
from trainshed.workflow.plan_request import PlanFlags, request_from_flags
from trainshed.workflow.resolve import resolve
from trainshed.workflow.submit import build_job

RECIPES = sorted(shipped_recipes())
CLUSTERS = sorted(file.stem for file in shipped_folder("clusters").glob("*.yaml") if file.stem != "local")
SAMPLED = {
    ("quickstart", "slurm-h100"),
    ("eks-llama2-7b-cpt", "eks-p4d"),
    ("gke-llama3-70b", "gke-a3-mega"),
    ("minio-llama3-1-70b-cpt", "minio-mi300x-ray"),
    ("soperator-llama3-3-70b", "soperator-h100"),
}
PAIRS = [
    pytest.param(recipe, cluster, marks=() if (recipe, cluster) in SAMPLED else pytest.mark.full)
    for recipe in RECIPES
    for cluster in CLUSTERS
]
SMALL = """
name: small
model: {preset: llama3-8b, init: random}
data: {synthetic: true, sequence_length: 8192}
train: {steps: 100, global_batch: 128, optimizer: {lr: 3.0e-4}}
"""
ENGINES = ("torch", "megatron", "nemo", "torchtune")
ENTRY = "- {{gpu: {gpu}, engine: {engine}, factor: 2.0, memory_factor: 1.4, from: small/0123abcd, steps: 50}}\n"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every engine on every GPU of the shipped clusters is twice as slow as predicted, and 40% larger."""
    gpus = ("h100-sxm", "h200", "a100-40gb", "mi300x")
    entries = [ENTRY.format(gpu=gpu, engine=engine) for gpu in gpus for engine in ENGINES]
    file = tmp_path_factory.mktemp("calibrated") / "calibration.yaml"
    file.write_text("calibrations:\n" + "".join(entries))
    return file


def planned(flags: PlanFlags) -> dict[str, Any]:
    """What `trainshed plan` says of a recipe on a cluster."""
    found = make_plan(request_from_flags(flags))
    return {
        "layout": found.chosen.layout,
        "seconds": found.chosen.step_seconds,
        "gib": found.chosen.memory.total,
        "calibration": found.calibration,
    }


def placed(recipe: str, cluster: Cluster, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `render`, `submit` and `run --on` put into a job."""
    resolved = resolve(load_recipe(recipe, keys), pin=False)
    run = plan_on_cluster(resolved, cluster, planned_model(resolved, cluster), None, None, despite_memory=True)
    assert run.predicted is not None
    predicted = run.predicted
    return {
        "layout": run.layout,
        "seconds": predicted["step_seconds"],
        "gib": predicted["memory_gib"],
        "calibration": predicted["calibration"],
    }


@pytest.mark.parametrize("keys", [(), ("layout=auto",)], ids=["as written", "layout auto"])
@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize(("recipe", "cluster"), PAIRS)
def test_plan_and_render_agree(
    recipe: str, cluster: str, calibrated: bool, keys: tuple[str, ...], calibration: Path
) -> None:
    for_cluster = (f"calibration={calibration}",) if calibrated else ()
    there = load_cluster(cluster, for_cluster)
    flags = PlanFlags(recipe=recipe, on=cluster, overrides=(*keys, *(f"cluster.{key}" for key in for_cluster)))
    try:
        wanted = planned(flags)
    except InputError:
        with pytest.raises(InputError):
            placed(recipe, there, keys)
        return
    assert placed(recipe, there, keys) == wanted
    if calibrated:
        assert wanted["calibration"]["file"] == str(calibration)
        assert len(wanted["calibration"]["sha256"]) == 64


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize(
    ("recipe", "gpu", "gpus"),
    [
        ("quickstart", "h100", 2),
        ("eks-llama2-7b-cpt", "h200", 8),
        *(
            pytest.param(recipe, gpu, gpus, marks=pytest.mark.full)
            for recipe in RECIPES
            for gpu, gpus in (("h100", 4), ("h200", 8), ("a100-40gb", 8), ("mi300x", 8))
        ),
    ],
)
def test_plan_and_a_run_on_this_machine_agree(
    recipe: str, gpu: str, gpus: int, calibrated: bool, calibration: Path
) -> None:
    """A run here has what GPUs the driver names; a plan is told them."""
    keys = ("layout=auto", "engine=torch", "train.precision=bf16")
    for_cluster = (f"calibration={calibration}",) if calibrated else ()
    cluster = load_cluster("local", for_cluster)
    resolved = resolve(load_recipe(recipe, keys), pin=False)
    hardware = local_hardware(find_gpu(gpu).device_names[0], gpus)
    flags = PlanFlags(
        recipe=recipe, gpu=gpu, gpus=str(gpus), overrides=(*keys, *(f"cluster.{key}" for key in for_cluster))
    )
    try:
        wanted = planned(flags)
    except InputError:
        with pytest.raises(InputError):
            auto_layout_for_gpus(planned_model(resolved, cluster), hardware, gpus, cluster, resolved)
        return
    chosen = auto_layout_for_gpus(planned_model(resolved, cluster), hardware, gpus, cluster, resolved)
    assert (chosen.layout, chosen.calibration) == (wanted["layout"], wanted["calibration"])
    assert any(reason.startswith("calibrated: steps times 2.000") for reason in chosen.reasons) == calibrated


def test_a_calibrated_job_says_by_what_in_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = tmp_path / "small.yaml", tmp_path / "calibration.yaml"
    recipe.write_text(SMALL)
    file.write_text("calibrations:\n" + ENTRY.format(gpu="h100-sxm", engine="torch"))
    plain, calibrated = (
        build_job(load_recipe(str(recipe)), load_cluster("slurm-h100", keys), offline=True)
        for keys in ((), (f"calibration={file}",))
    )
    before, after = (orjson.loads(job.files["plan.json"])["predicted"] for job in (plain, calibrated))
    assert before["calibration"] is None
    assert after["calibration"]["entry"]["factor"] == 2.0
    assert any(note.startswith("calibrated: steps times 2.000") for note in calibrated.notes)
    command = f"plan {recipe} --on slurm-h100 cluster.calibration={file} -o json"
    assert run_cli(shlex.split(command)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["step_seconds"] == after["step_seconds"]
    assert found["calibration"] == after["calibration"]
    assert found["chosen"]["layout"] == calibrated_layout(calibrated.files["plan.json"], found)


def calibrated_layout(plan_text: str, found: dict[str, Any]) -> dict[str, Any]:
    """The keys of a job's layout that a report has."""
    layout = orjson.loads(plan_text)["layout"]
    return {key: layout[key] for key in found["chosen"]["layout"]}

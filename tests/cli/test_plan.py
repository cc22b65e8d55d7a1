"""`trainshed plan`: what it takes, what it reports, what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.servers.hub_server import running
from trainshed.catalog import model_preset
from trainshed.cli import run_cli
from trainshed.models.families import to_hf_config

SMALL = "--model llama3-8b --gpu h100 --gpus 8 --seq 8192 --global-batch 128"
RECIPE = """
name: small
model: {preset: llama3-8b, init: random}
data: {synthetic: true, sequence_length: 8192}
train: {tokens: 10B, global_batch: 128, optimizer: {lr: 3.0e-4}}
"""


def plan(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a plan prints."""
    code = run_cli(["plan", *shlex.split(command)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def report(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what a plan reports to programs."""
    return json.loads(plan(f"{command} -o json", capsys))


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why a plan is refused, on one line."""
    assert run_cli(["plan", *shlex.split(command)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return " ".join(shown.err.split())


def test_what_is_chosen_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(f"{SMALL} --steps 1000 --price 2.5", capsys)
    chosen, memory = found["chosen"], found["chosen"]["memory_gib"]
    assert found["schema"] == "trainshed.plan-report/1"
    assert sum(chosen["time"].values()) == pytest.approx(chosen["step_seconds"])
    assert memory["total"] == pytest.approx(sum(memory.values()) - memory["total"] - memory["capacity"])
    assert memory["total"] <= memory["capacity"]
    assert chosen["tokens_per_second_per_gpu"] == pytest.approx(128 * 8192 / 8 / chosen["step_seconds"])
    assert chosen["mfu"] == pytest.approx(chosen["tflops_per_gpu"] / found["job"]["hardware"]["peak_tflops"])
    assert chosen["hours"] >= 1000 * chosen["step_seconds"] / 3600
    assert chosen["cost"] == pytest.approx(chosen["hours"] * 8 * 2.5)
    sizes = chosen["layout"]
    assert sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] == 8
    assert len(chosen["stages"]) == sizes["pp"]


def test_runners_up_are_as_many_as_asked_and_rejected_ones_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = report("--model llama3-70b --gpu h100 --gpus 64 --seq 8192 --global-batch 128 --top 3", capsys)
    assert len(found["runners_up"]) == 2
    assert found["rejected"]
    assert set(found["runners_up"][0]) == set(found["chosen"]) - {"stages", "hours", "cost"}
    assert all(each["reason"] and each["layout"]["tp"] for each in found["rejected"])


def test_a_given_layout_is_judged_and_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(f"{SMALL} --layout tp=4,micro_batch=2,recompute=full", capsys)
    chosen = found["chosen"]["layout"]
    assert (chosen["tp"], chosen["dp"], chosen["micro_batch"], chosen["recompute"]) == (4, 2, 2, "full")
    assert (found["searched"], found["runners_up"], found["considered"]) == (False, [], 1)


def test_a_recipe_says_what_is_trained_and_its_cluster_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    found = report(f"{recipe} --on slurm-h100 --nodes 2 train.precision=fp8 layout.tp=2", capsys)
    job = found["job"]
    assert (job["name"], job["model"], job["precision"], job["engine"]) == ("small", "llama3-8b", "fp8", "torch")
    assert (job["gpus"], job["hardware"]["gpu"]) == (16, "h100-sxm")
    assert job["steps"] == -(-10_000_000_000 // (8192 * 128))
    assert (found["searched"], found["chosen"]["layout"]["tp"], found["chosen"]["layout"]["dp"]) == (False, 2, 8)
    assert found["chosen"]["cost"] is None or found["chosen"]["cost"] > 0


def test_what_could_not_be_run_there_is_planned_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    notes = report(f"{tmp_path}/recipe.yaml data.stage=nvme --on slurm-h100", capsys)["notes"]
    (note,) = (note for note in notes if "would refuse" in note)
    assert "the cluster `slurm-h100` would refuse this recipe" in note
    assert "\n" not in note
    assert "data.stage" in note


def test_arguments_of_the_engine_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{RECIPE}engine: {{name: megatron}}\nlayout: {{tp: 4}}\n")
    asked = f"{recipe} --gpu h100 --gpus 8"
    plain = report(asked, capsys)
    hidden = report(f"{asked} engine.args.tp_comm_overlap=true", capsys)
    assert hidden["chosen"]["time"]["tp"] < 0.5 * plain["chosen"]["time"]["tp"]
    assert "counted of engine.args: tp_comm_overlap" in hidden["notes"]
    assert not any("engine.args" in note for note in plain["notes"])


@pytest.mark.parametrize(
    "gpu", ["3090", "4090", "5090", "a6000", "rtx-pro-6000", "l4", "l40s", "h20", "mi350x", "gb200", "b300"]
)
def test_gpus_that_people_own_are_planned_for_by_the_name_they_use(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(f"--model llama3.2-1b --gpu {gpu} --gpus 2 --seq 4096 --global-batch 64", capsys)
    assert found["chosen"]["fits"]
    assert 0.1 < found["chosen"]["mfu"] < 1


def test_several_gpus_are_planned_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama3-8b --gpus 8 --seq 8192 --global-batch 128 --steps 1000"
    found = report(f"{asked} --gpu h100,h200 --gpu v100-16gb", capsys)
    assert found["schema"] == "trainshed.plan-comparison/1"
    assert [each["gpu"] for each in found["plans"]] == ["h100", "h200", "v100-16gb"]
    for each in found["plans"][:2]:
        alone = report(f"{asked} --gpu {each['gpu']}", capsys)
        assert each["plan"] == alone
    assert found["plans"][2]["plan"] is None
    assert found["plans"][2]["error"]["what"] == "v100-16gb has no published peak for products in bf16"
    shown = plan(f"{asked} --gpu h100,h200,v100-16gb", capsys)
    rows = [line.removeprefix("▸").split() for line in shown.splitlines() if " hours" in line]
    assert [row[0] for row in rows] == ["h100-sxm", "h200"]
    assert "v100-16gb: v100-16gb has no published peak for products in bf16" in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--gpu h100,h1000", "--gpu: there is no GPU `h1000`"),
        ("--gpu h100 --gpu h200 --machine a3-mega", "--machine: a machine has one kind of GPU"),
        ("--gpu h100,h200 --report plan.html", "--report: a report is of one plan"),
        ("--gpu a10g,l4 --model llama3-70b --gpus 2", "llama3-70b does not fit on 2 a10g"),
    ],
)
def test_a_comparison_refuses_what_is_wrong_for_all(more: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "" if "--model" in more else "--model llama3-8b --gpus 8"
    assert words in refusal(f"{model} {more} --seq 8192 --global-batch 128", capsys)


def test_a_model_may_be_a_folder_with_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_config(folder / "config.json")
    asked = "--gpu h100 --gpus 8 --seq 4096 --global-batch 64"
    known = report(f"--model llama3.2-1b {asked}", capsys)
    found = report(f"--model {folder} {asked}", capsys)
    assert found["job"]["parameters"] == known["job"]["parameters"]
    assert found["chosen"] == known["chosen"]
    monkeypatch.chdir(tmp_path)
    assert report(f"--model mine {asked}", capsys)["chosen"] == known["chosen"]
    assert "write hf://org/name for the Hub" in refusal(f"--model org/name {asked}", capsys)
    (folder / "config.json").write_text("{")
    assert f"--model: {folder} cannot be read: its config.json is not JSON" in refusal(
        f"--model {folder} {asked}", capsys
    )
    (folder / "config.json").unlink()
    assert f"--model: {folder} cannot be read" in refusal(f"--model {folder} {asked}", capsys)


def test_a_model_may_be_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_cloud: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "--gpu h100 --gpus 8 --seq 4096 --global-batch 64"
    write_config(tmp_path / "config.json")
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["org/name"] = {"config.json": (tmp_path / "config.json").read_bytes(), "model.safetensors": b"none"}
        found = report(f"--model hf://org/name {asked}", capsys)
        assert hub.count("safetensors") == 0
        assert "--model: hf://org/nothing cannot be read" in refusal(f"--model hf://org/nothing {asked}", capsys)
    assert (found["job"]["name"], found["job"]["parameters"]) == ("hf://org/name", 1_235_814_400)


def write_config(file: Path) -> None:
    """Write the config.json of Llama-3.2-1B, without any weights beside it."""
    file.write_bytes(orjson.dumps(to_hf_config(model_preset("llama3.2-1b"))))


def test_a_gpu_without_bf16_says_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama3.2-1b --gpu v100-32gb --gpus 2 --seq 1024 --global-batch 8"
    assert "v100-32gb has no published peak for products in bf16 write fp32; fp16 with the engine megatron" in refusal(
        asked, capsys
    )
    said = refusal(f"{asked} --precision fp16", capsys)
    assert "the engine torch does not train in fp16: it has no loss scale write fp32, or another engine" in said
    found = report(f"{asked} --precision fp16 --engine megatron", capsys)
    assert found["job"]["hardware"]["peak_tflops"] == 125.0


def test_a_plan_has_a_range_and_says_what_was_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama3-8b --gpu a100-80gb --gpus 8 --seq 4096 --global-batch 128"
    found = report(asked, capsys)
    held = found["evidence"]
    assert held["step_seconds_low"] <= found["chosen"]["step_seconds"] <= held["step_seconds_high"]
    assert found["chosen"]["mfu"] > held["best_measured_mfu"]
    figures = (f"{found['chosen']['mfu']:.1%} MFU is more than was ever measured", f"{held['best_measured_mfu']:.1%}")
    (note,) = [note for note in found["notes"] if figures[0] in note]
    assert figures[1] in note
    assert figures[0] in " ".join(plan(asked, capsys).split())


def test_a_range_of_gpus_draws_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(SMALL.replace("--gpus 8", "--gpus 8..32"), capsys)
    assert [point["gpus"] for point in found["scaling"]["points"]] == [8, 16, 32]
    assert found["job"]["gpus"] == 32
    assert "the layout shown is the one for 32 GPUs" in found["notes"]


def test_a_plan_is_drawn_and_explained_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    shown = plan(f"{SMALL} --explain --report {page}", capsys)
    for words in ("one step, ", "the step in time", "why", "MFU", "the run"):
        assert words in shown
    assert shown.rstrip().endswith(f"wrote {page}")
    assert page.read_text().startswith("<!doctype html>")
    assert "\x1b[" not in shown


def test_a_word_of_ours_is_not_taken_for_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("validate").write_text(RECIPE)
    assert run_cli(["plan", "validate", "--columns"]) == 0
    assert "gpu" in capsys.readouterr().out


def test_a_calibration_is_used_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.yaml"
    file.write_text("calibrations:\n- {gpu: h100-sxm, engine: torch, factor: 1.25, from: small/0123abcd, steps: 50}\n")
    layout = "--layout tp=4,recompute=full"
    plain = report(f"{SMALL} {layout}", capsys)
    found = report(f"{SMALL} {layout} --calibration {file}", capsys)
    assert found["chosen"]["step_seconds"] == pytest.approx(1.25 * plain["chosen"]["step_seconds"])
    assert (plain["calibration"], found["calibration"]["entry"]["factor"]) == (None, 1.25)
    assert any(note.startswith("calibrated: steps times 1.250 for torch on h100-sxm") for note in found["notes"])
    other = report(f"{SMALL} {layout} --engine megatron --calibration {file}", capsys)
    assert any("has no calibration of megatron on h100-sxm" in note for note in other["notes"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "error: there is nothing to plan: no recipe, no model trainshed plan RECIPE --on CLUSTER, or"),
        (
            "quickstart --model llama3-8b",
            "--model: RECIPE and --model both say it: with a recipe, its key `model.",
        ),
        ("quickstart --seq 4096", "write data.sequence_length=4096, or leave RECIPE out"),
        (f"{SMALL} --nodes 2", "error: --gpus and --nodes say the same thing twice keep one of them"),
        (f"{SMALL} --steps 5 --tokens 1T", "error: --steps and --tokens say the same thing twice"),
        (f"{SMALL} --steps 0", "error: --steps: 0 is not a number above 0"),
        (f"{SMALL} --price nan", "error: --price: nan is not a number above 0"),
        (f"{SMALL} --price inf", "error: --price: inf is not a number above 0"),
        (f"{SMALL} --tokens 1e400", "error: --tokens: `1e400` is not a number of tokens write for example 15T"),
        (f"{SMALL} --tokens many", "error: --tokens: `many` is not a number of tokens write for example 15T"),
        ("--model llama3-8b --gpu h100 --gpus 8 --seq 8192", "--global-batch: is missing write --global-batch 1024"),
        ("--model llama3-8b --gpu h100 --seq 8192 --global-batch 8", "on how many GPUs? write --gpus 128, --nodes 16"),
        (SMALL.replace("llama3-8b", "lama3-8b"), "--model: there is no model preset `lama3-8b` did you mean llama3-8b"),
        (SMALL.replace("h100", "h1000"), "--gpu: there is no GPU `h1000`"),
        (SMALL.replace("--gpus 8", "--gpus few"), "--gpus: `few` is neither a number of GPUs nor a range"),
        (SMALL.replace("--gpus 8", "--gpus 64..8"), "--gpus: 64..8 is not a range of GPU counts"),
        (
            SMALL.replace("--gpus 8", "--gpus 12"),
            "--gpus: 12 GPUs are not a whole number of h100-sxm machines",
        ),
        (f"{SMALL} --machine p4d", "--gpu: --machine p4d has a100-40gb, and --gpu says h100-sxm"),
        (f"{SMALL} --precision nvfp4", "--precision: h100-sxm has no published peak for products in nvfp4 write fp32"),
        (f"{SMALL} --precision fp64", "--precision: there is no plan for products in `fp64` fp64 is for proofs"),
        (f"{SMALL} --layout tp=3", "8 ranks are not a multiple of tp 3"),
        (f"{SMALL} --layout tp=16", "8 ranks are not a multiple of tp 16"),
        (f"{SMALL} --layout zp=1", "--layout: unknown key `zp`"),
        (f"{SMALL} --top 0", "--top: 0 layouts cannot be shown write 1 or more"),
        (f"{SMALL} --report plan.pdf", "--report: a report is a page or a picture, and `plan.pdf` is neither"),
        (f"{SMALL} --calibration none.yaml", "none.yaml: cannot be read: No such file or directory"),
        (f"{SMALL} --engine jax", "--engine: there is no engine `jax` write torch, megatron, nemo or torchtune"),
        ("quickstart", "the cluster local does not say what machines it has write --gpu h100, --machine a3-mega"),
        ("quickstart --on slurm-h100 --gpus 999992", "and the cluster slurm-h100 has"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_write(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(command, capsys)


def test_a_layout_in_a_recipe_is_refused_at_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "layout: {tp: 16}\n")
    assert "recipe.yaml:6 (layout.tp): tp: 16" in refusal(f"{recipe} --machine dgx-h100 --gpus 16", capsys)


def test_an_architecture_that_cannot_be_read_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("{preset: llama3-8b, init: random}", f"{{from: {tmp_path}/none}}"))
    said = refusal(f"{recipe} --gpu h100 --gpus 8", capsys)
    assert "the architecture is that of" in said
    assert "name it besides: model.preset=NAME" in said

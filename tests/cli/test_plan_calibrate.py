"""`trainshed plan calibrate`: one of our runs, or a foreign log with its job in flags, becomes a factor in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from support.recipes.small_recipes import small_recipe
from trainshed.cli import run_cli
from trainshed.launch.attempt import write_plan
from trainshed.observe.events import EventWriter
from trainshed.plan import parse_layout, resolve_layout
from trainshed.plan.calibration import read_calibrations
from trainshed.recipe import Layout, to_yaml
from trainshed.storage import LocalStore

MEGATRON = (
    " [2026-02-03 04:05:06.789] iteration {n:8d}/     500 | consumed samples: {n:12d} | elapsed time per iteration "
    "(ms): 6000.0 | global batch size:   128 | lm loss: 1.0E+01 |\n"
)
JOB = ["--model", "llama3-8b", "--gpu", "h100", "--gpus", "16", "--seq", "8192", "--precision", "bf16"]


def calibrate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    code = run_cli(["plan", "calibrate", *map(str, arguments), "-o", "json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return orjson.loads(captured.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    assert run_cli(["plan", "calibrate", *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


def own_run(folder: Path, seconds: float, device: str) -> Path:
    """The folder of a run of ours, as far as calibrating reads it."""
    recipe = small_recipe("dense", ["train.precision=bf16"])
    store = LocalStore(folder / "ab12cd34")
    store.put("recipe.yaml", to_yaml(recipe).encode())
    config = recipe.model.config
    assert config is not None
    layout = resolve_layout(Layout.model_validate(parse_layout("tp=2,micro_batch=2")), config)
    write_plan(store, 1, layout)
    with EventWriter(store, "", attempt=1, rank=0) as events:
        versions = {"trainshed": "9.9", "torch": "2.11"}
        events.emit("start", run="a", layout="tp2", world_size=2, versions=versions, device=device, parameters=1)
        for step in range(1, 21):
            rates = {"step_seconds": seconds, "tokens_per_second_per_gpu": 1.0, "mfu": None, "mfu_full_attention": None}
            state = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "batch_hash": "00", "skipped": False}
            events.emit("step", step=step, tokens=128 * step, **rates, **state, memory_gib=1.0)
    return folder / "ab12cd34"


def test_a_run_of_ours_says_everything_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "calibration.yaml"
    report = calibrate(capsys, own_run(tmp_path, 0.25, "NVIDIA H200"), "--to", file)
    (entry,) = read_calibrations(file).entries
    assert (entry.gpu, entry.engine, entry.version, entry.learnt_from) == ("h200", "torch", "9.9", "proof/ab12cd34")
    assert entry.factor == pytest.approx(0.25 / report["predicted"]["step_seconds"], rel=1e-3)
    assert entry.memory_factor is not None
    assert report["calibration"]["from"] == "proof/ab12cd34"
    again = calibrate(capsys, own_run(tmp_path / "again", 0.5, "NVIDIA H200"), "--to", file)
    assert again["calibration"]["factor"] == pytest.approx(2 * entry.factor, rel=1e-3)
    assert [each.factor for each in read_calibrations(file).entries] == [again["calibration"]["factor"]]


def test_a_run_on_a_device_that_no_catalog_has_asks_for_a_machine_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = refused(capsys, own_run(tmp_path, 0.25, "cpu"), "--to", tmp_path / "c.yaml")
    assert "the run was on `cpu`, which the catalog does not know" in said
    assert "plan probe" in said


def test_what_the_run_says_itself_may_not_be_said_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = refused(capsys, own_run(tmp_path, 0.25, "NVIDIA H200"), "--model", "llama3-8b")
    assert "--model: the run's folder says what was trained" in said


def test_a_log_of_megatron_needs_its_job_in_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log, file = tmp_path / "train.log", tmp_path / "calibration.yaml"
    log.write_text("".join(MEGATRON.format(n=n) for n in range(1, 30)))
    options = [*JOB, "--layout", "tp=2", "--engine-version", "0.16.1", "--to", file]
    report = calibrate(capsys, log, *options)
    (entry,) = read_calibrations(file).entries
    assert (entry.engine, entry.version, entry.date) == ("megatron", "0.16.1", "2026-02-03")
    assert report["measured"]["step_seconds"] == 6.0
    assert entry.factor == pytest.approx(6.0 / report["predicted"]["step_seconds"], rel=1e-3)


def test_a_log_whose_batch_is_another_than_the_jobs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "train.log"
    log.write_text("".join(MEGATRON.format(n=n) for n in range(1, 30)))
    said = refused(capsys, log, *JOB, "--layout", "tp=2", "--global-batch", "256")
    assert "the log is of a global batch of 128, the job of 256" in said
    assert "a log does not say which layout it ran with" in refused(capsys, log, *JOB)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "so it is not a run" in refused(capsys, tmp_path)

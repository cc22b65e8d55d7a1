"""`trainshed metrics`: of logs with flags, of runs by their folder, of several side by side."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from support import TESTS
from trainshed.cli import run_cli
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore

GKE_JOB = ("--batch-size", "1024", "--gpus", "128", "--gpu", "h100", "--precision", "fp8", "--model", "llama3-70b")
RECIPE = """
name: proof
model: {{preset: llama3-8b, init: random}}
tokenizer: hf://org/name
data: {{sequence_length: 8192, train: [{{path: a.jsonl}}]}}
train: {{steps: 24, global_batch: 8, precision: bf16, optimizer: {{lr: {lr}}}}}
layout: {{tp: 2}}
"""


def metrics(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run_cli(["metrics", *map(str, words), "-o", "json"]) == 0
    return orjson.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run_cli(["metrics", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run_cli(["metrics", *map(str, words)]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def dllogger(tmp_path: Path) -> Path:
    """The file of the GKE recipe, by the entry that its README shows."""
    file = tmp_path / "dllogger.json"
    lines = ['DLLL {"timestamp": "1728593000.0", "type": "LOG", "step": "PARAMETER", "data": {"cfg/name": "llama"}}']
    for number in range(50):
        seconds = 45.81364059448242 if number > 4 else 70.0
        data = {
            "reduced_train_loss": 7.976484775543213,
            "lr": 8.49e-06,
            "global_step": number,
            "consumed_samples": 1024 * (number + 1),
            "train_backward_timing in s": 5.4e-05,
            "train_step_timing in s": seconds,
            "epoch": 0,
        }
        entry = {"timestamp": str(1728593000.0 + 46 * number), "type": "LOG", "step": number, "data": data}
        lines.append(f"DLLL {orjson.dumps(entry).decode()}")
    file.write_text("\n".join(lines) + "\n")
    return file


def write_run(folder: Path, seconds: float, *, lr: float = 1e-3, device: str = "NVIDIA H200") -> Path:
    """The folder of a run of our own engine with 12 steps."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(lr=lr))
    with EventWriter(LocalStore(folder), "", attempt=1, rank=0) as events:
        events.emit("start", run="p/q", layout="tp2", world_size=2, versions={}, device=device, parameters=8)
        for step in range(12):
            rates = {"tokens_per_second_per_gpu": 1.0, "mfu": None, "mfu_full_attention": None, "skipped": False}
            state = {"loss": 3.0, "grad_norm": 1.0, "lr": lr, "batch_hash": "00", "tokens": 65536 * (step + 1)}
            events.emit("step", step, step_seconds=seconds if step else 9 * seconds, **state, **rates)
    return folder


def test_the_gke_recipes_file_gives_its_figure(dllogger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = metrics(capsys, dllogger, "--start", 15, "--end", 40, *GKE_JOB)["runs"]
    assert (run["first_step"], run["last_step"], run["step_seconds"]["steps"]) == (15, 40, 26)
    assert round(run["step_seconds"]["mean"], 2) == 45.81
    assert int(run["mfu"]["model_tflops_full_attention"]) == 688
    assert round(100 * run["mfu"]["mfu_full_attention"], 1) == 34.8
    shown = text(capsys, dllogger, "--start", 15, "--end", 40, *GKE_JOB)
    assert "45.81 s mean" in shown
    assert "688.7 TFLOP/s/GPU with full attention" in shown
    assert "32.5% with causal attention, 34.8% with full, of 1,978.9 TFLOP/s, dense fp8" in shown
    assert "recomputation is not counted" in shown
    assert "--sequence-length is not written: 8192, the longest of llama3-70b" in shown


def test_without_flags_a_log_says_what_it_can(dllogger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = text(capsys, dllogger)
    assert "MFU         not known: the model, the sequence length, the precision, the batch and the number" in shown
    assert "49 of 1 to 49; left out: 1 first of an attempt" in shown


def test_a_log_of_megatron_says_batch_length_gpus_and_precision_itself(capsys: pytest.CaptureFixture[str]) -> None:
    log = TESTS / "observe" / "data" / "megatron-0.16.1.log"
    (run,) = metrics(capsys, log, "--model", "llama3-8b", "--gpu", "h100")["runs"]
    facts = run["facts"]
    assert (facts["global_batch"], facts["sequence_length"], facts["gpus"], facts["precision"]) == (4, 32, 2, "bf16")
    assert run["mfu"]["mfu"] > 0
    assert run["goodput"]["steps"] == 12
    said = refused(capsys, log, "--batch-size", 8)
    assert "--batch-size: the log is of a global batch of 4, not 8 leave it out" in said


def test_a_run_says_everything_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "store/runs/proof/0a1b2c3d", 8.0)
    (run,) = metrics(capsys, folder)["runs"]
    assert (run["name"], run["facts"]["gpu"], run["facts"]["model"]) == ("proof/0a1b2c3d", "h200", "llama3-8b")
    assert run["tokens_per_second"] == 65536 / 8
    assert 0 < run["mfu"]["mfu"] < run["mfu"]["mfu_full_attention"]
    assert run["left_out"] == {"first of an attempt": 1}
    assert "--model: the run's folder says llama3-8b, not llama3-70b" in refused(
        capsys, folder, "--model", "llama3-70b"
    )
    assert "the run was on h200, not h100-sxm" in refused(capsys, folder, "--gpu", "h100")


def test_an_unknown_device_has_no_mfu_until_somebody_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "store/runs/proof/0a1b2c3d", 8.0, device="Voodoo 2")
    assert "MFU         the catalog knows no peak of Voodoo 2" in text(capsys, folder)
    shown = text(capsys, folder, "--gpu", "h100")
    assert "of 989.4 TFLOP/s, dense bf16" in shown
    assert "the run's device is `Voodoo 2`; its peak is that of h100-sxm, as --gpu says" in shown


def test_more_than_a_gpu_can_do_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, write_run(tmp_path / "store/runs/proof/0a1b2c3d", 0.01))
    assert "is not possible" in said
    assert "one of its figures is wrong" in said


def test_two_runs_stand_side_by_side_with_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "store/runs/proof/0a1b2c3d", 8.0)
    other = write_run(tmp_path / "store/runs/proof/99999999", 4.0, lr=2e-3)
    assert metrics(capsys, one, other)["differences"] == {"train.optimizer.lr": [0.001, 0.002]}
    shown = text(capsys, one, other)
    assert "proof/0a1b2c3d" in shown
    assert "4.00 s (-50.0%)" in shown
    assert shown.splitlines()[-2:] == ["in their recipes:", "train.optimizer.lr  0.001  0.002"]


def test_a_run_beside_a_log_says_that_the_log_has_no_recipe(
    tmp_path: Path, dllogger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = text(capsys, write_run(tmp_path / "store/runs/proof/0a1b2c3d", 8.0), dllogger)
    assert "a log has no recipe: what differs is not known" in shown


def test_what_cannot_be_measured_is_refused_with_a_way_out(
    tmp_path: Path, dllogger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shopping.txt").write_text("milk\n")
    assert "this log has no steps of a training read are Trainshed's own log" in refused(
        capsys, tmp_path / "shopping.txt"
    )
    assert "it has the steps 0 to 49" in refused(capsys, dllogger, "--start", 90)
    assert "--start 5 comes after --end 2" in refused(capsys, dllogger, "--start", 5, "--end", 2)
    assert "`int7` is not a precision" in refused(capsys, dllogger, "--precision", "int7")
    assert "there is no model preset `lama3-70b`" in refused(capsys, dllogger, "--model", "lama3-70b")
    assert "--gpus: 0 is not a number of anything" in refused(capsys, dllogger, "--gpus", 0)
    assert "no such run" in refused(capsys, tmp_path / "nothing")
    assert refused(capsys)


def test_the_traces_of_a_run_and_one_trace_are_reported_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 0.5)
    trace = run / "profile" / "attempt-0001" / "rank-00000.00000012.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    shutil.copy(TESTS / "observe" / "data" / "h200.pt.trace.json.gz", trace)
    shown = text(capsys, run, "--profiles")
    assert "profile/attempt-0001/rank-00000.00000012.pt.trace.json.gz, rank 0: 2 steps" in shown
    assert "Memcpy HtoD (Pinned -> Device)" in shown
    of_run, of_trace = metrics(capsys, run, "--profiles"), metrics(capsys, trace, "--profiles")
    assert of_run["profiles"][0]["kernels"] == of_trace["profiles"][0]["kernels"]
    trace.unlink()
    assert "write `observe: {profile: {start: 10, steps: 3}}`" in refused(capsys, run, "--profiles")
    assert "--profiles is for one run" in refused(capsys, run, run, "--profiles")

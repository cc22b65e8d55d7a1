"""A run exported afterwards: the later attempt's steps count, and nothing is written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainshed.errors import InputError, NotFound
from trainshed.observe.events import EventWriter
from trainshed.observe.exporters import ExportedRun
from trainshed.observe.exporters.export_run import ExportTool, export_run
from trainshed.recipe import Observe
from trainshed.recipe.exporters import MlflowExperiment
from trainshed.storage import LocalStore

STEP: dict[str, Any] = {
    "grad_norm": 2.0,
    "lr": 1e-3,
    "step_seconds": 0.5,
    "tokens_per_second_per_gpu": 128.0,
    "mfu": None,
    "mfu_full_attention": None,
    "batch_hash": "0",
    "skipped": False,
}
START = {"layout": "dp2", "world_size": 2, "device": "cpu", "run": "r/1", "versions": {}, "parameters": 9}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts: the first is killed after step 5, the second resumes after step 2 and does 2 to 4 again."""
    folder = tmp_path / "runs" / "r" / "1"
    for attempt, steps in ((1, range(5)), (2, range(2, 7))):
        with EventWriter(LocalStore(folder), "", attempt=attempt, rank=0) as events:
            events.emit("start", **START)
            if attempt == 2:
                events.emit("resume", 2, from_attempt=1, checkpoint="step-00000002")
            for step in steps:
                events.emit("step", step, loss=10.0 * attempt + step, tokens=64 * (step + 1), **STEP)
                if step % 2:
                    events.emit("validation", step + 1, loss=100.0 * attempt + step, batches=1)
    return folder


def export(run: Path, tool: ExportTool, out: Path | None = None, observe: Observe | None = None) -> Any:
    exported = ExportedRun("r", "1", run, sequence_length=16)
    return export_run(LocalStore(run), "", tool, observe or Observe(), exported, out=out)


LOSSES = [(1, 10.0), (2, 11.0), (3, 22.0), (4, 23.0), (5, 24.0), (6, 25.0), (7, 26.0)]
VALIDATIONS = [(2, 101.0), (4, 203.0), (6, 205.0)]


def test_tensorboard_gets_the_steps_that_count_at_the_time_they_were_done(run: Path, tmp_path: Path) -> None:
    report = export(run, "tensorboard", tmp_path / "out")
    assert (report.steps, report.written, report.to) == (7, 10, str(tmp_path / "out" / "tensorboard"))
    read = EventAccumulator(report.to)
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == LOSSES
    assert [(point.step, point.value) for point in read.Scalars("validation/loss")] == VALIDATIONS
    emitted = (run / "events/attempt-0002/000001.jsonl").read_text().splitlines()
    assert read.Scalars("train/loss")[-1].wall_time == pytest.approx(orjson.loads(emitted[-1])["time"])


def test_dllogger_gets_each_step_once(run: Path) -> None:
    report = export(run, "dllogger")
    assert report.to == str(run / "dllogger/rank-0/dllogger.json")
    lines = [orjson.loads(line.removeprefix("DLLL ")) for line in Path(report.to).read_text().splitlines()]
    assert lines[0]["step"] == "PARAMETER"
    trained = [line for line in lines if "reduced_train_loss" in line["data"]]
    assert [(line["step"], line["data"]["reduced_train_loss"]) for line in trained] == LOSSES
    assert float(lines[1]["elapsedtime"]) >= 0


def test_files_that_are_there_are_left_alone(run: Path, tmp_path: Path) -> None:
    export(run, "dllogger")
    with pytest.raises(InputError, match="there are files of dllogger already") as caught:
        export(run, "dllogger")
    assert caught.value.hint == "write --out DIR, a folder without them"
    export(run, "dllogger", tmp_path / "elsewhere")


def test_a_tracker_is_sent_what_it_does_not_have(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    observe = Observe(mlflow=MlflowExperiment(uri=str(tmp_path / "mlruns")))
    assert export(run, "mlflow", observe=observe).written == 10
    assert export(run, "mlflow", observe=observe).written == 0
    (losses,) = (tmp_path / "mlruns").glob("*/*/metrics/train/loss")
    logged = [line.split()[1:] for line in losses.read_text().splitlines()]
    assert [(int(step), float(loss)) for loss, step in logged] == LOSSES


def test_a_tool_without_options_says_what_to_write(run: Path) -> None:
    with pytest.raises(InputError, match="where does wandb keep the run") as caught:
        export(run, "wandb")
    assert caught.value.hint == "write 'observe.wandb={project: NAME}' after the run"


def test_a_run_without_steps_has_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no steps to export"):
        export(tmp_path, "tensorboard")

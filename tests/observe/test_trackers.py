"""W&B, MLflow and trackio get every step once, also across restarts, and cannot stop or slow a training.

What they were sent is read back by their own readers. Their libraries take seconds to import.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainshed.observe.exporters import ExportedRun, open_exporters
from trainshed.observe.exporters.figures import FigurePoint
from trainshed.observe.exporters.tracker import ExportedMark, Tracker, TrackerExporter
from trainshed.recipe import Observe
from trainshed.recipe.exporters import MlflowExperiment, TrackioProject, WandbProject

Points = dict[str, list[tuple[int, float]]]
CONFIG = {"name": "tracked", "train": {"steps": 7, "optimizer": {"lr": 1e-3}}}


def step_event(step: int, loss: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "grad_norm": None,
        "lr": 1e-3,
        "tokens": 64 * (step + 1),
        "step_seconds": 0.5,
        "tokens_per_second_per_gpu": 128.0,
        "mfu": None,
    }


def attempt(folder: Path, observe: Observe, number: int, *events: dict[str, Any]) -> list[str]:
    """Export what one attempt emits; returns the warnings."""
    warnings: list[str] = []
    run = ExportedRun("tracked", "1", folder, sequence_length=16, attempt=number, steps=7, config=CONFIG)
    quiet = observe.model_copy(update={"tensorboard": False, "dllogger": False})
    for exporter in open_exporters(quiet, run, warn=warnings.append):
        with exporter:
            for event in events:
                exporter(event)
    return warnings


def wandb_points(folder: Path) -> Points:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    points: Points = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(bytes(data))
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.project) == ("tracked-1", "p")
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or item.nested_key[0]
                    if not name.startswith("_"):
                        points.setdefault(name, []).append((record.history.step.num, float(item.value_json)))
        store.close()
    return points


def mlflow_points(folder: Path) -> Points:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=str(folder / "mlruns"))
    experiment = client.get_experiment_by_name("tracked")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tracked/1", "FINISHED")
    assert run.data.params["train.optimizer.lr"] == "0.001"
    names = run.data.metrics
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in names
    }


def trackio_points(folder: Path) -> Points:
    import trackio

    (run,) = trackio.Api().runs(folder.name)
    assert run.name == "tracked/1"
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = {}
    for line in SQLiteStorage.get_logs(folder.name, "tracked/1"):
        for name in line.keys() - {"step", "timestamp"}:
            points.setdefault(name, []).append((line["step"], line[name]))
    return points


TOOLS: dict[str, tuple[Callable[[Path], Observe], Callable[[Path], Points]]] = {
    "wandb": (lambda folder: Observe(wandb=WandbProject(project="p", mode="offline")), wandb_points),
    "mlflow": (lambda folder: Observe(mlflow=MlflowExperiment(uri=str(folder / "mlruns"))), mlflow_points),
    "trackio": (lambda folder: Observe(trackio=TrackioProject(project=folder.name)), trackio_points),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_restarted_run_goes_on_in_the_same_run_and_repeats_nothing(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options, points = TOOLS[tool]
    observe = options(tmp_path)
    assert attempt(tmp_path, observe, 1, *(step_event(step, 9.0 - step) for step in range(5))) == []
    if tool == "wandb":
        time.sleep(1.1)  # its offline folders are named by the second, and one would take the place of the other
    resumed = {"kind": "resume", "step": 2, "from_attempt": 1, "checkpoint": "step-00000002"}
    measured = {"kind": "validation", "step": 7, "loss": 3.25, "batches": 4}
    end = {"kind": "end", "step": None, "reason": "finished", "exit_code": 0}
    repeated = [step_event(step, 9.0 - step) for step in range(2, 7)]
    assert attempt(tmp_path, observe, 2, resumed, *repeated, measured, end) == []
    found = points(tmp_path)
    assert sorted(found["train/loss"]) == [(step + 1, 9.0 - step) for step in range(7)]
    assert sorted(found["performance/step_seconds"]) == [(step + 1, 0.5) for step in range(7)]
    assert found["validation/loss"] == [(7, 3.25)]


class RecordingTracker(Tracker):
    """A tool that waits where it is told to, or fails."""

    destination = "nowhere"

    def __init__(self, release: threading.Event | None = None, error: Exception | None = None) -> None:
        self.points: list[int] = []
        self._release, self._error = release, error

    def open(self) -> None:
        if self._release is not None:
            self._release.wait()
        if self._error is not None:
            raise self._error

    def log(self, points: Sequence[FigurePoint]) -> None:
        self.points += [point.step for point in points]

    def close(self, exit_code: int) -> None:
        self.points.append(-exit_code)


def exporter_to(tracker: Tracker, folder: Path, warnings: list[str], **keys: Any) -> TrackerExporter:
    mark = ExportedMark(folder, "wandb", tracker.destination)
    return TrackerExporter("wandb", tracker, mark, warn=warnings.append, **keys)


def test_a_tool_that_does_not_answer_holds_up_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    release, warnings = threading.Event(), []
    stuck = RecordingTracker(release)
    with exporter_to(stuck, tmp_path, warnings, close_seconds=0.05, queue_size=10) as exporter:
        for step in range(100):
            exporter(step_event(step, 1.0))
    assert len(warnings) == 1
    assert warnings[0].startswith("observe.wandb: it has not taken everything within 0 s; the events have everything")
    assert stuck.points == []
    release.set()


def test_a_tool_that_fails_is_said_once_without_what_stands_in_its_addresses(tmp_path: Path) -> None:
    warnings: list[str] = []
    failing = RecordingTracker(error=ValueError("no entry: https://me:planted@host/api?token=planted\nand more"))
    exporter = exporter_to(failing, tmp_path, warnings)
    with exporter:
        exporter(step_event(0, 1.0))
        exporter._thread.join()  # it has failed
        for step in range(1, 5):
            exporter(step_event(step, 1.0))
        assert len(warnings) == 1  # said by training's own thread, at the next event
    assert len(warnings) == 1
    assert "nothing more is sent: ValueError: no entry: https://host/api" in warnings[0]
    assert "planted" not in warnings[0]
    assert "and more" not in warnings[0]


def test_what_was_sent_to_one_place_is_sent_again_to_another(tmp_path: Path) -> None:
    for place, expected in (("a", [1, 2, -1]), ("a", []), ("b", [1, 2, -1])):
        tracker = RecordingTracker()
        tracker.destination = place
        with exporter_to(tracker, tmp_path, []) as exporter:
            for step in range(2):
                exporter(step_event(step, 1.0))
        assert tracker.points == expected, place


def test_a_library_that_is_missing_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshed.errors import MissingExtra
    from trainshed.observe import exporters

    monkeypatch.setattr(exporters, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"observe\.wandb needs the extra 'wandb'") as caught:
        attempt(tmp_path, Observe(wandb=WandbProject(project="p")), 1)
    assert caught.value.hint == "pip install 'trainshed[wandb]'"
    assert os.listdir(tmp_path) == []

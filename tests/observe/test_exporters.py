"""TensorBoard's own reader and a DLLogger parser read what a training leaves beside its events."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainshed.observe.exporters import EXPORTERS, DLLoggerExporter, Exporter, TensorBoardExporter
from trainshed.observe.measured_run import measure_log

START = {
    "kind": "start",
    "step": None,
    "run": "r/1",
    "layout": "dp2",
    "world_size": 2,
    "device": "cpu",
    "parameters": 9,
}


def step_event(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "grad_norm": 2.0,
        "lr": 1e-3 / (step + 1),
        "tokens": 64 * (step + 1),
        "step_seconds": 0.5,
        "tokens_per_second_per_gpu": 128.0,
        "mfu": None,
    }


def written(kind: type[Exporter], folder: Path, *events: dict[str, Any]) -> list[str]:
    warnings: list[str] = []
    with kind(folder, sequence_length=16, warn=warnings.append) as exporter:
        for event in events:
            exporter(event)
    return warnings


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(point.step, pytest.approx(point.value, rel=1e-6)) for point in found.Scalars(tag)]


def dllogger_lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "dllogger" / "rank-0" / "dllogger.json").read_text()
    return [orjson.loads(line.removeprefix("DLLL ")) for line in text.splitlines() if line]


def test_tensorboard_reads_every_figure_with_steps_counted_from_one(tmp_path: Path) -> None:
    said = {"kind": "validation", "step": 2, "loss": 3.25, "batches": 4}
    written(TensorBoardExporter, tmp_path, START, step_event(0, 4.5), step_event(1, 4.25), said)
    assert scalars(tmp_path, "train/loss") == [(1, 4.5), (2, 4.25)]
    assert scalars(tmp_path, "train/lr") == [(1, 1e-3), (2, 5e-4)]
    assert scalars(tmp_path, "performance/step_seconds") == [(1, 0.5), (2, 0.5)]
    assert scalars(tmp_path, "validation/loss") == [(2, 3.25)]


def test_rewards_of_a_preference_run_are_curves_in_tensorboard(tmp_path: Path) -> None:
    rewards = {"reward_chosen": 0.5, "reward_margin": 0.75, "reward_accuracy": 0.875}
    measured = {"kind": "validation", "step": 1, "loss": 0.5, "batches": 4, "reward_accuracy": 0.625}
    written(TensorBoardExporter, tmp_path, START, step_event(0, 0.6) | rewards, measured)
    assert scalars(tmp_path, "train/reward_margin") == [(1, 0.75)]
    assert scalars(tmp_path, "train/reward_accuracy") == [(1, 0.875)]
    assert scalars(tmp_path, "validation/reward_accuracy") == [(1, 0.625)]


def test_steps_that_a_resumed_attempt_repeats_stand_once_in_tensorboard(tmp_path: Path) -> None:
    written(TensorBoardExporter, tmp_path, *(step_event(step, 9.0) for step in range(5)))
    resumed = {"kind": "resume", "step": 2, "from_attempt": 1, "checkpoint": "step-00000002"}
    written(TensorBoardExporter, tmp_path, resumed, *(step_event(step, 7.0) for step in range(2, 4)))
    assert scalars(tmp_path, "train/loss") == [(1, 9.0), (2, 9.0), (3, 7.0), (4, 7.0)]


def test_a_loss_that_is_not_finite_has_no_point(tmp_path: Path) -> None:
    for kind in EXPORTERS.values():
        written(kind, tmp_path, step_event(0, None), step_event(1, 2.0))
    assert scalars(tmp_path, "train/loss") == [(2, 2.0)]
    assert ["reduced_train_loss" in line["data"] for line in dllogger_lines(tmp_path)] == [False, True]


def test_a_figure_beyond_single_precision_is_infinite_in_tensorboard(tmp_path: Path) -> None:
    written(TensorBoardExporter, tmp_path, step_event(0, 2.0) | {"grad_norm": 1e39}, step_event(1, 2.0))
    assert scalars(tmp_path, "train/grad_norm") == [(1, math.inf), (2, 2.0)]


def test_dllogger_lines_are_nemos_and_our_own_reader_takes_them(tmp_path: Path) -> None:
    written(DLLoggerExporter, tmp_path, START, *(step_event(step, 24.0 - step) for step in range(24)))
    first, *steps = dllogger_lines(tmp_path)
    assert (first["step"], first["data"]["cfg/layout"]) == ("PARAMETER", "dp2")
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert steps[3]["data"] == {
        "reduced_train_loss": 21.0,
        "lr": 2.5e-4,
        "global_step": 4,
        "consumed_samples": 16,
        "train_step_timing in s": 0.5,
        "grad_norm": 2.0,
    }
    assert set(first) == {"timestamp", "datetime", "elapsedtime", "type", "step", "data"}
    measured = measure_log(tmp_path / "dllogger" / "rank-0" / "dllogger.json")
    assert (measured.kind, measured.step_seconds) == ("dllogger", 0.5)


def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    written(DLLoggerExporter, tmp_path, step_event(0, 4.0))
    file = tmp_path / "dllogger" / "rank-0" / "dllogger.json"
    os.truncate(file, file.stat().st_size - 20)
    written(DLLoggerExporter, tmp_path, step_event(1, 3.0))
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert orjson.loads(lines[1].removeprefix("DLLL "))["step"] == 2


def test_a_disk_that_is_full_is_said_once_and_training_goes_on(tiny_disk: Path) -> None:
    (tiny_disk / "filler").write_bytes(b"x" * 900_000)
    for kind in EXPORTERS.values():
        warnings = written(kind, tiny_disk, *(step_event(step, 1.0) for step in range(2000)))
        assert len(warnings) == 1
        assert warnings[0].startswith(f"observe.{kind.name}: nothing more is written there: No space left")

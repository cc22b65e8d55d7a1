"""What a live view shows of a run, from its events alone."""

from __future__ import annotations

from typing import Any

from trainshed.observe.event_text import EventFormatter
from trainshed.observe.live_view import LOSS_BINS, LiveView, LossBin, describe, device_summary, fewer_bins, rank_spread


def event(kind: str, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "rank": 0, "time": 1000.0, **values}


START = {"run": "small/x", "layout": "dp 2", "world_size": 2, "versions": {}, "device": "cpu", "parameters": 12}


def step(number: int, loss: float | None = 2.0, attempt: int = 1) -> dict[str, Any]:
    figures = {"grad_norm": 0.5, "lr": 1e-4, "tokens": 64 * (number + 1), "step_seconds": 2.0, "memory_gib": None}
    return event("step", attempt, step=number, loss=loss, mfu=0.4, tokens_per_second_per_gpu=100.0, **figures)


def test_a_million_steps_are_a_few_hundred_points_and_an_alarm_is_not_lost() -> None:
    view = LiveView(steps=200_000)
    view.add(step(number, loss=float(number)) for number in range(100_000))
    view.add([event("alarm", step=70_123, name="loss_spike", what="loss 9 is far above 2")])
    snapshot = view.snapshot()
    assert len(snapshot.losses) == LOSS_BINS
    assert [point.alarm for point in snapshot.losses].count(True) == 1
    assert snapshot.losses[0].loss == sum(range(416)) / 416
    (line,) = snapshot.lines
    assert (line.text, line.level) == ("ALARM loss spike: loss 9 is far above 2", "error")
    assert len(fewer_bins(snapshot.losses, 30)) == 30


def test_steps_and_validations_that_are_done_again_replace_the_old_ones() -> None:
    view = LiveView(steps=10)
    view.add([event("start", **START), *map(step, range(6)), event("validation", step=4, loss=3.0, batches=1)])
    view.add([event("start", 2, **START), event("resume", 2, step=2, checkpoint="x"), step(2, 9.0, 2)])
    view.add([event("validation", 2, step=3, loss=2.5, batches=1)])
    snapshot = view.snapshot()
    assert [point.loss for point in snapshot.losses] == [2.0, 2.0, 9.0]
    assert snapshot.validations == ((3, 2.5),)
    assert (snapshot.status.step, snapshot.status.attempt) == (3, 2)


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    assert fewer_bins([LossBin(0, 1.0), LossBin(1, None), LossBin(2, 3.0), LossBin(3, 5.0)], 2) == [
        LossBin(0, None),
        LossBin(2, 4.0),
    ]
    assert fewer_bins([], 5) == []


def test_the_slowest_rank_is_named_with_its_host() -> None:
    start = event("start", hosts=["a", "b"], world_size=4)
    spread = rank_spread(event("ranks", step=9, steps=10, compute_seconds=[1.0, 1.0, 1.0, 1.5]), start)
    assert spread is not None
    assert (spread.slowest_rank, spread.slowest_host, spread.fastest_rank) == (3, "b", 0)
    assert spread.excess == 0.5
    assert rank_spread(event("ranks", step=9, steps=10, compute_seconds=[1.0, None]), start) is None


def test_devices_are_a_few_figures_and_throttled_ones_are_named() -> None:
    lists = {"temperature_celsius": [60.0, 81.0], "power_watts": [500.0, None], "utilization": [1.0, 0.5]}
    summary = device_summary(event("devices", **lists, memory_gib=[None, None], throttled=[None, "power"]))
    assert summary is not None
    assert (summary.hottest_celsius, summary.hottest_rank, summary.power_watts) == (81.0, 1, 500.0)
    assert (summary.utilization, summary.memory_gib, summary.throttled) == (0.75, None, {1: "power"})


def test_the_last_checkpoint_says_its_stall_and_a_later_one_that_failed() -> None:
    view = LiveView()
    view.add([event("checkpoint", step=4, phase="staged", stall_seconds=0.25)])
    view.add([event("checkpoint", step=4, phase="committed", seconds=2.0, path="p")])
    view.add([event("checkpoint", step=4, phase="best", loss=1.5)])
    view.add([event("checkpoint", step=8, phase="failed", what="the disk is full")])
    saved = view.snapshot().checkpoint
    assert (saved.step, saved.stall_seconds, saved.best_loss, saved.failed) == (4, 0.25, 1.5, "the disk is full")


def test_a_stall_is_shown_until_the_next_step() -> None:
    view = LiveView()
    view.add([step(0), event("stall", ranks=[1], collective=None, what="rank 1 is stopped")])
    assert view.snapshot().stall == "rank 1 is stopped"
    view.add([step(1)])
    assert view.snapshot().stall is None


def test_every_kind_of_event_is_a_line_or_a_figure() -> None:
    words = EventFormatter(10)
    stage = event("stage", 0, name="prepare", state="failed", what="no text", seconds=3.0)
    shown = {
        "prepare failed in 3.0 s: no text": stage,
        "attempt 1 failed: rank 1 died": event("failure", ranks=[1], collective=None, what="rank 1 died"),
        "attempt 1 finished": event("end", reason="finished", exit_code=0),
        "first step took 4.0 s": event("phase", name="first_step", seconds=4.0),
        "profile of 3 steps: trace.json": event("profile", step=9, steps=3, path="trace.json", rank_profiled=0),
        "2 prompts answered after step 5": event("answers", step=5, answers=[{}, {}]),
        "validation after step 5: loss 2.0000": event("validation", step=5, loss=2.0, batches=1),
        "preflight: fabric is slow": event("preflight", verdict="warn", nodes=[], what="fabric is slow", seconds=1.0),
    }
    for text, given in shown.items():
        line = describe(given, words)
        assert line is not None
        assert line.text == text
    assert describe(event("end", reason="failed", exit_code=1) | {"rank": 3}, words) is None
    assert describe(step(0), words) is None


def test_stages_before_training_are_in_the_view_and_its_json() -> None:
    view = LiveView(steps=4)
    view.add([event("stage", 0, name="prepare", state="started")])
    plain = view.snapshot().to_plain()
    assert (plain["status"]["stage"], plain["status"]["attempt"]) == ("prepare started", None)
    assert plain["stages"][0]["name"] == "prepare"

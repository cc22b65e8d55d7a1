"""Where the time of a run went."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.observe.goodput import RunGoodput, measure_goodput


class Clock:
    """Writes the events of a run one after the other, at times that follow from how long each took."""

    def __init__(self) -> None:
        self.time, self.attempt, self.step = 1000.0, 1, 0
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, after: float = 0.0, **values: Any) -> None:
        self.time += after
        self.events.append({"kind": kind, "attempt": self.attempt, "time": self.time, "step": None, **values})

    def steps(self, count: int, seconds: float = 2.0, **values: Any) -> None:
        for _ in range(count):
            figures = {"step": self.step, "step_seconds": seconds, "skipped": False}
            self.emit("step", seconds, **figures | values)
            self.step += 1

    def restart(self, wait: float, step: int) -> None:
        self.time, self.attempt, self.step = self.time + wait, self.attempt + 1, step
        self.emit("resume", step=step)


def lost(goodput: RunGoodput) -> dict[str, float]:
    return {entry.reason: pytest.approx(entry.seconds, abs=1e-6) for entry in goodput.lost}


def test_a_run_without_a_hitch_lost_only_its_start() -> None:
    clock = Clock()
    clock.emit("phase", name="meeting", seconds=3.0)
    clock.emit("phase", 5.0, name="load", seconds=5.0)
    clock.steps(1, 12.0)
    clock.steps(9)
    clock.emit("end", reason="finished", exit_code=0)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert goodput.wall_seconds == pytest.approx(3 + 5 + 12 + 18)
    assert goodput.productive_seconds == pytest.approx(20.0)
    assert lost(goodput) == {
        "first steps": 10.0,
        "start: load": 5.0,
        "start: meeting": 3.0,
    }
    assert goodput.goodput == pytest.approx(20 / 38)


def test_work_that_is_done_again_is_lost_and_so_is_the_wait() -> None:
    clock = Clock()
    clock.steps(10)
    clock.emit("failure", 7.0, ranks=[1], collective=None, what="rank 1 died")
    clock.restart(100.0, step=6)
    clock.steps(6)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert (goodput.steps, goodput.attempts) == (12, 2)
    assert goodput.productive_seconds == pytest.approx(24.0)
    assert lost(goodput) == {
        "waiting between attempts": 100.0,
        "steps done again": 8.0,
        "from the last step to the end of a failed attempt": 7.0,
    }
    again = next(entry for entry in goodput.lost if entry.reason == "steps done again")
    assert again.count == 4


def test_the_time_after_the_last_step_until_more_are_asked_for_is_not_waiting() -> None:
    clock = Clock()
    clock.steps(10)
    clock.emit("end", reason="finished", exit_code=0)
    clock.restart(86_400.0, step=10)
    clock.emit("end", 1.0, reason="finished", exit_code=0)
    assert measure_goodput(clock.events) == measure_goodput(clock.events[:11])
    clock.restart(86_400.0, step=10)
    clock.steps(10)
    clock.emit("end", reason="finished", exit_code=0)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert (goodput.steps, goodput.attempts, lost(goodput)) == (20, 2, {})
    assert goodput.wall_seconds == pytest.approx(40.0)


def test_validations_checkpoints_stalls_and_skipped_steps_are_named() -> None:
    clock = Clock()
    clock.steps(5)
    clock.emit("validation", 4.0, step=5, loss=1.0, seconds=4.0)
    clock.emit("checkpoint", 1.0, step=5, phase="staged", stall_seconds=1.0)
    clock.emit("checkpoint", 6.0, step=5, phase="committed", seconds=6.0)
    clock.steps(4)
    clock.emit("stall", ranks=[3], collective=None, what="rank 3 is stopped")
    clock.steps(1, 30.0)
    clock.steps(1, skipped=True)
    clock.steps(2)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert lost(goodput) == {"validation": 4.0, "checkpoints": 7.0, "stalls": 28.0, "skipped steps": 2.0}
    assert goodput.productive_seconds + sum(entry.seconds for entry in goodput.lost) == pytest.approx(
        goodput.wall_seconds
    )


def test_a_checkpoint_that_is_written_beside_the_steps_costs_what_it_stalled() -> None:
    clock = Clock()
    clock.steps(5)
    clock.emit("checkpoint", 1.0, step=5, phase="staged", stall_seconds=1.0)
    began = clock.time
    clock.events.append({"kind": "checkpoint", "attempt": 1, "time": began + 1.5, "step": 5, "phase": "committed"})
    clock.steps(5)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert lost(goodput) == {"checkpoints": 1.0}


def test_times_that_are_estimates_give_no_goodput() -> None:
    clock = Clock()
    clock.steps(5, time_estimated=True)
    assert measure_goodput(clock.events) is None
    assert measure_goodput([]) is None


def test_what_is_not_known_to_be_anything_is_told_as_other() -> None:
    clock = Clock()
    clock.steps(5)
    clock.time += 50.0
    clock.steps(5)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert lost(goodput) == {"other": 50.0}


def test_stages_before_the_first_attempt_do_not_count() -> None:
    clock = Clock()
    clock.attempt = 0
    clock.emit("stage", name="prepare", state="done", seconds=500.0)
    clock.attempt, clock.time = 1, 5000.0
    clock.steps(5)
    goodput = measure_goodput(clock.events)
    assert goodput is not None
    assert (goodput.wall_seconds, goodput.attempts) == (10.0, 1)

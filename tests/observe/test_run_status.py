"""How a run stands by its own events."""

from __future__ import annotations

from typing import Any

from trainshed.observe.event_text import EventFormatter
from trainshed.observe.run_status import RunStatus, run_status_from_events, run_status_from_log


def step(number: int, attempt: int = 1, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "attempt": attempt,
        "step": number,
        "loss": 3.0 - number / 10,
        "mfu": 0.41,
        "tokens_per_second_per_gpu": 1234.0,
        "step_seconds": seconds,
    }


def event(kind: str, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "rank": 0, **values}


def test_a_run_in_the_middle_says_how_far_and_how_long_still() -> None:
    found = run_status_from_events([event("start"), *map(step, range(10))], steps=40)
    assert (found.step, found.eta_seconds) == (10, 60.0)
    assert found.summary() == "step 10 of 40, 0:01:00 left, loss 2.1000, 1,234 tokens/s/GPU, MFU 41.0%"
    on_cpus = run_status_from_events([event("start", device="cpu"), *map(step, range(10))], steps=40)
    assert "1,234 tokens/s/rank" in on_cpus.summary()


def test_before_the_first_step_it_says_which_phase_it_is_in() -> None:
    assert run_status_from_events([event("start"), event("phase", name="load")]).summary() == "in load"
    assert RunStatus().summary() == ""


def test_a_failure_is_told_until_a_later_attempt_ends_well() -> None:
    failed = [event("start"), step(0), event("failure", what="rank 1 died"), event("end", reason="failed")]
    assert run_status_from_events(failed).last_error == "rank 1 died"
    again = [*failed, event("start", 2), step(0, 2), step(1, 2), event("end", 2, reason="finished")]
    found = run_status_from_events(again, steps=2)
    assert (found.attempt, found.step, found.last_error, found.ended) == (2, 2, None, "finished")
    assert found.eta_seconds is None


def test_steps_that_a_killed_attempt_had_not_saved_are_undone_by_the_next() -> None:
    killed = [event("start"), *map(step, range(10))]
    again = [*killed, event("start", 2), event("resume", 2, step=4)]
    assert run_status_from_events(again, steps=40).step == 4
    found = run_status_from_events([*again, step(4, 2), step(5, 2), event("end", 2, reason="signal")], steps=40)
    assert (found.step, found.loss, found.ended) == (6, 2.5, "signal")


def test_a_failure_that_rank_0_could_not_tell_ends_the_attempt() -> None:
    assert run_status_from_events([event("start"), step(0), event("failure", what="rank 0 died")]).ended == "failed"


def test_where_events_are_out_of_reach_the_log_tells_the_same() -> None:
    words = EventFormatter(40)
    done = [step(number) | {"grad_norm": 0.5, "lr": 1e-4} for number in range(10)]
    lines = [
        "0: node 0: n1, ranks 0-1",
        *(f"0: {words.format(each)}" for each in done),
        "checkpoint of step 10 committed",
    ]
    found, told = run_status_from_log(lines), run_status_from_events(done, steps=40)
    assert found.summary() == told.summary()
    assert run_status_from_log(["nothing yet"], 40) == RunStatus(steps=40)


def test_a_loss_that_is_no_number_does_not_hide_the_step() -> None:
    text = EventFormatter(4).format(step(1) | {"loss": None, "grad_norm": None, "lr": 1e-4, "mfu": None})
    assert run_status_from_log([text or ""]).step == 2

"""What a person sees while a model trains."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from trainshed.cli.console import TerminalReporter, figures, training_progress
from trainshed.observe.engine_logs.trainshed import TrainshedReader
from trainshed.observe.event_text import EventFormatter

STEP: dict[str, Any] = {
    "kind": "step",
    "step": 36,
    "loss": 5.12345,
    "grad_norm": 0.9,
    "lr": 0.00057512,
    "step_seconds": 2.0,
    "tokens_per_second_per_gpu": 12345.6,
    "mfu": None,
}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (STEP, "37%  ETA 0:02:06  loss 5.1235  grad norm 0.900  lr 5.75e-04  12,346 tokens/s/GPU\n"),
        (STEP | {"mfu": 0.412}, "12,346 tokens/s/GPU  MFU 41.2%\n"),
        (STEP | {"loss": None}, "loss not finite  grad norm 0.900"),
        ({"kind": "validation", "step": 50, "loss": 3.0}, "validation after step 50: loss 3.0000\n"),
        ({"kind": "resume", "step": 50, "checkpoint": "there"}, "going on after step 50 from there\n"),
        ({"kind": "warning", "text": "odd"}, "warning: odd\n"),
        ({"kind": "signal", "step": 9, "name": "SIGTERM"}, "asked to stop by SIGTERM: stopped after step 9\n"),
        (
            {"kind": "non_finite", "step": 4, "policy": "skip", "what": "loss nan"},
            "warning: step 5: loss nan; nothing was updated, going on\n",
        ),
        ({"kind": "checkpoint", "step": 8, "phase": "staged"}, ""),
        (
            {"kind": "checkpoint", "step": 8, "phase": "committed", "path": "here"},
            "checkpoint of step 8 committed  here\n",
        ),
    ],
)
def test_an_event_is_one_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], event: dict[str, Any], said: str
) -> None:
    with training_progress(100) as on_event:
        on_event(event)
    shown = capsys.readouterr().err
    assert shown.endswith(said) or said in shown
    assert shown.count("\n") == (1 if said else 0)


def test_a_rank_without_a_gpu_has_no_rate_of_a_gpu() -> None:
    formatter = EventFormatter(100)
    formatter.format({"kind": "start", "run": "r/1", "parameters": 5, "device": "cpu", "layout": "one process"})
    line = formatter.format(STEP)
    assert line is not None
    assert line.endswith("12,346 tokens/s/rank")
    (event,) = TrainshedReader().read(line)
    assert event["tokens_per_second_per_gpu"] == 12346.0, "our own reader of logs knows both units"


def test_of_many_steps_a_log_gets_the_first_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    """Those in between come at most every few seconds; everything else is always said."""
    with training_progress(100) as on_event:
        for step in range(100):
            on_event(STEP | {"step": step})
            if step == 49:
                on_event({"kind": "validation", "step": 50, "loss": 3.0})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/100")
    assert lines[-1].startswith("step 100/100")
    assert "validation after step 50: loss 3.0000" in lines
    assert len(lines) < 100


def test_a_slow_rate_is_not_rounded_to_nothing() -> None:
    assert figures(3, None, "sizes", 16.0, done=True).endswith("  0.19 sizes/s  in 0:00:16")
    assert figures(8, None, "layers", 0.5, done=True).endswith("  16 layers/s  in 0.5 s")


def test_what_takes_no_time_has_no_rate_and_one_thing_is_not_a_plural() -> None:
    assert figures(1, 1, "epochs", 0.002, done=True).split() == ["1", "epoch", "in", "less", "than", "0.1", "s"]
    assert figures(2, 2, "epochs", 4.0, done=True).startswith("  2 epochs")


def test_the_unit_of_a_task_under_way_is_written_once() -> None:
    assert figures(1, 4, "runs", 2.0, done=False).startswith(" 25%  1 of 4 runs  ")
    assert figures(300e6, 2.8e9, "B", 10.0, done=False).startswith(" 11%  300.0 MB of 2.8 GB  ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_progress_bar_takes_one_line_in_any_terminal(width: int) -> None:
    shown = TerminalReporter()
    written = io.StringIO()
    shown.console = Console(file=written, width=width, force_terminal=True, color_system=None)
    with shown.task("tokenise", total=2.8e9, unit="B") as task:
        task.advance(1.2e9)
        task.describe("478,000 documents, 461,640,000 tokens")
    assert written.getvalue().count("\n") == 1, written.getvalue()
    assert "tokenise" in written.getvalue()
    assert "1.2 GB of 2.8 GB" in written.getvalue()

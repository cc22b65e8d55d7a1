"""What a person sees while a model trains."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.cli.console import training_progress

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

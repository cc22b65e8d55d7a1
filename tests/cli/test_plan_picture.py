"""A plan in a terminal: golden pictures of a plan with figures of our own, narrow and wide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from support.recipes.golden_files import check_golden
from support.recipes.small_plans import MEMORY, answer, layout, prediction
from trainshed.cli.plan_picture import picture
from trainshed.plan.planner import Plan
from trainshed.plan.search.scaling import ScalingCurve, ScalingPoint

CURVE = ScalingCurve(
    (
        ScalingPoint(64, None, None, "llama3-70b does not fit on 64 h100-sxm: " + "a long reason " * 12),
        ScalingPoint(128, prediction(layout(tp=8)), 1.0),
        ScalingPoint(256, prediction(layout(tp=4, pp=4, vp=5, cp=2)), 0.75),
    ),
    256,
    "waiting for other pipeline stages took 2% of a step on 128 GPUs and takes 20% on 256",
)


def drawn(found: Plan, width: int, *, colours: bool = False) -> str:
    console = Console(
        width=width, force_terminal=colours, color_system="truecolor" if colours else None, highlight=False, _environ={}
    )
    return picture(found, console, top=5)


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_looks_as_it_did(width: int) -> None:
    check_golden(f"plan/picture-{width}.txt", drawn(replace(answer(), scaling=CURVE), width))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    deep = replace(answer(), chosen=prediction(layout(tp=2, pp=16, vp=5)), scaling=CURVE)
    for found in (replace(answer(), scaling=CURVE), deep):
        assert max(map(len, drawn(found, width).splitlines())) <= width


def test_many_stages_are_shown_in_part_with_the_fullest_among_them() -> None:
    deep = prediction(layout(tp=2, pp=16, vp=5))
    stages = tuple(
        replace(stage, memory=replace(stage.memory, activations=33.0)) if stage.stage == 9 else stage
        for stage in deep.stages
    )
    lines = drawn(replace(answer(), chosen=replace(deep, stages=stages)), 80).splitlines()
    bars = [line.split()[0] for line in lines[lines.index("memory by pipeline stage, GiB of 79.6") + 1 :][:12]]
    assert bars == ["0", "1", "2", "3", "4", "5", "⋮", "9", "⋮", "13", "14", "15"]


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    full = prediction(layout(tp=8, pp=4), memory=replace(MEMORY, activations=60.0))
    shown = drawn(replace(answer(), chosen=full, searched=False), 80)
    assert "DOES NOT FIT: 103.3 of 79.6 GiB" in shown.splitlines()[4]
    assert "103.3 +23.7 GiB" in shown
    assert "layout as given" in shown


def test_colours_are_for_terminals_only() -> None:
    assert "\x1b[" not in drawn(answer(), 80)
    assert "\x1b[" in drawn(answer(), 80, colours=True)

"""A profile covers the steps and ranks that were asked for, is written once, and holds what those steps did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainshed.engines.torch.trainer import StepProfiler
from trainshed.recipe.schema import Profile

WANTED = Profile(start=3, steps=2, ranks=(0, 3))
"""The third and the fourth step, which the engine counts as 2 and 3."""


def run_steps(profiler: StepProfiler, steps: range) -> dict[int, Path]:
    """Steps that name themselves in the trace; returns after which step a file was written."""
    written = {}
    for step in steps:
        profiler.before(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2).add(1)
        path = profiler.after(step, last=step == steps[-1])
        if path is not None:
            written[step] = path
    return written


def steps_in(trace: Path) -> set[str]:
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("step ")}


def test_the_trace_holds_the_wanted_steps_and_no_others(tmp_path: Path) -> None:
    written = run_steps(StepProfiler(WANTED, 3, 0, tmp_path / "profile"), range(6))
    assert written == {3: tmp_path / "profile" / "rank-00003.json"}
    assert steps_in(written[3]) == {"step 2", "step 3"}


@pytest.mark.parametrize(("first", "steps"), [(3, {"step 3"}), (4, set())])
def test_a_resumed_run_profiles_what_is_left_of_them(first: int, steps: set[str], tmp_path: Path) -> None:
    written = run_steps(StepProfiler(WANTED, 0, first, tmp_path), range(first, 6))
    assert set().union(*map(steps_in, written.values())) == steps


def test_a_run_that_ends_early_still_writes_what_it_has(tmp_path: Path) -> None:
    written = run_steps(StepProfiler(WANTED, 0, 0, tmp_path), range(3))
    assert list(written) == [2]
    assert steps_in(written[2]) == {"step 2"}


@pytest.mark.parametrize(("wanted", "rank"), [(WANTED, 1), (None, 0)])
def test_other_ranks_and_other_recipes_write_nothing(wanted: Profile | None, rank: int, tmp_path: Path) -> None:
    assert run_steps(StepProfiler(wanted, rank, 0, tmp_path / "profile"), range(6)) == {}
    assert not (tmp_path / "profile").exists()

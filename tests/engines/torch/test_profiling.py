"""A profile covers the steps and ranks that were asked for, is written once a cycle, and holds what those steps did."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.recipes.small_recipes import ALONE
from support.runs.small_runs import SmallRuns, events
from trainshed.engines.torch.profiler import StepProfiler, WrittenProfile
from trainshed.observe.profile_summary import find_traces
from trainshed.recipe.schema import Profile

WANTED = Profile(start=3, steps=2, ranks=(0, 3))
"""The third and the fourth step, which the engine counts as 2 and 3."""
# What TensorBoard's plugin takes for a trace (torch_tb_profiler/consts.py, WORKER_PATTERN).
PLUGIN_NAME = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def run_steps(profiler: StepProfiler, steps: range) -> dict[int, list[WrittenProfile]]:
    """Steps that name themselves in the trace; returns after which step something was written."""
    written = {}
    for step in steps:
        profiler.before(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2).add(1)
        if profiles := profiler.after(step, last=step == steps[-1]):
            written[step] = profiles
    return written


def profiler(folder: Path, wanted: Profile | None = WANTED, rank: int = 0, first: int = 0) -> StepProfiler:
    return StepProfiler(wanted, rank, first, folder, attempt=1)


def events_in(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def steps_in(trace: Path) -> set[str]:
    return {event["name"] for event in events_in(trace) if event["name"].startswith("step ")}


def test_the_trace_holds_the_wanted_steps_and_no_others(tmp_path: Path) -> None:
    written = run_steps(profiler(tmp_path, rank=3), range(6))
    assert {step: [(profile.path, profile.steps) for profile in profiles] for step, profiles in written.items()} == {
        3: [("profile/attempt-0001/rank-00003.00000004.pt.trace.json.gz", 2)]
    }
    assert steps_in(tmp_path / written[3][0].path) == {"step 2", "step 3"}


def test_rank_0_speaks_for_the_others(tmp_path: Path) -> None:
    written = run_steps(profiler(tmp_path), range(6))
    assert [(profile.rank, profile.path) for profile in written[3]] == [
        (0, "profile/attempt-0001/rank-00000.00000004.pt.trace.json.gz"),
        (3, "profile/attempt-0001/rank-00003.00000004.pt.trace.json.gz"),
    ]
    summary = written[3][0].summary
    assert summary is not None
    assert summary["steps"] == 2
    kept = json.loads((tmp_path / "profile/attempt-0001/rank-00000.00000004.summary.json").read_text())
    assert kept == json.loads(json.dumps(summary))


def test_tensorboard_and_perfetto_open_the_file(tmp_path: Path) -> None:
    run_steps(profiler(tmp_path), range(6))
    shown = [path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file()]
    assert [PLUGIN_NAME.match(path.name).groups() for path in shown] == [("rank-00000", ".00000004")]  # type: ignore[union-attr]
    # Perfetto and Chrome ask for these of a complete event.
    complete = [event for event in events_in(shown[0]) if event["ph"] == "X"]
    assert complete
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    assert find_traces(tmp_path) == [tmp_path / "profile/attempt-0001/rank-00000.00000004.pt.trace.json.gz"]


def test_without_tensorboard_there_is_one_copy(tmp_path: Path) -> None:
    run_steps(StepProfiler(WANTED, 0, 0, tmp_path, 1, tensorboard=False), range(6))
    assert not (tmp_path / "tensorboard").exists()


def test_cycles_are_written_apart_and_what_is_between_them_is_not_recorded(tmp_path: Path) -> None:
    wanted = Profile(start=2, steps=2, warmup=1, wait=1, cycles=2)
    written = run_steps(profiler(tmp_path, wanted), range(9))
    traces = {step: steps_in(tmp_path / profiles[0].path) for step, profiles in written.items()}
    assert traces == {2: {"step 1", "step 2"}, 6: {"step 5", "step 6"}}


def test_options_add_stacks_shapes_and_memory(tmp_path: Path) -> None:
    wanted = Profile(start=1, steps=1, stacks=True, shapes=True, memory=True)
    (written,) = run_steps(profiler(tmp_path, wanted), range(2)).values()
    events = events_in(tmp_path / written[0].path)
    assert any(event.get("cat") == "python_function" for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event["name"] == "[memory]" for event in events)


@pytest.mark.parametrize(("first", "steps"), [(3, {"step 3"}), (4, set())])
def test_a_resumed_run_profiles_what_is_left_of_them(first: int, steps: set[str], tmp_path: Path) -> None:
    written = run_steps(profiler(tmp_path, first=first), range(first, 6))
    traces = [steps_in(tmp_path / profiles[0].path) for profiles in written.values()]
    assert set().union(*traces) == steps


def test_a_run_that_ends_early_still_writes_what_it_has(tmp_path: Path) -> None:
    written = run_steps(profiler(tmp_path), range(3))
    assert list(written) == [2]
    assert (written[2][0].steps, written[2][0].path) == (1, "profile/attempt-0001/rank-00000.00000003.pt.trace.json.gz")
    assert steps_in(tmp_path / written[2][0].path) == {"step 2"}


def test_a_run_that_ends_before_it_writes_nothing(tmp_path: Path) -> None:
    assert run_steps(profiler(tmp_path), range(2)) == {}


def test_a_run_that_ends_when_the_profiler_is_warm_writes_nothing(tmp_path: Path) -> None:
    one = profiler(tmp_path)
    one.before(1)
    assert one.after(1) == []
    assert one.after(1, last=True) == []  # an early stop is known only after the step
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("layout", [ALONE, "dp=2,micro_batch=2"])
def test_a_profile_across_a_phase_with_a_new_model_is_two_traces(small_runs: SmallRuns, layout: str) -> None:
    folder = small_runs.new_folder()
    small_runs.train(
        folder,
        "dense",
        layout,
        "train.steps=null",
        "train.schedule={}",
        "train.phases=[{steps: 2}, {steps: 2, lr: 1e-3}, {steps: 3, sequence_length: 32, global_batch: 4}]",
        "observe.profile={start: 2, steps: 4}",
    )
    # The second phase goes on with the model of the first.
    assert [(event["step"], event["steps"], event["path"]) for event in events(folder, "profile")] == [
        (4, 3, "profile/attempt-0001/rank-00000.00000004.pt.trace.json.gz"),
        (5, 1, "profile/attempt-0001/rank-00000.00000005.pt.trace.json.gz"),
    ]
    assert {path.name for path in find_traces(folder)} == {
        "rank-00000.00000004.pt.trace.json.gz",
        "rank-00000.00000005.pt.trace.json.gz",
    }


@pytest.mark.parametrize(("wanted", "rank"), [(WANTED, 1), (None, 0)])
def test_other_ranks_and_other_recipes_write_nothing(wanted: Profile | None, rank: int, tmp_path: Path) -> None:
    assert run_steps(profiler(tmp_path, wanted, rank), range(6)) == {}
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder belongs")
    written = run_steps(profiler(tmp_path), range(6))
    assert "the profile of rank 0 was not written whole" in (written[3][0].problem or "")

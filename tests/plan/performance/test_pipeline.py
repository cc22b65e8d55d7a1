"""The simulated pipeline, against what is known in closed form."""

from __future__ import annotations

import pytest

from trainshed.plan.performance.pipeline import PipelinePasses, pipeline_seconds, pipeline_timeline


@pytest.mark.parametrize(("pp", "vp", "micro"), [(2, 1, 2), (4, 1, 8), (4, 1, 64), (4, 2, 8), (4, 5, 32), (8, 2, 24)])
def test_equal_stages_wait_as_long_as_the_formula_says(pp: int, vp: int, micro: int) -> None:
    """(pp - 1) passes of one chunk, Narayanan et al. 2021."""
    found = pipeline_seconds(PipelinePasses.of([1.0] * pp * vp, [2.0] * pp * vp, pp), micro)
    assert found == pytest.approx(3.0 * (micro * vp + pp - 1))


@pytest.mark.parametrize(("vp", "micro"), [(1, 42), (3, 40)])
def test_a_long_step_is_extrapolated_as_it_would_be_simulated(vp: int, micro: int) -> None:
    forward = [1.0 + 0.1 * chunk for chunk in range(4 * vp)]
    backward = [2.0] * 4 * vp
    passes = PipelinePasses.of(forward, backward, 4, hop=0.05)
    long = pipeline_seconds(passes, micro)
    whole = max(slot.end for slot in pipeline_timeline(passes, micro))
    assert long == pytest.approx(whole, rel=0.01)


def test_the_slowest_stage_sets_the_pace() -> None:
    found = pipeline_seconds(PipelinePasses.of([1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 6.0], 4), 100)
    assert found == pytest.approx(9.0 * 100 + 3 * 3.0)


def test_gpipe_makes_all_forward_passes_first() -> None:
    slots = pipeline_timeline(PipelinePasses.of([1.0, 1.0], [2.0, 2.0], 2, schedule="gpipe"), 3)
    first = [slot for slot in slots if slot.rank == 0]
    assert [slot.kind for slot in first] == ["forward"] * 3 + ["backward"] * 3


def test_zero_bubble_waits_a_third_as_long() -> None:
    """ZB-H1 with equal times of forward, input gradients and weight gradients (Qi et al. 2024)."""
    plain, filled = (
        pipeline_seconds(PipelinePasses.of([1.0] * 4, [2.0] * 4, 4, schedule=schedule), 16)
        for schedule in ("1f1b", "zero_bubble")
    )
    assert plain == pytest.approx(3.0 * (16 + 3))
    assert filled - 3.0 * 16 <= (plain - 3.0 * 16) / 2
    slots = pipeline_timeline(PipelinePasses.of([1.0] * 4, [2.0] * 4, 4, schedule="zero_bubble"), 16)
    assert sum(slot.kind == "weights" for slot in slots) == 4 * 16


def test_no_pass_begins_before_what_it_needs_has_come() -> None:
    hop = 0.25
    slots = pipeline_timeline(PipelinePasses.of([1.0] * 8, [2.0] * 8, 4, hop=hop), 8)
    ends = {(slot.chunk, slot.micro_batch, slot.kind): slot.end for slot in slots}
    for slot in slots:
        if slot.kind == "forward" and slot.chunk:
            assert slot.start >= ends[slot.chunk - 1, slot.micro_batch, "forward"] + hop - 1e-9
        if slot.kind == "backward" and slot.chunk < 7:
            assert slot.start >= ends[slot.chunk + 1, slot.micro_batch, "backward"] + hop - 1e-9
    assert len(slots) == 4 * 2 * 8 * 2

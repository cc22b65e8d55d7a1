"""The simulated pipeline, against what is known in closed form."""

from __future__ import annotations

import pytest

from trainshed.plan.performance.pipeline import pipeline_seconds, timeline


@pytest.mark.parametrize(("pp", "vp", "micro"), [(2, 1, 2), (4, 1, 8), (4, 1, 64), (4, 2, 8), (4, 5, 32), (8, 2, 24)])
def test_equal_stages_wait_as_long_as_the_formula_says(pp: int, vp: int, micro: int) -> None:
    """(pp - 1) passes of one chunk, Narayanan et al. 2021."""
    found = pipeline_seconds([1.0] * pp * vp, [2.0] * pp * vp, pp, micro, hop=0.0, fill_first=False)
    assert found == pytest.approx(3.0 * (micro * vp + pp - 1))


@pytest.mark.parametrize("vp", [1, 3])
def test_a_long_step_is_extrapolated_as_it_would_be_simulated(vp: int) -> None:
    forward = [1.0 + 0.1 * chunk for chunk in range(4 * vp)]
    backward = [2.0] * 4 * vp
    long = pipeline_seconds(forward, backward, 4, 40, hop=0.05, fill_first=False)
    whole = max(slot.end for slot in timeline(forward, backward, 4, 40, hop=0.05, fill_first=False))
    assert long == pytest.approx(whole, rel=0.01)


def test_the_slowest_stage_sets_the_pace() -> None:
    found = pipeline_seconds([1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 6.0], 4, 100, hop=0.0, fill_first=False)
    assert found == pytest.approx(9.0 * 100 + 3 * 3.0)


def test_gpipe_makes_all_forward_passes_first() -> None:
    slots = timeline([1.0, 1.0], [2.0, 2.0], 2, 3, hop=0.0, fill_first=True)
    first = [slot for slot in slots if slot.rank == 0]
    assert [slot.backward for slot in first] == [False] * 3 + [True] * 3


def test_no_pass_begins_before_what_it_needs_has_come() -> None:
    hop = 0.25
    slots = timeline([1.0] * 8, [2.0] * 8, 4, 8, hop=hop, fill_first=False)
    ends = {(slot.chunk, slot.micro_batch, slot.backward): slot.end for slot in slots}
    for slot in slots:
        if not slot.backward and slot.chunk:
            assert slot.start >= ends[slot.chunk - 1, slot.micro_batch, False] + hop - 1e-9
        if slot.backward and slot.chunk < 7:
            assert slot.start >= ends[slot.chunk + 1, slot.micro_batch, True] + hop - 1e-9
    assert len(slots) == 4 * 2 * 8 * 2

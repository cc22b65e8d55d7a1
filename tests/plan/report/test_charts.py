"""The step as boxes: nothing overlaps, nothing runs before what it needs, and the textbook cases come out exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.recipes.small_plans import layout, prediction
from trainshed.plan.report.charts import StepTimeline, TimelineBox, step_timeline

CASES = [
    {"tp": 8},
    {"tp": 8, "pp": 4},
    {"tp": 8, "pp": 4, "schedule": "gpipe"},
    {"tp": 4, "pp": 4, "vp": 5, "cp": 2},
    {"tp": 8, "pp": 8, "vp": 2},
    {"tp": 8, "pp": 4, "schedule": "zero_bubble"},
]


def drawn(keys: dict[str, object], micro_batches: int) -> StepTimeline:
    chosen = layout(**keys)
    return step_timeline(prediction(chosen), micro_batches * chosen.dp * chosen.micro_batch)


def passes(found: StepTimeline, kind: str) -> dict[tuple[int, int], TimelineBox]:
    """Boxes by the model's chunk and the micro-batch."""
    return {(box.chunk * found.ranks + box.rank, box.micro_batch): box for box in found.boxes if box.kind == kind}


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_a_rank_does_one_thing_at_a_time(keys: dict[str, object]) -> None:
    found = drawn(keys, 8)
    for rank in range(found.ranks):
        boxes = sorted((box for box in found.boxes if box.rank == rank), key=lambda box: box.start)
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(boxes))


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_a_micro_batch_goes_through_all_chunks_and_back(keys: dict[str, object]) -> None:
    found, chunks = drawn(keys, 8), len(layout(**keys).stages)
    forwards, backwards = passes(found, "forward"), passes(found, "backward")
    assert set(forwards) == set(backwards) == {(chunk, each) for chunk in range(chunks) for each in range(found.shown)}
    for (chunk, each), box in forwards.items():
        assert box.end <= backwards[chunk, each].start + 1e-9
        if chunk + 1 < chunks:
            assert box.end <= forwards[chunk + 1, each].start + 1e-9
            assert backwards[chunk + 1, each].end <= backwards[chunk, each].start + 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_time_of_the_bubble_formula(schedule: str) -> None:
    found = drawn({"tp": 8, "pp": 4, "schedule": schedule}, 8)
    end = max(box.end for box in found.boxes if box.kind == "backward")
    assert end == pytest.approx((8 + 4 - 1) * (0.06 + 0.12))


def test_interleaving_and_zero_bubbles_wait_less() -> None:
    def waiting(**keys: object) -> float:
        found = drawn({"tp": 8, "pp": 4, **keys}, 8)
        busy = [box for box in found.boxes if box.kind in ("forward", "backward", "weights")]
        return 1 - sum(box.end - box.start for box in busy) / (4 * max(box.end for box in busy))

    plain = waiting()
    assert waiting(vp=5) < plain
    assert waiting(schedule="zero_bubble") < plain


def test_a_long_step_is_drawn_short_and_says_so() -> None:
    found = drawn({"tp": 8, "pp": 4}, 64)
    assert (found.micro_batches, found.shown, found.is_whole) == (64, 8, False)
    assert drawn({"tp": 8, "pp": 4}, 5).is_whole


def test_the_tail_of_the_step_is_drawn_after_the_pipeline() -> None:
    found = drawn({"tp": 8, "pp": 4}, 8)
    last = max(box.end for box in found.boxes if box.kind == "backward")
    reduced = [box for box in found.boxes if box.kind == "reduce"]
    assert len(reduced) == 4
    assert {box.start for box in reduced} == {last}
    assert found.seconds == pytest.approx(last + 1.3 + 0.5)

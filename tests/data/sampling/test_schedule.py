"""Batch sizes by step, with Megatron's ramp-up as the oracle, and skipped samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule, SkipList
from trainshed.errors import InputError


def walked(schedule: BatchSchedule, steps: int) -> list[int]:
    return np.concatenate(([0], np.cumsum([schedule.batch_size(step) for step in range(steps)]))).tolist()


ramps = st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(1, 12), st.integers(0, 3000))


@settings(max_examples=100)
@given(ramp=ramps)
def test_consumed_in_closed_form_equals_walking(ramp):
    start, increment, increments, samples = ramp
    schedule = BatchSchedule(start + increment * increments, BatchRampUp(start, increment, samples))
    expected = walked(schedule, 400)
    assert [schedule.consumed(step) for step in range(401)] == expected
    for count in (0, 1, expected[3], expected[3] + 1, expected[-1]):
        steps = schedule.steps_for(count)
        assert schedule.consumed(steps) >= count
        assert steps == 0 or schedule.consumed(steps - 1) < count


@settings(max_examples=100)
@given(ramp=ramps)
def test_the_ramp_is_megatrons_with_one_replica(megatron, ramp):
    start, increment, increments, each = ramp
    # Megatron divides by samples / increments; where that is not a whole number its floats may round a boundary.
    samples = (1 + each) * increments
    goal = start + increment * increments
    theirs = megatron.ramp_up(goal, 1, 1, False, 1, start, increment, samples)
    ours = BatchSchedule(goal, BatchRampUp(start, increment, samples))
    consumed = 0
    for step in range(300):
        theirs.update(consumed, consistency_check=True)
        assert ours.batch_size(step) == theirs.get_current_global_batch_size()
        consumed += theirs.get_current_global_batch_size()


def test_a_ramp_that_jumps_over_stages_names_only_the_sizes_it_uses():
    schedule = BatchSchedule(64, BatchRampUp(16, 16, 30))
    assert schedule.sizes == [16, 32, 64]
    assert [schedule.consumed(step) for step in range(5)] == [0, 16, 48, 112, 176]


def test_without_a_ramp_the_batch_is_constant():
    assert BatchSchedule(8).consumed(1_000_000) == 8_000_000
    assert BatchSchedule(8, BatchRampUp(8, 4, 100)).sizes == [8]
    assert BatchSchedule(8, BatchRampUp(4, 4, 0)).sizes == [8]


@pytest.mark.parametrize(
    "ramp", [BatchRampUp(3, 2, 10), BatchRampUp(0, 1, 10), BatchRampUp(9, 1, 10), BatchRampUp(4, 0, 10)]
)
def test_a_ramp_that_does_not_arrive_is_refused(ramp):
    with pytest.raises(InputError, match="does not reach the global batch of 8"):
        BatchSchedule(8, ramp)


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda at: (at[0], at[0] + at[1])), max_size=6)


@given(skipped=ranges)
def test_the_kth_sample_is_the_kth_that_is_not_skipped(skipped):
    gone = {sample for start, stop in skipped for sample in range(start, stop)}
    expected = [sample for sample in range(300) if sample not in gone][:100]
    skip = SkipList(skipped)
    assert skip.to_stream(np.arange(100)).tolist() == expected
    assert skip.stream_end(100) == expected[-1] + 1
    assert skip.stream_end(0) == 0


@given(skipped=ranges, more=ranges)
def test_a_range_added_later_changes_nothing_before_it(skipped, more):
    before = SkipList(skipped).to_stream(np.arange(200))
    after = SkipList([*skipped, *more]).to_stream(np.arange(200))
    first = min((start for start, _ in more), default=10**9)
    assert np.array_equal(before[before < first], after[: np.count_nonzero(before < first)])


def test_an_empty_range_is_refused():
    with pytest.raises(InputError, match="the range 7 to 7 holds no samples"):
        SkipList([(7, 7)])

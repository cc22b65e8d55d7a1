"""Scores of predictions: fractions, and None where there is nothing to judge by."""

import pytest

from trainshed.plan.published.validation import (
    ErrorScores,
    OutOfMemoryScores,
    RegretScores,
    error_scores,
    out_of_memory_scores,
    regret_scores,
)


def test_errors_count_both_directions_alike_and_the_bias_keeps_its_sign():
    scores = error_scores([(1.1, 1.0), (0.7, 1.0), (4.0, 4.0)])
    assert scores.count == 3
    assert scores.mape == pytest.approx(0.4 / 3)
    assert scores.median == pytest.approx(0.1)
    assert scores.bias == pytest.approx(-0.2 / 3)
    assert scores.worst == pytest.approx(0.3)


def test_balanced_accuracy_is_the_mean_of_both_sides_however_uneven_they_are():
    caught, missed, quiet, alarm = (True, True), (False, True), (False, False), (True, False)
    scores = out_of_memory_scores([caught] * 3 + [missed] + [quiet] * 95 + [alarm] * 5)
    assert (scores.positives, scores.negatives) == (4, 100)
    assert scores.precision == pytest.approx(3 / 8)
    assert scores.recall == pytest.approx(0.75)
    assert scores.balanced_accuracy == pytest.approx((0.75 + 0.95) / 2)


def test_regret_is_what_our_choice_costs_and_the_best_of_three_forgives_near_misses():
    # What we put first was measured 20% slower than the best, which we put third.
    close = [12.0, 13.0, 10.0, 90.0]
    right = [5.0, 6.0, 7.0]
    scores = regret_scores([close, right])
    assert scores.groups == 2
    assert scores.top1_mean == pytest.approx(0.1)
    assert scores.top1_worst == pytest.approx(0.2)
    assert scores.top3_mean == scores.top3_worst == 0.0


def test_nothing_to_judge_by_is_none_and_never_zero():
    assert error_scores([]) == ErrorScores()
    assert out_of_memory_scores([]) == OutOfMemoryScores()
    assert regret_scores([]) == RegretScores()
    only_failures = out_of_memory_scores([(True, True), (False, True)])
    assert (only_failures.recall, only_failures.precision, only_failures.balanced_accuracy) == (0.5, 1.0, None)
    only_runs = out_of_memory_scores([(False, False)])
    assert (only_runs.recall, only_runs.precision, only_runs.balanced_accuracy) == (None, None, None)

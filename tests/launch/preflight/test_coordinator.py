"""The bad node is found from pairs, whoever it is."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.launch.preflight.coordinator import (
    PairRate,
    PairRules,
    judge_nodes,
    next_pairs,
    reference_rate,
)

RULES = PairRules()
Rate = Callable[[int, int], float | None]


def find(nodes: list[int], rate: Rate, rules: PairRules = RULES) -> tuple[dict[int, str], list[list[tuple[int, int]]]]:
    """Measure as preflight does, with a function in the place of a network."""
    measured: list[PairRate] = []
    rounds: list[list[tuple[int, int]]] = []
    while pairs := next_pairs(nodes, measured, rules):
        taken = [node for pair in pairs for node in pair]
        assert len(set(taken)) == len(taken), "a node was in two pairs at once"
        assert not {frozenset(pair) for pair in pairs} & {frozenset(each.nodes) for each in measured}
        measured += [PairRate(pair, rate(*pair)) for pair in pairs]
        rounds.append(pairs)
        assert len(rounds) < 40
    return dict(judge_nodes(nodes, measured, rules)), rounds


def network(bad: Collection[int], slow: float | None, noise: Callable[[int, int], float] = lambda a, b: 0.0) -> Rate:
    def rate(a: int, b: int) -> float | None:
        if {a, b} & set(bad):
            return slow
        return 400.0 * (1 + noise(a, b))

    return rate


def said(verdicts: dict[int, str], verdict: str) -> set[int]:
    return {node for node, each in verdicts.items() if each == verdict}


@given(
    count=st.integers(3, 40),
    which=st.integers(0, 39),
    slow=st.one_of(st.none(), st.floats(1.0, 400 * 0.92)),
    seed=st.integers(0, 1000),
)
def test_one_bad_node_among_any_number_is_found_and_nobody_else(
    count: int, which: int, slow: float | None, seed: int
) -> None:
    bad = which % count
    spread = network([bad], slow, lambda a, b: 0.01 * ((a * 31 + b * 17 + seed) % 7) / 7)
    verdicts, rounds = find(list(range(count)), spread)
    assert said(verdicts, "replace") == {bad}
    assert said(verdicts, "pass") == set(range(count)) - {bad}
    assert len(rounds) <= 3


@given(count=st.integers(2, 40), seed=st.integers(0, 1000))
def test_healthy_nodes_pass_in_as_few_rounds_as_there_can_be(count: int, seed: int) -> None:
    verdicts, rounds = find(list(range(count)), network([], None, lambda a, b: 0.01 * ((a + b * seed) % 5) / 5))
    assert said(verdicts, "pass") == set(range(count))
    assert len(rounds) == (3 if count == 3 else 2 if count % 2 else 1)


@given(count=st.integers(6, 40), data=st.data())
def test_several_bad_nodes_are_found_where_the_machine_has_a_figure_to_hold(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count // 2 - 1))
    rules = PairRules(bad_below_gb_per_s=300.0)
    verdicts, _ = find(list(range(count)), network(bad, 150.0), rules)
    assert said(verdicts, "replace") == bad


def test_of_two_nodes_neither_can_be_blamed() -> None:
    verdicts, rounds = find([0, 1], network([1], None))
    assert verdicts == {0: "undecided", 1: "undecided"}
    assert rounds == [[(0, 1)]]


def test_where_nobody_gets_through_it_is_given_up_soon() -> None:
    verdicts, rounds = find(list(range(8)), lambda a, b: None)
    assert set(verdicts.values()) == {"undecided"}
    assert len(rounds) == 2


def test_numbers_of_nodes_need_not_follow_each_other() -> None:
    verdicts, _ = find([3, 8, 11, 40, 41], network([40], None))
    assert said(verdicts, "replace") == {40}


@pytest.mark.parametrize(("rate", "verdict"), [(387.0, "pass"), (385.0, "warn"), (373.0, "warn"), (371.0, "replace")])
def test_three_and_a_half_percent_are_worth_a_look_and_seven_are_bad(rate: float, verdict: str) -> None:
    verdicts, _ = find([0, 1, 2, 3], network([2], rate))
    assert verdicts == {0: "pass", 1: "pass", 2: verdict, 3: "pass"}


def test_among_many_pairs_that_spread_a_bad_one_must_stand_out() -> None:
    def spread(a: int, b: int) -> float:
        return 400.0 - 40.0 * (a // 2) / 9

    verdicts, _ = find(list(range(20)), spread)
    assert said(verdicts, "replace") == set()
    verdicts, _ = find(list(range(20)), lambda a, b: 100.0 if 7 in (a, b) else spread(a, b))
    assert said(verdicts, "replace") == {7}


def test_what_healthy_pairs_reach_is_not_pulled_down_by_bad_ones() -> None:
    pairs = [PairRate((0, 1), 400.0), PairRate((2, 3), 100.0), PairRate((4, 5), None)]
    assert reference_rate(pairs) == 400.0
    assert reference_rate([PairRate((0, 1), None)]) is None

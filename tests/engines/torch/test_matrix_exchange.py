"""The plan of who computes which matrix: each once, the work divided, nothing sent that a rank holds whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from trainshed.engines.torch import matrix_exchange
from trainshed.engines.torch.matrix_exchange import (
    ExchangeRound,
    WholeMatrix,
    _exchange_round,
    assign_matrices,
    matrix_holders,
    plan_rounds,
)
from trainshed.models.parameters import Parameter


@dataclass(frozen=True)
class OneTensor:
    """As much of a shard as a plan looks at."""

    parameter: Parameter
    name: str = "tensor"


def elements(matrix: WholeMatrix) -> float:
    return float(matrix.rows * matrix.columns)


def plans(shape: tuple[int, ...], count: int, table: list[list[list[int]]]) -> list[list[ExchangeRound]]:
    """The rounds of every rank, for `count` tensors of a shape, of which ranks hold the boxes of a table."""
    parameter = Parameter("tensor", shape, 0, "normal", 0, len(shape) == 3)
    tensors = [OneTensor(parameter)] * count
    holders = matrix_holders(tensors, [boxes * count for boxes in table])  # type: ignore[arg-type]
    computing = assign_matrices(holders, len(table), elements)
    return [
        [_exchange_round(rank, holders, matrices) for matrices in plan_rounds(computing)] for rank in range(len(table))
    ]


def computed(rounds: list[list[ExchangeRound]]) -> Counter[WholeMatrix]:
    return Counter(matrix for own in rounds for one in own for matrix in one.computed)


def test_copies_of_a_model_divide_the_matrices_and_send_only_results() -> None:
    rounds = plans((6, 4), 8, [[[0, 0, 0, 1, 6, 4]]] * 4)
    assert set(computed(rounds).values()) == {1}
    assert [sum(len(one.computed) for one in own) for own in rounds] == [2, 2, 2, 2]
    assert all(transfer.source == transfer.destination for own in rounds for one in own for transfer in one.gathered)
    results = {(t.matrix, t.destination) for own in rounds for one in own for t in one.shared_out}
    assert len(results) == 8 * 4


def test_shards_of_one_copy_meet_on_one_rank_and_return() -> None:
    rounds = plans((6, 4), 4, [[[0, 0, 0, 1, 3, 4]], [[0, 3, 0, 1, 3, 4]]])
    assert set(computed(rounds).values()) == {1}
    assert [sum(len(one.computed) for one in own) for own in rounds] == [2, 2]
    crossing = [t for one in rounds[0] for t in one.gathered if t.source != t.destination]
    assert {(t.box.row, t.box.rows) for t in crossing} == {(0, 3), (3, 3)}


def test_experts_that_a_rank_holds_whole_stay_where_they_are() -> None:
    rounds = plans((4, 6, 5), 1, [[[0, 0, 0, 2, 6, 5]], [[2, 0, 0, 2, 6, 5]]])
    assert set(computed(rounds).values()) == {1}
    assert [sorted(matrix.expert for one in own for matrix in one.computed) for own in rounds] == [[0, 1], [2, 3]]
    assert all(one.is_local for own in rounds for one in own)


def test_a_rank_without_rows_computes_and_sends_nothing_it_does_not_hold() -> None:
    rounds = plans((1, 4), 3, [[[0, 0, 0, 1, 1, 4]], [[0, 1, 0, 1, 0, 4]]])
    assert set(computed(rounds).values()) == {1}
    assert not [one.held for one in rounds[1] if one.held]


def test_rounds_bound_what_a_rank_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_exchange, "ROUND_ELEMENTS", 50)
    rounds = plans((6, 4), 10, [[[0, 0, 0, 1, 3, 4]], [[0, 3, 0, 1, 3, 4]]])
    assert set(computed(rounds).values()) == {1}
    assert {len(own) for own in rounds} == {3}, "all ranks take part in all rounds"
    assert max(sum(map(elements, one.computed)) for own in rounds for one in own) <= 50


def test_boxes_that_are_not_the_whole_matrix_are_found() -> None:
    with pytest.raises(AssertionError, match="the boxes of the ranks are not one matrix"):
        plans((6, 4), 1, [[[0, 0, 0, 1, 3, 4]], [[0, 3, 0, 1, 2, 4]]])

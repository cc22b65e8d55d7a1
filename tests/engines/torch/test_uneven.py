"""A run that has lost nodes goes on with replicas that do not divide its batch, and trains what one process trains."""

from __future__ import annotations

import pytest

from support.recipes.small_recipes import world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_uneven
from support.runs.small_runs import SmallRuns, difference
from trainshed.observe.event_log import read_steps
from trainshed.storage import LocalStore

RAMP = ("train.batch_ramp={start: 4, increment: 2, samples: 40}",)
DROPOUT = ("train.dropout=0.1",)


@pytest.mark.parametrize(
    ("model", "layout", "overrides"),
    [
        ("dense", "dp=3,micro_batch=2", ()),
        ("tied", "dp=3,shard=full,micro_batch=1", DROPOUT),
        pytest.param("dense", "dp=3,micro_batch=1", RAMP, marks=pytest.mark.full),
        pytest.param("dense", "dp=3,pp=2,micro_batch=1", (), marks=pytest.mark.full),
        pytest.param("dense", "dp=3,tp=2,shard=zero2,micro_batch=2", (), marks=pytest.mark.full),
        pytest.param("tied", "dp=3,cp=2,micro_batch=1", (), marks=pytest.mark.full),
    ],
)
def test_rows_that_do_not_come_out_even_give_the_losses_of_one_process(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str, overrides: tuple[str, ...]
) -> None:
    folder = small_runs.new_folder()
    assert set(rank_pool.run(train_uneven, folder, model, layout, overrides, ranks=world_size(layout))) == {0}
    got, expected = read_steps(LocalStore(folder), ""), small_runs.alone(model, *overrides)
    for figure in ("loss", "grad_norm"):
        assert difference(expected, got, figure) <= 1e-9, figure
    assert [each["batch_hash"] for each in got] == [each["batch_hash"] for each in expected]

"""The loss of each source of a batch: against PyTorch's own cross-entropy, on every layout, beside the loss itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.recipes.small_recipes import ALONE, small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import blended_order, train_blended
from support.runs.small_runs import SmallRuns
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.observe.event_log import read_steps
from trainshed.observe.exporters.figures import figure_point
from trainshed.storage import LocalStore

SHORT = ("train.steps=4",)


def blended_steps(runs: SmallRuns, pool: RankPool, model: str, layout: str, *, apart: bool) -> list[dict[str, Any]]:
    folder = runs.new_folder()
    assert set(pool.run(train_blended, folder, model, layout, SHORT, apart, ranks=world_size(layout))) == {0}
    return read_steps(LocalStore(folder), "")


@pytest.mark.parametrize("apart", [False, True])
def test_the_losses_of_sources_are_those_of_their_rows_alone(
    small_runs: SmallRuns, rank_pool: RankPool, apart: bool
) -> None:
    steps = blended_steps(small_runs, rank_pool, "dense", ALONE, apart=apart)
    recipe = small_recipe("dense", SHORT)
    job = small_job(small_runs.new_folder(), recipe, ALONE)
    mesh = single_rank_mesh(job.layout, torch.device("cpu"))
    model = build_model(job.config, mesh, sequence_length=16, precision="fp64", regularization=Regularization())
    init_model(model, recipe.seed)
    order = blended_order(job, apart=apart)
    rows, numbers = order.batch(0), order.source_numbers(0, 0, 8)
    starts = None if rows.document_starts is None else torch.from_numpy(rows.document_starts[:, :-1].astype("int64"))
    tokens, labels = torch.from_numpy(rows.tokens[:, :-1].astype("int64")), torch.from_numpy(rows.labels())
    with torch.no_grad():
        logits = model.stages[0].logits(model.stages[0](tokens, document_starts=starts)).transpose(0, 1)
    for number, name in enumerate(("articles", "code")):
        chosen = torch.from_numpy(numbers == number)
        expected = F.cross_entropy(logits[chosen].flatten(0, 1), labels[chosen].flatten(), ignore_index=-100).item()
        assert steps[0]["source_losses"][name] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "tp=2,pp=2,micro_batch=2"),
        ("dense", "dp=2,shard=full,micro_batch=2"),
        pytest.param("dense", "cp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("moe", "dp=2,ep=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("tied", "pp=2,vp=1,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_the_losses_of_sources_are_the_same_on_every_layout(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    expected = blended_steps(small_runs, rank_pool, model, ALONE, apart=True)
    got = blended_steps(small_runs, rank_pool, model, layout, apart=True)
    for there, here in zip(expected, got, strict=True):
        assert there["source_losses"].keys() == here["source_losses"].keys()
        assert all(
            here["source_losses"][name] == pytest.approx(loss, rel=1e-9)
            for name, loss in there["source_losses"].items()
        )


def test_the_losses_of_sources_are_curves_of_their_own() -> None:
    event = {"kind": "step", "step": 0, "loss": 2.0, "source_losses": {"articles": 1.5, "code": None}}
    point = figure_point(event)
    assert point is not None
    assert point.figures == {"train/loss": 2.0, "train/loss/articles": 1.5}

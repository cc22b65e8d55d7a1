"""Muon is PyTorch's on the matrices that a tensor consists of, and the same on every layout; AdamW does the rest."""

from __future__ import annotations

import math

import pytest
import torch

from support.models.one_process import one_process_model
from support.models.tiny_models import tiny_config
from support.recipes.small_recipes import ALONE
from support.runs.small_runs import SmallRuns, difference, figures, state
from trainshed.engines.torch.matrix_optimizer import MatrixRankOptimizer
from trainshed.engines.torch.model import RankModel
from trainshed.engines.torch.muon import newton_schulz
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.step import squared_grad_norm
from trainshed.recipe.optimizer import Optimizer

MUON = "train.optimizer={name: muon, lr: 3.0e-3}"
GOOD, BAD = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


def separate_matrices(name: str, weight: torch.Tensor, model: RankModel) -> list[torch.Tensor]:
    """Views of a tensor's projections, by the order of rows that native checkpoints document."""
    config = model.config
    if name.endswith("qkv.weight"):
        queries = config.heads // config.kv_heads * config.head_dim
        groups = weight.view(config.kv_heads, -1, weight.shape[-1])
        return list(groups.split([queries, config.head_dim, config.head_dim], dim=1))
    if "gate_up" in name:
        return [weight[..., 0::2, :], weight[..., 1::2, :]]
    return [weight]


def matrices_of(model: RankModel) -> list[tuple[int, torch.Tensor]]:
    """Every matrix that Muon makes orthogonal as a view [..., columns] of its weight, with the weight's number."""
    made = []
    for number, shard in enumerate(model.shards):
        weight = shard.local_tensor
        if shard.name.startswith("layers.") and weight.dim() > 1:
            for matrix in weight if "experts" in shard.name else [weight]:
                made += [(number, part) for part in separate_matrices(shard.name, matrix, model)]
    return made


def put_gradients(model: RankModel, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for shard in model.shards:
        gradient = torch.randn(shard.tensor.shape, generator=generator, dtype=torch.float64)
        shard.tensor.grad = gradient.to(shard.tensor.dtype) * (0.1 if step % 3 else 0.001)


def flat(view: torch.Tensor) -> torch.Tensor:
    return view.reshape(-1, view.shape[-1]).clone()


def gradient_views(model: RankModel) -> list[torch.Tensor]:
    """The gradients of `matrices_of`, in the same order."""
    grads = []
    for shard in model.shards:
        gradient = shard.gradient
        assert gradient is not None
        if shard.name.startswith("layers.") and gradient.dim() > 1:
            for matrix in gradient if "experts" in shard.name else [gradient]:
                grads += separate_matrices(shard.name, matrix, model)
    return grads


def test_newton_schulz_maps_the_singular_values_and_keeps_the_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((24, 16), (16, 24), (16, 16)):
        matrices = torch.randn(3, rows, columns, generator=generator, dtype=torch.float64)
        left, values, right = torch.linalg.svd(matrices, full_matrices=False)
        values = values / values.norm(dim=-1, keepdim=True)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected = left @ torch.diag_embed(values) @ right
        torch.testing.assert_close(newton_schulz(matrices, 5), expected, rtol=1e-9, atol=1e-9)
        assert 0.3 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("adjust_lr", "nesterov"), [("match_rms_adamw", True), ("original", False)])
def test_ten_steps_are_those_of_torch_on_separate_projections_and_adamw_on_the_rest(
    family: str, adjust_lr: str, nesterov: bool
) -> None:
    model = one_process_model(tiny_config(family, layers=1), length=8, precision="bf16")
    muon = {"adjust_lr": adjust_lr, "nesterov": nesterov, "momentum": 0.9}
    options = Optimizer.model_validate({"name": "muon", "lr": 1e-2, "clip": None, "muon": muon})
    optimizer = build_rank_optimizer(model, options)
    views = matrices_of(model)
    copies = [torch.nn.Parameter(flat(view)) for _, view in views]
    shared = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = torch.optim.Muon(copies, **shared, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust_lr)
    numbers = {number for number, _ in views}
    others = [shard for number, shard in enumerate(model.shards) if number not in numbers]
    other_copies = [torch.nn.Parameter(shard.local_tensor.clone()) for shard in others]
    adamw = torch.optim.AdamW(
        [
            {"params": [copy for copy in other_copies if copy.dim() > 1], "weight_decay": 0.1},
            {"params": [copy for copy in other_copies if copy.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=options.betas,
    )
    assert {shard.name for shard in others} >= {"embedding.weight", "norm.weight"}
    for step in range(10):
        put_gradients(model, step)
        for copy, gradient in zip(copies, gradient_views(model), strict=True):
            copy.grad = flat(gradient)
        for copy, shard in zip(other_copies, others, strict=True):
            copy.grad = shard.tensor.grad.clone()
        optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), GOOD)
        theirs.step()
        adamw.step()
    for (number, view), copy in zip(views, copies, strict=True):
        # Both multiply in bf16; a batch of products may be added up in another order.
        moved = float((copy.detach() - flat(view)).norm() / copy.detach().norm())
        assert moved < 2e-3, model.shards[number].name
    for shard, copy in zip(others, other_copies, strict=True):
        torch.testing.assert_close(shard.local_tensor, copy.detach(), rtol=2e-6, atol=2e-6)


def test_in_float64_a_step_is_the_polar_factor_that_newton_schulz_approaches() -> None:
    """A plain reference: singular values by their polynomial, one matrix at a time."""
    model = one_process_model(tiny_config("llama", layers=1), length=8, precision="fp64")
    options = Optimizer.model_validate({"name": "muon", "lr": 1e-2, "weight_decay": 0.3, "decoupled": True})
    optimizer = build_rank_optimizer(model, options)
    before = [flat(view) for _, view in matrices_of(model)]
    put_gradients(model, 1)
    norm = squared_grad_norm(model.shards).sqrt()
    optimizer.step(5e-3, norm, GOOD)
    for old, (_, view), gradient in zip(before, matrices_of(model), gradient_views(model), strict=True):
        # Nesterov's mix of a first step is a multiple of the gradient, and so is what the clip leaves.
        left, values, right = torch.linalg.svd(flat(gradient), full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected = old * (1 - 0.5 * 0.3) - 5e-3 * 0.2 * math.sqrt(max(old.shape)) * (left * values) @ right
        torch.testing.assert_close(flat(view), expected, rtol=1e-9, atol=1e-11)


def test_a_skipped_step_changes_neither_weights_nor_momentum() -> None:
    model = one_process_model(tiny_config("qwen3_moe", layers=1), length=8)
    optimizer = build_rank_optimizer(model, Optimizer.model_validate({"name": "muon", "lr": 1e-2}))
    assert isinstance(optimizer, MatrixRankOptimizer)
    put_gradients(model, 1)
    optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), GOOD)
    kept = [tensor.local.clone() for tensor in optimizer.state_tensors().values()]
    weights = [shard.local_tensor.clone() for shard in model.shards]
    for shard in model.shards:
        shard.tensor.grad = torch.full_like(shard.tensor, torch.nan)
    optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), BAD)
    assert all(map(torch.equal, [tensor.local for tensor in optimizer.state_tensors().values()], kept))
    assert all(map(torch.equal, [shard.local_tensor for shard in model.shards], weights))
    assert float(optimizer.updates) == 1


def test_state_has_the_names_of_the_weights_and_one_tensor_for_a_matrix() -> None:
    model = one_process_model(tiny_config("llama", layers=1), length=8)
    names = set(build_rank_optimizer(model, Optimizer.model_validate({"name": "muon", "lr": 1e-2})).state_tensors())
    assert "optimizer.momentum.layers.0.attention.qkv.weight" in names
    assert "optimizer.exp_avg.layers.0.attention.qkv.weight" not in names
    assert {"optimizer.exp_avg.embedding.weight", "optimizer.exp_avg_sq.norm.weight"} <= names


LAYOUTS = [
    ("dense", "tp=2,micro_batch=4"),
    ("dense", "dp=2,shard=full,micro_batch=2"),
    ("dense", "pp=2,dp=2,micro_batch=2"),
    ("moe", "tp=2,etp=2,micro_batch=4"),
]
MORE = [
    ("moe", "dp=2,ep=2,micro_batch=4"),
    ("latent", "tp=2,dp=2,ep=2,micro_batch=4"),
    ("dense", "dp=2,micro_batch=2"),
    ("dense", "dp=2,shard=none,micro_batch=2"),
    ("dense", "dp=2,shard=zero2,micro_batch=2"),
    ("dense", "dp=4,replicate=2,shard=full,micro_batch=2"),
    ("dense", "cp=2,tp=2,micro_batch=4"),
    ("dense", "tp=2,pp=2,micro_batch=4"),
    ("dense", "tp=2,dp=2,shard=full,micro_batch=4"),
    ("tied", "tp=2,pp=2,micro_batch=4"),
    ("tied", "pp=2,dp=2,micro_batch=2"),
    ("moe", "dp=4,ep=2,shard=full,micro_batch=2"),
    ("moe", "tp=2,dp=2,ep=2,etp=2,micro_batch=4"),
    ("moe", "tp=2,dp=2,ep=4,micro_batch=4"),
    ("moe", "pp=2,dp=2,ep=2,schedule=zero_bubble,micro_batch=2"),
    # More ranks than some tensors have rows.
    ("moe", "dp=8,ep=2,shard=full,micro_batch=1"),
]


@pytest.mark.parametrize(
    ("model", "layout"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_a_layout_trains_as_one_process_does(small_runs: SmallRuns, model: str, layout: str) -> None:
    expected, actual = small_runs.alone(model, MUON), small_runs.fresh(model, layout, MUON)
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9
    plain = small_runs.alone(model)
    assert [event["loss"] for event in plain] != [event["loss"] for event in expected]


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        ("dense", "dp=2,shard=full,micro_batch=2", "tp=2,micro_batch=4"),
        pytest.param("moe", "tp=2,etp=2,micro_batch=4", "dp=2,ep=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("dense", "pp=2,micro_batch=2", ALONE, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_with_its_momentum_on_another_layout(
    small_runs: SmallRuns, model: str, first: str, then: str
) -> None:
    folder = small_runs.new_folder()
    small_runs.train(folder, model, first, MUON, "train.steps=9")
    resumed = small_runs.train(folder, model, then, MUON)
    assert difference(small_runs.alone(model, MUON), resumed, "loss") <= 1e-9
    assert difference(small_runs.alone(model, MUON), resumed, "grad_norm") <= 1e-9


def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(small_runs: SmallRuns) -> None:
    straight, stopped = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "moe", ALONE, MUON, "train.steps=6")
    small_runs.train(stopped, "moe", ALONE, MUON, "train.steps=3")
    assert figures(small_runs.train(stopped, "moe", ALONE, MUON, "train.steps=6")) == figures(expected)
    one, other = state(straight, 6), state(stopped, 6)
    assert all(torch.equal(one[name], other[name]) for name in one)

"""AdamW is PyTorch's, clip included; a bad step changes nothing, and only matrices decay."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import CPU, one_process_model
from support.models.tiny_models import tiny_config
from trainshed.engines.torch.model import RankModel
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.step import squared_grad_norm
from trainshed.recipe.train import Optimizer

OPTIONS = Optimizer.model_validate({"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "clip": 1.0})
GOOD, BAD = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


def small_model(precision: str = "fp32") -> RankModel:
    """A model with matrices, norms and biases."""
    return one_process_model(tiny_config("gpt2", layers=1), length=8, precision=precision)


def put_gradients(model: RankModel, step: int) -> list[torch.Tensor]:
    """Random gradients, in some steps larger than the clip and in some smaller."""
    generator = torch.Generator().manual_seed(step)
    size = 0.1 if step % 3 else 0.001
    made = [torch.randn(w.tensor.shape, generator=generator, dtype=torch.float64) * size for w in model.shards]
    for weight, gradient in zip(model.shards, made, strict=True):
        weight.tensor.grad = gradient.to(weight.tensor.dtype)
    return made


def values(model: RankModel) -> list[torch.Tensor]:
    return [weight.local_tensor.clone() for weight in model.shards]


@pytest.mark.parametrize(
    ("precision", "clip", "tolerance"),
    # clip_grad_norm_ divides by the norm plus 1e-6, which float64 sees.
    [("fp32", None, 2e-6), ("fp32", 1.0, 2e-6), ("fp64", None, 1e-13), ("fp64", 1.0, 1e-8)],
)
def test_ten_steps_are_those_of_torch_with_clip_grad_norm(precision: str, clip: float | None, tolerance: float) -> None:
    model = small_model(precision)
    optimizer = AdamW(model.shards, OPTIONS.model_copy(update={"clip": clip}), CPU)
    copies = [value.requires_grad_() for value in values(model)]
    theirs = torch.optim.AdamW(
        [
            {"params": [copy for copy in copies if copy.dim() > 1], "weight_decay": OPTIONS.weight_decay},
            {"params": [copy for copy in copies if copy.dim() == 1], "weight_decay": 0.0},
        ],
        betas=OPTIONS.betas,
        eps=OPTIONS.eps,
    )
    clipped = []
    for step in range(10):
        lr = 1e-2 / (step + 1)
        for copy, gradient in zip(copies, put_gradients(model, step), strict=True):
            copy.grad = gradient.to(copy.dtype)
        norm = squared_grad_norm(model.shards).sqrt()
        optimizer.step(lr, norm, GOOD)
        if clip is not None:
            clipped.append(float(torch.nn.utils.clip_grad_norm_(copies, clip)) > clip)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
    assert set(clipped) == (set() if clip is None else {True, False})
    for weight, copy in zip(model.shards, copies, strict=True):
        torch.testing.assert_close(weight.local_tensor, copy.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_bad_step_changes_nothing_and_does_not_count(precision: str) -> None:
    with_bad, without = small_model(precision), small_model(precision)
    first, second = (AdamW(model.shards, OPTIONS, CPU) for model in (with_bad, without))
    for step in range(3):
        for model, optimizer in ((with_bad, first), (without, second)):
            put_gradients(model, step)
            optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), GOOD)
        before = values(with_bad)
        for poison in (torch.nan, torch.inf):
            with_bad.shards[0].tensor.grad = torch.full_like(with_bad.shards[0].tensor, poison)
            first.step(1e-2, squared_grad_norm(with_bad.shards).sqrt(), BAD)
        assert all(map(torch.equal, values(with_bad), before))
    assert float(first.updates) == float(second.updates) == 3
    for mine, other in (
        (values(with_bad), values(without)),
        (first.exp_avg, second.exp_avg),
        (first.exp_avg_sq, second.exp_avg_sq),
    ):
        assert all(map(torch.equal, mine, other))


def test_decay_is_on_matrices_only() -> None:
    model = small_model()
    before = values(model)
    optimizer = AdamW(model.shards, OPTIONS, CPU)
    for weight in model.shards:
        weight.tensor.grad = torch.zeros_like(weight.tensor)
    optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), GOOD)
    for weight, old in zip(model.shards, before, strict=True):
        factor = 1 - 1e-2 * 0.3 if weight.local_tensor.dim() > 1 else 1.0
        torch.testing.assert_close(weight.local_tensor, old * factor)


def test_a_tensor_without_a_gradient_stays_as_it_is() -> None:
    model = small_model()
    before = values(model)
    optimizer = AdamW(model.shards, OPTIONS, CPU)
    put_gradients(model, 1)
    model.shards[0].tensor.grad = None
    optimizer.step(1e-2, squared_grad_norm(model.shards).sqrt(), GOOD)
    same = [torch.equal(*pair) for pair in zip(values(model), before, strict=True)]
    assert same == [True] + [False] * (len(same) - 1)


def test_the_norm_is_over_all_gradients_in_float64() -> None:
    model = small_model()
    gradients = put_gradients(model, 1)
    expected = sum(gradient.float().double().square().sum() for gradient in gradients)
    torch.testing.assert_close(squared_grad_norm(model.shards), expected, rtol=1e-6, atol=0)


def test_state_has_the_names_and_boxes_of_the_weights() -> None:
    model = small_model()
    tensors = AdamW(model.shards, OPTIONS, CPU).state_tensors()
    wanted = [f"optimizer.{kind}.{weight.name}" for weight in model.shards for kind in ("exp_avg", "exp_avg_sq")]
    assert list(tensors) == wanted
    for weight in model.shards:
        assert tuple(tensors[f"optimizer.exp_avg.{weight.name}"].global_shape) == weight.parameter.shape

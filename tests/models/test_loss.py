"""The loss a slice of tokens at a time is the plain cross-entropy, whatever the slices, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainshed.models import loss
from trainshed.models.loss import IGNORE_INDEX, linear_cross_entropy

TOKENS, HIDDEN, WORDS = 23, 8, 37
Z_LOSS = 0.05


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, labels of which some are ignored, scale; logits reach far from 0."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).mul_(3).requires_grad_()
    weight = torch.randn(WORDS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[[0, 7, 8, TOKENS - 1]] = IGNORE_INDEX
    return hidden, weight, labels, torch.tensor(1.0 / int((labels != IGNORE_INDEX).sum()), dtype=dtype)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.t()
    z = z_loss * logits.logsumexp(-1).square()[labels != IGNORE_INDEX].sum() * scale
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX) * scale + z, z


def in_slices(monkeypatch: pytest.MonkeyPatch, slices: int) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", -(-TOKENS // slices) * WORDS)


@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
@pytest.mark.parametrize("slices", [1, 2, 5, TOKENS])
def test_loss_and_gradients_are_those_of_the_plain_cross_entropy(
    slices: int, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices(monkeypatch, slices)
    hidden, weight, labels, scale = batch(torch.float64)
    expected, expected_z = plain(hidden, weight, labels, scale, z_loss)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    found, z = linear_cross_entropy(hidden, weight, labels, scale, z_loss=z_loss)
    torch.testing.assert_close((found, z), (expected, expected_z))
    torch.testing.assert_close(torch.autograd.grad(found, [hidden, weight]), wanted)


def test_what_a_compiler_sees_is_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU nothing is overwritten, so that all of it fuses; the formula is another way to write the same.
    hidden, weight, labels, scale = batch(torch.float64)
    eager, z = linear_cross_entropy(hidden, weight, labels, scale, z_loss=Z_LOSS)
    wanted = torch.autograd.grad(eager, [hidden, weight])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled, compiled_z = linear_cross_entropy(hidden, weight, labels, scale, z_loss=Z_LOSS)
    torch.testing.assert_close((compiled, compiled_z), (eager, z))
    torch.testing.assert_close(torch.autograd.grad(compiled, [hidden, weight]), wanted)


def test_rows_that_only_make_a_product_fast_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slices(monkeypatch, 3)
    hidden, weight, labels, scale = batch(torch.float64)
    exact = linear_cross_entropy(hidden, weight, labels, scale, z_loss=Z_LOSS)
    wanted = torch.autograd.grad(exact[0], [hidden, weight])
    monkeypatch.setattr(loss, "_padded_rows", lambda rows: rows.shape[0] + 7)
    found = linear_cross_entropy(hidden, weight, labels, scale, z_loss=Z_LOSS)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(torch.autograd.grad(found[0], [hidden, weight]), wanted)


def test_gradients_are_those_of_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slices(monkeypatch, 3)
    hidden, weight, labels, scale = batch(torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: 3.0 * linear_cross_entropy(x, w, labels, scale, z_loss=Z_LOSS)[0], (hidden, weight), fast_mode=True
    )


def test_a_loss_that_is_differentiated_as_it_is_refuses_a_factor() -> None:
    hidden, weight, labels, scale = batch(torch.float64)
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, scale)[0], [hidden, weight])
    found, _ = linear_cross_entropy(hidden, weight, labels, scale, unit_factor=True)
    torch.testing.assert_close(torch.autograd.grad(found, [hidden, weight]), wanted)
    found, _ = linear_cross_entropy(hidden, weight, labels, scale, unit_factor=True)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        (2.0 * found).backward()


def test_in_bf16_only_the_products_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slices(monkeypatch, 2)
    hidden, weight, labels, scale = batch(torch.float32)
    narrow = hidden.detach().bfloat16().requires_grad_()
    found, _ = linear_cross_entropy(narrow, weight, labels, scale)
    expected, _ = plain(narrow.float(), weight.bfloat16().float(), labels, scale, 0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)
    found.backward()
    assert narrow.grad is not None
    assert weight.grad is not None
    assert (narrow.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_an_ignored_token_has_no_gradient_and_a_batch_of_them_no_loss() -> None:
    hidden, weight, labels, scale = batch(torch.float64)
    linear_cross_entropy(hidden, weight, labels, scale, z_loss=Z_LOSS)[0].backward()
    assert hidden.grad is not None
    moved = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(moved, labels != IGNORE_INDEX)
    with torch.no_grad():
        nothing, z = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE_INDEX), scale, z_loss=Z_LOSS)
    assert (float(nothing), float(z)) == (0.0, 0.0)


def test_logits_too_large_for_exp_give_a_finite_loss() -> None:
    hidden = torch.full((1, 1), 1e4)
    weight = torch.tensor([[1.0], [0.5], [-1.0]])
    found, _ = linear_cross_entropy(hidden, weight, torch.tensor([1]), torch.tensor(1.0))
    assert float(found) == 5e3


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, labels, scale = batch(torch.float64)
    with_gradients, _ = linear_cross_entropy(hidden, weight, labels, scale)
    with torch.no_grad():
        without, _ = linear_cross_entropy(hidden, weight, labels, scale)
    assert torch.equal(with_gradients, without)

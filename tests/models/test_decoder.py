"""The decoder computes what transformers computes from the same weights: logits, loss and gradients of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.models.one_process import by_name, fill_from_hf, gradients, one_process_model, token_rows
from support.models.tiny_models import VARIANTS, hf_model, save_tiny_hf, tiny_config
from trainshed.engines.torch.model import RankModel
from trainshed.models.attention import inverse_frequencies
from trainshed.models.loss import IGNORE_INDEX
from trainshed.models.moe import MoE
from trainshed.recipe import ModelConfig

ROWS, LENGTH = 2, 24


def ours(config: ModelConfig, folder: Path) -> RankModel:
    model = one_process_model(config, length=LENGTH)
    fill_from_hf(model, folder)
    return model


def our_logits(model: RankModel, tokens: torch.Tensor) -> torch.Tensor:
    """Scores as transformers lays them out: [B, S, V]."""
    with torch.no_grad():
        return model.stages[0].logits(model.stages[0](tokens)).transpose(0, 1)


def next_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Labels as transformers makes them: the next token, and none for the last."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)], dim=1)


def our_loss(model: RankModel, tokens: torch.Tensor) -> torch.Tensor:
    labels = next_tokens(tokens)
    model.normalization.tokens.fill_(1.0 / int((labels != IGNORE_INDEX).sum()))
    return model.stages[0](tokens, labels)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_loss_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path, seed=2)
    tokens = token_rows(config, ROWS, LENGTH)
    model, theirs = ours(config, tmp_path), hf_model(tmp_path)
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
    logits = our_logits(model, tokens)
    assert expected.logits.std() > 0.1
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_loss(model, tokens).detach(), expected.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama-biases", "qwen3-biases", "nemotron-biases"),
        *("llama3", "qwen3", "gpt2", "qwen3_moe", "deepseek_v3", "deepseek-plain"),
        *("gemma2", "olmo3", "nemotron", "gpt_oss", "gpt-oss-plain", "llama4_text", "llama4-scout"),
    ],
)
def test_gradients_of_all_tensors_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path / "weights", seed=3)
    tokens = token_rows(config, ROWS, LENGTH, seed=1)
    model, theirs = ours(config, tmp_path / "weights"), hf_model(tmp_path / "weights")
    our_loss(model, tokens).backward()
    found = gradients(model)

    theirs(tokens, labels=tokens).loss.backward()
    expected = as_native(theirs, config, tmp_path / "gradients")
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=2e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


def as_native(theirs: Any, config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model's gradients in place of its weights, so that what reads weights gives them under our names."""
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(weight.grad)
    theirs.save_pretrained(folder)
    return {name: weight.local_tensor for name, weight in by_name(ours(config, folder)).items()}


def test_a_sliding_window_forgets_tokens_before_it(tmp_path: Path) -> None:
    config = save_tiny_hf("mistral", tmp_path, layers=1, sliding_window=8)
    model = ours(config, tmp_path)
    tokens = token_rows(config, 1, LENGTH)
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % config.vocab_size
    moved = (our_logits(model, tokens) != our_logits(model, changed)).any(-1)[0]
    # One layer sees the token itself and the seven before it.
    assert moved.nonzero().flatten().tolist() == list(range(5, 13))


def test_rope_scaling_of_llama_3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    scaled = tiny_config("llama3")
    assert scaled.rope is not None
    assert scaled.rope.scaling is not None
    plain = inverse_frequencies(tiny_config("llama3", rope={"base": scaled.rope.base}))
    ratio = inverse_frequencies(scaled) / plain
    # Wavelengths of 6, 20, 63 and 199 positions against 32 original ones, bounds 32 / 4 and 32 / 1.
    assert ratio[0] == 1.0
    assert 1 / 8 < ratio[1] < 1.0
    assert ratio[2:].tolist() == [1 / 8, 1 / 8]


def test_a_shared_expert_is_added_to_what_the_router_chose() -> None:
    config = tiny_config("qwen3_moe", moe={"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 16})
    model = one_process_model(config, length=LENGTH)
    mlp = model.stages[0].layers["0"].mlp
    assert isinstance(mlp, MoE)
    x = torch.randn(LENGTH, 2, config.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
        whole, _ = mlp(x, None)
        normed = F.rms_norm(x, (config.hidden,), mlp.norm.weight, config.norm_eps)
        gate, up = mlp.shared.gate_up.weight[0::2], mlp.shared.gate_up.weight[1::2]
        shared = (F.silu(normed @ gate.t()) * (normed @ up.t())) @ mlp.shared.down.weight.t()
        mlp.shared.down.weight.zero_()
        routed, _ = mlp(x, None)
    assert shared.abs().mean() > 1
    torch.testing.assert_close(whole - routed, shared, rtol=1e-4, atol=1e-3)

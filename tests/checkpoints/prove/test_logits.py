"""The same tokens through two models: the streamed decoder against transformers, and the first layer that is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.tiny_models import VARIANTS, hf_model, save_tiny_hf
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.prove import logits as logits_module
from trainshed.checkpoints.prove.layerwise import TransformersOracle, layer_states, measure_probe
from trainshed.checkpoints.prove.logits import (
    ComparedLogits,
    LogitsComparison,
    LogitsNotRun,
    PromptBatch,
    compare_logits,
)
from trainshed.errors import InputError

SAMPLE = ("llama3", "gpt2", "qwen3_moe")


class AnotherFormat:
    """Weights that transformers cannot open: a stand-in for a format of our own over the same tensors."""

    def __init__(self, weights: HfWeights) -> None:
        self.config, self.dtypes, self.read = weights.config, weights.dtypes, weights.read
        self.close, self.__enter__, self.__exit__ = weights.close, weights.__enter__, weights.__exit__


def compared(a: Path, b: Path, **keys: object) -> LogitsComparison:
    answers = compare_logits(
        HfWeights(a), AnotherFormat(HfWeights(b)), PromptBatch.probe(HfWeights(a).config.vocab_size), **keys
    )  # type: ignore[arg-type]
    assert isinstance(answers, ComparedLogits)
    return answers.comparison


@pytest.mark.parametrize(
    "variant", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.full) for each in VARIANTS]
)
def test_the_streamed_decoder_agrees_with_transformers_after_every_layer(variant: str, tmp_path: Path) -> None:
    save_tiny_hf(variant, tmp_path, seed=2)
    tokens = PromptBatch.probe(96).ids
    with torch.no_grad():
        theirs = hf_model(tmp_path)(tokens, output_hidden_states=True)
    weights = HfWeights(tmp_path)
    states = zip(layer_states(weights, tokens), TransformersOracle(weights).states(tokens), strict=True)
    for (ours, oracle), expected in zip(states, (*theirs.hidden_states, theirs.logits), strict=True):
        assert ours.name == oracle.name
        assert torch.equal(oracle.values, expected), "layer by layer transformers computes what it does with all of it"
        torch.testing.assert_close(ours.values, expected, rtol=0, atol=2e-5, msg=ours.name)
    found = compared(tmp_path, tmp_path)
    assert found.passed
    assert found.greedy_equal == found.tokens == 128
    assert found.first_diverging is None
    assert found.computed_by[0].startswith("transformers ")


def test_the_layer_that_was_changed_is_where_they_part(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "a", seed=1, layers=3)
    save_tiny_hf("llama", tmp_path / "b", seed=1, layers=3)
    state = load_file(tmp_path / "b" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] *= 1.1
    save_file(state, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert not found.passed
    assert found.first_diverging == "layer 1"
    assert found.max_error is not None
    assert found.bound is not None
    assert found.max_error > found.bound
    state["model.layers.1.mlp.up_proj.weight"] *= float("nan")
    save_file(state, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.passed, found.cosine, found.max_error, found.first_diverging) == (False, None, None, "layer 1")


def test_equal_tensors_under_a_config_that_lost_its_rope_scaling_answer_differently(tmp_path: Path) -> None:
    save_tiny_hf("llama3", tmp_path / "a", seed=1)
    save_tiny_hf("llama3", tmp_path / "b", seed=1, rope={"base": 100.0})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert not found.passed
    assert found.first_diverging == "layer 0"


def test_a_conversion_that_rounds_is_compared_with_what_was_rounded(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "a", seed=1)
    save_tiny_hf("llama", tmp_path / "b", seed=1)
    rounded = {name: each.bfloat16() for name, each in load_file(tmp_path / "b" / "model.safetensors").items()}
    save_file(rounded, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    assert compared(tmp_path / "a", tmp_path / "b", dtype=torch.bfloat16).passed
    assert not compared(tmp_path / "a", tmp_path / "b").passed


def test_without_transformers_our_decoder_answers_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_hf("llama", tmp_path, seed=1)
    monkeypatch.setattr(logits_module, "transformers_name", lambda: None)
    found = compared(tmp_path, tmp_path)
    assert found.passed
    assert found.max_error == 0.0
    assert found.computed_by[0] == "Trainshed's decoder, layer by layer (transformers is not installed)"


def test_prompts_of_several_lengths_are_asked_at_once_and_their_padding_does_not_count(tmp_path: Path) -> None:
    save_tiny_hf("mistral", tmp_path, seed=1)
    weights = HfWeights(tmp_path)
    prompts = PromptBatch.of([[5, 6, 7], list(range(20))], 96)
    answers = compare_logits(weights, AnotherFormat(weights), prompts)  # type: ignore[arg-type]
    assert isinstance(answers, ComparedLogits)
    assert answers.comparison.passed
    assert answers.comparison.tokens == 23
    alone = compare_logits(weights, AnotherFormat(weights), PromptBatch.of([[5, 6, 7]], 96))  # type: ignore[arg-type]
    assert isinstance(alone, ComparedLogits)
    torch.testing.assert_close(alone.logits[0], answers.logits[0, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "said"), [([[1], []], "a prompt without tokens"), ([[1, 96]], "have a token 96, and the model has 96")]
)
def test_prompts_that_the_model_cannot_read(rows: list[list[int]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PromptBatch.of(rows, 96)


def test_models_of_different_shapes_are_not_asked(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "a")
    save_tiny_hf("llama", tmp_path / "b", layers=3)
    one, two = HfWeights(tmp_path / "a"), HfWeights(tmp_path / "b")
    answers = compare_logits(one, two, PromptBatch.probe(96))
    assert isinstance(answers, LogitsNotRun)
    assert "`layers` is 2 in the first, 3 in the second" in answers.reason
    save_tiny_hf("gpt2", tmp_path / "c", max_positions=16)
    short = HfWeights(tmp_path / "c")
    assert compare_logits(short, short, PromptBatch.probe(96)) == LogitsNotRun(
        "the model has learned fewer positions than 64"
    )
    assert measure_probe(short) is None

"""Log-likelihoods: those of transformers, whatever shares a context, however many run together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from support.models.tiny_models import hf_model, save_tiny_hf
from trainshed.errors import InputError, TrainshedError
from trainshed.serve.evaluation.likelihood import Continuation, LikelihoodScorer
from trainshed.serve.loading import load_model


def requests(vocab_size: int) -> list[Continuation]:
    """Groups of one to four continuations, of one token and of many; some with their context are longer than 64."""
    draw = random.Random(7)
    asked = []
    for context_length in (1, 3, 20, 60, 20, 63):
        context = [draw.randrange(vocab_size) for _ in range(context_length)]
        for length in draw.sample((1, 2, 9, 30), draw.randint(1, 4)):
            asked.append(Continuation(context, [draw.randrange(vocab_size) for _ in range(length)]))
    draw.shuffle(asked)
    return asked


@pytest.mark.parametrize("variant", ["llama", "mistral", pytest.param("mixtral", marks=pytest.mark.full)])
def test_continuations_have_the_likelihood_of_transformers(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save_tiny_hf(variant, tmp_path, seed=3)
    asked, decoder, theirs = requests(config.vocab_size), load_model(str(tmp_path)).decoder, hf_model(tmp_path)
    counted: list[int] = []
    scores = LikelihoodScorer(decoder, max_length=64).score(asked, counted.append)
    assert sum(counted) == len(asked)
    for one, request in zip(scores, asked, strict=True):
        whole = [*request.context, *request.tokens][-65:]
        with torch.no_grad():
            logprobs = theirs(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)[-len(request.tokens) :]
        tokens = torch.tensor(request.tokens)
        assert one.logprob == pytest.approx(float(logprobs.gather(1, tokens[:, None]).sum()), rel=1e-5)
        assert one.is_greedy == bool((logprobs.argmax(-1) == tokens).all())
    # Small passes, and few logits at a time, give the same.
    monkeypatch.setattr("trainshed.serve.evaluation.likelihood.PASS_TOKENS", {"cpu": 70})
    monkeypatch.setattr("trainshed.serve.evaluation.likelihood._LOGITS_ELEMENTS", 3 * config.vocab_size)
    for one, other in zip(LikelihoodScorer(decoder, max_length=64).score(asked), scores, strict=True):
        assert (one.logprob, one.is_greedy) == (pytest.approx(other.logprob, rel=1e-5), other.is_greedy)


def test_what_cannot_be_scored_is_said(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path, seed=3)
    scorer = LikelihoodScorer(load_model(str(tmp_path)).decoder, max_length=64)
    assert scorer.score([Continuation([1], [])])[0].logprob == 0.0
    with pytest.raises(TrainshedError, match="has 65 tokens, and the model has 64 positions"):
        scorer.score([Continuation([1], [1] * 65)])


def test_weights_that_are_not_numbers_have_no_likelihood(tmp_path: Path) -> None:
    """lm-eval would take the first choice of every question, and call that a score."""
    save_tiny_hf("llama", tmp_path, seed=3)
    decoder = load_model(str(tmp_path)).decoder
    for parameter in decoder.parameters():
        parameter.fill_(float("nan"))
    with pytest.raises(InputError, match="the scores of the model are not numbers"):
        LikelihoodScorer(decoder, max_length=64).score([Continuation([1], [2, 3])])

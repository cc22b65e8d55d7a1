"""Answers at a validation: the likeliest tokens of the model as it stands, the same on every layout, packed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.recipes.small_recipes import ALONE, MODELS, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_measuring
from support.runs.small_runs import events, state
from trainshed.data.prompts import ValidationPrompts
from trainshed.engines.torch.sample_answers import AnswerRows
from trainshed.models.decoder import DecoderStage
from trainshed.recipe import ModelConfig
from trainshed.serve.loading import build_decoder

PROMPTS = ValidationPrompts(
    texts=("a", "b", "c", "d", "e"),
    tokens=((7,), (1, 2, 3), (4, 9, 11, 23, 5), (60, 59), (30, 31, 32, 33)),
    answer_tokens=6,
    end_tokens=frozenset({14, 20}),
)
STEPS = ("train.steps=4",)


def answered(pool: RankPool, folder: Path, layout: str, model: str = "dense", *, packed: bool = False) -> list[Any]:
    """Train a little and return the answers of each validation."""
    arguments = (folder, model, layout, STEPS, 2, False, None, None, None, PROMPTS, packed)
    assert set(pool.run(train_measuring, *arguments, ranks=world_size(layout))) == {0}
    return [(event["step"], event["answers"]) for event in events(folder, "answers")]


def greedy(decoder: DecoderStage, prompt: tuple[int, ...]) -> tuple[list[int], bool]:
    """One prompt by itself, a token at a time, through the decoder that serves."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < PROMPTS.answer_tokens:
        with torch.no_grad():
            hidden = decoder(torch.tensor([tokens + [0] * (decoder.spec.sequence_length - len(tokens))]))
            token = int(decoder.logits(hidden[len(tokens) - 1, 0]).argmax())
        if token in PROMPTS.end_tokens:
            return tokens[len(prompt) :], True
        tokens.append(token)
    return tokens[len(prompt) :], False


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The answers of one process."""
    models = ("dense", "tied", "moe")
    return {model: answered(rank_pool, tmp_path_factory.mktemp(model), ALONE, model) for model in models}


SAMPLED = ("dense", "tied", "moe", "latent")


@pytest.mark.parametrize(
    "model", [*SAMPLED, *(pytest.param(model, marks=pytest.mark.full) for model in MODELS if model not in SAMPLED)]
)
def test_answers_are_the_likeliest_tokens_of_the_weights_at_that_step(
    rank_pool: RankPool, tmp_path: Path, model: str
) -> None:
    answers = answered(rank_pool, tmp_path, ALONE, model)
    assert [step for step, _ in answers] == [2, 4]
    decoder = build_decoder(ModelConfig.model_validate(MODELS[model]), torch.float64, torch.device("cpu"))
    weights = state(tmp_path / "apart", 4)
    decoder.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")},
        assign=True,
    )
    expected = [greedy(decoder, prompt) for prompt in PROMPTS.tokens]
    assert [(answer["tokens"], answer["ended"]) for answer in answers[-1][1]] == expected
    assert [answer["prompt"] for answer in answers[-1][1]] == list(PROMPTS.texts)
    file = json.loads((tmp_path / "answers" / "step-00000004.json").read_text())
    assert (file["schema"], file["step"], file["answers"]) == ("trainshed.answers/1", 4, answers[-1][1])
    if model == "dense":
        assert {ended for _, ended in expected} == {True, False}
    assert len({tuple(tokens) for tokens, _ in expected}) > 3, "answers that are all the same prove little"


@pytest.mark.parametrize(
    ("model", "layout", "packed"),
    [
        ("dense", "tp=2,micro_batch=4", False),
        ("dense", "pp=2,micro_batch=2", False),
        ("dense", "cp=2,micro_batch=4", False),
        ("dense", "dp=2,shard=full,micro_batch=2", True),
        # Ranks without a prompt: the head is gathered on all of them.
        ("dense", "dp=4,shard=full,micro_batch=2", False),
        ("dense", ALONE, True),
        ("moe", "dp=2,ep=2,micro_batch=4", False),
        pytest.param("dense", "cp=2,tp=2,micro_batch=4", True, marks=pytest.mark.full),
        pytest.param("tied", "pp=2,dp=2,micro_batch=2", True, marks=pytest.mark.full),
        pytest.param("tied", "tp=2,pp=2,micro_batch=4", False, marks=pytest.mark.full),
        pytest.param("dense", "dp=4,shard=zero2,micro_batch=2", False, marks=pytest.mark.full),
        pytest.param("dense", "pp=2,dp=2,shard=full,micro_batch=2", True, marks=pytest.mark.full),
        pytest.param("moe", "tp=2,ep=2,micro_batch=4", True, marks=pytest.mark.full),
    ],
)
def test_every_layout_gives_the_answers_of_one_process(
    rank_pool: RankPool, tmp_path: Path, alone: dict[str, list[Any]], model: str, layout: str, packed: bool
) -> None:
    assert answered(rank_pool, tmp_path, layout, model, packed=packed) == alone[model]


def test_a_pipeline_of_several_chunks_per_rank_answers_as_one_process(rank_pool: RankPool, tmp_path: Path) -> None:
    four = ("model.config.layers=4",)
    answers = []
    for name, layout in (("one", ALONE), ("chunks", "pp=2,vp=2,micro_batch=2")):
        (tmp_path / name).mkdir()
        arguments = (tmp_path / name, "dense", layout, (*STEPS, *four), 2, False, None, None, None, PROMPTS)
        assert set(rank_pool.run(train_measuring, *arguments, ranks=world_size(layout))) == {0}
        answers.append([event["answers"] for event in events(tmp_path / name, "answers")])
    assert answers[0] == answers[1]


def test_prompts_share_rows_where_documents_are_kept_apart_and_have_their_own_otherwise() -> None:
    packed = AnswerRows(PROMPTS, 16, row_multiple=4, packed=True)
    assert packed.tokens.shape == (4, 16)
    assert (packed.rows, packed.starts) == ([0, 0, 1, 2, 2], [0, 6, 0, 0, 7])
    assert packed.document_starts is not None
    assert packed.document_starts[0].tolist() == [0] * 6 + [6] * 8 + [14] * 2, "the rest of a row is its own document"
    assert packed.tokens[0].tolist() == [7, *[0] * 5, 1, 2, 3, *[0] * 7]
    apart = AnswerRows(PROMPTS, 16, row_multiple=4, packed=False)
    assert (apart.tokens.shape, apart.document_starts) == ((8, 16), None)
    assert (apart.rows, apart.starts) == ([0, 1, 2, 3, 4], [0] * 5)
    apart.append(1, 42)
    assert apart.tokens[1, :5].tolist() == [1, 2, 3, 42, 0]
    assert apart.last_column(1) == 3
    apart.append(1, 14)
    assert (apart.answers[1], apart.ended[1]) == ([42], True)
    assert apart.open_prompts == [0, 2, 3, 4]
    for _ in range(PROMPTS.answer_tokens):
        apart.append(2, 8)
    assert apart.open_prompts == [0, 3, 4]
    assert apart.tokens[2, 5:].tolist() == [*[8] * 5, *[0] * 6], "the last token is not read any more"


def test_where_nothing_decodes_answers_they_are_stored_as_tokens_and_it_is_said(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    ((_, answers), _) = answered(rank_pool, tmp_path, ALONE)
    assert {answer["answer"] for answer in answers} == {None}
    assert any("answers are stored as tokens" in event["text"] for event in events(tmp_path, "warning"))

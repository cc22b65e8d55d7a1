"""Tokens are chosen as asked: by the model's probabilities, within bounds, with random numbers of one's own."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from trainshed.serve.request import SamplingParams
from trainshed.serve.sampler import SampledToken, SamplerState, sample

SCORES = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.5, -0.5])
DRAWS = 4000


def counted(scores: torch.Tensor = SCORES, draws: int = DRAWS, **sampling: Any) -> Counter[int]:
    """How often each token is chosen, in an answer of so many tokens."""
    chooser = SamplerState(SamplingParams(seed=7, **sampling))
    return Counter(one(scores, chooser).token for _ in range(draws))


def one(scores: torch.Tensor, chooser: SamplerState) -> SampledToken:
    """What is chosen of one row."""
    (choice,) = sample(scores[None], [chooser])
    assert choice is not None
    return choice


def check_distribution(found: Counter[int], expected: torch.Tensor) -> None:
    """Pearson's statistic against its 99.9% quantile (of at most 7 degrees of freedom); fixed seeds, so never flaky."""
    total = sum(found.values())
    assert set(found) <= set(expected.nonzero().flatten().tolist())
    likely = [(found[token], total * float(share)) for token, share in enumerate(expected) if share > 0]
    statistic = sum((seen - due) ** 2 / due for seen, due in likely)
    assert statistic < 24.3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    check_distribution(counted(temperature=temperature), (SCORES / temperature).softmax(-1))


def test_top_k_draws_from_the_likeliest_alone() -> None:
    kept = torch.where(SCORES >= 1.0, SCORES, -math.inf)
    check_distribution(counted(top_k=3), kept.softmax(-1))


def test_top_p_keeps_the_token_that_fills_the_share_and_no_more() -> None:
    probabilities = SCORES.softmax(-1)
    best = float(probabilities[0] + probabilities[6])
    for share, kept in ((best - 1e-3, {0, 6}), (best + 1e-3, {0, 6, 1}), (float(probabilities[0]) - 1e-3, {0})):
        mask = torch.tensor([token in kept for token in range(len(SCORES))])
        check_distribution(counted(top_p=share, draws=1500), torch.where(mask, SCORES, -math.inf).softmax(-1))


def test_top_p_counts_within_what_top_k_left() -> None:
    # Of three tokens with 51%, 31% and 19% among themselves, 80% are two.
    assert set(counted(top_k=3, top_p=0.8, draws=500)) == {0, 6}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}, {"temperature": 0.0, "top_k": 5}],
    ids=str,
)
def test_settings_that_leave_one_token_give_the_likeliest(sampling: dict[str, Any]) -> None:
    assert set(counted(draws=50, **sampling)) == {0}


@pytest.mark.parametrize("sampling", [{}, {"top_k": 100}, {"top_p": 1.0}, {"top_k": 8, "top_p": 0.999999}], ids=str)
def test_bounds_that_bind_nothing_leave_every_token(sampling: dict[str, Any]) -> None:
    assert set(counted(draws=3000, **sampling)) == set(range(8))


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    scores = SCORES.clone()
    scores[[0, 7]] = -math.inf
    assert set(counted(scores, temperature=5.0)) == {1, 2, 3, 4, 5, 6}


def test_random_numbers_are_ones_own() -> None:
    """The same seed draws the same tokens, whoever else draws beside it and in whichever row."""
    wanted = SamplingParams(seed=11, temperature=1.3)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_k=4),
        SamplingParams(seed=4, logprobs=2, top_p=0.5),
    ]
    rows = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    alone = SamplerState(wanted)
    expected = [one(row, alone).token for row in rows]
    among, beside = SamplerState(wanted), [SamplerState(each) for each in others]
    found = []
    for number, row in enumerate(rows):
        batch, place = [*beside], number % 4
        batch.insert(place, among)
        scores = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        scores[place] = row
        choice = sample(scores, batch)[place]
        assert choice is not None
        found.append(choice.token)
    assert found == expected
    assert len(set(expected)) > 3


def test_without_a_seed_answers_differ() -> None:
    scores = torch.zeros(1000)
    drawn = {tuple(one(scores, chooser).token for _ in range(4)) for chooser in [SamplerState(SamplingParams())] * 2}
    drawn |= {tuple(one(scores, SamplerState(SamplingParams())).token for _ in range(4))}
    assert len(drawn) > 1


def test_seeds_that_differ_in_sign_or_size_are_different_seeds() -> None:
    scores = torch.zeros(10_000)
    first = {one(scores, SamplerState(SamplingParams(seed=seed))).token for seed in (0, 1, -1, 2**64, 2**64 + 1)}
    assert len(first) == 5


def test_penalties_count_what_was_chosen_before() -> None:
    scores = torch.tensor([1.0, 0.9, 0.2])
    # 1.0, then 0.9; then 1.0 - 0.5, 0.9 - 0.5 and 0.2; then 0.0, 0.4 and 0.2.
    frequency = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=0.5))
    assert [one(scores, frequency).token for _ in range(5)] == [0, 1, 0, 1, 2]
    presence = SamplerState(SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert [one(scores, presence).token for _ in range(4)] == [0, 1, 0, 0]
    thanks = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=-1.0))
    assert [one(scores, thanks).token for _ in range(3)] == [0, 0, 0]


def test_logprobs_are_the_models_own_whatever_was_done_to_the_scores() -> None:
    chooser = SamplerState(SamplingParams(temperature=0.2, top_k=2, presence_penalty=1.0, seed=1, logprobs=3))
    expected = SCORES.log_softmax(-1)
    for _ in range(4):
        choice = one(SCORES, chooser)
        assert choice.logprob == pytest.approx(float(expected[choice.token]))
        assert [each.token for each in choice.top_logprobs] == [0, 6, 1]
        assert [each.logprob for each in choice.top_logprobs] == pytest.approx(expected[[0, 6, 1]].tolist())


def test_each_row_is_told_as_many_alternatives_as_it_asked_for() -> None:
    counts = [None, 0, 2, 20]
    choices = sample(
        SCORES.repeat(4, 1), [SamplerState(SamplingParams(temperature=0.0, logprobs=count)) for count in counts]
    )
    assert [len(choice.top_logprobs) for choice in choices if choice] == [0, 0, 2, 8]
    assert [choice.logprob is None for choice in choices if choice] == [True, False, False, False]


@pytest.mark.parametrize("broken", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"logprobs": 1}], ids=str)
def test_scores_that_are_no_numbers_choose_nothing_and_harm_nobody(
    broken: list[float], sampling: dict[str, Any]
) -> None:
    rows = torch.tensor([[0.0, 9.0], broken, [0.0, 9.0]])
    choices = sample(rows, [SamplerState(SamplingParams(seed=1, **sampling)) for _ in rows])
    assert [choice and choice.token for choice in choices] == [1, None, 1]

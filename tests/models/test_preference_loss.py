"""The loss of packed pairs a slice of tokens at a time is the plain DPO loss and that of trl; so are its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.models.tiny_models import random_hf_model, tiny_config
from support.models.trl_preference import PackedPairs, TokenPair, pack_pairs, random_pairs, trl_dpo
from trainshed.models import loss
from trainshed.models.loss import IGNORE_INDEX, VocabularyShard
from trainshed.models.preference_loss import (
    PREFERENCE_FIGURES,
    PackedDocuments,
    PreferenceRule,
    document_slots,
    linear_document_logps,
    linear_preference_loss,
    number_documents,
)

LENGTH, HIDDEN, WORDS = 50, 8, 37
RULES = [
    PreferenceRule(0.1),
    PreferenceRule(0.5, label_smoothing=0.2),
    PreferenceRule(2.0, length_normalized=True),
    PreferenceRule(0.3, label_smoothing=0.1, length_normalized=True),
]


def packed_pairs() -> PackedPairs:
    """Two rows of three pairs and of one, which leaves more padding than documents; and one of padding alone."""
    pairs = random_pairs(4, WORDS)
    return pack_pairs([pairs[:3], pairs[3:], []], LENGTH)


def documents_of(packed: PackedPairs) -> PackedDocuments:
    rows, slots = len(packed.tokens), document_slots(packed.tokens.shape[1])
    numbers = number_documents(packed.document_starts) + slots * torch.arange(rows)[:, None]
    return PackedDocuments(numbers.flatten(), rows, slots)


def states(packed: PackedPairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and a head."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(packed.tokens.numel(), HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(WORDS, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight


def plain_logps(hidden: torch.Tensor, weight: torch.Tensor, packed: PackedPairs, rule: PreferenceRule) -> torch.Tensor:
    """The log-probabilities of each pair [P, 2], read off all logits, document by document."""
    tokens = (hidden @ weight.t()).log_softmax(-1).view(*packed.tokens.shape, -1)
    logps = []
    for row, labels, starts in zip(tokens, packed.labels, packed.document_starts, strict=True):
        for start in starts.unique().tolist():
            mine = (starts == start) & (labels != IGNORE_INDEX)
            if mine.any():
                logp = row[mine].gather(-1, labels[mine][:, None]).sum()
                logps.append(logp / mine.sum() if rule.length_normalized else logp)
    return torch.stack(logps).view(-1, 2)


def plain_loss(
    hidden: torch.Tensor, weight: torch.Tensor, packed: PackedPairs, reference: torch.Tensor, rule: PreferenceRule
) -> tuple[torch.Tensor, dict[str, float]]:
    logps = plain_logps(hidden, weight, packed, rule)
    rewards = rule.beta * (logps - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - rule.label_smoothing) * F.logsigmoid(margin) - rule.label_smoothing * F.logsigmoid(-margin)
    means = [*rewards.mean(0), (margin > 0).double().mean(), *logps.mean(0)]
    return losses.mean(), {name: mean.item() for name, mean in zip(PREFERENCE_FIGURES, means, strict=True)}


def our_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    packed: PackedPairs,
    reference_hidden: torch.Tensor,
    reference_weight: torch.Tensor,
    rule: PreferenceRule,
    pairs: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    documents, labels = documents_of(packed), packed.labels.flatten()
    vocabulary = VocabularyShard(weight.shape[0])
    reference = linear_document_logps(reference_hidden, reference_weight, labels, documents, rule, vocabulary)
    scale = torch.tensor(1.0 / pairs, dtype=hidden.dtype)
    loss, figures = linear_preference_loss(hidden, weight, labels, documents, reference, scale, rule, vocabulary)
    return loss, dict(zip(PREFERENCE_FIGURES, (figures / pairs).tolist(), strict=True))


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("slices", [1, 7])
def test_loss_figures_and_gradients_are_those_of_the_plain_formula(
    slices: int, rule: PreferenceRule, frozen_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_pairs()
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", -(-packed.tokens.numel() // slices) * WORDS)
    hidden, weight = states(packed)
    weight.requires_grad_(not frozen_head)
    base = 0.7 * hidden.detach().flip(-1)
    inputs = [hidden] if frozen_head else [hidden, weight]
    reference = plain_logps(base, weight, packed, rule).detach()
    expected, expected_figures = plain_loss(hidden, weight, packed, reference, rule)
    expected_gradients = torch.autograd.grad(3.0 * expected, inputs)
    result, figures = our_loss(hidden, weight, packed, base, weight, rule, pairs=4)
    torch.testing.assert_close(result, expected)
    assert figures == pytest.approx(expected_figures, rel=1e-12)
    assert 0 < figures["reward_accuracy"] < 1, "pairs of both kinds"
    torch.testing.assert_close(torch.autograd.grad(3.0 * result, inputs), expected_gradients)


def test_only_tokens_of_answers_have_a_gradient() -> None:
    packed = packed_pairs()
    hidden, weight = states(packed)
    our_loss(hidden, weight, packed, 0.5 * hidden, weight, RULES[0], pairs=4)[0].backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, packed.labels.flatten() != IGNORE_INDEX)


def test_a_model_that_is_its_own_reference_has_no_rewards_and_the_loss_of_a_coin() -> None:
    packed = packed_pairs()
    hidden, weight = states(packed)
    result, figures = our_loss(hidden, weight, packed, hidden, weight, PreferenceRule(0.1), pairs=4)
    assert result.item() == pytest.approx(0.6931471805599453, rel=1e-15)
    assert (figures["reward_chosen"], figures["reward_rejected"], figures["reward_accuracy"]) == (0.0, 0.0, 0.0)


def test_a_document_without_a_partner_counts_for_nothing() -> None:
    packed = packed_pairs()
    hidden, weight = states(packed)
    whole, _ = our_loss(hidden, weight, packed, 0.5 * hidden, weight, RULES[0], pairs=4)
    # The last pair of the first row loses the labels of its worse answer.
    labels = packed.labels.clone()
    worse = packed.document_starts[0] == packed.document_starts[0].unique()[5]
    labels[0, worse] = IGNORE_INDEX
    three = PackedPairs(packed.tokens, labels, packed.document_starts)
    result, _ = our_loss(hidden, weight, three, 0.5 * hidden, weight, RULES[0], pairs=4)
    rest = without_pair(packed, 2)
    reference = plain_logps(0.5 * hidden, weight, rest, RULES[0])
    expected, _ = plain_loss(hidden, weight, rest, reference, RULES[0])
    torch.testing.assert_close(result, expected * 3 / 4)
    assert result.item() < whole.item()


def without_pair(packed: PackedPairs, pair: int) -> PackedPairs:
    """The same rows with both answers of a pair of the first row unlearned."""
    labels = packed.labels.clone()
    for start in packed.document_starts[0].unique()[2 * pair : 2 * pair + 2].tolist():
        labels[0, packed.document_starts[0] == start] = IGNORE_INDEX
    return PackedPairs(packed.tokens, labels, packed.document_starts)


def test_documents_are_numbered_in_their_row_whatever_their_length() -> None:
    starts = torch.tensor([[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    expected = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    assert torch.equal(number_documents(starts), expected)
    assert document_slots(6) == 6
    assert document_slots(7) == 8


@pytest.fixture
def hf_models() -> tuple[Any, Any]:
    config = tiny_config("llama")
    return random_hf_model(config, 0), random_hf_model(config, 1)


def packed_states(model: Any, rows: list[list[TokenPair]], packed: PackedPairs) -> torch.Tensor:
    """The hidden states of a transformers model, each document by itself, at its place in the packed rows."""
    hidden = torch.zeros(*packed.tokens.shape, model.config.hidden_size)
    for number, pairs in enumerate(rows):
        documents = [document for pair in pairs for document in pair.documents]
        alone = [model.base_model(torch.tensor([document])).last_hidden_state[0] for document in documents]
        together = torch.cat(alone)
        hidden[number, : len(together)] = together
    return hidden.flatten(0, 1)


@pytest.mark.parametrize(
    ("loss_type", "rule"),
    [
        ("sigmoid", PreferenceRule(0.1)),
        ("sigmoid", PreferenceRule(0.6)),
        ("sigmoid_norm", PreferenceRule(1.5, length_normalized=True)),
    ],
)
def test_loss_rewards_and_gradients_are_those_of_trl(
    loss_type: str, rule: PreferenceRule, hf_models: tuple[Any, Any], tmp_path: Path
) -> None:
    model, reference = hf_models
    pairs = random_pairs(5, model.config.vocab_size)
    rows = [pairs[:2], pairs[2:]]
    packed = pack_pairs(rows, LENGTH)
    theirs = trl_dpo(model, reference, pairs, tmp_path, loss_type=loss_type, beta=rule.beta)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(theirs.loss, parameters)
    result, figures = our_loss(
        packed_states(model, rows, packed),
        model.lm_head.weight,
        packed,
        packed_states(reference, rows, packed),
        reference.lm_head.weight,
        rule,
        pairs=5,
    )
    torch.testing.assert_close(result, theirs.loss, rtol=1e-6, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(result, parameters), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert figures["reward_accuracy"] == pytest.approx(theirs.figures["rewards/accuracies"]) or rule.length_normalized
    if not rule.length_normalized:  # trl's rewards are those of sums even where its loss compares means
        for ours, name in [
            ("reward_chosen", "rewards/chosen"),
            ("reward_rejected", "rewards/rejected"),
            ("logp_chosen", "logps/chosen"),
            ("logp_rejected", "logps/rejected"),
        ]:
            assert figures[ours] == pytest.approx(theirs.figures[name], rel=1e-6, abs=1e-6)


def test_smoothed_labels_are_those_of_trl(hf_models: tuple[Any, Any], tmp_path: Path) -> None:
    # trl smooths labels this way in `aot`, which sorts the pairs of a batch: with one pair there is nothing to sort.
    model, reference = hf_models
    (pair,) = random_pairs(1, model.config.vocab_size, seed=3)
    packed = pack_pairs([[pair]], LENGTH)
    theirs = trl_dpo(model, reference, [pair], tmp_path, loss_type="aot", beta=0.4, label_smoothing=0.2)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(theirs.loss, parameters)
    result, _ = our_loss(
        packed_states(model, [[pair]], packed),
        model.lm_head.weight,
        packed,
        packed_states(reference, [[pair]], packed),
        reference.lm_head.weight,
        PreferenceRule(0.4, label_smoothing=0.2),
        pairs=1,
    )
    torch.testing.assert_close(result, theirs.loss, rtol=1e-6, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(result, parameters), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)

"""Sampling tokens: each row of a batch by its own parameters and its own random numbers.

A row's token is a function of its logits, its parameters, its seed and how many tokens it has sampled; never of
the rows beside it. So rows are only put together in one operation where that cannot change any of them.

Shapes: B rows, R those of them that are sampled at random, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainshed.serve.request import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class SampledToken:
    """A token that was chosen, and its log-probability where it was asked for."""

    token: int
    logprob: float | None = None
    alternatives: tuple[TokenLogprob, ...] = ()


class SamplerState:
    """What one answer remembers of its choices: its random numbers, and which tokens it has used how often."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        seed = sampling.seed if sampling.seed is not None else random.SystemRandom().getrandbits(64)
        # Python's generator is the same on every platform and in every version; a text as a seed keeps its sign.
        self._random = random.Random(str(seed))
        self._used: dict[int, int] = {}

    @property
    def is_penalised(self) -> bool:
        """Whether tokens that were used count for less."""
        return bool(self._used) and bool(self.sampling.frequency_penalty or self.sampling.presence_penalty)

    def uniform(self) -> float:
        """Return the next of its random numbers, in [0, 1)."""
        return self._random.random()

    def penalties(self, scores: torch.Tensor) -> torch.Tensor:
        """Take what used tokens lose off a row of scores [V]."""
        sampling = self.sampling
        tokens = torch.tensor(list(self._used), device=scores.device)
        losses = [sampling.frequency_penalty * count + sampling.presence_penalty for count in self._used.values()]
        return scores.index_add(0, tokens, -torch.tensor(losses, dtype=scores.dtype, device=scores.device))

    def use(self, token: int) -> None:
        """Remember a choice."""
        if self.sampling.frequency_penalty or self.sampling.presence_penalty:
            self._used[token] = self._used.get(token, 0) + 1


def sample(logits: torch.Tensor, choosers: Sequence[SamplerState]) -> list[SampledToken | None]:
    """Choose a token for each row of scores: float32 [B, V]; None where the scores are no numbers."""
    scores = logits
    penalised = [row for row, chooser in enumerate(choosers) if chooser.is_penalised]
    if penalised:
        scores = logits.clone()
        for row in penalised:
            scores[row] = choosers[row].penalties(logits[row])
    chosen = scores.argmax(-1)
    for bounded in (False, True):
        rows = [row for row, chooser in enumerate(choosers) if _is_random(chooser, bounded=bounded)]
        if rows:
            at = torch.tensor(rows, device=logits.device)
            chosen[at] = _sample_rows(scores[at], [choosers[row] for row in rows], bounded=bounded)
    # A row that holds something else than numbers, or nothing that could be chosen, shows it in its largest.
    tokens, sound = torch.stack([chosen, logits.amax(-1).isfinite().long()]).tolist()
    for chooser, token in zip(choosers, tokens, strict=True):
        chooser.use(token)
    choices = [SampledToken(token) if is_sound else None for token, is_sound in zip(tokens, sound, strict=True)]
    told = [row for row, chooser in enumerate(choosers) if chooser.sampling.logprobs is not None]
    if told:
        at = torch.tensor(told, device=logits.device)
        most = max(choosers[row].sampling.logprobs or 0 for row in told)
        found = compute_logprobs(logits[at], chosen[at], most)
        for row, choice in zip(told, found, strict=True):
            count = choosers[row].sampling.logprobs
            if sound[row]:
                choices[row] = SampledToken(choice.token, choice.logprob, choice.alternatives[:count])
    return choices


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> list[SampledToken]:
    """Tell the log-probability of a token in each row of scores [B, V], and those of the likeliest tokens."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(alternatives, logprobs.shape[1]), dim=-1)
    rows = zip(tokens.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        SampledToken(token, logprob, tuple(TokenLogprob(*each) for each in zip(others, values, strict=True)))
        for token, logprob, others, values in rows
    ]


def _is_random(chooser: SamplerState, *, bounded: bool) -> bool:
    sampling = chooser.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0) == bounded


def _sample_rows(scores: torch.Tensor, choosers: Sequence[SamplerState], *, bounded: bool) -> torch.Tensor:
    """Draw a token for each row of scores [R, V] by its temperature, and within its bounds: int64 [R]."""
    settings = [
        (each.sampling.temperature, each.uniform(), each.sampling.top_p, each.sampling.top_k) for each in choosers
    ]
    table = torch.tensor(settings, dtype=torch.float64, device=scores.device)
    temperature, uniform, top_p, top_k = (column[:, None] for column in table.unbind(1))
    # The likeliest becomes 0 before the division, so that no temperature is too small for it.
    scores = (scores - scores.amax(-1, keepdim=True)).double() / temperature
    if not bounded:
        return _invert_cdf(scores.softmax(-1), uniform)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -math.inf)
    probabilities = scores.softmax(-1)
    # Tokens up to and including the one that fills the share: what stands before each is less than the share.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill((before >= top_p) & (rank > 0), 0.0)
    return order.gather(1, _invert_cdf(probabilities, uniform)[:, None])[:, 0]


def _invert_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Find where the uniform number falls among probabilities [R, V], which need not sum to 1: int64 [R]."""
    ends = probabilities.cumsum(-1)
    found = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[-1] - 1)[:, 0]

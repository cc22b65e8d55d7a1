"""Sampling tokens: each row of a batch by its own parameters and its own random numbers.

A row's token is a function of its logits, its parameters, its seed and how many tokens it has sampled, and not of the
other rows. So rows share an operation only if that cannot change any of them.

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
    """A sampled token, and its log-probability if it was requested."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class SamplerState:
    """The state of one request's sampler: its random numbers, and how often it has used each token."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        seed = sampling.seed if sampling.seed is not None else random.SystemRandom().getrandbits(64)
        # Python's generator is the same on every platform and in every version; a string as seed keeps the sign.
        self._random = random.Random(str(seed))
        self._counts: dict[int, int] = {}

    @property
    def is_penalised(self) -> bool:
        """Whether penalties apply to tokens that were used."""
        return bool(self._counts) and bool(self.sampling.frequency_penalty or self.sampling.presence_penalty)

    def next_uniform(self) -> float:
        """Return the next random number, in [0, 1)."""
        return self._random.random()

    def apply_penalties(self, scores: torch.Tensor) -> torch.Tensor:
        """Subtract the penalties of used tokens from a row of logits [V]."""
        sampling = self.sampling
        tokens = torch.tensor(list(self._counts), device=scores.device)
        losses = [sampling.frequency_penalty * count + sampling.presence_penalty for count in self._counts.values()]
        return scores.index_add(0, tokens, -torch.tensor(losses, dtype=scores.dtype, device=scores.device))

    def record(self, token: int) -> None:
        """Count a token as used."""
        if self.sampling.frequency_penalty or self.sampling.presence_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | None]:
    """Sample a token for each row of logits, float32 [B, V]; None if a row's logits are not finite."""
    scores = logits
    penalised = [row for row, state in enumerate(states) if state.is_penalised]
    if penalised:
        scores = logits.clone()
        for row in penalised:
            scores[row] = states[row].apply_penalties(logits[row])
    sampled = scores.argmax(-1)
    for bounded in (False, True):
        rows = [row for row, state in enumerate(states) if _is_random(state, bounded=bounded)]
        if rows:
            at = torch.tensor(rows, device=logits.device)
            sampled[at] = _sample_rows(scores[at], [states[row] for row in rows], bounded=bounded)
    # A row with a NaN, or without any finite logit, shows it in its maximum.
    tokens, finite = torch.stack([sampled, logits.amax(-1).isfinite().long()]).tolist()
    for state, token in zip(states, tokens, strict=True):
        state.record(token)
    results = [SampledToken(token) if is_finite else None for token, is_finite in zip(tokens, finite, strict=True)]
    with_logprobs = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
    if with_logprobs:
        at = torch.tensor(with_logprobs, device=logits.device)
        most = max(states[row].sampling.logprobs or 0 for row in with_logprobs)
        computed = compute_logprobs(logits[at], sampled[at], most)
        for row, token in zip(with_logprobs, computed, strict=True):
            count = states[row].sampling.logprobs
            if finite[row]:
                results[row] = SampledToken(token.token, token.logprob, token.top_logprobs[:count])
    return results


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_logprobs: int) -> list[SampledToken]:
    """Return the log-probability of one token in each row of logits [B, V], and those of the most likely tokens."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top_logprobs, logprobs.shape[1]), dim=-1)
    rows = zip(tokens.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        SampledToken(token, logprob, tuple(map(TokenLogprob, others, values)))
        for token, logprob, others, values in rows
    ]


def _is_random(state: SamplerState, *, bounded: bool) -> bool:
    sampling = state.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0) == bounded


def _sample_rows(scores: torch.Tensor, states: Sequence[SamplerState], *, bounded: bool) -> torch.Tensor:
    """Sample a token for each row of logits [R, V] by its temperature, top_k and top_p: int64 [R]."""
    settings = [
        (state.sampling.temperature, state.next_uniform(), state.sampling.top_p, state.sampling.top_k)
        for state in states
    ]
    table = torch.tensor(settings, dtype=torch.float64, device=scores.device)
    temperature, uniform, top_p, top_k = (column[:, None] for column in table.unbind(1))
    # The maximum becomes 0 before the division, so that no temperature is too small for it.
    scores = (scores - scores.amax(-1, keepdim=True)).double() / temperature
    if not bounded:
        return _invert_cdf(scores.softmax(-1), uniform)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -math.inf)
    probabilities = scores.softmax(-1)
    # Keep tokens up to and including the one that reaches top_p: the sum before each of them is less than top_p.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill((before >= top_p) & (rank > 0), 0.0)
    return order.gather(1, _invert_cdf(probabilities, uniform)[:, None])[:, 0]


def _invert_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Find where the uniform number falls among probabilities [R, V], which need not sum to 1: int64 [R]."""
    ends = probabilities.cumsum(-1)
    index = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)
    return index.clamp_(max=probabilities.shape[-1] - 1)[:, 0]

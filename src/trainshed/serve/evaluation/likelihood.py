"""Log-likelihoods of continuations, many at once: a context is computed once for all that follow it.

Requests with the same context are one group (the choices of a question). A pass runs the contexts of many groups, each
with its first continuation. Further passes run the other continuations over the cached keys of their context. A context
of a few tokens (whole texts have only BOS) is not worth a pass of its own: such requests are groups by themselves.

Shapes: T tokens of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import DecoderStage
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.runner import ModelRunner, ScheduledTokens

PASS_TOKENS = {"cpu": 1024, "cuda": 8192}
"""How many tokens one pass runs. On a CPU more do not make a token cheaper; a GPU wants large products."""
_SHORTEST_SHARED_CONTEXT = 16
"""In tokens. Members of a group run one after another, so what they share must be worth more than running together."""
# The most elements of logits that are computed at a time.
_LOGITS_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Continuation:
    """What is scored: the tokens that follow a context, which has one token at least."""

    context: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Likelihood:
    """The log-likelihood of a continuation, and whether greedy decoding would have given it."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True)
class _Group:
    """Requests with the same context: their numbers, and their tokens."""

    context: tuple[int, ...]
    members: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def block_length(self) -> int:
        """How many slots of the cache it needs."""
        return len(self.context) + max(len(tokens) for _, tokens in self.members) - 1

    @property
    def first_pass_tokens(self) -> int:
        return len(self.context) + len(self.members[0][1]) - 1


@dataclass
class _Totals:
    """The sums of one request so far."""

    logprob: float = 0.0
    is_greedy: bool = True


_Target = tuple[int, int, int]
"""Row of a pass's hidden states, the token that follows it, the number of its request."""


class LikelihoodScorer:
    """Scores continuations with a whole decoder on one device."""

    def __init__(self, decoder: DecoderStage, *, max_length: int) -> None:
        self.max_length = max_length
        self.pass_tokens = PASS_TOKENS.get(decoder.spec.device.type, PASS_TOKENS["cpu"])
        slots = max(self.pass_tokens, max_length)
        self._runner = ModelRunner(decoder, ServingLimits(1, max_length, slots), eager=True)
        self._logits_rows = max(1, _LOGITS_ELEMENTS // decoder.config.vocab_size)

    def score(
        self, requests: Sequence[Continuation], on_scored: Callable[[int], None] = lambda _: None
    ) -> list[Likelihood]:
        """Return the likelihood of each continuation. `on_scored` is called with how many more are done.

        A request longer than the model's positions loses the beginning of its context.
        """
        totals = [_Totals() for _ in requests]
        # The longest first: what is said of the time that is left is then never too little.
        groups = sorted(self._groups(requests), key=lambda group: (-group.block_length, group.context))
        with torch.inference_mode():
            for batch in self._batches(groups):
                self._score_batch(batch, totals)
                on_scored(sum(len(group.members) for group in batch))
        return [Likelihood(total.logprob, total.is_greedy) for total in totals]

    def _groups(self, requests: Sequence[Continuation]) -> list[_Group]:
        groups: dict[tuple[tuple[int, ...], int | None], _Group] = {}
        for number, request in enumerate(requests):
            tokens = tuple(request.tokens)
            if not tokens:
                continue  # the likelihood of nothing is 1
            if len(tokens) > self.max_length:
                raise TrainshedError(
                    f"a continuation has {len(tokens)} tokens, and the model has {self.max_length} positions",
                    hint="write shorter choices, or evaluate a model with more positions",
                )
            context = tuple(request.context)[-(self.max_length + 1 - len(tokens)) :]
            alone = number if len(context) < _SHORTEST_SHARED_CONTEXT else None
            groups.setdefault((context, alone), _Group(context)).members.append((number, tokens))
        return list(groups.values())

    def _batches(self, groups: Sequence[_Group]) -> Iterator[list[_Group]]:
        """Yield groups whose first passes and whose blocks of the cache fit together."""
        batch: list[_Group] = []
        blocks = tokens = 0
        for group in groups:
            blocks, tokens = blocks + group.block_length, tokens + group.first_pass_tokens
            if batch and (blocks > self._runner.limits.cache_tokens or tokens > self.pass_tokens):
                yield batch
                batch, blocks, tokens = [], group.block_length, group.first_pass_tokens
            batch.append(group)
        if batch:
            yield batch

    def _score_batch(self, batch: Sequence[_Group], totals: list[_Totals]) -> None:
        starts: list[int] = []
        parts: list[ScheduledTokens] = []
        targets: list[_Target] = []
        row = slot = 0
        for group in batch:
            number, tokens = group.members[0]
            starts.append(slot)
            parts.append(ScheduledTokens([*group.context, *tokens[:-1]], 0, slot, longest=group.block_length))
            row += len(group.context)
            # The state after the context predicts the first token of every member.
            targets += [(row - 1, others[0], member) for member, others in group.members]
            targets += [(row + place, token, number) for place, token in enumerate(tokens[1:])]
            row, slot = row + len(tokens) - 1, slot + group.block_length
        self._run(parts, targets, totals)
        for turn in range(1, max(len(group.members) for group in batch)):
            self._score_members(batch, starts, turn, totals)

    def _score_members(self, batch: Sequence[_Group], starts: Sequence[int], turn: int, totals: list[_Totals]) -> None:
        """Run one further continuation of each group that has so many, over the keys of its context."""
        parts: list[ScheduledTokens] = []
        targets: list[_Target] = []
        row = 0
        for group, start in zip(batch, starts, strict=True):
            number, tokens = group.members[turn] if turn < len(group.members) else (0, ())
            if len(tokens) < 2:
                continue
            parts.append(ScheduledTokens(tokens[:-1], len(group.context), start, longest=group.block_length))
            targets += [(row + place, token, number) for place, token in enumerate(tokens[1:])]
            row += len(tokens) - 1
        if parts:
            self._run(parts, targets, totals)

    def _run(self, parts: Sequence[ScheduledTokens], targets: Sequence[_Target], totals: list[_Totals]) -> None:
        hidden = self._runner.prefill(parts, together=True)
        rows = sorted({row for row, _, _ in targets})
        place = {row: number for number, row in enumerate(rows)}
        wanted = sorted((place[row], token, number) for row, token, number in targets)
        states = hidden[torch.tensor(rows, device=hidden.device)]
        done = 0
        for start in range(0, len(rows), self._logits_rows):
            stop = min(start + self._logits_rows, len(rows))
            end = next((at for at in range(done, len(wanted)) if wanted[at][0] >= stop), len(wanted))
            self._add(states[start:stop], start, wanted[done:end], totals)
            done = end

    def _add(self, states: torch.Tensor, first: int, wanted: Sequence[_Target], totals: list[_Totals]) -> None:
        """Add what logits of states [R, H] say of the wanted tokens to the sums of their requests."""
        logits = self._runner.logits(states)
        at, tokens, _ = torch.tensor(wanted, device=states.device).unbind(1)
        at = at - first
        logprobs = (logits[at, tokens] - logits.logsumexp(-1)[at]).tolist()
        if any(map(math.isnan, logprobs)):
            raise InputError(
                "the scores of the model are not numbers: its weights are broken, or too large for their dtype",
                hint="try --dtype bf16 or fp32",
            )
        greedy = (logits.argmax(-1)[at] == tokens).tolist()
        for (_, _, number), logprob, is_greedy in zip(wanted, logprobs, greedy, strict=True):
            totals[number].logprob += logprob
            totals[number].is_greedy &= is_greedy

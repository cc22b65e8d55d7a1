"""Run the same tokens through two models: how far apart are their logits, and after which layer do they diverge?

Tensors can be equal while a lost key of the config (RoPE scaling, an epsilon) makes another model of them. So each side
is computed by an oracle where one is installed: transformers for Hugging Face's weights, megatron-core for Megatron's.
Everything else is computed by our decoder. All run layer by layer, in float32 on the CPU, in the memory of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.megatron.weights import MegatronWeights
from trainshed.checkpoints.prove.layerwise import (
    LOGITS,
    OLDEST_TRANSFORMERS,
    LayerState,
    TransformersOracle,
    is_transformers_family,
    is_transformers_supported,
    layer_states,
    transformers_name,
)
from trainshed.checkpoints.prove.megatron_oracle import MegatronOracle
from trainshed.checkpoints.prove.probe import PROBE_TOKENS, probe_batch
from trainshed.checkpoints.weights import AdvanceProgress, Weights
from trainshed.errors import InputError
from trainshed.reporting import SILENT, Reporter

# A share of the largest value: float32 rounding differs between implementations (fused attention, order of sums).
LOGITS_BOUND = 1e-4
# Rounding may make a router send a token to another expert; that token's logits then differ, and this is not an error.
TOKENS_WITHIN, TOKENS_WITHIN_WITH_EXPERTS = 1.0, 0.99
OUR_DECODER = "Trainshed's decoder, layer by layer"


@dataclass(frozen=True)
class PromptBatch:
    """Token ids [B, S], padded at the end; `lengths` are those without padding. Causal models never see a pad."""

    ids: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], vocab_size: int) -> PromptBatch:
        """Make a batch of prompts of several lengths."""
        if not rows or not all(rows):
            raise InputError("there is a prompt without tokens", hint="write one prompt a line")
        largest = max(max(row) for row in rows)
        if largest >= vocab_size:
            raise InputError(
                f"the prompts have a token {largest}, and the model has {vocab_size}",
                hint="name the tokenizer that belongs to the model with --tokenizer",
            )
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        return cls(ids, tuple(map(len, rows)))

    @classmethod
    def probe(cls, vocab_size: int) -> PromptBatch:
        """The inputs of the probe batch."""
        ids = torch.from_numpy(probe_batch(vocab_size, PROBE_TOKENS)[:, :-1]).long()
        return cls(ids, (ids.shape[1],) * ids.shape[0])

    def without_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [B, S, …] without padding: [tokens, …]."""
        return torch.cat([row[:length] for row, length in zip(values, self.lengths, strict=True)])


@dataclass(frozen=True)
class LogitsNotRun:
    """Logits that were not computed, and the reason."""

    reason: str
    passed: bool = True

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"ran": False, "reason": self.reason}


@dataclass(frozen=True)
class LogitsComparison:
    """The logits of two models for the same tokens.

    `cosine` is the lowest of all tokens, `max_error` the largest difference of two logits, `bound` its limit; all are
    None where a logit is NaN. `greedy_equal` counts the tokens after which both predict the same next token.
    """

    passed: bool
    cosine: float | None
    max_error: float | None
    bound: float | None
    tokens: int
    tokens_within: int
    greedy_equal: int
    first_diverging: str | None
    computed_by: tuple[str, str]

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"ran": True, **asdict(self), "computed_by": list(self.computed_by)}


@dataclass(frozen=True)
class ComparedLogits:
    """A comparison, and the logits [B, S, V] of the second model."""

    comparison: LogitsComparison
    logits: torch.Tensor


def compare_logits(
    a: Weights, b: Weights, prompts: PromptBatch, *, dtype: torch.dtype | None = None, reporter: Reporter = SILENT
) -> ComparedLogits | LogitsNotRun:
    """Run both models on the same prompts; with `dtype` the weights of the first are rounded to it beforehand."""
    for key in ("layers", "hidden", "vocab_size"):
        one, two = getattr(a.config, key), getattr(b.config, key)
        if one != two:
            return LogitsNotRun(f"the models are not of one shape: `{key}` is {one} in the first, {two} in the second")
    if a.config.positions == "learned" and prompts.ids.shape[1] > min(a.config.max_positions, b.config.max_positions):
        return LogitsNotRun(f"the model has learned fewer positions than {prompts.ids.shape[1]}")
    diverging: str | None = None
    left = right = LayerState("", torch.empty(0))
    with ExitStack() as open_oracles, reporter.task("running layers", total=2 * a.config.layers, unit="layers") as task:
        one, by_one = _run_model(a, prompts, dtype, task.advance, open_oracles)
        two, by_two = _run_model(b, prompts, None, task.advance, open_oracles)
        for left, right in zip(one, two, strict=True):
            if diverging is None and left.name != LOGITS:
                first, second = prompts.without_padding(left.values), prompts.without_padding(right.values)
                if _within(_errors(first, second), _bound(first)) < _wanted_share(a):
                    diverging = right.name
    return ComparedLogits(_judge(a, prompts, left, right, diverging, (by_one, by_two)), right.values)


def _run_model(
    weights: Weights, prompts: PromptBatch, dtype: torch.dtype | None, advance: AdvanceProgress, open_oracles: ExitStack
) -> tuple[Iterator[LayerState], str]:
    """Return the states of a model, and the name of what computes them."""
    by = OUR_DECODER
    if isinstance(weights, HfWeights):
        name = transformers_name()
        if name is None:
            by += " (transformers is not installed)"
        elif not is_transformers_supported():
            by += f" ({name} is older than {OLDEST_TRANSFORMERS})"
        elif not is_transformers_family(weights.config.family):
            by += f" ({name} does not know `{weights.config.family}`)"
        else:
            oracle = TransformersOracle(weights, dtype)
            if not oracle.unknown:
                return oracle.states(prompts.ids, advance), name
            by += f" ({name} has `{oracle.unknown[0]}`, which nobody here knows where to find)"
    elif isinstance(weights, MegatronWeights):
        megatron = MegatronOracle(weights, prompts.ids, dtype)
        open_oracles.callback(megatron.close)
        if megatron.refusal is None:
            return megatron.states(advance), megatron.name
        by += f" ({megatron.name} {megatron.refusal})"
    return layer_states(weights, prompts.ids, dtype=dtype, advance=advance), by


def _judge(
    a: Weights, prompts: PromptBatch, left: LayerState, right: LayerState, diverging: str | None, by: tuple[str, str]
) -> LogitsComparison:
    one, two = prompts.without_padding(left.values), prompts.without_padding(right.values)
    errors, bound = _errors(one, two), _bound(one)
    within = _within(errors, bound)
    # Written so that NaN fails.
    passed = within >= _wanted_share(a)
    if not passed and diverging is None:
        diverging = "head"
    return LogitsComparison(
        passed=passed,
        cosine=_number(torch.nn.functional.cosine_similarity(one.double(), two.double(), dim=-1).min()),
        max_error=_number(errors.max()),
        bound=_number(torch.tensor(bound)),
        tokens=one.shape[0],
        tokens_within=round(within * one.shape[0]),
        greedy_equal=int((one.argmax(-1) == two.argmax(-1)).sum()),
        first_diverging=None if passed else diverging,
        computed_by=by,
    )


def _errors(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return the largest difference at each token: [tokens]."""
    return (one - two).abs().amax(-1)


def _bound(values: torch.Tensor) -> float:
    return LOGITS_BOUND * max(1.0, float(values.abs().max()))


def _within(errors: torch.Tensor, bound: float) -> float:
    """Return the share of tokens whose error is within the bound."""
    return float((errors <= bound).double().mean())


def _wanted_share(weights: Weights) -> float:
    return TOKENS_WITHIN if weights.config.moe is None else TOKENS_WITHIN_WITH_EXPERTS


def _number(value: torch.Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None

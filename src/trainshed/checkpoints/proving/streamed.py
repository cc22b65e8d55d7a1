"""Our decoder over weights in any format, one layer at a time: a model of any size runs in the memory of one layer.

It is the decoder that trains (`models/decoder.py`), in float32 on one process; here its layers come and go. What it
says about weights is what the engine will say before step 0.

Shapes: S tokens, B sequences, H hidden, V vocabulary; the decoder works S-first, what is given out is [B, S, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.checkpoints.proving.compare import boxes
from trainshed.checkpoints.proving.probe import TOKENS, Probe, probe_batch
from trainshed.checkpoints.weights import Weights
from trainshed.errors import InputError
from trainshed.models.collectives import Axes
from trainshed.models.decoder import Block, Losses
from trainshed.models.layers import Norm
from trainshed.models.parameters import Parameter, layer_parameters, parameters
from trainshed.models.positions import rotary_table
from trainshed.reporting import SILENT, Reporter

LOGITS = "logits"
"""The name of the last state."""


@dataclass(frozen=True)
class State:
    """What a model holds after one of its parts: the residual stream [B, S, H], at the end the logits [B, S, V]."""

    name: str
    values: torch.Tensor


@torch.no_grad()
def streamed_states(
    weights: Weights,
    tokens: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[State]:
    """Carry token ids [B, S] through a model: after the embedding, each layer, the last norm; then the logits.

    With `dtype` the weights are rounded to it first. What follows the last layer is given out normed, as transformers
    does. `advance` is called after each layer.
    """
    config, length = weights.config, tokens.shape[1]
    if config.positions == "learned" and length > config.max_positions:
        raise InputError(
            f"{length} tokens are more than the {config.max_positions} positions this model has learned",
            hint="ask it something shorter",
        )
    reading = _Reading(weights, dtype)
    table = {each.name: each for each in parameters(config) if each.layer is None}
    positions = torch.arange(length)
    rotary = None
    if config.positions == "rope":
        cosine, sine = rotary_table(config, positions)
        rotary = cosine[:, None, None], sine[:, None, None]
    x = reading.rows(table["embedding.weight"], tokens.t())
    if config.positions == "learned":
        x = x + reading.rows(table["positions.weight"], positions)[:, None]
    yield State("embedding", x.transpose(0, 1))
    for layer in range(config.layers):
        with torch.device("meta"):
            block = Block(config, Axes(), Losses(), layer, "none")
        reading.fill(block, f"layers.{layer}.", {each.name: each for each in layer_parameters(config, layer)})
        x, _ = block(x, rotary, None, None, positions)
        advance(1)
        if layer < config.layers - 1:
            yield State(f"layer {layer}", x.transpose(0, 1))
    with torch.device("meta"):
        norm = Norm(config.hidden, config)
    reading.fill(norm, "norm.", table)
    x = norm(x)
    yield State(f"layer {config.layers - 1}", x.transpose(0, 1))
    head = table["embedding.weight" if config.tied_embeddings else "head.weight"]
    yield State(LOGITS, reading.scores(head, x).transpose(0, 1))


def probe_loss(logits: torch.Tensor, vocab_size: int) -> float:
    """The loss of logits [B, S, V] for the inputs of the probe batch, in nats per token."""
    labels = torch.from_numpy(probe_batch(vocab_size, TOKENS)[:, 1:]).long()
    return float(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


def measured_probe(weights: Weights, reporter: Reporter = SILENT) -> Probe | None:
    """Measure the loss of weights on the probe batch; None where the model has learned fewer positions than it has."""
    if weights.config.positions == "learned" and weights.config.max_positions < TOKENS:
        return None
    vocab_size = weights.config.vocab_size
    tokens = torch.from_numpy(probe_batch(vocab_size, TOKENS)[:, :-1]).long()
    values = tokens
    with reporter.task("running layers", total=weights.config.layers, unit="layers") as task:
        for state in streamed_states(weights, tokens, advance=task.advance):
            values = state.values
    return as_probe(probe_loss(values, vocab_size), vocab_size)


def as_probe(loss: float, vocab_size: int) -> Probe:
    """The probe of a loss that was computed here."""
    return Probe.measured(loss, vocab_size=vocab_size, sequence_length=TOKENS, precision="fp32")


class _Reading:
    """Reads what a part needs, in the narrowest dtype that holds it: layers widen weights where they use them."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None) -> None:
        stored = torch.bfloat16 if weights.dtypes == ["bfloat16"] else torch.float32
        self._weights, self._dtype = weights, dtype or stored

    def fill(self, module: nn.Module, prefix: str, table: Mapping[str, Parameter]) -> None:
        """Give a module without memory its weights."""
        state = {}
        for name, _ in module.named_parameters():
            parameter = table[prefix + name]
            state[name] = self._weights.read(parameter, (0,) * len(parameter.shape), parameter.shape, self._dtype)
        module.load_state_dict(state, assign=True)

    def rows(self, parameter: Parameter, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table by their number, float32 [*ids, H]: the table itself never exists whole."""
        found = torch.empty(*ids.shape, parameter.shape[1])
        for (start, _), (count, width) in boxes(parameter.shape):
            here = (ids >= start) & (ids < start + count)
            if here.any():
                block = self._weights.read(parameter, (start, 0), (count, width), self._dtype)
                found[here] = block[ids[here] - start].float()
        return found

    def scores(self, parameter: Parameter, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, B, H] against every row of a table: [S, B, V]."""
        scores = torch.empty(*x.shape[:-1], parameter.shape[0])
        for (start, _), (count, width) in boxes(parameter.shape):
            block = self._weights.read(parameter, (start, 0), (count, width), self._dtype).float()
            scores[..., start : start + count] = x @ block.t()
        return scores

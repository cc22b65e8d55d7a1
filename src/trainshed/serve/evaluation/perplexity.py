"""The loss of a model on prepared tokens, as the engine's validation computes it: same rows, same labels, same layers.

Rows come from a `DataOrder`, so documents are kept apart, or not, as in training. The loss is the sum over all labelled
tokens divided by their number.

Shapes: B rows of a pass, L sequence_length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainshed.data.order import DataOrder
from trainshed.data.sampling.rows import IGNORED_LABEL, SampleRows
from trainshed.errors import InputError
from trainshed.models.decoder import DecoderStage, LossNormalization, Regularization
from trainshed.models.layers import Linear
from trainshed.models.moe import GroupedExperts
from trainshed.reporting import SILENT, Reporter

PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
"""How many tokens one pass runs: rows are as long as they are, so this many at most unless a single row is longer."""


@dataclass(frozen=True)
class MeasuredLoss:
    """The summed loss of labelled tokens, how many there are, and how many bytes of text they stand for.

    `bytes` is None where the tokenizer does not say it.
    """

    loss_sum: float
    tokens: int
    bytes: int | None

    @property
    def loss(self) -> float:
        """The mean loss of a token, in nats."""
        return self.loss_sum / self.tokens

    def scores(self) -> dict[str, float]:
        """Return what is reported. Perplexity is exp(loss), infinite where that is not a number of 64 bits."""
        scores = {"loss": self.loss, "perplexity": math.exp(self.loss) if self.loss < 700 else math.inf}
        if self.bytes:
            scores["bits_per_byte"] = self.loss_sum / math.log(2) / self.bytes
        return scores


def every_row(order: DataOrder) -> list[np.ndarray]:
    """Return every sample of an order's only source once."""
    (source,) = order.sources
    assert source.epoch_samples is not None, "prepared tokens have an end"
    return [np.arange(source.epoch_samples, dtype=np.int64)]


def measure_loss(
    decoder: DecoderStage,
    order: DataOrder,
    samples: Sequence[np.ndarray],
    *,
    token_bytes: np.ndarray | None = None,
    label: str = "perplexity",
    reporter: Reporter = SILENT,
) -> MeasuredLoss:
    """Return the loss of a decoder over samples of an order; `token_bytes` [V] are the lengths of tokens in bytes."""
    length = order.sequence_length
    if length > decoder.config.max_positions:
        raise InputError(
            f"rows of {length} tokens are longer than the {decoder.config.max_positions} positions of the model",
            hint=f"write --sequence-length {decoder.config.max_positions} or less",
        )
    rows_at_once = max(1, PASS_TOKENS.get(decoder.spec.device.type, PASS_TOKENS["cpu"]) // length)
    model = _with_row_length(decoder, length)
    loss_sum, tokens, text_bytes = 0.0, 0, 0
    total = sum(map(len, samples)) * length
    with torch.inference_mode(), reporter.task(label, total=total, unit="tokens") as task:
        for part in samples:
            for start in range(0, len(part), rows_at_once):
                rows = order.read(part[start : start + rows_at_once])
                labels = rows.labels()
                learned = labels[labels != IGNORED_LABEL]
                loss_sum += _loss_sum(model, rows, labels)
                tokens += len(learned)
                text_bytes += 0 if token_bytes is None else int(token_bytes[learned].sum())
                task.advance(len(rows) * length)
                if tokens:
                    task.describe(f"loss {loss_sum / tokens:.4f}")
    if not tokens:
        raise InputError("these tokens have no labels: nothing in them is learned", where=order.sources[0].name)
    if not math.isfinite(loss_sum):
        raise InputError(
            "the loss is not a number: the weights are broken, or too large for their dtype",
            hint="try --dtype bf16 or fp32",
        )
    return MeasuredLoss(loss_sum, tokens, None if token_bytes is None else text_bytes)


def _with_row_length(decoder: DecoderStage, length: int) -> DecoderStage:
    """Return the decoder for rows of a length; it has the same weights, not a copy of them."""
    device = decoder.spec.device
    normalization = LossNormalization(torch.ones((), device=device), torch.ones((), device=device))
    spec = replace(decoder.spec, sequence_length=length)
    with torch.device("meta"):
        model = DecoderStage(decoder.config, decoder.axes, spec, Regularization(), normalization).to(spec.dtype)
    model.requires_grad_(False).load_state_dict(decoder.state_dict(), assign=True)
    for ours, theirs in zip(model.modules(), decoder.modules(), strict=True):
        # Serving reorders gate and up projections once (`put_gates_first`).
        if isinstance(ours, Linear | GroupedExperts) and isinstance(theirs, Linear | GroupedExperts):
            ours.gate_up_interleaved = theirs.gate_up_interleaved
    return model.eval()


def _loss_sum(model: DecoderStage, rows: SampleRows, labels: np.ndarray) -> float:
    device = model.spec.device
    tokens = torch.from_numpy(rows.tokens[:, :-1].astype(np.int64)).to(device)
    starts = rows.document_starts
    placed = None if starts is None else torch.from_numpy(starts[:, :-1].astype(np.int64)).to(device)
    return float(model(tokens, torch.from_numpy(labels).to(device), None, placed)[0])

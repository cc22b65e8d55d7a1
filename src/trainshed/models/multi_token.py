"""Multi-token prediction (section 2.2 of DeepSeek-V3's report): layers after the last, each predicts one token further.

The layer at depth k takes, at column c, the hidden state of depth k - 1 and the embedding of token c + k, and predicts
token c + k + 1 with the model's own head. Its input is made by `MtpInput`; its tokens and labels are the labels of the
batch, shifted. The hidden states that it is given are normalised, those of depth 0 by the model's last norm, as in
Megatron-LM and vLLM.

Shapes: L whole sequence, S tokens of this context-parallel rank, s = S / tp, B sequences of the micro-batch, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.attention import context_parallel_positions
from trainshed.models.collectives import AxisGroup, all_gather
from trainshed.models.layers import Linear, Norm
from trainshed.models.loss import IGNORE_INDEX
from trainshed.recipe import ModelConfig


class MtpInput(nn.Module):
    """What a layer for multi-token prediction has besides a layer: how its input is made, and its last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding_norm = Norm(config.hidden, config)
        self.hidden_norm = Norm(config.hidden, config)
        self.projection = Linear(2 * config.hidden, config.hidden, bias=False)
        self.norm = Norm(config.hidden, config)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Join hidden states and embedded tokens [s, B, H] into the input of the layer [s, B, H]."""
        return self.projection(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1))


def further_tokens(labels: torch.Tensor, depth: int, cp: AxisGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that the layer at a depth is given and its labels, both [B, S], from the labels [B, S].

    A column counts only if every token up to the one that it predicts is a label too. Elsewhere the sequence or its
    document ends: the token is then 0, and the label is ignored.
    """
    whole = _whole_rows(labels, cp)
    known = torch.stack([_shifted(whole, columns) != IGNORE_INDEX for columns in range(depth + 1)]).all(0)
    tokens = torch.where(known, _shifted(whole, depth - 1), 0)
    further = torch.where(known, _shifted(whole, depth), IGNORE_INDEX)
    columns = context_parallel_positions(whole.shape[1], cp.size, cp.rank).to(labels.device)
    return tokens[:, columns], further[:, columns]


def _shifted(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return rows [B, L] whose column c is column c + `columns`; those after the last are ignored labels."""
    return F.pad(rows[:, columns:], (0, min(columns, rows.shape[1])), value=IGNORE_INDEX)


def _whole_rows(labels: torch.Tensor, cp: AxisGroup) -> torch.Tensor:
    """Return the labels [B, L] of whole sequences from those of each context-parallel rank [B, S]."""
    if cp.size == 1:
        return labels
    gathered = all_gather(labels.t(), cp).t()
    length = gathered.shape[1]
    order = torch.cat([context_parallel_positions(length, cp.size, rank) for rank in range(cp.size)])
    whole = torch.empty_like(gathered)
    whole[:, order.to(labels.device)] = gathered
    return whole

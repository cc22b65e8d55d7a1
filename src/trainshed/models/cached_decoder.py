"""The decoder with a KV cache: new tokens of many sequences at once, over the cached keys and values before them.

It is the decoder that trains, layer by layer; only its attention differs. Keys and values of all sequences lie in one
row of slots, each sequence in consecutive slots of its own, and every new token sees the slots of its sequence.

Shapes: T new tokens of all sequences, one sequence after the other; B sequences; N slots of the cache; G key/value
groups, r query heads per group, D head_dim, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.attention import apply_rotary, causal_attention
from trainshed.models.decoder import DecoderLayer, DecoderStage
from trainshed.models.layers import Linear, gates_first
from trainshed.models.moe import GroupedExperts, MoE

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""How new queries [T, G · r, D] see the cached keys and values [N, G, D]: gives [T, G · r, D]."""


@dataclass(frozen=True)
class SequenceSpan:
    """A sequence in a step: its new tokens are `count` rows from `row` on, all its keys `length` places from `place`.

    The keys of the new tokens are the last of them.
    """

    row: int
    count: int
    place: int
    length: int


class CachedDecoder:
    """A whole decoder on one device, and the keys and values of what it has read."""

    def __init__(self, chunk: DecoderStage, places: int) -> None:
        assert chunk.spec.first, "a decoder that answers is whole"
        assert chunk.spec.last, "a decoder that answers is whole"
        self.chunk, self.config = chunk, chunk.config
        shape = (self.config.layers, places, self.config.kv_heads, self.config.head_dim)
        self.keys = torch.zeros(shape, dtype=chunk.spec.dtype, device=chunk.spec.device)
        self.values = torch.zeros_like(self.keys)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        attending: AttentionFunction,
        *,
        apart: int = 0,
    ) -> torch.Tensor:
        """Read new tokens [T] at their positions [T], keep their keys at `places` [T]: normalised states [T, H].

        With `apart` only so many of the tokens go through experts, one by one: what a token gets then never depends on
        who else chose the same expert.
        """
        chunk = self.chunk
        x = F.embedding(tokens, chunk.embedding.weight).to(chunk.spec.dtype)
        if self.config.positions == "learned":
            x = x + F.embedding(positions, chunk.positions.weight).to(x.dtype)
        rotary = None if chunk.rotary is None else (chunk.rotary[0][positions], chunk.rotary[1][positions])
        x = x[:, None]
        for layer, block in enumerate(chunk.layers.values()):
            assert isinstance(block, DecoderLayer), "a decoder's layers are blocks"
            keys, values = self.keys[layer], self.values[layer]
            query, key, value = block.attention.project(x, None)
            if rotary is not None:
                # Both at once: a step of few tokens is as long as it has operations.
                turned = apply_rotary(torch.cat([query, key], dim=2), *rotary).to(x.dtype)
                query, key = turned.split([query.shape[2], key.shape[2]], dim=2)
            keys.index_copy_(0, places, key[:, 0])
            values.index_copy_(0, places, value[:, 0])
            out = attending(query[:, 0], keys, values)
            x = x + block.attention.out(out.reshape(len(tokens), 1, -1))
            if isinstance(block.mlp, MoE):
                parts = [block.mlp(part, None)[0] for part in (x[:apart].split(1) if apart else (x,))]
                x = x + torch.cat([*parts, torch.zeros_like(x[apart:])] if apart else parts)
            else:
                x = x + block.mlp(x)
        return chunk.norm(x)[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary for states [T, H]: float32 [T, V]."""
        return self.chunk.logits(hidden).float()


def per_sequence_attention(spans: Sequence[SequenceSpan], window: int | None) -> AttentionFunction:
    """Attend sequence by sequence: on every device and in every dtype, and whatever the others are."""

    def attending(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(query)
        for span in spans:
            seen = span.length if window is None else min(span.length, window + span.count - 1)
            own = slice(span.place + span.length - seen, span.place + span.length)
            rows = slice(span.row, span.row + span.count)
            if span.count == 1:
                out[rows] = _decode_attention(query[rows], keys[own], values[own])
            else:
                out[rows] = causal_attention(query[rows, None], keys[own, None], values[own, None], window)[:, 0]
        return out

    return attending


def _decode_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query token sees all it is given: the heads of a group stand as tokens, so that nothing is repeated."""
    groups = keys.shape[1]
    grouped = query.view(1, groups, -1, query.shape[-1])
    out = F.scaled_dot_product_attention(grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return out.reshape(1, -1, query.shape[-1])


@dataclass(frozen=True)
class VarlenMetadata:
    """The spans of a step on the device, for one kernel over all sequences: int32 throughout.

    `rows` [B + 1] is where the new tokens of each sequence begin, and where the last end; `places` [B + 1] where its
    keys begin (the last entry is not read); `lengths` [B] how many there are.
    """

    rows: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    most_rows: int
    most_keys: int


def supports_varlen_flash(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch's flash attention takes sequences of different lengths here."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def varlen_flash_attention(ragged: VarlenMetadata, window: int | None) -> AttentionFunction:
    """Attend with one kernel; it reads where sequences begin and end on the device, so that a graph can hold it."""
    # A single new token sees everything before it: the kernel then shares long sequences out over the GPU, which it
    # does only where it is told of neither a mask nor a window.
    causal = ragged.most_rows > 1
    left = None if window is None else window - 1
    right = None if window is None else 0

    def attending(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            query,
            keys,
            values,
            ragged.rows,
            ragged.places,
            ragged.most_rows,
            ragged.most_keys,
            0.0,
            causal,
            False,
            window_size_left=left,
            window_size_right=right,
            seqused_k=ragged.lengths,
        )[0]

    return attending


@torch.no_grad()
def put_gates_first(model: nn.Module) -> None:
    """Lay gate and up projections out as they are used, once: training does so at each step, where it costs nothing."""
    for module in model.modules():
        if isinstance(module, Linear) and module.paired:
            module.weight = nn.Parameter(gates_first(module.weight, 0), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(gates_first(module.bias, 0), requires_grad=False)
            module.paired = False
        elif isinstance(module, GroupedExperts) and module.paired:
            module.gate_up = nn.Parameter(gates_first(module.gate_up, 1), requires_grad=False)
            module.paired = False

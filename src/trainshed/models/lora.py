"""LoRA and DoRA: adapters beside the frozen projections of a decoder, computed as PEFT computes them.

    LoRA    y = W x + scale · B (A dropout(x)) + bias
    DoRA    y = W x + (m / n - 1) · W dropout(x) + (m / n) · scale · B (A dropout(x)) + bias

n are the lengths of the rows of W + scale · B A. They count as constants in backward, as in PEFT; m is learned.

A module that fuses several of Hugging Face's projections (queries, keys and values; gate and up) stays one product:
their A are stacked, and their B are put into one matrix with the rows of the fused weight and zeros where a projection
does not read another's A. So a module costs two small products, however many projections it has. They share one
dropout mask, which depends on the module, the sample, the position and the channel, not on the layout.

Shapes: S tokens, B sequences, r rank, R = r · adapted projections of the module, e experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.attention import context_parallel_positions
from trainshed.models.collectives import AxisGroup, ParallelAxes, all_reduce
from trainshed.models.decoder import DecoderLayer, DecoderStage
from trainshed.models.embedding import Embedding, TrainedRows
from trainshed.models.layers import CounterDropout, Linear, RowParallelLinear
from trainshed.models.moe import GroupedExperts, GroupSizes, grouped_linear
from trainshed.models.parameters import AdaptedProjection, AddedRows, adapted_projections
from trainshed.models.quantization import Quantization, QuantizedWeight
from trainshed.recipe import Lora, ModelConfig


class AdapterWeights(nn.Module):
    """The factors of one projection's adapter on this rank, and DoRA's magnitude."""

    def __init__(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], *, dora: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(a_shape))
        self.b = nn.Parameter(torch.empty(b_shape))
        self.magnitude = nn.Parameter(torch.empty(b_shape[:-1])) if dora else None


@dataclass(frozen=True)
class FusedRows:
    """How the rows of a module's output are made of those of its projections.

    Each of `groups` groups has a run of rows of every projection, in this order.
    """

    runs: Mapping[str, int]
    groups: int = 1

    def rows(self, projection: str) -> int:
        """Return how many rows a projection has on this rank."""
        return self.groups * self.runs[projection]

    def fuse(self, parts: Mapping[str, torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Put the rows of the projections into the order of the module; those of a missing one are zeros."""
        if len(self.runs) == 1:
            return next(iter(parts.values()))
        like = next(iter(parts.values()))
        pieces = []
        for projection, run in self.runs.items():
            part = parts.get(projection)
            if part is None:
                part = like.new_zeros((*like.shape[:dim], self.groups * run, *like.shape[dim + 1 :]))
            pieces.append(part.unflatten(dim, (self.groups, run)))
        return torch.cat(pieces, dim=dim + 1).flatten(dim, dim + 1)


class _Adapters(nn.ModuleDict):
    """The adapters of one module by the names of its projections."""

    enabled = True
    """Whether the module uses them; see `adapters_disabled`."""

    @property
    def adapters(self) -> dict[str, AdapterWeights]:
        """The adapters by name."""
        return cast("dict[str, AdapterWeights]", dict(self.items()))


def _stacked_a(adapters: Mapping[str, AdapterWeights], dtype: torch.dtype) -> torch.Tensor:
    """Return all A, one after the other: [R, in], of experts [e, R, in]."""
    parts = [adapter.a.to(dtype) for adapter in adapters.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _fused_b(adapters: Mapping[str, AdapterWeights], rows: FusedRows, dtype: torch.dtype) -> torch.Tensor:
    """Return one B for the stacked A: [out, R], of experts [e, out, R]."""
    last = len(adapters) - 1
    parts: dict[str, torch.Tensor] = {}
    for number, (name, adapter) in enumerate(adapters.items()):
        b = adapter.b.to(dtype)
        rank = b.shape[-1]
        parts[name] = F.pad(b, (number * rank, (last - number) * rank)) if last else b
    return rows.fuse(parts, dim=next(iter(parts.values())).dim() - 2)


class LoraAdapters(_Adapters):
    """The adapters of a `Linear`."""

    def __init__(
        self,
        weights: Mapping[str, AdapterWeights],
        rows: FusedRows,
        lora: Lora,
        dropout: CounterDropout,
        positions: torch.Tensor,
        columns: AxisGroup,
    ) -> None:
        super().__init__(weights)
        self.fused_rows, self.scale, self.dora = rows, lora.scale, lora.dora
        self.dropout, self.positions = dropout, positions
        self.columns = columns
        """The ranks that hold other columns of the weight."""

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None, linear: Linear) -> torch.Tensor:
        """Return the product of the adapted weight with x [S, B, in]: [S, B, out], without the bias."""
        drops = self.dropout.key is not None and samples is not None
        dropped = self.dropout(x, samples, self.positions) if drops else x
        a, b = _stacked_a(self.adapters, x.dtype), _fused_b(self.adapters, self.fused_rows, x.dtype)
        out = linear.base_product(x)
        delta = F.linear(F.linear(dropped, a) * self.scale, b)
        if not self.dora:
            return out + delta
        factor = self._dora_factor(linear.matrix(x.dtype), a, b).to(x.dtype)
        if drops:
            return out + (factor - 1.0) * linear.base_product(dropped) + factor * delta
        return factor * (out + delta)

    def _dora_factor(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return m / n for each row of the fused weight, 1 for rows without an adapter."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        magnitudes: dict[str, torch.Tensor] = {}
        for name, adapter in self.adapters.items():
            assert adapter.magnitude is not None, "with DoRA every adapter has one"
            magnitudes[name] = adapter.magnitude.to(wide)
        factor = self.fused_rows.fuse(magnitudes) / self.row_norms(weight, a, b)
        if len(magnitudes) == len(self.fused_rows.runs):
            return factor
        adapted = self.fused_rows.fuse({name: torch.ones_like(part) for name, part in magnitudes.items()})
        return torch.where(adapted > 0, factor, 1.0)

    @torch.no_grad()
    def row_norms(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the lengths of the rows of W + scale · B A, in float32 or better.

        The square is multiplied out, |W|² + 2 scale · W (B A) + scale² · |B A|², so that no matrix of the size of W is
        made. Each rank sums its columns.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        b = b.to(wide)
        squares = squares + 2.0 * self.scale * (F.linear(weight, a).to(wide) * b).sum(1)
        squares = squares + self.scale**2 * (b @ (a.to(wide) @ a.to(wide).t()) * b).sum(1)
        return all_reduce(squares, self.columns).sqrt()


class ExpertAdapters(_Adapters):
    """The adapters of stacked experts, cut over etp as the experts are."""

    def __init__(self, weights: Mapping[str, AdapterWeights], up_rows: FusedRows, lora: Lora) -> None:
        super().__init__(weights)
        self.up_rows, self.scale = up_rows, lora.scale

    def up(self, x: torch.Tensor, groups: GroupSizes) -> torch.Tensor:
        """Return what is added to the up projection, gates first: rows [rows, H], sorted by expert."""
        return self._delta({name: self.adapters[name] for name in self.up_rows.runs}, self.up_rows, x, groups)

    def down(self, x: torch.Tensor, groups: GroupSizes) -> torch.Tensor:
        """Return what is added to the down projection."""
        down = self.adapters["down_proj"]
        return self._delta({"down_proj": down}, FusedRows({"down_proj": down.b.shape[1]}), x, groups)

    def _delta(
        self, adapters: Mapping[str, AdapterWeights], rows: FusedRows, x: torch.Tensor, groups: GroupSizes
    ) -> torch.Tensor:
        a, b = _stacked_a(adapters, x.dtype), _fused_b(adapters, rows, x.dtype)
        if missing := -a.shape[1] % _GROUPED_MULTIPLE if x.is_cuda else 0:
            a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        return grouped_linear(grouped_linear(x, a, groups) * self.scale, b, groups)


_GROUPED_MULTIPLE = 8
"""Rows of bf16 must be whole multiples of 16 bytes for grouped products on a GPU; other ranks are padded."""


def add_adapters(stage: DecoderStage, lora: Lora, *, dtype: torch.dtype, added: AddedRows | None = None) -> None:
    """Freeze a stage's weights and give its projections adapters of `dtype`, without values.

    The rows of added tokens, in the embedding and in the head, are trained too. From now on gates are stored before
    ups: whoever loads the frozen weights puts them in this order once.
    """
    _freeze(stage, lora.quantize)
    config, axes, spec = stage.config, stage.axes, stage.spec
    for table in (getattr(stage, name, None) for name in ("embedding", "head")):
        if added is not None and isinstance(table, Embedding):
            stop = stage.vocab_start + table.weight.shape[0]
            table.added = TrainedRows(added, config.hidden, stage.vocab_start, stop).to(dtype)
    with torch.device("cpu"):  # even while parameters are made on the meta device
        positions = context_parallel_positions(spec.sequence_length, axes.cp.size, axes.cp.rank).to(spec.device)
        whole_sequence = torch.arange(spec.sequence_length).to(spec.device)
    for number in spec.layers:
        block = stage.layers[str(number)]
        assert isinstance(block, DecoderLayer)
        by_module: dict[str, list[AdaptedProjection]] = {}
        for adapted in adapted_projections(config, lora, number):
            by_module.setdefault(adapted.module, []).append(adapted)
        block.cheap_products = frozenset(lora.rank * len(projections) for projections in by_module.values())
        for name, projections in by_module.items():
            module = block.get_submodule(name)
            if isinstance(module, GroupedExperts):
                module.lora = _expert_adapters(projections, config, axes, lora).to(dtype)
                continue
            assert isinstance(module, Linear), f"{name} is a projection"
            columns = axes.tp if isinstance(module, RowParallelLinear) else AxisGroup()
            width = module.weight.shape[1] if module.quantized is None else module.quantized.columns
            dropout = CounterDropout(
                number,
                f"lora.{name}",
                lora.dropout,
                stage.regularization.seed,
                spec.device,
                first_channel=columns.rank * width,
            )
            rows = _fused_rows(name, projections, config, axes)
            weights: dict[str, AdapterWeights] = {
                projection.projection: AdapterWeights(
                    (lora.rank, width), (rows.rows(projection.projection), lora.rank), dora=lora.dora
                )
                for projection in projections
            }
            seen = positions
            if projections[0].replicated:
                seen = stage.local_columns  # what every tp rank holds whole sees the rank's own tokens alone
            elif name == "attention.kv_up":
                seen = whole_sequence  # the latents of all cp ranks
            module.lora = LoraAdapters(weights, rows, lora, dropout, seen, columns).to(dtype)


@contextmanager
def adapters_disabled(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Let a model compute what its frozen base computes."""
    adapters = [module for stage in stages for module in stage.modules() if isinstance(module, _Adapters | TrainedRows)]
    for module in adapters:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapters:
            module.enabled = True


def _freeze(stage: DecoderStage, quantize: Quantization | None) -> None:
    stage.requires_grad_(False)
    for name, module in list(stage.layers.named_modules()):
        if isinstance(module, Linear | GroupedExperts):
            module.gate_up_interleaved = False
        if quantize is not None and isinstance(module, Linear) and not name.endswith("router"):
            rows, columns = module.weight.shape
            del module.weight
            module.quantized = QuantizedWeight(quantize, rows, columns)


def _fused_rows(
    module: str, projections: Sequence[AdaptedProjection], config: ModelConfig, axes: ParallelAxes
) -> FusedRows:
    """Return how this rank's rows of a module are made of its projections', adapted or not."""
    first = projections[0]
    if module == "attention.qkv":
        head = config.head_dim
        runs = {"q_proj": config.heads // config.kv_heads * head, "k_proj": head, "v_proj": head}
        return FusedRows(runs, config.kv_heads // axes.tp.size)
    if first.row_parallel or first.replicated:
        return FusedRows({first.projection: first.outputs})
    width = first.outputs // axes.tp.size
    if module.startswith("attention."):
        return FusedRows({first.projection: width})
    return FusedRows({"gate_proj": width, "up_proj": width} if config.gated else {"up_proj": width})


def _expert_adapters(
    projections: Sequence[AdaptedProjection], config: ModelConfig, axes: ParallelAxes, lora: Lora
) -> ExpertAdapters:
    assert config.moe is not None, "only models with experts have them"
    count, width = config.moe.experts // axes.ep.size, config.moe.ffn // axes.etp.size
    up_rows = FusedRows({projection.projection: width for projection in projections if not projection.row_parallel})
    weights: dict[str, AdapterWeights] = {}
    for projection in projections:
        inputs, outputs = projection.inputs, projection.outputs
        if projection.row_parallel:
            inputs //= axes.etp.size
        else:
            outputs //= axes.etp.size
        shapes = (count, lora.rank, inputs), (count, outputs, lora.rank)
        weights[projection.projection] = AdapterWeights(*shapes, dora=False)
    return ExpertAdapters(weights, up_rows, lora)

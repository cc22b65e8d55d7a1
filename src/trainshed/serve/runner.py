"""The model runner: prefill runs some tokens of prompts, decode computes one more token of every running request.

On a CPU every request gets the same bits whatever other requests run. Prompts are prefilled one at a time, in chunks
that begin at multiples of their size. A decode step always has the same number of rows, used or not, because a matrix
product rounds differently with another number of rows. On a GPU a decode step is a CUDA graph, one for each of a few
numbers of rows, and prompts are prefilled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainshed.models.attention import attention_rule, supports_flash
from trainshed.models.cached_decoder import (
    AttentionFunction,
    CachedDecoder,
    PerSequenceAttention,
    SequenceSpan,
    VarlenMetadata,
    varlen_flash_attention,
)
from trainshed.models.decoder import DecoderStage
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.adapters import AdapterBank, AdapterStep, RowRuns
from trainshed.serve.kv_cache import ServingLimits

PREFILL_CHUNK_TOKENS = {"cpu": 128, "cuda": 2048}
"""How many prompt tokens are prefilled between two decode steps."""


@dataclass(frozen=True)
class ScheduledTokens:
    """New tokens of one sequence, the first at `position`; its block of the cache begins at `block_start`."""

    tokens: Sequence[int]
    position: int
    block_start: int
    adapter: int = 0
    """Its number in the `AdapterBank`; 0: the base."""
    longest: int = 0
    """The most tokens that the sequence may have in the end, by which some models turn positions."""


class ModelRunner:
    """Runs a decoder with its KV cache."""

    def __init__(
        self,
        decoder: DecoderStage,
        limits: ServingLimits,
        *,
        adapters: AdapterBank | None = None,
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> None:
        self.config, self.limits, self.device = decoder.config, limits, decoder.spec.device
        self._adapter_step = None if adapters is None else adapters.step
        # One slot more, for padding rows of a step.
        self._padding_slot = limits.cache_tokens
        self._cached_decoder = CachedDecoder(decoder, limits.cache_tokens + 1)
        self.prefill_chunk_tokens = PREFILL_CHUNK_TOKENS.get(self.device.type, PREFILL_CHUNK_TOKENS["cpu"])
        self.on_gpu = self.device.type == "cuda"
        rules = [attention_rule(self.config, layer) for layer in range(self.config.layers)]
        changed_scores = any(rule.needs_scores for rule in rules)
        has_chunks = any(rule.chunk is not None and rule.chunk < limits.max_length for rule in rules)
        # Latents are wider than the heads that this kernel takes.
        self._flash = (
            self.config.mla is None
            and not changed_scores
            and not has_chunks
            and supports_flash(self.config.head_dim, decoder.spec.dtype, self.device)
        )
        self._graphs: dict[tuple[int, bool], _DecodeGraph] = {}
        # Experts in another dtype than bfloat16 copy their token counts to the host.
        self.uses_graphs = (
            self._flash and not eager and (self.config.moe is None or decoder.spec.dtype == torch.bfloat16)
        )
        if self.on_gpu and not eager and not self.uses_graphs:
            dtype = str(decoder.spec.dtype).removeprefix("torch.")
            reporter.note(
                "answers come kernel by kernel, not as CUDA graphs: these need an NVIDIA GPU, bfloat16 (or float16 "
                "where there are no experts), heads in steps of 8, scores without a soft cap or sinks, sequences "
                "within one chunk of attention and no latent attention; "
                f"the model is {dtype} with heads of {self.config.head_dim}"
                + (
                    " and scores that are changed"
                    if changed_scores
                    else " and chunks of attention"
                    if has_chunks
                    else " (try --dtype bf16)"
                )
            )

    def prefill(self, scheduled: Sequence[ScheduledTokens], *, together: bool = False) -> torch.Tensor:
        """Run tokens of prompts: hidden states [T, H], one sequence after the other.

        With `together` a CPU, too, runs all of them in one pass. The bits of a sequence then depend on the others.
        """
        if len(scheduled) > 1 and not self.on_gpu and not together:
            return torch.cat([self.prefill([part]) for part in scheduled])
        tokens = [token for part in scheduled for token in part.tokens]
        positions = [part.position + i for part in scheduled for i in range(len(part.tokens))]
        slots = [part.block_start + part.position + i for part in scheduled for i in range(len(part.tokens))]
        table_rows = [
            row
            for part in scheduled
            for row in self._table_rows(range(part.position, part.position + len(part.tokens)), part.longest)
        ]
        token_ids, position_ids, slot_ids, row_ids = torch.tensor(
            [tokens, positions, slots, table_rows], device=self.device
        ).unbind(0)
        if self._adapter_step is not None:
            lengths, adapters = [len(part.tokens) for part in scheduled], [part.adapter for part in scheduled]
            self._adapter_step.rows = RowRuns.of(lengths, adapters)
        attention = self._attention(scheduled)
        return self._cached_decoder.hidden(token_ids, position_ids, slot_ids, attention, table_rows=row_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [T, H] of one sequence: float32 [T, V]."""
        return self._cached_decoder.logits(hidden)

    def last_logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits of some rows of hidden states [T, H], each of another sequence: float32 [B, V]."""
        wanted = hidden[torch.tensor(rows, device=self.device)]
        return self.logits(wanted) if self.on_gpu else torch.cat([self.logits(row) for row in wanted.split(1)])

    def decode(self, scheduled: Sequence[ScheduledTokens]) -> torch.Tensor:
        """Run the last token of every request: logits of the next, float32 [B, V]. On a GPU it may still be running."""
        rows = [
            (
                part.tokens[0],
                part.position,
                part.block_start + part.position,
                part.block_start,
                part.adapter,
                self._table_rows([part.position], part.longest)[0],
            )
            for part in scheduled
        ]
        adapted = self._adapter_step is not None and any(part.adapter for part in scheduled)
        if self.uses_graphs:
            return self._graph(len(rows), adapted=adapted).run(rows)[: len(rows)]
        width = len(rows) if self.on_gpu else self.limits.max_sequences
        rows += [_padding_row(self._padding_slot)] * (width - len(rows))
        tokens, positions, slots, _, adapters, table_rows = torch.tensor(rows, device=self.device).unbind(1)
        if self._adapter_step is not None:
            self._adapter_step.rows = adapters if adapted else None
        one_by_one = len(scheduled) if self.config.moe is not None and not self.on_gpu else 0
        hidden = self._cached_decoder.hidden(
            tokens, positions, slots, self._attention(scheduled), table_rows=table_rows, one_by_one=one_by_one
        )
        return self._cached_decoder.logits(hidden)[: len(scheduled)]

    def _table_rows(self, positions: Sequence[int], longest: int) -> list[int]:
        return self._cached_decoder.table_rows(positions, longest)

    def _attention(self, scheduled: Sequence[ScheduledTokens]) -> AttentionFunction:
        if not self._flash:
            spans, query_start = [], 0
            for part in scheduled:
                spans.append(
                    SequenceSpan(query_start, len(part.tokens), part.block_start, part.position + len(part.tokens))
                )
                query_start += len(part.tokens)
            return PerSequenceAttention(spans)
        starts = [0]
        for part in scheduled:
            starts.append(starts[-1] + len(part.tokens))
        lengths = [part.position + len(part.tokens) for part in scheduled]
        table = [starts, [*(part.block_start for part in scheduled), 0], [*lengths, 0]]
        rows, slots, ends = torch.tensor(table, dtype=torch.int32, device=self.device).unbind(0)
        max_query_length = max(len(part.tokens) for part in scheduled)
        return varlen_flash_attention(VarlenMetadata(rows, slots, ends[:-1], max_query_length, max(lengths)))

    def _graph(self, rows: int, *, adapted: bool) -> _DecodeGraph:
        width = min(1 << (rows - 1).bit_length(), self.limits.max_sequences)
        if (width, adapted) not in self._graphs:
            step = self._adapter_step if adapted else None
            self._graphs[width, adapted] = _DecodeGraph(
                self._cached_decoder, self.limits, width, self._padding_slot, step
            )
        return self._graphs[width, adapted]


_Row = tuple[int, int, int, int, int, int]
"""Of a decode step: token, position, slot, where its sequence's block begins, adapter, row in tables of positions."""


def _padding_row(slot: int) -> _Row:
    return (0, 0, slot, slot, 0, 0)


class _DecodeGraph:
    """A decode step of a fixed number of rows as a CUDA graph: to launch its kernels one by one takes longer.

    With an `adapter_step` its rows may have adapters.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        limits: ServingLimits,
        width: int,
        padding_slot: int,
        adapter_step: AdapterStep | None = None,
    ) -> None:
        device = decoder.keys.device
        self._padding_row = _padding_row(padding_slot)
        self._width = width
        self._inputs = torch.tensor([self._padding_row] * width, device=device).t().contiguous()
        # Kept, because the graph goes on reading this memory.
        self._starts = torch.arange(width + 1, dtype=torch.int32, device=device)

        def step() -> torch.Tensor:
            tokens, positions, slots, begins, _, table_rows = self._inputs.unbind(0)
            lengths = (positions + 1).int()
            metadata = VarlenMetadata(
                self._starts, torch.cat([begins, begins[:1]]).int(), lengths, 1, limits.max_length
            )
            attention = varlen_flash_attention(metadata)
            hidden = decoder.hidden(tokens, positions, slots, attention, table_rows=table_rows)
            return decoder.logits(hidden)

        if adapter_step is not None:
            adapter_step.rows = self._inputs[4]
        warmup_stream = torch.cuda.Stream(device)
        warmup_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warmup_stream):
            for _ in range(2):  # libraries choose kernels and allocate workspaces before the capture
                step()
        torch.cuda.current_stream(device).wait_stream(warmup_stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU at the same time (a server measures its memory).
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step()
        if adapter_step is not None:
            adapter_step.rows = None

    def run(self, rows: Sequence[_Row]) -> torch.Tensor:
        """Run a step; the next one overwrites its result."""
        table = [*rows, *([self._padding_row] * (self._width - len(rows)))]
        self._inputs.copy_(torch.tensor(table).t(), non_blocking=True)
        self._graph.replay()
        return self._logits

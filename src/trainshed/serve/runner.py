"""The model runner: prefill reads some of a prompt, decode makes one more token of every running request.

On a CPU every request gets the same bits whoever else is being served: prompts are read one at a time, in chunks
that begin at multiples of their size, and a decode step always has the same number of rows, used or not, because
a matrix product rounds differently with another number of them. On a GPU a decode step is a CUDA graph, one for
each of a few numbers of rows, and prompts are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainshed.models.cached_decoder import (
    AttentionFunction,
    CachedDecoder,
    SequenceSpan,
    VarlenMetadata,
    per_sequence_attention,
    supports_varlen_flash,
    varlen_flash_attention,
)
from trainshed.models.decoder import DecoderStage
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.kv_cache import ServingLimits

PREFILL_CHUNK_TOKENS = {"cpu": 128, "cuda": 2048}
"""How much of prompts is read between two tokens of the answers under way."""


@dataclass(frozen=True)
class ScheduledTokens:
    """New tokens of one sequence, the first at `position`; its run of the cache begins at `place`."""

    tokens: Sequence[int]
    position: int
    place: int


class ModelRunner:
    """A model with its cache."""

    def __init__(
        self, chunk: DecoderStage, room: ServingLimits, *, eager: bool = False, reporter: Reporter = SILENT
    ) -> None:
        self.config, self.room, self.device = chunk.config, room, chunk.spec.device
        # One place more, for rows of a step that stand for nobody.
        self._nowhere = room.cache_tokens
        self._decoder = CachedDecoder(chunk, room.cache_tokens + 1)
        self.chunk_tokens = PREFILL_CHUNK_TOKENS.get(self.device.type, PREFILL_CHUNK_TOKENS["cpu"])
        self.on_gpu = self.device.type == "cuda"
        self._flash = supports_varlen_flash(self.config.head_dim, chunk.spec.dtype, self.device)
        self._graphs: dict[int, _DecodeGraph] = {}
        # Experts in another dtype than bfloat16 ask the host how many tokens each one has.
        self.uses_graphs = self._flash and not eager and (self.config.moe is None or chunk.spec.dtype == torch.bfloat16)
        if self.on_gpu and not eager and not self.uses_graphs:
            dtype = str(chunk.spec.dtype).removeprefix("torch.")
            reporter.note(
                "answers come kernel by kernel, not as CUDA graphs: these need an NVIDIA GPU, bfloat16 (or float16 "
                "where there are no experts) and heads in steps of 8; "
                f"the model is {dtype} with heads of {self.config.head_dim} (try --dtype bf16)"
            )

    def read(self, parts: Sequence[ScheduledTokens]) -> torch.Tensor:
        """Read new tokens of prompts: states [T, H], one part after the other."""
        if len(parts) > 1 and not self.on_gpu:
            return torch.cat([self.read([part]) for part in parts])
        tokens = [token for part in parts for token in part.tokens]
        positions = [part.position + i for part in parts for i in range(len(part.tokens))]
        places = [part.place + part.position + i for part in parts for i in range(len(part.tokens))]
        new, at, kept = torch.tensor([tokens, positions, places], device=self.device).unbind(0)
        return self._decoder.hidden(new, at, kept, self._attending(parts))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores for states [T, H] of one sequence: float32 [T, V]."""
        return self._decoder.logits(hidden)

    def first_logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Scores for some rows of states [T, H], each of another sequence: float32 [B, V]."""
        wanted = hidden[torch.tensor(rows, device=self.device)]
        return self.logits(wanted) if self.on_gpu else torch.cat([self.logits(row) for row in wanted.split(1)])

    def advance(self, parts: Sequence[ScheduledTokens]) -> torch.Tensor:
        """Read the last token of every answer and score the next: float32 [B, V]; on a GPU it may still be at it."""
        rows = [(part.tokens[0], part.position, part.place + part.position, part.place) for part in parts]
        if self.uses_graphs:
            return self._graph(len(rows)).run(rows)[: len(rows)]
        width = len(rows) if self.on_gpu else self.room.max_sequences
        rows += [(0, 0, self._nowhere, self._nowhere)] * (width - len(rows))
        tokens, positions, places, _ = torch.tensor(rows, device=self.device).unbind(1)
        apart = len(parts) if self.config.moe is not None and not self.on_gpu else 0
        hidden = self._decoder.hidden(tokens, positions, places, self._attending(parts), apart=apart)
        return self._decoder.logits(hidden)[: len(parts)]

    def _attending(self, parts: Sequence[ScheduledTokens]) -> AttentionFunction:
        window = self.config.sliding_window
        if not self._flash:
            spans, row = [], 0
            for part in parts:
                spans.append(SequenceSpan(row, len(part.tokens), part.place, part.position + len(part.tokens)))
                row += len(part.tokens)
            return per_sequence_attention(spans, window)
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.tokens))
        lengths = [part.position + len(part.tokens) for part in parts]
        table = [starts, [*(part.place for part in parts), 0], [*lengths, 0]]
        rows, places, ends = torch.tensor(table, dtype=torch.int32, device=self.device).unbind(0)
        most_rows = max(len(part.tokens) for part in parts)
        return varlen_flash_attention(VarlenMetadata(rows, places, ends[:-1], most_rows, max(lengths)), window)

    def _graph(self, rows: int) -> _DecodeGraph:
        width = min(1 << (rows - 1).bit_length(), self.room.max_sequences)
        if width not in self._graphs:
            self._graphs[width] = _DecodeGraph(self._decoder, self.room, width, self._nowhere)
        return self._graphs[width]


class _DecodeGraph:
    """One step of a fixed number of answers as a CUDA graph: launching its kernels one by one takes longer."""

    def __init__(self, decoder: CachedDecoder, room: ServingLimits, width: int, nowhere: int) -> None:
        device = decoder.keys.device
        self._idle = (0, 0, nowhere, nowhere)
        self._width = width
        self._inputs = torch.tensor([self._idle] * width, device=device).t().contiguous()
        # Kept, as the graph goes on reading where they lie.
        self._starts = torch.arange(width + 1, dtype=torch.int32, device=device)

        def step() -> torch.Tensor:
            tokens, positions, places, begins = self._inputs.unbind(0)
            lengths = (positions + 1).int()
            ragged = VarlenMetadata(self._starts, torch.cat([begins, begins[:1]]).int(), lengths, 1, room.max_length)
            hidden = decoder.hidden(
                tokens, positions, places, varlen_flash_attention(ragged, decoder.config.sliding_window)
            )
            return decoder.logits(hidden)

        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):  # libraries choose their kernels and take their workspaces before the capture
                step()
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile (a server measures its memory).
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step()

    def run(self, rows: Sequence[tuple[int, int, int, int]]) -> torch.Tensor:
        """Make a step; what it returns is written over by the next."""
        table = [*rows, *([self._idle] * (self._width - len(rows)))]
        self._inputs.copy_(torch.tensor(table).t(), non_blocking=True)
        self._graph.replay()
        return self._logits

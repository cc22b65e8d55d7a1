"""Answers to fixed prompts at every validation, on any layout, with the forward pass of training.

Prompts are documents in rows of the usual shape, each with room for its answer. One forward pass over all rows gives
the next token of every answer, always the likeliest. There is no KV cache: a whole row costs what it costs in training,
and no memory is needed besides. Where documents are kept apart several prompts share a row; otherwise each has its own.

All ranks hold all rows and read the same next tokens, so that they run the same number of forward passes. The rows are
cut into rounds: in one round every data-parallel rank runs one micro-batch.

Shapes: P prompts, N rows, B rows of a micro-batch, L sequence length, S tokens of this context-parallel rank, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist

from trainshed.data.prompts import ANSWERS_SCHEMA, AnswerDecoder, ValidationPrompts
from trainshed.engines.torch.model import RankModel
from trainshed.engines.torch.rank_env import EventEmitter
from trainshed.errors import TrainshedError
from trainshed.models.attention import context_parallel_positions
from trainshed.models.collectives import AxisGroup, all_gather
from trainshed.models.decoder import DecoderStage
from trainshed.run_folder import answers_file
from trainshed.storage.attempts import Attempt


class AnswerRows:
    """The rows [N, L] in which prompts are answered: who is where, and the tokens so far."""

    def __init__(self, prompts: ValidationPrompts, sequence_length: int, *, row_multiple: int, packed: bool) -> None:
        self.prompts = prompts
        self.rows: list[int] = []
        """The row of each prompt."""
        self.starts: list[int] = []
        """Its first column."""
        self.answers: list[list[int]] = [[] for _ in prompts.tokens]
        self.ended = [False] * len(prompts.tokens)
        """Whether the model has ended its answer itself."""
        used: list[int] = []
        for tokens in prompts.tokens:
            room = len(tokens) + prompts.answer_tokens - 1
            row = next((row for row, end in enumerate(used) if packed and end + room <= sequence_length), len(used))
            if row == len(used):
                used.append(0)
            self.rows.append(row)
            self.starts.append(used[row])
            used[row] += room
        count = -(-len(used) // row_multiple) * row_multiple
        self.tokens = np.zeros((count, sequence_length), np.int64)
        self.document_starts = np.zeros((count, sequence_length), np.int64) if packed else None
        for row, start, tokens in zip(self.rows, self.starts, prompts.tokens, strict=True):
            self.tokens[row, start : start + len(tokens)] = tokens
            if self.document_starts is not None:
                self.document_starts[row, start:] = start
        if self.document_starts is not None:
            for row, end in enumerate(used):  # what is left of a row is a document of its own
                self.document_starts[row, end:] = end

    @property
    def open_prompts(self) -> list[int]:
        """The prompts whose answers go on."""
        longest = self.prompts.answer_tokens
        return [n for n, answer in enumerate(self.answers) if not self.ended[n] and len(answer) < longest]

    def last_column(self, prompt: int) -> int:
        """Return the column of the last token so far: the next one is predicted there."""
        return self.starts[prompt] + len(self.prompts.tokens[prompt]) + len(self.answers[prompt]) - 1

    def append(self, prompt: int, token: int) -> None:
        """Add the next token of an answer."""
        if token in self.prompts.end_tokens:
            self.ended[prompt] = True
            return
        self.answers[prompt].append(token)
        if len(self.answers[prompt]) < self.prompts.answer_tokens:
            self.tokens[self.rows[prompt], self.last_column(prompt)] = token


@dataclass(frozen=True)
class Answer:
    """An answer as it is stored; the text is None where nobody has decoded it yet."""

    prompt: str
    answer: str | None
    tokens: list[int]
    ended: bool


class AnswerLog:
    """Stores the answers of a run: as an event, and as a file of their own for each step. Only rank 0 has one."""

    def __init__(self, prompts: ValidationPrompts, attempt: Attempt, emit: EventEmitter) -> None:
        self._prompts, self._attempt, self._emit = prompts, attempt, emit
        self._decoder: AnswerDecoder | None = None
        try:
            self._decoder = AnswerDecoder.open(attempt.store, attempt.run_folder)
        except TrainshedError as error:
            text = f"answers are stored as tokens ({error.what}): `trainshed status RUN --answers` decodes them"
            self._emit("warning", text=text)

    def write(self, step: int, rows: AnswerRows, seconds: float) -> None:
        """Store the answers after a step; a store that fails does not end the training."""
        answers = [asdict(answer) for answer in self._answers(rows)]
        self._emit("answers", step, answers=answers, seconds=seconds)
        body: dict[str, Any] = {"schema": ANSWERS_SCHEMA, "step": step, "answers": answers}
        path = f"{self._attempt.run_folder}/{answers_file(step)}".lstrip("/")
        try:
            self._attempt.put(path, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
        except TrainshedError as error:
            self._emit("warning", step, text=f"the answers are in the events, but {answers_file(step)} is not: {error}")

    def _answers(self, rows: AnswerRows) -> list[Answer]:
        prompts = self._prompts
        return [
            Answer(
                text,
                None if self._decoder is None else self._decoder.decode(tokens, answer),
                answer,
                ended,
            )
            for text, tokens, answer, ended in zip(prompts.texts, prompts.tokens, rows.answers, rows.ended, strict=True)
        ]


class SampleAnswers:
    """Lets one rank's model answer the prompts of a run, together with all other ranks.

    `packed`: several prompts may share a row, because the run keeps documents apart. Rank 0 has the log.
    """

    def __init__(
        self, prompts: ValidationPrompts, model: RankModel, *, packed: bool, log: AnswerLog | None = None
    ) -> None:
        self.prompts, self.model, self.packed, self.log = prompts, model, packed, log
        cp = model.mesh.axes.cp
        self._columns = context_parallel_positions(model.sequence_length, cp.size, cp.rank).tolist()
        self._local_index = {column: index for index, column in enumerate(self._columns)}

    def run(self, step: int, on_token: Callable[[], None]) -> None:
        """Answer the prompts after a step, and store the answers."""
        began = time.monotonic()
        rows = self.ask(on_token)
        if self.log is not None:
            self.log.write(step, rows, time.monotonic() - began)

    def ask(self, on_token: Callable[[], None] = lambda: None) -> AnswerRows:
        """Answer all prompts; `on_token` is called before each forward pass over the rows."""
        layout = self.model.mesh.layout
        round_rows = layout.dp * layout.micro_batch
        rows = AnswerRows(self.prompts, self.model.sequence_length, row_multiple=round_rows, packed=self.packed)
        with torch.no_grad():
            while open_prompts := rows.open_prompts:
                on_token()
                next_tokens = torch.full((len(self.prompts.tokens),), -1, dtype=torch.int64)
                for first_row in range(0, len(rows.tokens), round_rows):
                    asked = [n for n in open_prompts if first_row <= rows.rows[n] < first_row + round_rows]
                    if asked:
                        self._run_round(rows, first_row, asked, next_tokens)
                for prompt, token in enumerate(self._agree(next_tokens)):
                    if prompt in open_prompts:
                        rows.append(prompt, token)
        return rows

    def _run_round(self, rows: AnswerRows, first_row: int, asked: Sequence[int], next_tokens: torch.Tensor) -> None:
        """Run this rank's micro-batch of a round; where it has the last stage, fill in the tokens that it predicts."""
        mesh = self.model.mesh
        start = first_row + mesh.coordinates.dp * mesh.layout.micro_batch
        stop = start + mesh.layout.micro_batch
        document_starts = None
        if rows.document_starts is not None:
            document_starts = torch.from_numpy(rows.document_starts[start:stop]).to(mesh.device)
        tokens = torch.from_numpy(rows.tokens[start:stop, self._columns]).to(mesh.device)
        hidden = hidden_states(self.model, tokens, document_starts)
        if hidden is None:
            return
        here = [
            (prompt, rows.rows[prompt] - start, self._local_index[column])
            for prompt in asked
            if start <= rows.rows[prompt] < stop and (column := rows.last_column(prompt)) in self._local_index
        ]
        # FSDP gathers the head on all ranks together, so a rank without a prompt multiplies one state for nobody.
        prompts, row_indices, columns = (list(part) for part in zip(*(here or [(None, 0, 0)]), strict=True))
        chosen = hidden[torch.tensor(columns, device=mesh.device), torch.tensor(row_indices, device=mesh.device)]
        likeliest = likeliest_tokens(self.model.stages[-1], chosen, mesh.axes.tp)
        if here:
            next_tokens[prompts] = likeliest.cpu()

    def _agree(self, next_tokens: torch.Tensor) -> list[int]:
        """Tell all ranks the tokens that some of them have predicted."""
        if self.model.mesh.layout.world_size > 1:
            next_tokens = next_tokens.to(self.model.mesh.device)
            dist.all_reduce(next_tokens, op=dist.ReduceOp.MAX)
        return next_tokens.tolist()


def hidden_states(model: RankModel, tokens: torch.Tensor, document_starts: torch.Tensor | None) -> torch.Tensor | None:
    """Run one micro-batch [B, S] through the whole model: the hidden states [S, B, H] at its end.

    Every rank of the pipeline calls this; all but the one with the last stage get None. Stages run one after the other:
    a schedule that fills the pipeline holds buffers of its own, and one for this would replace that of training.
    """
    mesh, layout = model.mesh, model.mesh.layout
    stages = dict(zip(layout.chunks(mesh.coordinates.pp), model.stages, strict=True))
    last = layout.pp * layout.vp - 1
    x: torch.Tensor | None = None
    for number, stage in stages.items():
        if number == 0:
            x = tokens
        else:
            shape = (tokens.shape[1] // layout.tp, tokens.shape[0], model.config.hidden)
            x = torch.empty(shape, dtype=model.dtype, device=mesh.device)
            dist.recv(x, group=mesh.pp.ranks, group_src=(number - 1) % layout.pp)
        x = stage(x, document_starts=document_starts)
        if number < last:
            dist.send(x.contiguous(), group=mesh.pp.ranks, group_dst=(number + 1) % layout.pp)
            x = None
    return x


def likeliest_tokens(stage: DecoderStage, hidden: torch.Tensor, tp: AxisGroup) -> torch.Tensor:
    """Return the likeliest next token for hidden states [P, H]; the vocabulary is cut over tp. int64 [P]."""
    score, token = stage.logits(hidden).max(-1)
    if tp.size == 1:
        return token
    # Both in one tensor: float64 holds every token id.
    best = torch.stack([score.double(), (token + stage.vocab_start).double()])[None]
    scores, tokens = all_gather(best, tp).unbind(1)
    return tokens.gather(0, scores.argmax(0)[None])[0].long()

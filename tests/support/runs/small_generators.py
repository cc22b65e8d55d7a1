"""Asking a generator and waiting for its answers; small generators over tiny models."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainshed.models.decoder import DecoderStage
from trainshed.models.init import init_parameter
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.loading import build_decoder, load_model
from trainshed.serve.request import (
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    GenerationHandle,
    Generator,
    OutputToken,
    PrefillDone,
    SamplingParams,
)
from trainshed.serve.scheduler import ModelGenerator

PATIENCE_SECONDS = 240
CPU = torch.device("cpu")


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    warn, task = note, SILENT.task


@dataclass
class Answered:
    """An answer as its events come."""

    events: list[GenerationEvent] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    ticket: GenerationHandle | None = None

    def tell(self, event: GenerationEvent) -> None:
        self.events.append(event)
        if isinstance(event, GenerationFinished | GenerationFailed):
            self.over.set()

    def wait(self) -> Answered:
        assert self.over.wait(PATIENCE_SECONDS), "no end came"
        return self

    @property
    def end(self) -> GenerationEvent:
        return self.events[-1]

    @property
    def pieces(self) -> list[OutputToken]:
        return [event for event in self.events if isinstance(event, OutputToken)]

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, OutputToken | GenerationFinished))

    @property
    def prompt_pieces(self) -> tuple[OutputToken, ...]:
        return next(event.logprobs for event in self.events if isinstance(event, PrefillDone))


def begin(generator: Generator, prompt: Sequence[int], *, adapter: str | None = None, **sampling: Any) -> Answered:
    """Ask, without waiting for the answer."""
    answer = Answered()
    answer.ticket = generator.submit(prompt, SamplingParams(**sampling), answer.tell, adapter=adapter)
    return answer


def ask(generator: Generator, prompt: Sequence[int], *, adapter: str | None = None, **sampling: Any) -> Answered:
    """Ask and wait for the whole answer."""
    return begin(generator, prompt, adapter=adapter, **sampling).wait()


def fresh_chunk(
    config: ModelConfig, seed: int = 0, device: torch.device = CPU, dtype: Any = torch.float32
) -> DecoderStage:
    """A whole decoder with fresh weights, wide enough that tokens differ in their scores."""
    chunk = build_decoder(config.model_copy(update={"init_std": config.hidden**-0.5}), dtype, device)
    chunk.to_empty(device=device)
    held = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
    for parameter in parameters(config):
        init_parameter(held[parameter.name].data, parameter, (0,) * len(parameter.shape), chunk.config, seed)
    return chunk


@contextmanager
def generating(
    folder: Path | DecoderStage, *, room: ServingLimits | None = None, **options: Any
) -> Iterator[ModelGenerator]:
    """A generator over the weights in a folder, or over a decoder."""
    chunk = folder if isinstance(folder, DecoderStage) else load_model(str(folder), device="cpu").decoder
    length = chunk.config.max_positions
    generator = ModelGenerator(chunk, room or ServingLimits(4, length, 4 * length), **options)
    try:
        yield generator
    finally:
        generator.close()

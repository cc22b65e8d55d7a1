"""One prompt and one answer: what `trainshed generate` and `LoadedModel.generate` do."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainshed.errors import TrainshedError
from trainshed.serve.request import (
    FinishReason,
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    PrefillDone,
    SamplingParams,
)

if TYPE_CHECKING:
    from trainshed.serve.loading import LoadedModel


@dataclass(frozen=True)
class GenerationOutput:
    """What a model said to a prompt; `str()` of it is the text."""

    text: str
    tokens: tuple[int, ...]
    """The ids of the answer."""
    prompt_tokens: int
    finish_reason: FinishReason
    """`stop`: an end token or a stop text; `length`: as many tokens as were asked for."""
    seconds: float
    """From the end of the prompt's prefill to the last token."""

    @property
    def tokens_per_second(self) -> float:
        """How fast the answer came."""
        return len(self.tokens) / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return self.text


def generate_text(
    model: LoadedModel,
    tokens: Sequence[int],
    sampling: SamplingParams,
    *,
    eager: bool = False,
    on_text: Callable[[str], None] = lambda text: None,
) -> GenerationOutput:
    """Let a model go on with tokens; `on_text` gets each piece of text as it comes."""
    sampling.check()
    # Of the cache only what this one answer can need is taken.
    length = min(model.config.max_positions, len(tokens) + max(sampling.max_tokens or 0, 1))
    if sampling.max_tokens is None:
        length = model.config.max_positions
    generator = model.generator(max_sequences=1, max_length=length, eager=eager)
    events: queue.SimpleQueue[tuple[float, GenerationEvent]] = queue.SimpleQueue()
    ids: list[int] = []
    text, began = "", time.perf_counter()

    def keep(event: GenerationEvent) -> None:
        # The time is the generator's: this thread may see the first event only when the answer is complete.
        events.put((time.perf_counter(), event))

    try:
        generator.submit(list(tokens), sampling, keep)
        while True:
            moment, event = events.get()
            if isinstance(event, GenerationFailed):
                raise TrainshedError(f"the model could not go on: {event.reason}")
            if isinstance(event, PrefillDone):
                began = moment
                continue
            text += event.text
            on_text(event.text)
            if isinstance(event, GenerationFinished):
                break
            ids.append(event.token)
    finally:
        generator.close()
    return GenerationOutput(text, tuple(ids), len(tokens), event.finish_reason, moment - began)

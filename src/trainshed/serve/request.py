"""What is asked of a model and what comes back: sampling parameters, the events of a generation, and the `Generator`
protocol that the scheduler and every API share. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainshed.errors import InputError

FinishReason = Literal["stop", "length", "cancelled"]
MAX_TOP_LOGPROBS = 100
"""More are refused: they are for people, and each costs a row of text."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop."""

    max_tokens: int | None = None
    """None: until the model's length is full."""
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_k: int = 0
    """0: no bound."""
    top_p: float = 1.0
    seed: int | None = None
    """The same seed, prompt and sampling give the same answer, whoever else is being answered."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    ignore_end: bool = False
    """Go on after the model's own end token."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    """How many alternatives are told with each token; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Tell the log-probability of each token of the prompt, too."""

    def check(self) -> None:
        """Refuse settings that mean nothing."""
        wrong = {
            "max_tokens": self.max_tokens is not None and self.max_tokens < 0,
            "temperature": not 0.0 <= self.temperature < math.inf,
            "top_k": self.top_k < 0,
            "top_p": not 0.0 < self.top_p <= 1.0,
            "frequency_penalty": not math.isfinite(self.frequency_penalty),
            "presence_penalty": not math.isfinite(self.presence_penalty),
            "logprobs": self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "stop": "" in self.stop,
        }
        hints = {
            "max_tokens": "write a whole number from 0 up",
            "temperature": "write 0 for the likeliest token, 1 for the model's own probabilities",
            "top_k": "write how many of the likeliest tokens may be chosen; 0 for all",
            "top_p": "write a share over 0 and up to 1",
            "logprobs": f"write how many alternatives to tell, 0 to {MAX_TOP_LOGPROBS}",
            "stop": "write a text that is not empty",
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise InputError(
                    f"`{name}: {getattr(self, name)}` means nothing", hint=hints.get(name, "write a finite number")
                )


@dataclass(frozen=True)
class TokenLogprob:
    """A token that could have stood there."""

    token: int
    logprob: float


@dataclass(frozen=True)
class OutputToken:
    """One token of an answer."""

    token: int
    text: str
    """What it adds to the text: nothing while a character is half there or a stop text may be beginning."""
    logprob: float | None = None
    """Of the model itself, before temperature and bounds."""
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PrefillDone:
    """The prompt has been read; log-probabilities of its tokens from the second on, where they were asked for."""

    logprobs: tuple[OutputToken, ...] = ()


@dataclass(frozen=True)
class GenerationFinished:
    """The answer is whole. `text` is what was held back and is part of it after all."""

    reason: FinishReason
    text: str = ""


@dataclass(frozen=True)
class GenerationFailed:
    """The model could not go on; the sentence says why."""

    why: str


GenerationEvent = PrefillDone | OutputToken | GenerationFinished | GenerationFailed


@dataclass(frozen=True)
class GeneratorLoad:
    """How busy a generator is."""

    running: int
    waiting: int
    cached_tokens: int
    cache_tokens: int
    """Room for tokens, in all."""
    prompt_tokens_total: int
    generated_tokens_total: int


class GenerationHandle(Protocol):
    """A question that is being answered."""

    def cancel(self) -> None:
        """Stop answering; an `Ended("cancelled")` follows unless the answer was whole already."""
        ...


class Generator(Protocol):
    """Answers many questions at once. Its events come from a thread of its own, in order for each question."""

    @property
    def max_length(self) -> int:
        """Prompt and answer together, in tokens."""
        ...

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, tell: Callable[[GenerationEvent], None]
    ) -> GenerationHandle:
        """Take a question; raises `InputError` for a prompt that is empty, too long or of unknown tokens."""
        ...

    def load(self) -> GeneratorLoad:
        """Say how busy it is."""
        ...

    def failure(self) -> str | None:
        """Say why it can answer nothing any more; None while all is well."""
        ...

    def close(self) -> None:
        """Answer nothing more: running questions end as cancelled."""
        ...

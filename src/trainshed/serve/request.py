"""A generation request and its events: sampling parameters, output tokens, and the `Generator` protocol that the
scheduler and every API share. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainshed.errors import InputError

FinishReason = Literal["stop", "length", "cancelled"]
MAX_TOP_LOGPROBS = 100
"""More are refused: people read them, and each is a line of text."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop."""

    max_tokens: int | None = None
    """None: until the model's maximum length."""
    temperature: float = 1.0
    """0: always the most likely token."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    seed: int | None = None
    """The same seed, prompt and sampling give the same output, whatever other requests run."""
    stop: tuple[str, ...] = ()
    """Stop strings: they end the output and are not part of it."""
    ignore_eos: bool = False
    """Go on after an EOS token."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    """How many top tokens are returned with each output token; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Also return the log-probability of each token of the prompt."""

    def check(self) -> None:
        """Refuse parameters that are out of range."""
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
    """A token of the vocabulary and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class OutputToken:
    """One token of the output."""

    token: int
    text: str
    """What it adds to the text: nothing while a character is incomplete or a stop string may be beginning."""
    logprob: float | None = None
    """Of the model itself, before temperature, top_k and top_p."""
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PrefillDone:
    """Prefill is done; `logprobs` are those of the prompt's tokens from the second on, if they were requested."""

    logprobs: tuple[OutputToken, ...] = ()


@dataclass(frozen=True)
class GenerationFinished:
    """The output is complete. `text` is the rest that was held back."""

    finish_reason: FinishReason
    text: str = ""


@dataclass(frozen=True)
class GenerationFailed:
    """The model could not go on; `reason` is a sentence."""

    reason: str


GenerationEvent = PrefillDone | OutputToken | GenerationFinished | GenerationFailed


@dataclass(frozen=True)
class GeneratorLoad:
    """The load of a generator."""

    running: int
    waiting: int
    cached_tokens: int
    cache_tokens: int
    """Size of the KV cache."""
    prompt_tokens_total: int
    generated_tokens_total: int


class GenerationHandle(Protocol):
    """A request that was submitted."""

    def cancel(self) -> None:
        """Stop generating; a `GenerationFinished("cancelled")` follows unless the request has already finished."""
        ...


class Generator(Protocol):
    """Runs many requests at once. Its events come from its own thread, in order for each request."""

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and output together."""
        ...

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        on_event: Callable[[GenerationEvent], None],
        *,
        adapter: str | None = None,
    ) -> GenerationHandle:
        """Submit a request; raises `InputError` for a prompt that is empty, too long or of unknown tokens.

        `adapter` names one of the adapters that are loaded; None: the base alone answers.
        """
        ...

    def load(self) -> GeneratorLoad:
        """Return the current load."""
        ...

    def failure(self) -> str | None:
        """Return why no request can run any more; None while all is well."""
        ...

    def close(self) -> None:
        """Stop; running requests end as cancelled."""
        ...

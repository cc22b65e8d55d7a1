"""A model of letters for the API's tests: a token is a character, and what it says is written down beforehand.

It keeps the generator's contract (a thread of its own, events in order, cancelling), so that tests can hold an answer
at any token and see what the server does meanwhile; the real model has tests of its own in `test_real_model.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainshed.errors import InputError
from trainshed.serve.request import (
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    GeneratorLoad,
    OutputToken,
    PrefillDone,
    SamplingParams,
    TokenLogprob,
)

END = 0
BEGINNING = 1


class Letters:
    """Tokens are code points; 0 ends a text, 1 begins it."""

    bos_token: int | None = BEGINNING
    can_chat = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        special = {END: "<end>", BEGINNING: "<begin>"}
        return "".join(special.get(token) or chr(token) for token in tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise InputError("the conversation must begin with the user")
        return self.encode("".join(f"{each['role']}:{each['content']}\n" for each in messages) + "assistant:")


@dataclass(eq=False)
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    tell: Callable[[GenerationEvent], None]
    adapter: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedGenerator:
    """Says `script` after every prompt, then the model's own end; `hold` keeps all answers at their next token."""

    script: str = "hello world"
    max_length: int = 256
    said: list[Asked] = field(default_factory=list)
    broken: str | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    generated: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hold.set()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        on_event: Callable[[GenerationEvent], None],
        *,
        adapter: str | None = None,
    ) -> Asked:
        if not prompt:
            raise InputError("the prompt is empty")
        if not all(0 <= token < 0xD800 for token in prompt):
            raise InputError("these are not letters")
        asked = Asked(list(prompt), sampling, on_event, adapter)
        self.said.append(asked)
        with self._lock:
            self.running += 1
        threading.Thread(target=self._answer, args=(asked,), daemon=True).start()
        return asked

    def load(self) -> GeneratorLoad:
        prompts = sum(len(asked.prompt) for asked in self.said)
        return GeneratorLoad(self.running, 0, self.generated, 1000, prompts, self.generated)

    def failure(self) -> str | None:
        return self.broken

    def close(self) -> None:
        for asked in self.said:
            asked.cancel()

    def _answer(self, asked: Asked) -> None:
        last = self._events(asked)
        with self._lock:
            self.running -= 1
        asked.tell(last)

    def _events(self, asked: Asked) -> GenerationFinished | GenerationFailed:
        sampling = asked.sampling
        read = tuple(self._piece(token, sampling) for token in asked.prompt[1:]) if sampling.prompt_logprobs else ()
        asked.tell(PrefillDone(read))
        text = ""
        for letter in self.script[: sampling.max_tokens]:
            while not self.hold.wait(0.005):
                if asked.cancelled.is_set():
                    return GenerationFinished("cancelled")
            if asked.cancelled.is_set():
                return GenerationFinished("cancelled")
            if self.broken:
                return GenerationFailed(self.broken)
            text += letter
            with self._lock:
                self.generated += 1
            if any(text.endswith(stop) for stop in sampling.stop):
                asked.tell(OutputToken(ord(letter), ""))
                return GenerationFinished("stop")
            asked.tell(self._piece(ord(letter), sampling))
        whole = sampling.max_tokens is None or len(self.script) < sampling.max_tokens
        return GenerationFinished("stop" if whole else "length")

    def _piece(self, token: int, sampling: SamplingParams) -> OutputToken:
        if sampling.logprobs is None:
            return OutputToken(token, chr(token))
        others = tuple(TokenLogprob(token + step, -0.25 * (step + 1)) for step in range(sampling.logprobs))
        return OutputToken(token, chr(token), -0.25, others)

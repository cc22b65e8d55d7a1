"""The desk between the event loop and the generator's thread: questions go in, their events come out as they happen.

A question lives no longer than somebody waits for it: whoever asks waits in `attending(...)`, which cancels what is
unfinished when it is left, and when the client goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from starlette.types import Receive

from trainshed.errors import InputError, TrainshedError
from trainshed.serve.asking import Ended, Event, Failed, Generator, Piece, PromptRead, Reason, Sampling, Ticket
from trainshed.serve.http.metrics import Metrics
from trainshed.serve.http.refusal import Refusal, bad

MAX_TOKENS = 2**21
"""Of all prompts and answers of one request; each is an object of some 200 bytes until the answer is sent."""
MAX_LOGPROBS = 2**21
"""Of one request. With `echo`, `logprobs: 20` asks for 21 of them for each token of the prompt as well."""


@dataclass(frozen=True)
class Question:
    """A prompt and how to go on from it."""

    prompt: Sequence[int]
    sampling: Sampling


@dataclass
class Answer:
    """An answer that is being gathered, or is whole."""

    prompt_pieces: tuple[Piece, ...] = ()
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    reason: Reason | None = None

    def add(self, event: Event) -> None:
        """Take in what happened."""
        match event:
            case PromptRead():
                self.prompt_pieces = event.logprobs
            case Piece():
                self.pieces.append(event)
                self.text += event.text
            case Ended():
                self.text += event.text
                self.reason = event.reason
            case Failed():
                raise Refusal(500, event.why, code="generation_failed")


class Asked:
    """The questions of one request. Iterate over it for (number of the question, event), each until its end."""

    def __init__(self, count: int) -> None:
        self.tickets: list[Ticket] = []
        self.client_left = False
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._unread = count

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._unread:
            number, event = await self._events.get()
            self._unread -= isinstance(event, Ended | Failed)
            yield number, event

    def put(self, number: int, event: Event) -> None:
        """Take an event of a question (on the event loop)."""
        self._events.put_nowait((number, event))

    def cancel(self) -> None:
        """Stop answering all of it."""
        for ticket in self.tickets:
            ticket.cancel()

    async def whole(self) -> list[Answer]:
        """Wait for all answers."""
        answers = [Answer() for _ in self.tickets]
        async for number, event in self:
            answers[number].add(event)
        if any(answer.reason == "cancelled" for answer in answers):
            raise self.cut_short()
        return answers

    def cut_short(self) -> Refusal:
        """Return what to say of an answer that was cancelled: the client left, or the server is going away."""
        if self.client_left:
            return Refusal(499, "the client has left")  # nginx's status; seen in the metrics only
        return Refusal(503, "the server is shutting down", code="shutting_down")


class Desk:
    """Takes questions from coroutines; refuses more than `max_questions` at once, running and waiting together."""

    def __init__(self, generator: Generator, metrics: Metrics, max_questions: int) -> None:
        self.max_questions = max_questions
        self._generator, self._metrics = generator, metrics
        self._asked: set[Asked] = set()
        self._open = 0
        self._mail = _Mail()

    @property
    def busy(self) -> bool:
        """Whether somebody still waits for an answer, or for the rest of its text."""
        return bool(self._asked)

    def cancel_all(self) -> None:
        """Stop answering everybody; from any thread."""
        for asked in list(self._asked):
            asked.cancel()

    def check_count(self, answers: int) -> None:
        """Refuse more answers than this server takes at once; routes ask before they do anything for each of them."""
        if answers > self.max_questions:
            raise bad(f"this asks for {answers} answers at once; this server takes {self.max_questions}")

    def _check_size(self, questions: Sequence[Question]) -> None:
        """Refuse what a small body can ask for and no machine can hold."""
        longest = self._generator.max_length
        tokens = logprobs = 0
        for question in questions:
            prompt, sampling = len(question.prompt), question.sampling
            answer = sampling.max_tokens if sampling.max_tokens is not None else max(longest - prompt, 0)
            tokens += prompt + answer
            if sampling.logprobs is not None:
                logprobs += (answer + prompt * sampling.prompt_logprobs) * (1 + sampling.logprobs)
        if tokens > max(MAX_TOKENS, longest):
            raise bad(
                f"this asks for {tokens} tokens of prompts and answers together; one request may ask for "
                f"{max(MAX_TOKENS, longest)}: send fewer prompts, a smaller `n` or a smaller `max_tokens`"
            )
        if logprobs > MAX_LOGPROBS:
            raise bad(
                f"this asks for {logprobs} log-probabilities; one request may ask for {MAX_LOGPROBS}: "
                "send fewer prompts, or a smaller `n`, `max_tokens` or number of `logprobs`"
            )

    def ask(self, questions: Sequence[Question]) -> Asked:
        """Take the questions of a request, all or none; whoever asks must then be `attending`."""
        self.check_count(len(questions))
        self._check_size(questions)
        if self._open + len(questions) > self.max_questions:
            raise Refusal(429, f"{self._open} questions are being answered or wait: try later", code="queue_full")
        asked = Asked(len(questions))
        self._mail.loop = asyncio.get_running_loop()
        try:
            for number, question in enumerate(questions):
                deliver = partial(self._deliver, asked, number, _Clock(self._metrics))
                tell = partial(self._mail.send, deliver)
                asked.tickets.append(self._generator.submit(question.prompt, question.sampling, tell))
                self._open += 1
        except TrainshedError as error:
            raise _refused(error) from None
        finally:
            if len(asked.tickets) < len(questions):
                asked.cancel()
        self._asked.add(asked)
        return asked

    @asynccontextmanager
    async def attending(self, asked: Asked, receive: Receive) -> AsyncIterator[Asked]:
        """Wait for answers in here: they are cancelled when the client goes away, and when this is left."""
        watch = asyncio.create_task(_cancel_when_client_leaves(receive, asked))
        try:
            yield asked
        finally:
            watch.cancel()
            self._asked.discard(asked)
            asked.cancel()

    def _deliver(self, asked: Asked, number: int, clock: _Clock, event: Event) -> None:
        if isinstance(event, Ended | Failed):
            self._open -= 1
        elif isinstance(event, Piece):
            clock.token()
        asked.put(number, event)


class _Clock:
    """Measures one answer: the time to its first token, then from token to token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last_seconds = time.monotonic()
        self._first = True

    def token(self) -> None:
        now_seconds = time.monotonic()
        histogram = self._metrics.first_token_seconds if self._first else self._metrics.token_seconds
        histogram.observe(now_seconds - self._last_seconds)
        self._first, self._last_seconds = False, now_seconds


class _Mail:
    """Brings events from the generator's thread to the loop, which is woken once for all that came together."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._letters: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._is_called = False

    def send(self, deliver: Callable[[Event], None], event: Event) -> None:
        """Let the loop deliver an event."""
        self._letters.append((deliver, event))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # once the loop has ended nobody listens
                self.loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        # Before the letters are taken: what comes from now on calls again.
        self._is_called = False
        while self._letters:
            deliver, event = self._letters.popleft()
            deliver(event)


def _refused(error: TrainshedError) -> Refusal:
    if isinstance(error, InputError):
        return bad(str(error), code="invalid_prompt")
    return Refusal(503, str(error), code="model_failed")


async def _cancel_when_client_leaves(receive: Receive, asked: Asked) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    asked.client_left = True
    asked.cancel()

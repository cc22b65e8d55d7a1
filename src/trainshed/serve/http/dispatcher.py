"""Between the event loop and the generator's thread: requests go in, their events come out as they happen.

A request lives no longer than somebody waits for it: whoever sends one waits in `attending(...)`, which cancels
what is unfinished when it is left, and when the client goes away.
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
from trainshed.serve.http.errors import ApiError, bad_request
from trainshed.serve.http.metrics import ServerMetrics
from trainshed.serve.request import (
    FinishReason,
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    GenerationHandle,
    Generator,
    OutputToken,
    PrefillDone,
    SamplingParams,
)

MAX_REQUEST_TOKENS = 2**21
"""Of all prompts and answers of one request; each is an object of some 200 bytes until the answer is sent."""
MAX_REQUEST_LOGPROBS = 2**21
"""Of one request. With `echo`, `logprobs: 20` asks for 21 of them for each token of the prompt as well."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to go on from it."""

    prompt: Sequence[int]
    sampling: SamplingParams


@dataclass
class CompletionOutput:
    """An answer that is being gathered, or is whole."""

    prompt_pieces: tuple[OutputToken, ...] = ()
    pieces: list[OutputToken] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None

    def add(self, event: GenerationEvent) -> None:
        """Take in what happened."""
        match event:
            case PrefillDone():
                self.prompt_pieces = event.logprobs
            case OutputToken():
                self.pieces.append(event)
                self.text += event.text
            case GenerationFinished():
                self.text += event.text
                self.reason = event.reason
            case GenerationFailed():
                raise ApiError(500, event.why, code="generation_failed")


class RequestBatch:
    """The questions of one request. Iterate over it for (number of the question, event), each until its end."""

    def __init__(self, count: int) -> None:
        self.tickets: list[GenerationHandle] = []
        self.client_left = False
        self._events: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue()
        self._unread = count

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        while self._unread:
            number, event = await self._events.get()
            self._unread -= isinstance(event, GenerationFinished | GenerationFailed)
            yield number, event

    def put(self, number: int, event: GenerationEvent) -> None:
        """Take an event of a question (on the event loop)."""
        self._events.put_nowait((number, event))

    def cancel(self) -> None:
        """Stop answering all of it."""
        for ticket in self.tickets:
            ticket.cancel()

    async def whole(self) -> list[CompletionOutput]:
        """Wait for all answers."""
        answers = [CompletionOutput() for _ in self.tickets]
        async for number, event in self:
            answers[number].add(event)
        if any(answer.reason == "cancelled" for answer in answers):
            raise self.cut_short()
        return answers

    def cut_short(self) -> ApiError:
        """Return what to say of an answer that was cancelled: the client left, or the server is going away."""
        if self.client_left:
            return ApiError(499, "the client has left")  # nginx's status; seen in the metrics only
        return ApiError(503, "the server is shutting down", code="shutting_down")


class RequestDispatcher:
    """Takes questions from coroutines; refuses more than `max_questions` at once, running and waiting together."""

    def __init__(self, generator: Generator, metrics: ServerMetrics, max_questions: int) -> None:
        self.max_questions = max_questions
        self._generator, self._metrics = generator, metrics
        self._asked: set[RequestBatch] = set()
        self._open = 0
        self._mail = _EventRelay()

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
            raise bad_request(f"this asks for {answers} answers at once; this server takes {self.max_questions}")

    def _check_size(self, questions: Sequence[GenerationRequest]) -> None:
        """Refuse what a small body can ask for and no machine can hold."""
        longest = self._generator.max_length
        tokens = logprobs = 0
        for question in questions:
            prompt, sampling = len(question.prompt), question.sampling
            answer = sampling.max_tokens if sampling.max_tokens is not None else max(longest - prompt, 0)
            tokens += prompt + answer
            if sampling.logprobs is not None:
                logprobs += (answer + prompt * sampling.prompt_logprobs) * (1 + sampling.logprobs)
        if tokens > max(MAX_REQUEST_TOKENS, longest):
            raise bad_request(
                f"this asks for {tokens} tokens of prompts and answers together; one request may ask for "
                f"{max(MAX_REQUEST_TOKENS, longest)}: send fewer prompts, a smaller `n` or a smaller `max_tokens`"
            )
        if logprobs > MAX_REQUEST_LOGPROBS:
            raise bad_request(
                f"this asks for {logprobs} log-probabilities; one request may ask for {MAX_REQUEST_LOGPROBS}: "
                "send fewer prompts, or a smaller `n`, `max_tokens` or number of `logprobs`"
            )

    def ask(self, questions: Sequence[GenerationRequest]) -> RequestBatch:
        """Take the questions of a request, all or none; whoever asks must then be `attending`."""
        self.check_count(len(questions))
        self._check_size(questions)
        if self._open + len(questions) > self.max_questions:
            raise ApiError(429, f"{self._open} questions are being answered or wait: try later", code="queue_full")
        asked = RequestBatch(len(questions))
        self._mail.loop = asyncio.get_running_loop()
        try:
            for number, question in enumerate(questions):
                deliver = partial(self._deliver, asked, number, _LatencyTimer(self._metrics))
                tell = partial(self._mail.send, deliver)
                asked.tickets.append(self._generator.submit(question.prompt, question.sampling, tell))
                self._open += 1
        except TrainshedError as error:
            raise _as_api_error(error) from None
        finally:
            if len(asked.tickets) < len(questions):
                asked.cancel()
        self._asked.add(asked)
        return asked

    @asynccontextmanager
    async def attending(self, asked: RequestBatch, receive: Receive) -> AsyncIterator[RequestBatch]:
        """Wait for answers in here: they are cancelled when the client goes away, and when this is left."""
        watch = asyncio.create_task(_cancel_when_client_leaves(receive, asked))
        try:
            yield asked
        finally:
            watch.cancel()
            self._asked.discard(asked)
            asked.cancel()

    def _deliver(self, asked: RequestBatch, number: int, clock: _LatencyTimer, event: GenerationEvent) -> None:
        if isinstance(event, GenerationFinished | GenerationFailed):
            self._open -= 1
        elif isinstance(event, OutputToken):
            clock.token()
        asked.put(number, event)


class _LatencyTimer:
    """Measures one answer: the time to its first token, then from token to token."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last_seconds = time.monotonic()
        self._first = True

    def token(self) -> None:
        now_seconds = time.monotonic()
        histogram = self._metrics.first_token_seconds if self._first else self._metrics.token_seconds
        histogram.observe(now_seconds - self._last_seconds)
        self._first, self._last_seconds = False, now_seconds


class _EventRelay:
    """Brings events from the generator's thread to the loop, which is woken once for all that came together."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._letters: deque[tuple[Callable[[GenerationEvent], None], GenerationEvent]] = deque()
        self._is_called = False

    def send(self, deliver: Callable[[GenerationEvent], None], event: GenerationEvent) -> None:
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


def _as_api_error(error: TrainshedError) -> ApiError:
    if isinstance(error, InputError):
        return bad_request(str(error), code="invalid_prompt")
    return ApiError(503, str(error), code="model_failed")


async def _cancel_when_client_leaves(receive: Receive, asked: RequestBatch) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    asked.client_left = True
    asked.cancel()

"""Between the event loop and the generator's thread: requests go in, their events come out as they happen.

A request lives only as long as its caller waits for it in `awaiting(...)`. This cancels unfinished requests when it is
left, and when the client disconnects.
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
"""Of all prompts and outputs of one HTTP request; each is an object of about 200 bytes until the response is sent."""
MAX_REQUEST_LOGPROBS = 2**21
"""Of one HTTP request. With `echo`, `logprobs: 20` asks for 21 of them for each token of the prompt as well."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and its sampling parameters, and the adapter that answers it (None: the base)."""

    prompt: Sequence[int]
    sampling: SamplingParams
    adapter: str | None = None


@dataclass
class CompletionOutput:
    """The output of one request so far."""

    prompt_tokens: tuple[OutputToken, ...] = ()
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def add(self, event: GenerationEvent) -> None:
        """Add an event."""
        match event:
            case PrefillDone():
                self.prompt_tokens = event.logprobs
            case OutputToken():
                self.tokens.append(event)
                self.text += event.text
            case GenerationFinished():
                self.text += event.text
                self.finish_reason = event.finish_reason
            case GenerationFailed():
                raise ApiError(500, event.reason, code="generation_failed")


class RequestBatch:
    """The requests of one HTTP request. Iterate over it for (number of the request, event), until all have ended."""

    def __init__(self, count: int) -> None:
        self.handles: list[GenerationHandle] = []
        self.client_left = False
        self._events: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue()
        self._unread = count

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        while self._unread:
            number, event = await self._events.get()
            self._unread -= isinstance(event, GenerationFinished | GenerationFailed)
            yield number, event

    def put(self, number: int, event: GenerationEvent) -> None:
        """Add an event of a request (on the event loop)."""
        self._events.put_nowait((number, event))

    def cancel(self) -> None:
        """Cancel all its requests."""
        for handle in self.handles:
            handle.cancel()

    async def collect(self) -> list[CompletionOutput]:
        """Wait for all outputs."""
        outputs = [CompletionOutput() for _ in self.handles]
        async for number, event in self:
            outputs[number].add(event)
        if any(output.finish_reason == "cancelled" for output in outputs):
            raise self.cancelled_error()
        return outputs

    def cancelled_error(self) -> ApiError:
        """Return the error of a cancelled request: the client has left, or the server is shutting down."""
        if self.client_left:
            return ApiError(499, "the client has left")  # nginx's status; seen in the metrics only
        return ApiError(503, "the server is shutting down", code="shutting_down")


class RequestDispatcher:
    """Submits requests from coroutines; refuses more than `max_requests` at once, running and waiting together."""

    def __init__(self, generator: Generator, metrics: ServerMetrics, max_requests: int) -> None:
        self.max_requests = max_requests
        self._generator, self._metrics = generator, metrics
        self._batches: set[RequestBatch] = set()
        self._open_requests = 0
        self._relay = _EventRelay()

    @property
    def busy(self) -> bool:
        """Whether a caller still waits for outputs, or for the rest of a stream."""
        return bool(self._batches)

    def cancel_all(self) -> None:
        """Cancel all requests; from any thread."""
        for batch in list(self._batches):
            batch.cancel()

    def check_count(self, outputs: int) -> None:
        """Refuse more outputs than this server takes at once; routes check this first."""
        if outputs > self.max_requests:
            raise bad_request(f"this asks for {outputs} answers at once; this server takes {self.max_requests}")

    def _check_size(self, requests: Sequence[GenerationRequest]) -> None:
        """Refuse an output size that a small body can ask for and no machine can hold."""
        longest = self._generator.max_length
        tokens = logprobs = 0
        for request in requests:
            prompt, sampling = len(request.prompt), request.sampling
            output = sampling.max_tokens if sampling.max_tokens is not None else max(longest - prompt, 0)
            tokens += prompt + output
            if sampling.logprobs is not None:
                logprobs += (output + prompt * sampling.prompt_logprobs) * (1 + sampling.logprobs)
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

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestBatch:
        """Submit the requests of one HTTP request, all or none; the caller must then wait in `awaiting`."""
        self.check_count(len(requests))
        self._check_size(requests)
        if self._open_requests + len(requests) > self.max_requests:
            raise ApiError(
                429, f"{self._open_requests} questions are being answered or wait: try later", code="queue_full"
            )
        batch = RequestBatch(len(requests))
        self._relay.loop = asyncio.get_running_loop()
        try:
            for number, request in enumerate(requests):
                deliver = partial(self._deliver, batch, number, _LatencyTimer(self._metrics))
                on_event = partial(self._relay.send, deliver)
                batch.handles.append(
                    self._generator.submit(request.prompt, request.sampling, on_event, adapter=request.adapter)
                )
                self._open_requests += 1
        except TrainshedError as error:
            raise _as_api_error(error) from None
        finally:
            if len(batch.handles) < len(requests):
                batch.cancel()
        self._batches.add(batch)
        return batch

    @asynccontextmanager
    async def awaiting(self, batch: RequestBatch, receive: Receive) -> AsyncIterator[RequestBatch]:
        """Wait for outputs in this context: requests are cancelled when the client disconnects, and when it is left."""
        watch = asyncio.create_task(_cancel_when_client_leaves(receive, batch))
        try:
            yield batch
        finally:
            watch.cancel()
            self._batches.discard(batch)
            batch.cancel()

    def _deliver(self, batch: RequestBatch, number: int, clock: _LatencyTimer, event: GenerationEvent) -> None:
        if isinstance(event, GenerationFinished | GenerationFailed):
            self._open_requests -= 1
        elif isinstance(event, OutputToken):
            clock.token()
        batch.put(number, event)


class _LatencyTimer:
    """Measures one request: the time to its first token, then from token to token."""

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
    """Passes events from the generator's thread to the event loop, which is woken once for several events."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._events: deque[tuple[Callable[[GenerationEvent], None], GenerationEvent]] = deque()
        self._is_scheduled = False

    def send(self, deliver: Callable[[GenerationEvent], None], event: GenerationEvent) -> None:
        """Have the event loop deliver an event."""
        self._events.append((deliver, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # after the loop has ended there is nobody to deliver to
                self.loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        # Before the events are taken: an event that comes from now on schedules another call.
        self._is_scheduled = False
        while self._events:
            deliver, event = self._events.popleft()
            deliver(event)


def _as_api_error(error: TrainshedError) -> ApiError:
    if isinstance(error, InputError):
        return bad_request(str(error), code="invalid_prompt")
    return ApiError(503, str(error), code="model_failed")


async def _cancel_when_client_leaves(receive: Receive, batch: RequestBatch) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    batch.client_left = True
    batch.cancel()

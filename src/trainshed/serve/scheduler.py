"""The scheduler: one thread that generates for many requests at once, first come first served.

Requests wait in order until there is a row and a block of the KV cache for all tokens they may need. Between two decode
steps there is one chunk of prefill, and prompts take turns in it, so a long prompt does not delay others for long. Once
something has failed, nothing more is generated, and every request ends with the reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import DecoderStage
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.adapters import AdapterBank
from trainshed.serve.kv_cache import BlockAllocator, ServingLimits
from trainshed.serve.request import (
    FinishReason,
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    GeneratorLoad,
    OutputToken,
    PrefillDone,
    SamplingParams,
)
from trainshed.serve.runner import ModelRunner, ScheduledTokens
from trainshed.serve.sampler import SampledToken, SamplerState, compute_logprobs, sample
from trainshed.serve.tokenizer import DecodeTokens, IncrementalDetokenizer, StopStrings


def check_prompt(tokens: Sequence[int], sampling: SamplingParams, *, vocab_size: int, max_length: int) -> None:
    """Refuse a prompt that the model cannot take, or that leaves no room for an output token."""
    if not tokens:
        raise InputError("the prompt is empty", hint="write at least one token")
    unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if unknown:
        raise InputError(
            f"the prompt holds the token {unknown[0]}, and the model knows 0 to {vocab_size - 1}",
            hint="use the model's own tokenizer",
        )
    if len(tokens) + (sampling.max_tokens != 0) > max_length:
        raise InputError(
            f"the prompt has {len(tokens)} tokens, and prompt and answer have room for {max_length}",
            hint="write a shorter prompt",
        )


class ScheduledRequest:
    """A request that waits, is in prefill, is in decode or has ended.

    It is also the `GenerationHandle` of the caller: `wake` tells the scheduler that it was cancelled.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        on_event: Callable[[GenerationEvent], None],
        *,
        decode: DecodeTokens | None = None,
        eos_tokens: frozenset[int] = frozenset(),
        adapter: int = 0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.sampling, self.max_new_tokens, self.on_event = prompt, sampling, max_new_tokens, on_event
        self.sampler = SamplerState(sampling)
        self.prompt_logprobs: list[OutputToken] = []
        self.block_start: int | None = None
        """Where its block of the cache begins; None while it has none."""
        self.prefilled = 0
        """How many tokens of the prompt are in the cache."""
        self.output_tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        """Why no further token is needed, as far as tokens alone decide; a stop string may end it earlier."""
        self.cancelled = self.ended = False
        self._stops = StopStrings(sampling.stop)
        self._decode, self._eos_tokens, self._adapter, self._wake = decode, eos_tokens, adapter, wake
        self._text: IncrementalDetokenizer | None = None

    @property
    def block_length(self) -> int:
        """How many slots of the cache it can ever need."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def cached_tokens(self) -> int:
        """How many of its tokens are in the cache."""
        return self.prefilled + max(len(self.output_tokens) - 1, 0)

    @property
    def is_stopped(self) -> bool:
        """Whether its text contains a stop string."""
        return self._stops.found

    def cancel(self) -> None:
        """Stop generating."""
        self.cancelled = True
        self._wake()

    def next_prefill(self, max_tokens: int) -> ScheduledTokens:
        """Return the next tokens of the prompt."""
        assert self.block_start is not None, "prefill comes after admission"
        tokens = self.prompt[self.prefilled : self.prefilled + max_tokens]
        return ScheduledTokens(tokens, self.prefilled, self.block_start, self._adapter, self.block_length)

    def next_decode(self) -> ScheduledTokens:
        """Return the last token, after which the next one is sampled."""
        assert self.block_start is not None, "decode comes after admission"
        position = len(self.prompt) + len(self.output_tokens) - 1
        return ScheduledTokens(self.output_tokens[-1:], position, self.block_start, self._adapter, self.block_length)

    def append(self, sampled: SampledToken) -> None:
        """Append a sampled token to the output."""
        self.output_tokens.append(sampled.token)
        if sampled.token in self._eos_tokens and not self.sampling.ignore_eos:
            self.finish_reason = "stop"
        elif len(self.output_tokens) == self.max_new_tokens:
            self.finish_reason = "length"

    def output_token(self, sampled: SampledToken) -> OutputToken:
        """Return a sampled token with the text that it adds."""
        text = self._stops.push(self._detokenizer().push(sampled.token)) if self._decode is not None else ""
        return OutputToken(sampled.token, text, sampled.logprob, sampled.top_logprobs)

    def finish(self, reason: FinishReason) -> GenerationFinished:
        """Return the end with the text that was held back, which may still contain a stop string."""
        rest = self._stops.push(self._detokenizer().finish()) if self._decode is not None else ""
        return (
            GenerationFinished("stop", rest)
            if self.is_stopped
            else GenerationFinished(reason, rest + self._stops.finish())
        )

    def _detokenizer(self) -> IncrementalDetokenizer:
        if self._text is None:
            assert self._decode is not None, "only a generator with a tokenizer makes text"
            self._text = IncrementalDetokenizer(self._decode, self.prompt)
        return self._text


# Tokens of a prompt whose logits are computed at a time: the logits of one are as long as the vocabulary.
_LOGPROB_ROWS = 128
_NOT_FINITE = (
    "the scores of the model are not numbers: its weights are broken, or too large for its dtype "
    "(try --dtype bf16 or fp32)"
)
SampledTokens = list[tuple[ScheduledRequest, SampledToken]]


@dataclass(frozen=True)
class _DecodeStep:
    """A decode step that was launched; on a GPU it runs while the tokens of the last one are emitted."""

    requests: Sequence[ScheduledRequest]
    logits: torch.Tensor


@dataclass(frozen=True)
class OutputText:
    """How tokens become text (None: outputs have no text), and which tokens end an output."""

    decode: DecodeTokens | None = None
    eos_tokens: frozenset[int] = frozenset()


class ModelGenerator:
    """Runs requests on a model; `decode` turns tokens into text (None: outputs have no text).

    `adapters` are those that requests may name; an adapter with a tokenizer of its own is in `adapter_texts`.
    """

    def __init__(
        self,
        decoder: DecoderStage,
        limits: ServingLimits,
        *,
        decode: DecodeTokens | None = None,
        eos_tokens: frozenset[int] = frozenset(),
        adapters: AdapterBank | None = None,
        adapter_texts: Mapping[str, OutputText] | None = None,
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> None:
        self._limits, self._text = limits, OutputText(decode, eos_tokens)
        self._adapters, self._adapter_texts = adapters, dict(adapter_texts or {})
        self._vocab_size = decoder.config.vocab_size
        self._runner = ModelRunner(decoder, limits, adapters=adapters, eager=eager, reporter=reporter)
        self._allocator = BlockAllocator(limits.cache_tokens)
        self._waiting: deque[ScheduledRequest] = deque()
        self._prefilling: deque[ScheduledRequest] = deque()
        self._decoding: list[ScheduledRequest] = []
        self._decode_step: _DecodeStep | None = None
        self._prompt_tokens = self._generated_tokens = 0
        # Guards the three queues, the totals and the two attributes below.
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="trainshed-generator", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and output together."""
        return self._limits.max_length

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        on_event: Callable[[GenerationEvent], None],
        *,
        adapter: str | None = None,
    ) -> ScheduledRequest:
        """Submit a request; raises `InputError` for a prompt that is empty, too long or of unknown tokens.

        `adapter` names one of the adapters; None: the base alone answers. An output that reaches the maximum length
        ends there, whatever `max_tokens` says.
        """
        tokens = [int(token) for token in prompt]
        sampling.check()
        check_prompt(tokens, sampling, vocab_size=self._vocab_size, max_length=self.max_length)
        space = self.max_length - len(tokens)
        max_new_tokens = space if sampling.max_tokens is None else min(sampling.max_tokens, space)
        text = self._text if adapter is None else self._adapter_texts.get(adapter, self._text)
        request = ScheduledRequest(
            tokens,
            sampling,
            max_new_tokens,
            on_event,
            decode=text.decode,
            eos_tokens=text.eos_tokens,
            adapter=self._adapter_number(adapter),
            wake=self._wake,
        )
        with self._changed:
            if self._failure is not None or self._closed:
                raise TrainshedError(f"nothing is answered any more: {self._failure or 'the generator is closed'}")
            self._waiting.append(request)
            self._changed.notify()
        return request

    def load(self) -> GeneratorLoad:
        """Return the current load."""
        with self._changed:
            running = [*self._prefilling, *self._decoding]
            return GeneratorLoad(
                running=len(running),
                waiting=len(self._waiting),
                cached_tokens=sum(request.cached_tokens for request in running),
                cache_tokens=self._limits.cache_tokens,
                prompt_tokens_total=self._prompt_tokens,
                generated_tokens_total=self._generated_tokens,
            )

    def failure(self) -> str | None:
        """Return why no request can run any more; None while all is well."""
        return self._failure

    def close(self) -> None:
        """Stop; running requests end as cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _adapter_number(self, name: str | None) -> int:
        if name is not None and self._adapters is None:
            raise InputError(f"there is no adapter `{name}`: none is loaded", hint="ask the base alone")
        return 0 if self._adapters is None else self._adapters.number(name)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._run_step()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _wait_for_work(self) -> bool:
        """Wait for work, end cancelled requests, admit waiting ones; False once the generator is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._prefilling or self._decoding or self._closed)
            closed = self._closed
            unfinished = [*self._prefilling, *self._decoding, *self._waiting]
        for request in unfinished:
            if closed or request.cancelled:
                self._end(request, GenerationFinished("cancelled"))
        if closed:
            return False
        with self._changed:
            self._admit()
        return True

    def _admit(self) -> None:
        """Admit requests in order, as long as there is a row and a block of the cache."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._limits.max_sequences:
            block_start = self._allocator.allocate(self._waiting[0].block_length)
            if block_start is None:
                return
            self._waiting[0].block_start = block_start
            self._prefilling.append(self._waiting.popleft())

    def _run_step(self) -> None:
        """Finish the decode step that runs, do some prefill, launch the next decode step, emit the sampled tokens."""
        sampled_tokens = [*self._finish_decode(), *self._prefill()]
        if not self._runner.on_gpu:
            # On a CPU nothing runs beside a step, so tokens are emitted before it.
            self._emit_tokens(sampled_tokens)
            sampled_tokens = []
        decoding = [request for request in self._decoding if request.finish_reason is None]
        if decoding:
            self._decode_step = _DecodeStep(
                decoding, self._runner.decode([request.next_decode() for request in decoding])
            )
        self._emit_tokens(sampled_tokens)

    def _finish_decode(self) -> SampledTokens:
        step, self._decode_step = self._decode_step, None
        if step is None:
            return []
        return self._sample(step.requests, step.logits)

    def _sample(self, requests: Sequence[ScheduledRequest], logits: torch.Tensor) -> SampledTokens:
        """Sample a token for each request; some may have ended by a stop string since the step began."""
        sampled_tokens: SampledTokens = []
        for request, sampled in zip(requests, sample(logits, [request.sampler for request in requests]), strict=True):
            if sampled is None:
                self._end(request, GenerationFailed(_NOT_FINITE))
            elif not request.ended:
                request.append(sampled)
                sampled_tokens.append((request, sampled))
        return sampled_tokens

    def _prefill(self) -> SampledTokens:
        """Prefill one chunk; requests whose prompt is complete get their first token."""
        scheduled = self._schedule_prefill()
        if not scheduled:
            return []
        hidden = self._runner.prefill([part for _, part in scheduled])
        prefilled: list[ScheduledRequest] = []
        rows: list[int] = []
        end = 0
        for request, part in scheduled:
            start, end = end, end + len(part.tokens)
            if request.sampling.prompt_logprobs:
                self._add_prompt_logprobs(request, part, hidden[start:end])
            with self._changed:
                request.prefilled += len(part.tokens)
                self._prompt_tokens += len(part.tokens)
                if request.prefilled < len(request.prompt):
                    continue
                self._prefilling.remove(request)
                self._decoding.append(request)
            self._emit(request, PrefillDone(tuple(request.prompt_logprobs)))
            if request.max_new_tokens:
                prefilled.append(request)
                rows.append(end - 1)
            else:
                self._end(request, GenerationFinished("length"))
        if not prefilled:
            return []
        return self._sample(prefilled, self._runner.last_logits(hidden, rows))

    def _schedule_prefill(self) -> list[tuple[ScheduledRequest, ScheduledTokens]]:
        """Choose the prompt tokens of the next chunk; requests that are in it go to the end of the queue.

        On a CPU a prompt is always cut at the same positions, on a GPU the chunk is filled up.
        """
        scheduled: list[tuple[ScheduledRequest, ScheduledTokens]] = []
        chunk = left = self._runner.prefill_chunk_tokens
        with self._changed:
            for request in self._prefilling:
                part = request.next_prefill(left if self._runner.on_gpu else chunk)
                if not part.tokens or len(part.tokens) > left:
                    break
                scheduled.append((request, part))
                left -= len(part.tokens)
            self._prefilling.rotate(-len(scheduled))
        return scheduled

    def _add_prompt_logprobs(self, request: ScheduledRequest, part: ScheduledTokens, hidden: torch.Tensor) -> None:
        """Compute the log-probability of each prompt token from the hidden state before it."""
        next_tokens = request.prompt[part.position + 1 : part.position + 1 + len(part.tokens)]
        for start in range(0, len(next_tokens), _LOGPROB_ROWS):
            tokens = torch.tensor(next_tokens[start : start + _LOGPROB_ROWS], device=hidden.device)
            logits = self._runner.logits(hidden[start : start + len(tokens)])
            for sampled in compute_logprobs(logits, tokens, request.sampling.logprobs or 0):
                request.prompt_logprobs.append(OutputToken(sampled.token, "", sampled.logprob, sampled.top_logprobs))

    def _emit_tokens(self, sampled_tokens: SampledTokens) -> None:
        """Detokenize sampled tokens and emit them; a request may end by a stop string."""
        for request, sampled in sampled_tokens:
            if request.ended:
                continue
            if request.finish_reason != "stop":
                with self._changed:
                    self._generated_tokens += 1
                self._emit(request, request.output_token(sampled))
            if request.is_stopped:
                self._end(request, GenerationFinished("stop"))
            elif request.finish_reason is not None:
                self._end(request, request.finish(request.finish_reason))

    def _end(self, request: ScheduledRequest, event: GenerationEvent) -> None:
        with self._changed:
            if request.ended:
                return
            request.ended = True
            for queue in (self._waiting, self._prefilling, self._decoding):
                if request in queue:
                    queue.remove(request)
            if request.block_start is not None:
                self._allocator.free(request.block_start, request.block_length)
                request.block_start = None
        self._emit(request, event)

    def _emit(self, request: ScheduledRequest, event: GenerationEvent) -> None:
        try:
            request.on_event(event)
        except Exception:
            # The caller cannot take events any more: that ends this request and no other.
            request.cancelled = True

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            unfinished = [*self._prefilling, *self._decoding, *self._waiting]
        for request in unfinished:
            self._end(request, GenerationFailed(reason))

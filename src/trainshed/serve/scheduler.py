"""The scheduler: one thread that generates for many requests at once, first come first served.

Requests wait in order until there is a row and room in the KV cache for all they may need. Between two decode
steps some of the prompts that are still in prefill is read, each in its turn: a long prompt holds nobody up for
long. Once something has failed, nothing more is generated: everybody is told why.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import DecoderStage
from trainshed.reporting import SILENT, Reporter
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
    """Refuse a prompt that a model cannot read, or after which it has no room for a token that is wanted."""
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
    """A question that waits, whose prompt is being read, that is being answered, or that has ended.

    It is also the ticket that whoever asked holds: `wake` tells the generator that it was cancelled.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        limit: int,
        tell: Callable[[GenerationEvent], None],
        *,
        decode: DecodeTokens | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.sampling, self.limit, self.tell = prompt, sampling, limit, tell
        self.chooser = SamplerState(sampling)
        self.prompt_logprobs: list[OutputToken] = []
        self.place: int | None = None
        """Where its run of the cache begins; None while it has none."""
        self.read = 0
        """How many tokens of the prompt have been read."""
        self.chosen: list[int] = []
        self.full: FinishReason | None = None
        """Why no further token is wanted, as far as tokens alone tell."""
        self.cancelled = self.ended = False
        self._stops = StopStrings(sampling.stop)
        self._decode, self._wake = decode, wake
        self._text: IncrementalDetokenizer | None = None

    @property
    def room(self) -> int:
        """How many places of the cache it can ever need."""
        return len(self.prompt) + self.limit

    @property
    def cached_tokens(self) -> int:
        """How many tokens have keys and values."""
        return self.read + max(len(self.chosen) - 1, 0)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has been found."""
        return self._stops.found

    def cancel(self) -> None:
        """Stop answering."""
        self.cancelled = True
        self._wake()

    def next_prompt(self, most: int) -> ScheduledTokens:
        """Return what of the prompt is to be read next."""
        assert self.place is not None, "read only once it has been admitted"
        return ScheduledTokens(self.prompt[self.read : self.read + most], self.read, self.place)

    def last_token(self) -> ScheduledTokens:
        """Return the token that the next one is chosen after."""
        assert self.place is not None, "answered only once it has been admitted"
        return ScheduledTokens(self.chosen[-1:], len(self.prompt) + len(self.chosen) - 1, self.place)

    def take(self, choice: SampledToken, ends: frozenset[int]) -> None:
        """Add a token; `ends` are the model's end tokens."""
        self.chosen.append(choice.token)
        if choice.token in ends and not self.sampling.ignore_end:
            self.full = "stop"
        elif len(self.chosen) == self.limit:
            self.full = "length"

    def piece(self, choice: SampledToken) -> OutputToken:
        """Tell a token with the text that it adds."""
        text = self._stops.push(self._stream().push(choice.token)) if self._decode is not None else ""
        return OutputToken(choice.token, text, choice.logprob, choice.alternatives)

    def ending(self, reason: FinishReason) -> GenerationFinished:
        """End it with what was held back; that may still hold a stop text."""
        rest = self._stops.push(self._stream().finish()) if self._decode is not None else ""
        return (
            GenerationFinished("stop", rest)
            if self.is_stopped
            else GenerationFinished(reason, rest + self._stops.finish())
        )

    def _stream(self) -> IncrementalDetokenizer:
        if self._text is None:
            assert self._decode is not None, "asked only where there is text"
            self._text = IncrementalDetokenizer(self._decode, self.prompt)
        return self._text


# Scores of a prompt's tokens are made so many at a time: each is a row of the vocabulary.
_LOGPROB_ROWS = 128
_NOT_FINITE = (
    "the scores of the model are no numbers: its weights are broken, or too large for its dtype "
    "(try --dtype bf16 or fp32)"
)
SampledTokens = list[tuple[ScheduledRequest, SampledToken]]


@dataclass(frozen=True)
class _DecodeStep:
    """A step of answers that has been started; on a GPU it runs while what came before is told."""

    answers: Sequence[ScheduledRequest]
    logits: torch.Tensor


class ModelGenerator:
    """Answers questions with a model; `decode` turns tokens into text (None: answers have no text)."""

    def __init__(
        self,
        chunk: DecoderStage,
        room: ServingLimits,
        *,
        decode: DecodeTokens | None = None,
        ends: frozenset[int] = frozenset(),
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> None:
        self._room, self._decode, self._ends = room, decode, ends
        self._vocab_size = chunk.config.vocab_size
        self._stepper = ModelRunner(chunk, room, eager=eager, reporter=reporter)
        self._places = BlockAllocator(room.cache_tokens)
        self._waiting: deque[ScheduledRequest] = deque()
        self._reading: deque[ScheduledRequest] = deque()
        self._answering: list[ScheduledRequest] = []
        self._step: _DecodeStep | None = None
        self._prompt_tokens = self._generated_tokens = 0
        # Guards the three lists, the totals and the two words below.
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="trainshed-generator", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._room.max_length

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, tell: Callable[[GenerationEvent], None]
    ) -> ScheduledRequest:
        """Take a question; raises `InputError` for a prompt that is empty, too long or of unknown tokens.

        An answer that reaches the model's length ends there, whatever `max_tokens` says.
        """
        tokens = [int(token) for token in prompt]
        sampling.check()
        check_prompt(tokens, sampling, vocab_size=self._vocab_size, max_length=self.max_length)
        space = self.max_length - len(tokens)
        limit = space if sampling.max_tokens is None else min(sampling.max_tokens, space)
        answer = ScheduledRequest(tokens, sampling, limit, tell, decode=self._decode, wake=self._wake)
        with self._changed:
            if self._failure is not None or self._closed:
                raise TrainshedError(f"nothing is answered any more: {self._failure or 'the generator is closed'}")
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    def load(self) -> GeneratorLoad:
        """Say how busy it is."""
        with self._changed:
            running = [*self._reading, *self._answering]
            return GeneratorLoad(
                running=len(running),
                waiting=len(self._waiting),
                cached_tokens=sum(answer.cached_tokens for answer in running),
                cache_tokens=self._room.cache_tokens,
                prompt_tokens_total=self._prompt_tokens,
                generated_tokens_total=self._generated_tokens,
            )

    def failure(self) -> str | None:
        """Say why it can answer nothing any more; None while all is well."""
        return self._failure

    def close(self) -> None:
        """Answer nothing more: running questions end as cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._next():
                    self._turn()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _next(self) -> bool:
        """Wait for something to do, let go of who was cancelled, take on who waits; False once it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._reading or self._answering or self._closed)
            closed = self._closed
            everybody = [*self._reading, *self._answering, *self._waiting]
        for answer in everybody:
            if closed or answer.cancelled:
                self._end(answer, GenerationFinished("cancelled"))
        if closed:
            return False
        with self._changed:
            self._admit()
        return True

    def _admit(self) -> None:
        """Take on whoever came first, as long as there is a row and a run of the cache."""
        while self._waiting and len(self._reading) + len(self._answering) < self._room.max_sequences:
            place = self._places.take(self._waiting[0].room)
            if place is None:
                return
            self._waiting[0].place = place
            self._reading.append(self._waiting.popleft())

    def _turn(self) -> None:
        """Finish the step of answers under way, read some of the prompts, start the next step, tell what came."""
        came = [*self._finish_step(), *self._read_prompts()]
        if not self._stepper.on_gpu:
            # There a step is not made beside anything else: what came is told before it.
            self._tell(came)
            came = []
        wanting = [answer for answer in self._answering if answer.full is None]
        if wanting:
            self._step = _DecodeStep(wanting, self._stepper.advance([answer.last_token() for answer in wanting]))
        self._tell(came)

    def _finish_step(self) -> SampledTokens:
        step, self._step = self._step, None
        if step is None:
            return []
        return self._chosen(step.answers, step.logits)

    def _chosen(self, answers: Sequence[ScheduledRequest], logits: torch.Tensor) -> SampledTokens:
        """Choose a token for each answer; some may have ended by their text since the step began."""
        came: SampledTokens = []
        for answer, choice in zip(answers, sample(logits, [each.chooser for each in answers]), strict=True):
            if choice is None:
                self._end(answer, GenerationFailed(_NOT_FINITE))
            elif not answer.ended:
                answer.take(choice, self._ends)
                came.append((answer, choice))
        return came

    def _read_prompts(self) -> SampledTokens:
        """Read as much of prompts as one turn may take; whoever is read through gets a first token."""
        turn = self._next_parts()
        if not turn:
            return []
        hidden = self._stepper.read([part for _, part in turn])
        through: list[ScheduledRequest] = []
        rows: list[int] = []
        end = 0
        for answer, part in turn:
            start, end = end, end + len(part.tokens)
            if answer.sampling.prompt_logprobs:
                self._score_prompt(answer, part, hidden[start:end])
            with self._changed:
                answer.read += len(part.tokens)
                self._prompt_tokens += len(part.tokens)
                if answer.read < len(answer.prompt):
                    continue
                self._reading.remove(answer)
                self._answering.append(answer)
            self._say(answer, PrefillDone(tuple(answer.prompt_logprobs)))
            if answer.limit:
                through.append(answer)
                rows.append(end - 1)
            else:
                self._end(answer, GenerationFinished("length"))
        if not through:
            return []
        return self._chosen(through, self._stepper.first_logits(hidden, rows))

    def _next_parts(self) -> list[tuple[ScheduledRequest, ScheduledTokens]]:
        """Choose what is read now, about one chunk in all; whoever has had a turn comes last.

        On a CPU how a prompt is cut depends on nobody else, on a GPU the chunk is filled up.
        """
        turn: list[tuple[ScheduledRequest, ScheduledTokens]] = []
        chunk = left = self._stepper.chunk_tokens
        with self._changed:
            for answer in self._reading:
                part = answer.next_prompt(left if self._stepper.on_gpu else chunk)
                if not part.tokens or len(part.tokens) > left:
                    break
                turn.append((answer, part))
                left -= len(part.tokens)
            self._reading.rotate(-len(turn))
        return turn

    def _score_prompt(self, answer: ScheduledRequest, part: ScheduledTokens, hidden: torch.Tensor) -> None:
        """Tell each token of a prompt by the state before it."""
        following = answer.prompt[part.position + 1 : part.position + 1 + len(part.tokens)]
        for start in range(0, len(following), _LOGPROB_ROWS):
            tokens = torch.tensor(following[start : start + _LOGPROB_ROWS], device=hidden.device)
            logits = self._stepper.logits(hidden[start : start + len(tokens)])
            for choice in compute_logprobs(logits, tokens, answer.sampling.logprobs or 0):
                answer.prompt_logprobs.append(OutputToken(choice.token, "", choice.logprob, choice.alternatives))

    def _tell(self, came: SampledTokens) -> None:
        """Make text of what was chosen and hand it out; an answer may end by its text."""
        for answer, choice in came:
            if answer.ended:
                continue
            if answer.full != "stop":
                with self._changed:
                    self._generated_tokens += 1
                self._say(answer, answer.piece(choice))
            if answer.is_stopped:
                self._end(answer, GenerationFinished("stop"))
            elif answer.full is not None:
                self._end(answer, answer.ending(answer.full))

    def _end(self, answer: ScheduledRequest, event: GenerationEvent) -> None:
        with self._changed:
            if answer.ended:
                return
            answer.ended = True
            for part in (self._waiting, self._reading, self._answering):
                if answer in part:
                    part.remove(answer)
            if answer.place is not None:
                self._places.give_back(answer.place, answer.room)
                answer.place = None
        self._say(answer, event)

    def _say(self, answer: ScheduledRequest, event: GenerationEvent) -> None:
        try:
            answer.tell(event)
        except Exception:
            # Whoever asked cannot listen any more: that ends their answer, and nobody else's.
            answer.cancelled = True

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            everybody = [*self._reading, *self._answering, *self._waiting]
        for answer in everybody:
            self._end(answer, GenerationFailed(why))

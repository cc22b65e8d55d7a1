"""The generator: one thread that answers many questions at once, first come first served.

Questions wait in order until there is a row and room in the cache for all they may need. Between two tokens of the
answers under way, some of the prompts that are still being read is read, each in its turn: a long prompt holds nobody
up for long. Once something has failed, nothing more is answered: everybody is told why.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainshed.errors import TrainshedError
from trainshed.models.decoder import Chunk
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.answer import Answer, check_prompt
from trainshed.serve.asking import Ended, Event, Failed, Load, Piece, PromptRead, Sampling
from trainshed.serve.cache import Places, Room
from trainshed.serve.detokenise import Decode
from trainshed.serve.sampling import Choice, choose, logprobs_of
from trainshed.serve.stepping import Part, Stepper

# Scores of a prompt's tokens are made so many at a time: each is a row of the vocabulary.
_SCORED_TOGETHER = 128
_NOT_NUMBERS = (
    "the scores of the model are no numbers: its weights are broken, or too large for its dtype "
    "(try --dtype bf16 or fp32)"
)
Chosen = list[tuple[Answer, Choice]]


@dataclass(frozen=True)
class _Step:
    """A step of answers that has been started; on a GPU it runs while what came before is told."""

    answers: Sequence[Answer]
    logits: torch.Tensor


class ModelGenerator:
    """Answers questions with a model; `decode` turns tokens into text (None: answers have no text)."""

    def __init__(
        self,
        chunk: Chunk,
        room: Room,
        *,
        decode: Decode | None = None,
        ends: frozenset[int] = frozenset(),
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> None:
        self._room, self._decode, self._ends = room, decode, ends
        self._vocab_size = chunk.config.vocab_size
        self._stepper = Stepper(chunk, room, eager=eager, reporter=reporter)
        self._places = Places(room.cache_tokens)
        self._waiting: deque[Answer] = deque()
        self._reading: deque[Answer] = deque()
        self._answering: list[Answer] = []
        self._step: _Step | None = None
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

    def submit(self, prompt: Sequence[int], sampling: Sampling, tell: Callable[[Event], None]) -> Answer:
        """Take a question; raises `InputError` for a prompt that is empty, too long or of unknown tokens.

        An answer that reaches the model's length ends there, whatever `max_tokens` says.
        """
        tokens = [int(token) for token in prompt]
        sampling.check()
        check_prompt(tokens, sampling, vocab_size=self._vocab_size, max_length=self.max_length)
        space = self.max_length - len(tokens)
        limit = space if sampling.max_tokens is None else min(sampling.max_tokens, space)
        answer = Answer(tokens, sampling, limit, tell, decode=self._decode, wake=self._wake)
        with self._changed:
            if self._failure is not None or self._closed:
                raise TrainshedError(f"nothing is answered any more: {self._failure or 'the generator is closed'}")
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    def load(self) -> Load:
        """Say how busy it is."""
        with self._changed:
            running = [*self._reading, *self._answering]
            return Load(
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
                self._end(answer, Ended("cancelled"))
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
            self._step = _Step(wanting, self._stepper.advance([answer.last_token() for answer in wanting]))
        self._tell(came)

    def _finish_step(self) -> Chosen:
        step, self._step = self._step, None
        if step is None:
            return []
        return self._chosen(step.answers, step.logits)

    def _chosen(self, answers: Sequence[Answer], logits: torch.Tensor) -> Chosen:
        """Choose a token for each answer; some may have ended by their text since the step began."""
        came: Chosen = []
        for answer, choice in zip(answers, choose(logits, [each.chooser for each in answers]), strict=True):
            if choice is None:
                self._end(answer, Failed(_NOT_NUMBERS))
            elif not answer.ended:
                answer.take(choice, self._ends)
                came.append((answer, choice))
        return came

    def _read_prompts(self) -> Chosen:
        """Read as much of prompts as one turn may take; whoever is read through gets a first token."""
        turn = self._next_parts()
        if not turn:
            return []
        hidden = self._stepper.read([part for _, part in turn])
        through: list[Answer] = []
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
            self._say(answer, PromptRead(tuple(answer.prompt_logprobs)))
            if answer.limit:
                through.append(answer)
                rows.append(end - 1)
            else:
                self._end(answer, Ended("length"))
        if not through:
            return []
        return self._chosen(through, self._stepper.first_logits(hidden, rows))

    def _next_parts(self) -> list[tuple[Answer, Part]]:
        """Choose what is read now, about one chunk in all; whoever has had a turn comes last.

        On a CPU how a prompt is cut depends on nobody else, on a GPU the chunk is filled up.
        """
        turn: list[tuple[Answer, Part]] = []
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

    def _score_prompt(self, answer: Answer, part: Part, hidden: torch.Tensor) -> None:
        """Tell each token of a prompt by the state before it."""
        following = answer.prompt[part.position + 1 : part.position + 1 + len(part.tokens)]
        for start in range(0, len(following), _SCORED_TOGETHER):
            tokens = torch.tensor(following[start : start + _SCORED_TOGETHER], device=hidden.device)
            logits = self._stepper.logits(hidden[start : start + len(tokens)])
            for choice in logprobs_of(logits, tokens, answer.sampling.logprobs or 0):
                answer.prompt_logprobs.append(Piece(choice.token, "", choice.logprob, choice.alternatives))

    def _tell(self, came: Chosen) -> None:
        """Make text of what was chosen and hand it out; an answer may end by its text."""
        for answer, choice in came:
            if answer.ended:
                continue
            if answer.full != "stop":
                with self._changed:
                    self._generated_tokens += 1
                self._say(answer, answer.piece(choice))
            if answer.is_stopped:
                self._end(answer, Ended("stop"))
            elif answer.full is not None:
                self._end(answer, answer.ending(answer.full))

    def _end(self, answer: Answer, event: Event) -> None:
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

    def _say(self, answer: Answer, event: Event) -> None:
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
            self._end(answer, Failed(why))

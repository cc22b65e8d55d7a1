"""One answer on its way: its question, what has been read and chosen, and the text of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainshed.errors import InputError
from trainshed.serve.asking import Ended, Event, Piece, Reason, Sampling
from trainshed.serve.detokenise import Decode, StopTexts, TextStream
from trainshed.serve.sampling import Choice, Chooser
from trainshed.serve.stepping import Part


def check_prompt(tokens: Sequence[int], sampling: Sampling, *, vocab_size: int, max_length: int) -> None:
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


class Answer:
    """A question that waits, whose prompt is being read, that is being answered, or that has ended.

    It is also the ticket that whoever asked holds: `wake` tells the generator that it was cancelled.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        tell: Callable[[Event], None],
        *,
        decode: Decode | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.sampling, self.limit, self.tell = prompt, sampling, limit, tell
        self.chooser = Chooser(sampling)
        self.prompt_logprobs: list[Piece] = []
        self.place: int | None = None
        """Where its run of the cache begins; None while it has none."""
        self.read = 0
        """How many tokens of the prompt have been read."""
        self.chosen: list[int] = []
        self.full: Reason | None = None
        """Why no further token is wanted, as far as tokens alone tell."""
        self.cancelled = self.ended = False
        self._stops = StopTexts(sampling.stop)
        self._decode, self._wake = decode, wake
        self._text: TextStream | None = None

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

    def next_prompt(self, most: int) -> Part:
        """Return what of the prompt is to be read next."""
        assert self.place is not None, "read only once it has been admitted"
        return Part(self.prompt[self.read : self.read + most], self.read, self.place)

    def last_token(self) -> Part:
        """Return the token that the next one is chosen after."""
        assert self.place is not None, "answered only once it has been admitted"
        return Part(self.chosen[-1:], len(self.prompt) + len(self.chosen) - 1, self.place)

    def take(self, choice: Choice, ends: frozenset[int]) -> None:
        """Add a token; `ends` are the model's end tokens."""
        self.chosen.append(choice.token)
        if choice.token in ends and not self.sampling.ignore_end:
            self.full = "stop"
        elif len(self.chosen) == self.limit:
            self.full = "length"

    def piece(self, choice: Choice) -> Piece:
        """Tell a token with the text that it adds."""
        text = self._stops.push(self._stream().push(choice.token)) if self._decode is not None else ""
        return Piece(choice.token, text, choice.logprob, choice.alternatives)

    def ending(self, reason: Reason) -> Ended:
        """End it with what was held back; that may still hold a stop text."""
        rest = self._stops.push(self._stream().finish()) if self._decode is not None else ""
        return Ended("stop", rest) if self.is_stopped else Ended(reason, rest + self._stops.finish())

    def _stream(self) -> TextStream:
        if self._text is None:
            assert self._decode is not None, "asked only where there is text"
            self._text = TextStream(self._decode, self.prompt)
        return self._text

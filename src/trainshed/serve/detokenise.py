"""Text as it comes, token by token: whole characters only, and nothing that may still turn out to be a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write where bytes are no character (yet)."""
# A character has at most four bytes, so at most three of an unfinished one can stand at the end.
_MOST_UNFINISHED = 3
# Decoders look at the token before (a space is written or not), so some tokens stay in sight.
_TOKENS_IN_SIGHT = 8

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Turns an answer's tokens into text. `prompt` is what stands before it: its end decides about a first space."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # Not from the middle of a character on, if a few tokens more avoid it.
        ends = [list(prompt[-_TOKENS_IN_SIGHT - more :]) for more in range(_MOST_UNFINISHED + 1)]
        self._tokens = next((end for end in ends if end and REPLACEMENT not in decode(end)), ends[0])
        self._told = len(decode(self._tokens).rstrip(REPLACEMENT)) if self._tokens else 0
        self._unfinished = 0
        """How many tokens have come since the text last ended with a whole character."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        new = self._new(self._finished(whole))
        if len(self._tokens) >= 2 * _TOKENS_IN_SIGHT and REPLACEMENT not in whole:
            self._forget()
        return new

    def finish(self) -> str:
        """Return what is left at the end: bytes that never became a character, as the decoder writes them."""
        return self._new(self._decode(self._tokens)) if self._tokens else ""

    def _finished(self, text: str) -> str:
        """Cut what may be the beginning of a character off the end.

        Decoders that know bytes as tokens show a whole row of them as broken until its last character is there, so
        all of it waits; but not for longer than a character can take.
        """
        self._unfinished = self._unfinished + 1 if text.endswith(REPLACEMENT) else 0
        settled = len(text.rstrip(REPLACEMENT))
        if self._unfinished > _MOST_UNFINISHED:
            settled = max(settled, len(text) - _MOST_UNFINISHED)
        return text[:settled]

    def _new(self, text: str) -> str:
        new = text[self._told :]
        self._told = max(self._told, len(text))
        return new

    def _forget(self) -> None:
        """Drop tokens whose text is told, where the rest reads as before: not in the middle of a character."""
        kept = self._tokens[-_TOKENS_IN_SIGHT:]
        text = self._decode(kept)
        if REPLACEMENT not in text:
            self._tokens, self._told = kept, len(text)


class StopTexts:
    """Holds back what may begin a stop text, and finds the one that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what is surely part of the answer."""
        if not self._stops:
            return text
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            # The one that ends first: so it does not matter how the text was cut into tokens.
            self.found = True
            told, self._held = self._held[: min(found)[1]], ""
            return told
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - kept
        told, self._held = self._held[:cut], self._held[cut:]
        return told

    def finish(self) -> str:
        """Return what was held back and is part of the answer after all."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """How many of a text's last characters are the first of a stop text."""
    return next(
        (count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])),
        0,
    )

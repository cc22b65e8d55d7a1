"""Log-probabilities in OpenAI's two shapes: the columns of a completion, the rows of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainshed.serve.asking import Alternative, Piece
from trainshed.serve.http.model import Words


@dataclass
class Columns:
    """The log-probabilities of a completion, token after token; offsets are into its text."""

    words: Words
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def add_prompt(self, prompt: Sequence[int], pieces: Sequence[Piece], text: str) -> None:
        """Add the tokens of a prompt, of which the first has no probability."""
        offset = 0
        known = iter(pieces)
        for position, token in enumerate(prompt):
            self._add(token, next(known, None) if position else None, min(offset, len(text)))
            # What the tokenizer put before the text takes no place in it.
            if position or text.startswith(self.tokens[-1]):
                offset += len(self.tokens[-1])

    def add(self, pieces: Iterable[Piece], offset: int) -> None:
        """Add the tokens of an answer whose text begins at `offset`."""
        for piece in pieces:
            self._add(piece.token, piece, offset)
            offset += len(piece.text)

    def _add(self, token: int, piece: Piece | None, offset: int) -> None:
        self.tokens.append(self.words.decode([token]))
        self.text_offset.append(offset)
        if piece is None or piece.logprob is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite(piece.logprob))
        top: dict[str, float] = {}
        # The likeliest first: where two tokens read alike (halves of characters), it is the one that is told.
        for each in sorted((*piece.alternatives, Alternative(token, piece.logprob)), key=lambda each: -each.logprob):
            top.setdefault(self.words.decode([each.token]), finite(each.logprob))
        self.top_logprobs.append(top)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)


def rows(words: Words, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the log-probabilities of a chat's answer."""
    content = [
        {
            **_row(words, Alternative(piece.token, piece.logprob or 0.0)),
            "top_logprobs": [_row(words, each) for each in piece.alternatives],
        }
        for piece in pieces
    ]
    return {"content": content, "refusal": None}


def _row(words: Words, of: Alternative) -> dict[str, Any]:
    text = words.decode([of.token])
    # A token may be half a character: its bytes cannot be told from its text.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite(of.logprob), "bytes": known}

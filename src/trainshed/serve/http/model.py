"""What the API needs of a model: its name, its generator, and its words (text to tokens and back)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainshed.serve.asking import Generator


class Words(Protocol):
    """A model's tokenizer, as the API uses it."""

    @property
    def beginning(self) -> int | None:
        """The token that begins a text; None where the tokenizer has none."""
        ...

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with what the tokenizer itself puts around a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins; raises `InputError`."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A model that can be asked."""

    name: str
    generator: Generator
    words: Words

"""`model` and `tokenizer`: what is trained, from which weights, over which vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from trainshed.recipe.address import Address
from trainshed.recipe.architecture import ModelConfig
from trainshed.recipe.section import PositiveInt, Problem, Section, Text, by_shape

# A byte-level BPE starts from the 256 bytes; one more is the end-of-document token.
SMALLEST_VOCABULARY = 257


class ModelSection(Section):
    """The model: an architecture, and weights to start from or the word `random`."""

    preset: Text | None = Field(None, description="Architecture by name from the catalog", examples=["llama3.1-8b"])
    config: ModelConfig | None = Field(None, description="Architecture written out, in place of `preset`")
    from_: Address | None = Field(
        None,
        alias="from",
        description="Address of the weights; without `preset` or `config` the architecture is read there",
        examples=["hf://meta-llama/Llama-3.1-8B@0123abc"],
    )
    init: Literal["random"] | None = Field(
        None, description="`random`: train from nothing. Must be said where there is no `from`"
    )
    verdict: Literal["ignore"] | None = Field(
        None, description="`ignore`: train on converted weights although the proof of their conversion failed"
    )

    def problems(self) -> Iterator[Problem]:
        """One architecture, one origin of the weights."""
        if self.preset and self.config:
            yield Problem(("config",), "`preset` and `config` both name the architecture", "keep one of them")
        if not self.preset and not self.config and not self.from_:
            yield Problem((), "names no architecture", "write `preset: llama3.1-8b`, `config: {…}` or `from: hf://…`")
        if not self.from_ and not self.init:
            yield Problem(
                ("init",),
                "there are no weights to start from and nobody said to train from nothing",
                "write `from: hf://org/name` or `init: random` under `model`",
            )
        if self.from_ and self.init:
            yield Problem(("init",), "`from` and `init: random` contradict each other", "keep one of them")
        if self.verdict == "ignore" and not self.from_:
            yield Problem(("verdict",), "there are no weights with a verdict", "delete the line")


class TokenizerTraining(Section):
    """A byte-level BPE learned from the training sources themselves."""

    vocab_size: Annotated[int, Field(ge=SMALLEST_VOCABULARY)] = Field(
        description="Number of tokens, end-of-document included", examples=[8192]
    )
    min_frequency: PositiveInt = Field(2, description="A pair seen less often is not merged")
    eod: Text = Field("<|endoftext|>", description="The end-of-document token")


class TrainedTokenizer(Section):
    """A tokenizer that is made before the data is prepared."""

    train: TokenizerTraining = Field(description="Learn a byte-level BPE from the training sources")


TokenizerSection = Annotated[
    Annotated[Address, Tag("(text)")] | Annotated[TrainedTokenizer, Tag("(a mapping)")],
    by_shape,
]
"""The address of a tokenizer, or `{train: {vocab_size: …}}`."""

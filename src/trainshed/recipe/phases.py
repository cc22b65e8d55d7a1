"""`train.phases`: a training in parts, each with a length, data, a batch, a learning rate and a layout of its own.

What a phase leaves out is what the recipe says. `phase_spans.py` says which steps of the run a phase is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainshed.recipe.data import SkipRange, Source, skip_problems
from trainshed.recipe.layout import Layout
from trainshed.recipe.section import (
    Count,
    NotNegativeFloat,
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    Text,
    as_list,
)

PHASE_LENGTH_KEYS = ("steps", "tokens")


class PhaseData(Section):
    """The documents of a phase, where they are not those of `data`; all other keys of `data` hold for them too."""

    train: Annotated[
        tuple[Source, ...],
        Field(strict=False),
        BeforeValidator(as_list, json_schema_input_type=Source | list[Source]),
    ] = Field((), description="One source or a list of them; left out: those of `data.train`")
    seed: NotNegativeInt | None = Field(None, description="Seed of the phase's data order; left out: `data.seed`")
    skip: Annotated[tuple[SkipRange, ...], Field(strict=False)] = Field(
        (), description="Sample ranges [start, stop) of the phase's own order that are left out"
    )

    def problems(self) -> Iterator[Problem]:
        """Ranges in order."""
        yield from skip_problems(self.skip)


class TrainPhase(Section):
    """One part of a training. The weights and the optimiser's state go on from the part before it."""

    name: Text | None = Field(None, description="How reports call it; left out: phase-1, phase-2, …", examples=["main"])
    steps: PositiveInt | None = Field(None, description="Length of the phase in steps", examples=[1000])
    tokens: Count | None = Field(None, description="Length of the phase in tokens", examples=["20B"])
    sequence_length: PositiveInt | None = Field(
        None, description="Tokens per sample; left out: `data.sequence_length`", examples=[32768]
    )
    global_batch: PositiveInt | None = Field(
        None, description="Sequences per step; left out: `train.global_batch`", examples=[256]
    )
    data: PhaseData | None = Field(
        None,
        description="Other documents; left out: those of `data`. A phase with the same data and sequence length as an "
        "earlier one goes on where that stopped; any other begins at the start of its own order",
    )
    lr: NotNegativeFloat | None = Field(
        None,
        description="Learning rate at the end of the phase; left out: the one it begins with. The first phase "
        "begins at 0 if its shape is linear or cosine",
        examples=[3e-4],
    )
    shape: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How the learning rate gets from where it is to `lr`: at once, or over the whole phase",
    )
    rope_base: PositiveFloat | None = Field(
        None,
        description="Base of the rotary frequencies from this phase on; left out: as before",
        examples=[8000000.0],
    )
    layout: Layout | None = Field(
        None, description="The layout of this phase, on as many ranks; left out: the recipe's", examples=[{"cp": 4}]
    )

    def problems(self) -> Iterator[Problem]:
        """One length, and a learning rate that is not 0 throughout."""
        given = [key for key in PHASE_LENGTH_KEYS if getattr(self, key) is not None]
        if not given:
            yield Problem((), "says nothing about the length of the phase", "write `steps: 1000` or `tokens: 20B`")
        if len(given) > 1:
            yield Problem(("tokens",), "`steps` and `tokens` both say how long the phase is", "keep one of them")
        if self.lr == 0 and self.shape == "constant":
            yield Problem(("lr",), "is 0 from the first step on: nothing would be learned", "write `shape: linear`")

    def phase_steps(self, sequence_length: int, global_batch: int) -> int:
        """Return its length in steps of the whole batch."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None, "the schema asks for one of them"
        return -(-self.tokens // (sequence_length * global_batch))


def phase_problems(phases: tuple[TrainPhase, ...]) -> Iterator[Problem]:
    """Yield what is wrong with phases beside each other; paths are within `train`."""
    names = [phase.name or f"phase-{number}" for number, phase in enumerate(phases, start=1)]
    for number, phase in enumerate(phases):
        if phase.name is not None and names.count(phase.name) > 1:
            yield Problem(("phases", number, "name"), f"two phases are called `{phase.name}`", "rename one")
            break


def without_lengths(phase: dict[str, object]) -> dict[str, object]:
    """Return a phase's plain keys without those whose change continues the same run: length, name, layout and skips."""
    kept = {key: value for key, value in phase.items() if key not in (*PHASE_LENGTH_KEYS, "name", "layout")}
    if isinstance(data := kept.get("data"), dict):
        kept["data"] = {key: value for key, value in data.items() if key != "skip"}
    return kept

"""How a run is executed and kept: `engine`, `checkpoint`, `observe`, `resources`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from trainshed.recipe.address import Address
from trainshed.recipe.section import NotNegativeInt, PositiveInt, Problem, Section, Text, by_shape

Flag = Annotated[bool, Tag("(true or false)")]
Number = Annotated[int | float, Tag("(a number)")]
Word = Annotated[str, Tag("(text)")]
EngineArgument = Annotated[
    Flag
    | Number
    | Word
    | Annotated[list[Annotated[Flag | Number | Word, by_shape]], Tag("(a list)")]
    | Annotated[None, Tag("(nothing)")],
    by_shape,
]


class Engine(Section):
    """What steps the model."""

    name: Literal["torch", "megatron", "nemo", "torchtune"] = Field("torch", description="The engine")
    image: Text | None = Field(None, description="Container image, by digest", examples=["nvcr.io/…@sha256:…"])
    version: Text | None = Field(
        None,
        description="A foreign engine's version, whose arguments are written; left out: the newest that is known here",
        examples=["0.16.1"],
    )
    program: Text | None = Field(
        None,
        description="Path of a foreign engine's program in its image; left out: where images of that name have it",
        examples=["/opt/megatron-lm/pretrain_gpt.py"],
    )
    args: dict[str, EngineArgument] = Field(
        default_factory=dict,
        description="Arguments handed to a foreign engine as they are (checked against its list)",
    )

    def problems(self) -> Iterator[Problem]:
        """Our own engine takes no arguments and has no version but that of Trainshed."""
        if self.name == "torch" and self.args:
            yield Problem(
                ("args",), "the torch engine takes no `args`: its options are keys of the recipe", "delete it"
            )
        if self.name == "torch" and self.version is not None:
            yield Problem(("version",), "the torch engine has no version of its own", "delete it")
        if self.program is not None and self.name != "megatron":
            yield Problem(("program",), f"{self.name} is started by its own name", "delete it")


class Checkpoint(Section):
    """When the state is saved, how many are kept, what a start does with those that are there."""

    every: PositiveInt | None = Field(500, description="Steps between two checkpoints; null: only at the end")
    keep: PositiveInt | None = Field(3, description="Number of checkpoints kept; null: all (Megatron: always all)")
    to: Address | None = Field(
        None,
        description="Where checkpoints are kept, under the run's name and id; left out: in the run's folder",
        examples=["s3://bucket/checkpoints"],
    )
    async_: bool = Field(
        True, alias="async", description="Go on training while a checkpoint is written (torchtune: never)"
    )
    resume: Literal["auto", "must", "fresh"] = Field(
        "auto",
        description="auto: go on where there is a checkpoint; must: fail without one; fresh: fail with one",
    )


class Profile(Section):
    """A profile of some steps."""

    start: PositiveInt = Field(10, description="First step that is profiled, counted from 1 as everywhere")
    steps: PositiveInt = Field(3, description="Number of steps")
    ranks: Annotated[tuple[NotNegativeInt, ...], Field(strict=False, min_length=1)] = Field(
        (0,), description="Ranks that are profiled"
    )

    @property
    def steps_before(self) -> int:
        """Steps of the run before the first that is profiled."""
        return self.start - 1


class Observe(Section):
    """What is written besides the run's events."""

    tensorboard: bool | None = Field(
        None, description="TensorBoard files in the run's folder; left out: where the engine writes them"
    )
    dllogger: bool | None = Field(
        None, description="DLLogger JSON in the run's folder; left out: where the engine writes it"
    )
    profile: Profile | None = Field(None, description="Profile some steps")


class Resources(Section):
    """What the run asks of the cluster."""

    nodes: PositiveInt | None = Field(
        None, description="Number of nodes; `--nodes` wins over it, it wins over the cluster's default"
    )


class Elastic(Section):
    """What becomes of a run that loses nodes."""

    min_nodes: PositiveInt = Field(description="Fewer nodes than this do not train: the run waits")
    spares: NotNegativeInt = Field(0, description="Nodes held in the allocation to stand in for bad ones")


class Export(Section):
    """What becomes of the trained weights."""

    format: Literal["hf", "megatron"] = Field("hf", description="Format of the exported weights")
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Their dtype")
    to: Address | None = Field(None, description="Where they go; left out: `export` in the run's folder")


def expand_engine(value: Any) -> Any:
    """Let `engine: torch` stand for `engine: {name: torch}`."""
    return {"name": value} if isinstance(value, str) else value

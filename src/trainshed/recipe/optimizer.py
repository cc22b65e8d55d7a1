"""`train.optimizer`, and what else decides about an update: groups of tensors, spikes, averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainshed.recipe.registered import EngineArgument, choice_or_registered, option_problems, registered_class
from trainshed.recipe.section import (
    Fraction,
    NotNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    Text,
)


class MuonOptions(Section):
    """How Muon updates the matrices of layers; AdamW, by the keys beside this one, updates everything else."""

    momentum: Fraction = Field(0.95, description="Decay of the averaged gradient")
    nesterov: bool = Field(True, description="Look one step ahead: mix the gradient into its average once more")
    ns_steps: PositiveInt = Field(5, description="Newton-Schulz iterations that make the average orthogonal")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of the learning rate: match_rms_adamw: 0.2 · sqrt(the larger side), so that a step is as "
        "long as AdamW's; original: sqrt(max(1, rows / columns))",
    )


class ParameterGroup(Section):
    """Some tensors that are trained in another way; a tensor belongs to the first group that names it."""

    match: Text = Field(
        description="Names of tensors as in our checkpoints, with * for any text",
        examples=["layers.*.norm.weight"],
    )
    lr_scale: PositiveFloat | None = Field(None, description="Factor of the learning rate")
    weight_decay: NotNegativeFloat | None = Field(
        None, description="Their weight decay; written for norms or biases, these decay too"
    )
    freeze: bool = Field(False, description="Never update them; they have no optimizer state")

    def problems(self) -> Iterator[Problem]:
        """A group changes something, and a frozen one nothing else."""
        changes = [key for key in ("lr_scale", "weight_decay") if getattr(self, key) is not None]
        if self.freeze and changes:
            yield Problem((changes[0],), "a frozen tensor is never updated", "delete it, or `freeze`")
        if not self.freeze and not changes:
            yield Problem((), "says nothing about its tensors", "write lr_scale, weight_decay or freeze")


class Optimizer(Section):
    """What turns gradients into updates."""

    name: Annotated[str, choice_or_registered("optimizer", Literal["adamw", "muon"])] = Field(
        "adamw", description="The optimiser: ours, or one that a plugin registers"
    )
    lr: PositiveFloat = Field(description="Peak learning rate", examples=[3e-4])
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field((0.9, 0.95), description="Adam's averages")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    weight_decay: NotNegativeFloat = Field(0.1, description="Decay of matrices (not of norms and biases)")
    decoupled: bool = Field(
        False,
        description="Decay by `weight_decay` itself, which only the schedule scales; false: by lr · weight_decay, as "
        "PyTorch's AdamW does",
    )
    clip: PositiveFloat | None = Field(1.0, description="Largest gradient norm; null: no clipping")
    states: Literal["fp32", "bf16"] | None = Field(
        None, description="Precision of Adam's averages; left out: fp32; bf16 halves their memory"
    )
    muon: MuonOptions | None = Field(None, description="Options of `name: muon`")
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Tensors that are trained in another way, by patterns of their names",
        examples=[[{"match": "embedding.*", "lr_scale": 0.1}]],
    )
    options: dict[str, EngineArgument] | None = Field(
        None, description="Options of an optimiser that a plugin registers", examples=[{"momentum": 0.9}]
    )

    def problems(self) -> Iterator[Problem]:
        """A registered optimiser says which keys it reads."""
        registered = registered_class("optimizer", self.name)
        if self.options is not None and self.name in ("adamw", "muon"):
            yield Problem(("options",), f"{self.name} has none: its keys stand beside it", "delete it")
        yield from option_problems("optimizer", self.name, self.options or {}, ("options",), positional=1)
        for key in ("betas", "eps") if registered is not None else ():
            usual = type(self).model_fields[key].default
            if getattr(self, key) != usual and key not in getattr(registered, "reads", ()):
                yield Problem((key,), f"the optimizer {self.name} does not read it", "delete it")
        if self.states is not None and registered is not None:
            yield Problem(
                ("states",), f"the optimizer {self.name} of a plugin keeps its states as its weights are", "delete it"
            )
        if self.muon is not None and self.name != "muon":
            yield Problem(("muon",), "is read with `name: muon` only", "delete it, or write `name: muon`")


class Spikes(Section):
    """Skip a step whose loss or gradient norm is far above those of the last steps."""

    sigma: PositiveFloat = Field(
        6.0, description="Skip above the mean of the window by so many of its standard deviations"
    )
    window: Annotated[int, Field(ge=2)] = Field(
        128, description="Learned steps in the window; nothing is skipped before it is full"
    )
    max_in_a_row: PositiveInt = Field(10, description="More skipped steps in a row than this end the run")


class Ema(Section):
    """An exponential moving average of the weights, kept in fp32 beside them and saved with them."""

    decay: Fraction = Field(description="Share of the average that each update keeps", examples=[0.999])
    validation: bool = Field(False, description="Measure the validation loss with the averaged weights")

"""The flags of `trainshed plan`, as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

from trainshed.errors import InputError
from trainshed.plan.searching.scaling import doubling

_OF_THE_RECIPE = {
    "model": "model.preset",
    "seq": "data.sequence_length",
    "global_batch": "train.global_batch",
    "precision": "train.precision",
    "engine": "engine",
    "steps": "train.steps",
    "tokens": "train.tokens",
}
"""Flags that stand in for keys of a recipe: with a recipe there, its keys are changed instead."""
ENGINES = ("torch", "megatron", "nemo", "torchtune")
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")


@dataclass(frozen=True)
class Flags:
    """What a person wrote; None where they wrote nothing."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    on: str | None = None
    model: str | None = None
    gpu: str | None = None
    machine: str | None = None
    gpus: str | None = None
    nodes: int | None = None
    seq: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    layout: str | None = None
    engine: str | None = None
    steps: int | None = None
    tokens: str | None = None
    price: float | None = None
    calibration: str | None = None

    def check(self) -> None:
        """Refuse flags that contradict each other, and questions that name nothing to plan."""
        for one, other in (("gpus", "nodes"), ("steps", "tokens")):
            if self._given(one) and self._given(other):
                raise InputError(f"--{one} and --{other} say the same thing twice", hint="keep one of them")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise InputError(f"{value:g} is not more than 0", where=flag(field.name))
        if self.engine is not None and self.engine not in ENGINES:
            hint = f"write {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            raise InputError(f"there is no engine `{self.engine}`", where="--engine", hint=hint)
        if self.recipe is None:
            self._check_without_recipe()
            return
        for name, key in _OF_THE_RECIPE.items():
            if self._given(name):
                raise InputError(
                    f"RECIPE and {flag(name)} both say it: with a recipe, its key `{key}` decides",
                    where=flag(name),
                    hint=f"write {key}={getattr(self, name)}, or leave RECIPE out",
                )

    def _check_without_recipe(self) -> None:
        if self.model is None:
            raise InputError(
                "there is nothing to plan: no recipe, no model",
                hint="trainshed plan RECIPE --on CLUSTER, or trainshed plan --model llama3-70b --gpu h100 --gpus 128 "
                "--seq 8192 --global-batch 1024",
            )
        for name, example in (("seq", "8192"), ("global_batch", "1024")):
            if not self._given(name):
                raise InputError("is missing", where=flag(name), hint=f"write {flag(name)} {example}")

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def gpu_counts(self) -> tuple[int, ...]:
        """Return the numbers of GPUs in `--gpus 128` or `--gpus 8..4096` (doubling); none where it is not given."""
        text = self.gpus
        if text is None:
            return ()
        if text.isdecimal() and int(text) > 0:
            return (int(text),)
        match = _RANGE.match(text)
        if match is None:
            raise InputError(
                f"`{text}` is neither a number of GPUs nor a range",
                where="--gpus",
                hint="write --gpus 128, or --gpus 8..4096 for a scaling curve",
            )
        return tuple(doubling(int(match[1]), int(match[2])))


def separated(written: Iterable[str]) -> tuple[str, ...]:
    """Return the values of a flag that may be given again, or with commas, each once: `h100,h200`."""
    values = [value.strip() for text in written for value in text.split(",")]
    return tuple(dict.fromkeys(filter(None, values)))


def flag(name: str) -> str:
    """Return a flag as it is written."""
    return f"--{name.replace('_', '-')}"

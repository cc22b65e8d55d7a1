"""What an import has found so far: keys of the recipe, and what became of each argument."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from trainshed.engines.imported import Dropped, Imported, Mapped, Mistake
from trainshed.engines.megatron.importing.parsed import Parsed
from trainshed.engines.megatron.importing.words import Found
from trainshed.recipe.schema import LONGEST_NAME

_ORDER = ("name", "model", "tokenizer", "data", "train", "layout", "engine", "checkpoint", "observe")


class Notebook:
    """One import under way."""

    def __init__(self, parsed: Parsed, found: Found, name: str) -> None:
        self.parsed, self.found, self.name = parsed, found, name
        self.recipe: dict[str, Any] = {"name": _run_name(name)}
        self.cluster: dict[str, Any] = {}
        self.questions: list[str] = []
        self._mapped: list[Mapped] = []
        self._dropped: list[Dropped] = []
        self._done: set[str] = set()

    @property
    def steps(self) -> int | None:
        """The length of the run, where it is known."""
        return self.recipe.get("train", {}).get("steps")

    def put(self, key: str, value: Any, *dests: str) -> None:
        """Write a key of the recipe, and say which arguments it comes from; those not given are Megatron's defaults."""
        section = self.recipe
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        self.note(f"{key}: {_shown(value)}", *dests)

    def note(self, ours: str, *dests: str) -> None:
        """Say what some arguments became."""
        for dest in dests:
            if dest in self.parsed.written and dest not in self._done:
                self._mapped.append(Mapped(self.parsed.written[dest], ours))
            self._done.add(dest)

    def drop(self, why: str, *dests: str) -> None:
        """Say that some arguments have no place in a recipe."""
        for dest in dests:
            if dest in self.parsed.written and dest not in self._done:
                self._dropped.append(Dropped(self.parsed.written[dest], why))
            self._done.add(dest)

    def left(self) -> list[str]:
        """Return the given arguments that nothing was said about yet."""
        return [dest for dest in self.parsed.written if dest not in self._done]

    def given(self, *dests: str) -> bool:
        """Tell whether one of some arguments is there."""
        return any(dest in self.parsed.given for dest in dests)

    def imported(self, mistakes: tuple[Mistake, ...]) -> Imported:
        """Close the book."""
        for written, near in self.parsed.unknown.items():
            meant = f"; did you mean {near}?" if near else ""
            self._dropped.append(Dropped(written, f"no version of Megatron-LM known here has it{meant}"))
        for written, fate in self.parsed.retired.items():
            if not any(each.theirs == written for each in (*self._mapped, *self._dropped)):
                self._dropped.append(Dropped(written, str(fate)))
        ordered = {key: self.recipe[key] for key in _ORDER if key in self.recipe}
        return Imported(
            kind="megatron",
            recipe=ordered | self.recipe,
            cluster=self.cluster,
            mapped=tuple(self._mapped),
            dropped=tuple(self._dropped),
            mistakes=mistakes,
            open_questions=tuple(self.questions),
        )


def _run_name(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", PurePath(name).stem.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"megatron-{plain}".strip("-")
    return named[:LONGEST_NAME].rstrip("-")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)

"""Where each value of a recipe was written, so that every error can say file and line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Step = str | int
KeyPath = tuple[Step, ...]
"""A key from the root: `("data", "train", 0, "path")`."""


@dataclass(frozen=True)
class Place:
    """A spot in a file (lines and columns count from 1), or an override on the command line."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass
class Places:
    """The place of every key by path, and the folder of the file.

    Two `Places` are always equal: where a value was written is no part of what the recipe says.
    """

    source: str = field(default="recipe", compare=False)
    folder: Path = field(default_factory=Path, compare=False)
    keys: dict[KeyPath, Place] = field(default_factory=dict, compare=False, repr=False)
    values: dict[KeyPath, Place] = field(default_factory=dict, compare=False, repr=False)

    def where(self, path: KeyPath) -> str:
        """Describe the place of a key: `recipe.yaml:12 (train.optimizer.lr)`.

        A key that was not written (a missing one, a default) gets the line of the nearest key around it.
        """
        place = self._nearest(path) or Place(self.source)
        dotted = dotted_key(path)
        if not dotted or (place.line is None and _names(place.source, dotted)):
            return str(place)
        return f"{place} ({dotted})"

    def _nearest(self, path: KeyPath) -> Place | None:
        for length in range(len(path), -1, -1):
            prefix = path[:length]
            place = self.keys.get(prefix) or self.values.get(prefix)
            if place is not None and (length or place.line is None):
                return place
        return None

    def forget_below(self, path: KeyPath) -> None:
        """Drop every place at or below `path`: its value was replaced."""
        for table in (self.keys, self.values):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]

    def insert_step(self, path: KeyPath, step: Step) -> None:
        """Move everything below `path` one level down: `data.train.path` became `data.train.0.path`."""
        size = len(path)
        for table in (self.keys, self.values):
            for known in [known for known in table if len(known) > size and known[:size] == path]:
                table[(*path, step, *known[size:])] = table.pop(known)


@dataclass
class Document:
    """One parsed YAML file: plain values, and where each was written."""

    value: Any
    places: Places


def dotted_key(path: Iterable[Step]) -> str:
    """Write a path the way overrides do: `data.train.0.path`; a step with a dot in it is quoted."""
    return ".".join(f'"{step}"' if isinstance(step, str) and "." in step else str(step) for step in path)


def _names(source: str, dotted: str) -> bool:
    """Tell whether an override (`command line: cluster.nodes.max=4`) already shows the key."""
    return source.removeprefix("command line: ").removeprefix("cluster.").startswith(f"{dotted}=")

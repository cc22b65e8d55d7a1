"""`engine.args` for engines with nested configurations: keys that are known, and that nothing else has decided."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_source import parse


@dataclass(frozen=True)
class Setting:
    """One key of an engine's configuration, and the key of the recipe, plan or cluster that decides it."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class KnownKeys:
    """The keys that one version of an engine reads, from a data file: sections by dotted name, each a list of keys.

    A `*` at the end of a section's list lets any key stand there: the engine hands them on to whoever is named.
    """

    engine: str
    file: Path

    @cached_property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """The keys of each section; the root's is called `-`."""
        document = parse(self.file.read_text(encoding="utf-8"), self.file.name).value
        return {section: tuple(keys) for section, keys in document["sections"].items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every known key, dotted."""
        return tuple(
            key if section == "-" else f"{section}.{key}"
            for section, keys in self.sections.items()
            for key in keys
            if key != "*"
        )

    def knows(self, key: str) -> bool:
        """Whether the engine reads a dotted key."""
        section = key.rpartition(".")[0] or "-"
        return key in self._set or "*" in self.sections.get(section, ())

    def nearest(self, key: str) -> str | None:
        """Return the known key that was probably meant."""
        last = key.rpartition(".")[2]
        same = [name for name in self.names if name.rpartition(".")[2] == last]
        near = same or difflib.get_close_matches(key, self.names, n=1, cutoff=0.6)
        return near[0] if near else None

    @cached_property
    def _set(self) -> frozenset[str]:
        return frozenset(self.names)


def argument_problems(
    arguments: Mapping[str, Any], known: KnownKeys, decided: Mapping[str, Setting]
) -> Iterator[Problem]:
    """Yield what is wrong with `engine.args`: keys nobody reads, and those that contradict recipe, plan or cluster."""
    for key, value in arguments.items():
        path = ("engine", "args", key)
        if key in decided:
            setting = decided[key]
            if setting.value != value:
                yield Problem(
                    path,
                    f"contradicts `{setting.source}`, which makes it {shown(setting.value)}",
                    f"change {setting.source}, and delete it here",
                )
        elif not known.knows(key):
            near = known.nearest(key)
            yield Problem(
                path,
                f"{known.engine} reads no `{key}`",
                f"did you mean {near}?" if near else f"its keys are in {known.file.name}",
            )


def shown(value: Any) -> str:
    """Show a value as a person would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)

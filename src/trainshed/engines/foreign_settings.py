"""Reading another engine's configuration: every setting is mapped, dropped with a reason, or kept as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainshed.engines.config_tree import flatten, resolve_references
from trainshed.engines.engine_arguments import KnownKeys, shown
from trainshed.engines.imported import Dropped, Imported, Mapped, Mistake
from trainshed.recipe.places import Document
from trainshed.recipe.schema import Recipe


class ForeignSettings:
    """The settings of one file, and what has become of them so far."""

    def __init__(self, document: Document) -> None:
        self.values = resolve_references(flatten(document.value))
        self.recipe: dict[str, Any] = {}
        self.cluster: dict[str, Any] = {}
        self.written = flatten(document.value)
        self._places = document.places
        self._mapped: list[Mapped] = []
        self._dropped: list[Dropped] = []
        self._mistakes: list[Mistake] = []
        self._questions: list[str] = []
        self._seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return a value; a key that is there and null is `otherwise` too."""
        value = self.values.get(key)
        return otherwise if value is None else value

    def take(self, key: str, ours: str, value: Any) -> None:
        """Write a key of the recipe that one of theirs became."""
        self.write(ours, value)
        self.mapped(key, f"{ours}: {shown(value)}")

    def mapped(self, key: str, ours: str) -> None:
        """Say what became of a key whose value is already in the recipe, if it is there and nothing has yet."""
        if key in self.values and key not in self._seen:
            self._seen.add(key)
            self._mapped.append(Mapped(self._as_written(key), ours))

    def write(self, ours: str, value: Any) -> None:
        """Write a key of the recipe."""
        _set(self.recipe, ours, value)

    def hint(self, key: str, ours: str, value: Any) -> None:
        """Write a key of a cluster file that one of theirs speaks of."""
        _set(self.cluster, ours, value)
        self.mapped(key, f"cluster file, {ours}: {shown(value)}")

    def drop(self, key: str, why: str) -> None:
        """Leave a key out, if it is there and nobody has taken it."""
        if key in self.values and key not in self._seen:
            self._seen.add(key)
            self._dropped.append(Dropped(self._as_written(key), why))

    def drop_section(self, section: str, why: str) -> None:
        """Leave out what is left of a section."""
        for key in self.left():
            if key.startswith(f"{section}."):
                self.drop(key, why)

    def mistake(self, key: str, what: str, instead: str) -> None:
        """Note something that the file gets wrong, at the line where it stands."""
        path = tuple(key.split("."))
        where = self._places.where(path)
        self._mistakes.append(Mistake(where, what, instead))

    def ask(self, question: str) -> None:
        """Note what the file leaves open."""
        self._questions.append(question)

    def left(self) -> list[str]:
        """Return the keys that nothing has become of yet."""
        return [key for key in self.values if key not in self._seen]

    def keep_rest(self, known: KnownKeys, fixed: Mapping[str, Any]) -> None:
        """Keep the rest as `engine.args`, less what is written anyway and what the engine never reads."""
        arguments: dict[str, Any] = {}
        for key in self.left():
            value = self.values[key]
            if key in fixed and fixed[key] == value:
                self.mapped(key, "written by Trainshed in any case")
            elif not known.knows(key):
                self.drop(key, f"{known.engine} has no such key: nobody reads it")
            elif value is None or value == {}:
                self.drop(key, "says nothing")
            elif _is_argument(value):
                arguments[key] = value
                self.mapped(key, f"engine.args.{key}: {shown(value)}")
            else:
                self.drop(key, "is neither a value nor a list of values")
        if arguments:
            self.recipe.setdefault("engine", {})["args"] = arguments

    def imported(self, kind: str) -> Imported:
        """Return what was read."""
        order = [field.alias or name for name, field in Recipe.model_fields.items()]
        return Imported(
            kind=kind,
            recipe={key: self.recipe[key] for key in order if key in self.recipe},
            cluster=self.cluster,
            mapped=tuple(self._mapped),
            dropped=tuple(self._dropped),
            mistakes=tuple(self._mistakes),
            open_questions=tuple(self._questions),
        )

    def _as_written(self, key: str) -> str:
        return f"{key}: {shown(self.written[key])}"


def _is_argument(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, bool | int | float | str) for item in value)
    return isinstance(value, bool | int | float | str)


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value

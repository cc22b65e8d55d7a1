"""A data file of the catalog: entries by name, each with its source, and a person's own entry in the same form."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import Field, PrivateAttr

from trainshed.errors import InputError, RecipeError
from trainshed.recipe.section import Section, Text
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument, decode_utf8, parse_yaml

YAML_SUFFIXES = (".yaml", ".yml")


class CatalogEntry(Section):
    """One entry of a data file."""

    source: Text = Field(description="Where the figures are published")

    _name: str = PrivateAttr("")

    @property
    def name(self) -> str:
        """The name it stands under."""
        return self._name


Kind = TypeVar("Kind", bound=CatalogEntry)


@dataclass(frozen=True)
class CatalogTable(Generic[Kind]):
    """The entries of one file, checked one by one when they are asked for."""

    file: Path
    kind: type[Kind]
    noun: str
    how_to_describe: str | None = None
    """What the error of an unknown name says to write."""
    other_names: str | None = None
    """The key of an entry that lists further names it goes by."""
    short_names: Mapping[str, str] = field(default_factory=dict)
    """What people write for several entries at once (`ib`), and how the names of these begin."""

    def names(self) -> list[str]:
        """Return the names of all entries, in the order of the file."""
        return list(self._values)

    def entry(self, name: str) -> Kind:
        """Return an entry by one of its names; letters may be large or small."""
        known = self._known.get(_normalized(name))
        if known is None:
            raise InputError(f"there is no {self.noun} `{name}` in the catalog", hint=self._hint(name))
        if known not in self._checked:
            document = YamlDocument(self._values[known], SourceMap(f"{self.file.name}, {known}"))
            self._checked[known] = _named(validate(self.kind, document), known)
        return self._checked[known]

    def find(self, name_or_path: str | os.PathLike[str]) -> Kind:
        """Return an entry by name, or the one that a file describes."""
        text = os.fspath(name_or_path)
        return self.from_file(text) if is_path(text) else self.entry(text)

    def from_file(self, path: str | os.PathLike[str]) -> Kind:
        """Return the one entry of a person's own file, written as in the catalog."""
        file = Path(path)
        try:
            document = parse_yaml(decode_utf8(file.read_bytes(), str(file)), str(file))
        except OSError as error:
            hint = self.how_to_describe
            raise InputError(f"cannot be read: {error.strerror}", where=str(file), hint=hint) from None
        names = list(document.value)
        if len(names) != 1 or not isinstance(document.value[names[0]], dict):
            raise RecipeError(
                f"the file must describe one {self.noun} under its name", where=str(file), hint=self.how_to_describe
            )
        return _named(validate(self.kind, _subdocument(document, names[0])), names[0])

    @cached_property
    def _values(self) -> dict[str, Any]:
        return parse_yaml(self.file.read_text(encoding="utf-8"), self.file.name).value

    @cached_property
    def _known(self) -> dict[str, str]:
        """Every name that is understood, and the entry it stands for."""
        known = {_normalized(name): name for name in self._values}
        for name, value in self._values.items():
            for other in value.get(self.other_names, ()) if self.other_names else ():
                known.setdefault(_normalized(other), name)
        return known

    @cached_property
    def _checked(self) -> dict[str, Kind]:
        return {}

    def _hint(self, name: str) -> str:
        wanted = self.short_names.get(_normalized(name), _normalized(name))
        beginning = [known for known in self._values if known.startswith(wanted)]
        # Two words of three letters are alike by chance.
        alike = difflib.get_close_matches(wanted, self._known, n=3, cutoff=0.6) if len(wanted) > 3 else []
        near = beginning or list(dict.fromkeys(self._known[each] for each in alike))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known {self.noun}s: {', '.join(self._values)}"
        return f"{hint}\n{self.how_to_describe}" if self.how_to_describe else hint


def is_path(text: str) -> bool:
    """Whether what was written for a name is the path of a file."""
    return "/" in text or Path(text).suffix in YAML_SUFFIXES


def _normalized(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _named(entry: Kind, name: str) -> Kind:
    entry._name = name
    return entry


def _subdocument(document: YamlDocument, name: str) -> YamlDocument:
    """The value of one key, with the lines it was written on."""
    places = SourceMap(document.places.source, document.places.folder)
    for table, inner in ((document.places.keys, places.keys), (document.places.values, places.values)):
        inner.update({path[1:]: place for path, place in table.items() if path[:1] == (name,)})
    return YamlDocument(document.value[name], places)

"""A data file of the catalog: entries by name, each with its source. A person's own file has the same form."""

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
        """Its name in the file."""
        return self._name


EntryType = TypeVar("EntryType", bound=CatalogEntry)


@dataclass(frozen=True)
class CatalogTable(Generic[EntryType]):
    """The entries of one file; each is checked when it is first used."""

    file: Path
    entry_type: type[EntryType]
    noun: str
    how_to_describe: str | None = None
    """What the error about an unknown name tells people to write."""
    other_names: str | None = None
    """The key of an entry that lists its other names."""
    short_names: Mapping[str, str] = field(default_factory=dict)
    """A word that people use for several entries (`ib`), and how their names begin."""

    def names(self) -> list[str]:
        """Return the names of all entries, in the order of the file."""
        return list(self._values)

    def entry(self, name: str) -> EntryType:
        """Return an entry by one of its names; letters may be large or small."""
        known = self._name_index.get(_normalized(name))
        if known is None:
            raise InputError(f"there is no {self.noun} `{name}` in the catalog", hint=self._hint(name))
        if known not in self._validated:
            document = YamlDocument(self._values[known], SourceMap(f"{self.file.name}, {known}"))
            self._validated[known] = _named(validate(self.entry_type, document), known)
        return self._validated[known]

    def find(self, name_or_path: str | os.PathLike[str]) -> EntryType:
        """Return an entry by name, or the one that a file describes."""
        text = os.fspath(name_or_path)
        return self.from_file(text) if is_path(text) else self.entry(text)

    def from_file(self, path: str | os.PathLike[str]) -> EntryType:
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
        return _named(validate(self.entry_type, _subdocument(document, names[0])), names[0])

    @cached_property
    def _values(self) -> dict[str, Any]:
        return parse_yaml(self.file.read_text(encoding="utf-8"), self.file.name).value

    @cached_property
    def _name_index(self) -> dict[str, str]:
        """Every accepted name, and the entry that it means."""
        known = {_normalized(name): name for name in self._values}
        for name, value in self._values.items():
            for other in value.get(self.other_names, ()) if self.other_names else ():
                known.setdefault(_normalized(other), name)
        return known

    @cached_property
    def _validated(self) -> dict[str, EntryType]:
        return {}

    def _hint(self, name: str) -> str:
        wanted = self.short_names.get(_normalized(name), _normalized(name))
        beginning = [known for known in self._values if known.startswith(wanted)]
        # Words of three letters are often similar by chance.
        alike = difflib.get_close_matches(wanted, self._name_index, n=3, cutoff=0.6) if len(wanted) > 3 else []
        near = beginning or list(dict.fromkeys(self._name_index[name] for name in alike))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known {self.noun}s: {', '.join(self._values)}"
        return f"{hint}\n{self.how_to_describe}" if self.how_to_describe else hint


def is_path(text: str) -> bool:
    """Whether a name is the path of a file."""
    return "/" in text or Path(text).suffix in YAML_SUFFIXES


def _normalized(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _named(entry: EntryType, name: str) -> EntryType:
    entry._name = name
    return entry


def _subdocument(document: YamlDocument, name: str) -> YamlDocument:
    """The value of one key, with its lines in the file."""
    places = SourceMap(document.places.source, document.places.folder)
    for table, inner in ((document.places.keys, places.keys), (document.places.values, places.values)):
        inner.update({path[1:]: place for path, place in table.items() if path[:1] == (name,)})
    return YamlDocument(document.value[name], places)

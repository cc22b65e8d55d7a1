"""What a recipe and a cluster have in common: each is a whole file, which knows where its keys were written."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr

from trainshed.recipe.overrides import Override, python_override
from trainshed.recipe.section import Section
from trainshed.recipe.yaml_io import SourceMap, dump_yaml
from trainshed.redaction import redacted


class WrittenFile(Section):
    """A section that is a file of its own."""

    _places: SourceMap = PrivateAttr(default_factory=SourceMap)

    def _repr_html_(self) -> str:
        """Show the file in a notebook: the keys that do not have their default."""
        from trainshed.recipe.load import to_plain

        return f"<pre>{html.escape(redacted(dump_yaml(to_plain(self, defaults=False))))}</pre>"

    @property
    def places(self) -> SourceMap:
        """Return where each key was written."""
        return self._places

    @property
    def folder(self) -> Path:
        """Return the folder of the file; relative paths of scripts and plugins begin there."""
        return self._places.folder

    def where(self, key: str) -> str:
        """Return the place of a key for an error: `recipe.yaml:12 (data.train.0.path)`."""
        return self._places.where(tuple(int(step) if step.isdigit() else step for step in key.split(".")))

    def with_(self, key: str | Mapping[str, Any], value: Any = None) -> Self:
        """Return this with another value at a key (`train.optimizer.lr`), or at several: `{key: value, …}`.

        Checked as an override on the command line is, with the same errors.
        """
        changes = key if isinstance(key, Mapping) else {key: value}
        return self.with_overrides([python_override(name, entry) for name, entry in changes.items()])

    def with_overrides(self, overrides: Iterable[str | Override]) -> Self:
        """Return this with overrides as the command line has them: `train.steps=100`."""
        more = list(overrides)
        if not more:
            return self
        text, before = self._places.text, self._places.overrides
        if text is None or self._parse_again(text, before) != self:  # made or changed in Python: written out first
            from trainshed.recipe.load import to_yaml

            text, before = to_yaml(self), ()
        return self._parse_again(text, [*before, *more])

    def _parse_again(self, text: str, overrides: Iterable[str | Override]) -> Self:
        """Read the text of such a file with overrides, as if it lay where this one does."""
        raise NotImplementedError

"""What the recipe and the plan decide, in Megatron's words, each with the key of ours that decides it.

A setting that equals Megatron's default is kept too (and not written): `engine.args` may not contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainshed.engines.megatron.known import ArgumentList


@dataclass(frozen=True)
class Setting:
    """One thing that Megatron is told; None: it must not be told."""

    dest: str
    value: Any
    key: str | None
    """The key of the recipe that says it; None: chosen here, and `engine.args` may choose otherwise."""


class Settings:
    """All settings of one launch, in the order in which they are written."""

    def __init__(self, known: ArgumentList) -> None:
        self.known = known
        self._settings: dict[str, Setting] = {}

    def put(self, key: str | None, **values: Any) -> None:
        """Decide some settings; each may be decided once."""
        for dest, value in values.items():
            assert self.known.has(dest), f"Megatron-LM {self.known.version} has no argument for {dest}"
            assert dest not in self._settings, f"{dest} is decided twice"
            self._settings[dest] = Setting(dest, value, key)

    def choose(self, **values: Any) -> None:
        """Choose some settings that no key of the recipe speaks about; those that a version does not have are left."""
        self.put(None, **{dest: value for dest, value in values.items() if self.known.has(dest)})

    def decided(self, dest: str) -> Setting | None:
        """Return who decided something, None where nobody did."""
        return self._settings.get(dest)

    def value(self, dest: str) -> Any:
        """Return what Megatron will take something to be: as decided, or its default."""
        setting = self._settings.get(dest)
        if setting is not None and setting.value is not None:
            return setting.value
        return self.known.default(dest) if self.known.has(dest) else None

    def add(self, setting: Setting) -> None:
        """Add what `engine.args` says, over nothing that was decided."""
        self._settings[setting.dest] = setting

    def words(self) -> tuple[str, ...]:
        """Return the command line."""
        return tuple(word for each in self._settings.values() for word in self.known.written(each.dest, each.value))

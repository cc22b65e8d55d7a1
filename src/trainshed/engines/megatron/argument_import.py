"""One import of Megatron's arguments, and what became of each."""

from __future__ import annotations

from typing import Any

from trainshed.engines.importing import ConfigImport, DroppedSetting, ImportedConfig, ImportMistake
from trainshed.engines.megatron.arguments import ParsedArguments
from trainshed.engines.megatron.script import ScriptArguments
from trainshed.recipe import ModelConfig


class ArgumentImport(ConfigImport):
    """The arguments of one training; what is not given is Megatron's default, not the recipe's."""

    model: ModelConfig | None = None
    """The architecture, None where it is known only from a checkpoint."""

    def __init__(self, parsed: ParsedArguments, script: ScriptArguments, name: str) -> None:
        super().__init__(parsed.given, parsed.written, kind="megatron", name=name)
        self.parsed, self.script = parsed, script

    @property
    def steps(self) -> int:
        """The length of the run; it is read before the schedule."""
        return self.recipe["train"]["steps"]

    def get(self, key: str, default: Any = None) -> Any:
        """Return what Megatron takes an argument to be, given or not."""
        value = self.parsed[key]
        return default if value is None else value

    def has_any(self, *keys: str) -> bool:
        """Whether one of some arguments is given."""
        return any(key in self.values for key in keys)

    def keep_arguments(self) -> None:
        """Keep the rest as `engine.args`, except what only a running shell knows and what is gone."""
        known, arguments = self.parsed.known, {}
        for dest in self.unread_keys():
            if dest not in self.values:
                self.ask(f"engine.args: `{self.parsed.open[dest]}` holds what only a running shell knows")
                self.drop("only a running shell knows its value", dest)
                continue
            value = self.values[dest]
            if not known.has(dest):
                self.drop(f"Megatron-LM {known.version} has it no more", dest)
                continue
            argument = next(argument for argument in known.setting(dest) if _can_set(argument.kind, value))
            key = argument.option.removeprefix("--")
            if argument.kind in ("flag", "unflag"):
                value = True
            arguments[key] = list(value) if isinstance(value, tuple) else value
            self.note_mapped(f"engine.args.{key}", dest)
        if arguments:
            self.set_recipe("engine.args", arguments)

    def finish(self, mistakes: tuple[ImportMistake, ...]) -> ImportedConfig:
        """Return what was read; arguments that are unknown or retired are dropped."""
        for written, near in self.parsed.unknown.items():
            meant = f"; did you mean {near}?" if near else ""
            self._dropped.append(DroppedSetting(written, f"no version of Megatron-LM known here has it{meant}"))
        accounted = {setting.theirs for setting in (*self._mapped, *self._dropped)}
        for written, fate in self.parsed.retired.items():
            if written not in accounted:
                self._dropped.append(DroppedSetting(written, str(fate)))
        self._mistakes += mistakes
        return self.imported()


def _can_set(kind: str, value: Any) -> bool:
    """Whether an argument of a kind is what was written to set this value."""
    if isinstance(value, bool):
        return kind == ("flag" if value else "unflag") or kind == "switch"
    return kind not in ("flag", "unflag", "switch")

"""The arguments that Megatron-LM knows, per version: `arguments-VERSION.json`, read from its own parsers.

An argument is looked up by its option (`--lr`) or by the name of what it sets (`lr`; argparse calls it dest). Several
options may set one thing: `--disable-bias-linear` sets `add_bias_linear` to false.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainshed.errors import InputError

Kind = Literal["flag", "unflag", "switch", "int", "float", "text", "ints", "pattern"]
"""flag: its presence means true; unflag: false; switch: `--x` or `--no-x`; ints: whole numbers joined by commas;
pattern: a whole number, or a Python list of 0 and 1 that Megatron evaluates.
"""

VERSIONS = ("0.16.1", "head")
"""Versions whose arguments are known, oldest first."""
NEWEST = VERSIONS[-1]


@dataclass(frozen=True)
class Argument:
    """One argument of a version."""

    option: str
    dest: str
    kind: Kind
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    also: tuple[str, ...] = ()
    """Other spellings; of a switch, the one that turns it off."""

    @property
    def takes_value(self) -> bool:
        """Whether something must follow it."""
        return self.kind not in ("flag", "unflag", "switch")

    @property
    def wants(self) -> str:
        """What must follow, in words."""
        one = {
            "int": "a whole number",
            "float": "a number",
            "text": "text",
            "ints": "whole numbers joined by commas",
            "pattern": "a whole number or a pattern",
        }
        if not self.takes_value:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.nargs is None:
            return one[self.kind]
        return f"a list of {self.nargs} of them: {one[self.kind]}" if self.nargs == 3 else f"a list: {one[self.kind]}"


class ArgumentList:
    """All arguments of one version."""

    def __init__(self, version: str, source: str, arguments: Sequence[Argument]) -> None:
        self.version, self.source = version, source
        self.arguments = tuple(arguments)
        self._by_option = {option: each for each in arguments for option in (each.option, *each.also)}
        self._by_dest: dict[str, list[Argument]] = {}
        for each in arguments:
            self._by_dest.setdefault(each.dest, []).append(each)

    def option(self, option: str) -> Argument | None:
        """Return an argument by one of its spellings, `--lr`; None where this version has none such."""
        return self._by_option.get(option)

    def has(self, dest: str) -> bool:
        """Tell whether anything sets `dest` in this version."""
        return dest in self._by_dest

    def setting(self, dest: str) -> tuple[Argument, ...]:
        """Return the arguments that set `dest`."""
        return tuple(self._by_dest[dest])

    def default(self, dest: str) -> Any:
        """Return what `dest` is where no argument sets it."""
        return self._by_dest[dest][0].default

    def written(self, dest: str, value: Any) -> tuple[str, ...]:
        """Return the words that set `dest` to a value; none where it is None, or a flag as it is anyway."""
        arguments = self._by_dest[dest]
        if value is None:
            return ()
        if isinstance(value, bool):
            return self._flag(dest, arguments, value)
        argument = next(each for each in arguments if each.takes_value)
        if argument.nargs is not None:
            return (argument.option, *(_word(each) for each in (value if isinstance(value, tuple | list) else [value])))
        if argument.kind == "ints":
            return (argument.option, ",".join(map(str, value)))
        text = _word(value)
        # argparse takes a word that begins with a dash for an option, unless it is a negative number.
        if text.startswith("-") and not isinstance(value, int | float):
            return (f"{argument.option}={text}",)
        return (argument.option, text)

    def _flag(self, dest: str, arguments: list[Argument], value: bool) -> tuple[str, ...]:
        if value == bool(arguments[0].default):
            return ()
        for each in arguments:
            if each.kind == "switch":
                return (each.option if value else each.also[0],)
            if each.kind == ("flag" if value else "unflag"):
                return (each.option,)
        raise AssertionError(f"no argument of Megatron-LM {self.version} makes {dest} {value}")

    def nearest(self, option: str) -> str | None:
        """Return the known option that was probably meant."""
        near = difflib.get_close_matches(option, self._by_option, n=1, cutoff=0.6)
        return near[0] if near else None


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


@cache
def known_arguments(version: str = NEWEST) -> ArgumentList:
    """Return the arguments of a version."""
    if version not in VERSIONS:
        raise InputError(
            f"the arguments of Megatron-LM {version} are not known here",
            hint=f"write engine.version: {' or '.join(VERSIONS)} (the nearest to what the image has)",
        )
    document = json.loads(Path(__file__).with_name(f"arguments-{version}.json").read_text(encoding="utf-8"))
    return ArgumentList(
        version,
        document["source"],
        [
            Argument(
                option,
                each["dest"],
                each["kind"],
                each.get("nargs"),
                tuple(each["choices"]) if "choices" in each else None,
                each.get("default"),
                tuple(each.get("also", ())),
            )
            for option, each in document["arguments"].items()
        ],
    )

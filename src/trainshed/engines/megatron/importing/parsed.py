"""Words as Megatron-LM's own parser would read them: what each argument sets, and to which value."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainshed.engines.megatron.known import VERSIONS, Argument, ArgumentList, known_arguments
from trainshed.engines.megatron.retired import RETIRED, Retired
from trainshed.errors import InputError


@dataclass
class Parsed:
    """The arguments of one training."""

    known: ArgumentList
    given: dict[str, Any] = field(default_factory=dict)
    """Values by dest, of the arguments that are there."""
    written: dict[str, str] = field(default_factory=dict)
    """The same as they are written: `--lr 1e-5`."""
    retired: dict[str, Retired] = field(default_factory=dict)
    """By how they are written."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """As they are written, with the option that was probably meant."""
    open: dict[str, str] = field(default_factory=dict)
    """Dests whose value only a running shell knows, as they are written."""

    def __getitem__(self, dest: str) -> Any:
        """Return what Megatron takes something to be, given or not."""
        if dest in self.given:
            return self.given[dest]
        return self.known.default(dest) if self.known.has(dest) else None

    def namespace(self) -> Namespace:
        """Return everything, defaults included, as Megatron's program would see it."""
        every = {each.dest: each.default for each in reversed(self.known.arguments)}
        return Namespace(**every | self.given)


def parse(words: Sequence[str], name: str) -> Parsed:
    """Parse with the newest version that knows every argument, or the newest of all."""
    lists = [known_arguments(version) for version in reversed(VERSIONS)]
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    fitting = [known for known in lists if all(known.option(each) or each in RETIRED for each in options)]
    parsed = Parsed((fitting or lists)[0])
    left = list(words)
    while left:
        _next(parsed, left, lists, name)
    return parsed


def _next(parsed: Parsed, left: list[str], lists: list[ArgumentList], name: str) -> None:
    option, sign, value = left.pop(0).partition("=")
    values = [value] if sign else []
    if not option.startswith("--"):
        if option.startswith(("$", "-", "\\")) or not option.strip():
            return  # "$@", or a short option of another program
        raise InputError(f"`{option}` belongs to no argument", where=name, hint="quote a value that has blanks in it")
    while not sign and left and not left[0].startswith("--"):
        values.append(left.pop(0))
    written = " ".join([option, *values])
    argument = next((found for known in lists if (found := known.option(option))), None)
    if option in RETIRED:
        parsed.retired[written] = RETIRED[option]
    if argument is None:
        if option not in RETIRED:
            parsed.unknown[written] = parsed.known.nearest(option)
        return
    parsed.written[argument.dest] = written
    if any("$" in each for each in values):
        parsed.open[argument.dest] = written
        if argument.kind != "text":
            return
    parsed.given[argument.dest] = _value(argument, option, values, written, name)


def _value(argument: Argument, option: str, values: list[str], written: str, name: str) -> Any:
    if not argument.takes_value:
        if values:
            raise InputError(f"`{written}`: {option} takes no value", where=name, hint=f"write {option} alone")
        return not (argument.kind == "unflag" or (argument.kind == "switch" and option in argument.also))
    try:
        read = [_one(argument, each) for each in values]
    except ValueError:
        read = []
    if not read or (argument.nargs is None and len(read) != 1):
        if argument.nargs == "*" and not values:
            return None
        raise InputError(f"`{written}`: {option} takes {argument.wants}", where=name, hint="correct it")
    return read[0] if argument.nargs is None else read


def _one(argument: Argument, text: str) -> Any:
    if argument.kind == "int":
        value: Any = int(text)
    elif argument.kind == "float":
        value = float(text)
    elif argument.kind == "ints":
        return tuple(int(each) for each in text.strip("()").split(","))
    elif argument.kind == "pattern":
        value = int(text) if text.isdigit() else text
    else:
        value = text
    if argument.choices is not None and value not in argument.choices:
        raise ValueError(text)
    return value

"""The points of a sweep: which values of which keys each of its runs has.

key=a,b,c      these values; several such keys make a grid of all their combinations
key=a..b       with `--random`: drawn log-uniformly from a to b, to three digits (whole numbers where both ends are)

A comma inside brackets, braces or quotes belongs to a value (`betas=[0.9,0.95],[0.9,0.99]`). With `--random N` the
points are N of the grid, or N draws where a key is a range. The seed alone decides which.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from trainshed.errors import InputError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_WHOLE = re.compile(r"[+-]?\d+")
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_DIGITS = 3
"""Significant digits of a drawn value: more would make longer names and not a better search."""
_DRAWS_PER_POINT = 100
MOST_POINTS = 10_000
"""A larger grid is most likely a typing error."""
NOT_SWEPT = ("name", "store", "cluster.store", "cluster.name", "cluster.target")
"""Keys that say where runs are kept: runs of one sweep are kept in one place."""

Values = tuple[tuple[str, str], ...]
"""The swept keys of one point with their values, as they would be written on the command line."""


@dataclass(frozen=True)
class SweptKey:
    """A key with the values that a sweep tries, or the range that it draws them from."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False

    @property
    def is_range(self) -> bool:
        """Whether values are drawn."""
        return not self.values

    def draw(self, generator: random.Random) -> str:
        """Draw a value."""
        if not self.is_range:
            return generator.choice(self.values)
        value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return str(round(value)) if self.is_whole else f"{value:.{_DIGITS}g}"


def split_swept(overrides: Sequence[str]) -> tuple[list[str], list[SweptKey]]:
    """Separate what is the same in every run from the keys that are swept, in the order they are written."""
    same: list[str] = []
    swept: list[SweptKey] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        values = [part.strip() for part in _split_commas(value)] if equals else []
        span = _RANGE.fullmatch(value.strip()) if equals else None
        if span is None and len(values) < 2:
            same.append(text)
            continue
        if key in NOT_SWEPT:
            raise InputError(
                f"`{key}` says where runs are kept, and runs of one sweep are kept in one place", where=key
            )
        if any(other.key == key for other in swept):
            raise InputError(f"`{key}` is swept twice", where=text, hint=f"write all its values once: {key}=a,b,c")
        swept.append(_range(key, span) if span is not None else _listed(key, values, text))
    return same, swept


def _range(key: str, span: re.Match[str]) -> SweptKey:
    low, high = float(span[1]), float(span[2])
    if not 0 < low < high:
        raise InputError(
            f"`{span[0]}` is not a range: it is drawn log-uniformly, from a number above 0 to a larger one",
            where=key,
            hint=f"write {key}=1e-5..1e-3, or the values themselves: {key}=a,b,c",
        )
    return SweptKey(key, low=low, high=high, is_whole=all(_WHOLE.fullmatch(span[end]) for end in (1, 2)))


def _listed(key: str, values: list[str], text: str) -> SweptKey:
    if "" in values:
        raise InputError("a value is empty", where=text, hint=f"write {key}=a,b,c")
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise InputError(f"{', '.join(sorted(twice))} is written twice", where=text, hint="write every value once")
    return SweptKey(key, values=tuple(values))


def _split_commas(text: str) -> Iterator[str]:
    """Split at the commas that are in no brackets, braces or quotes."""
    part, open_marks, quote = "", [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSING:
            open_marks.append(_CLOSING[letter])
        elif open_marks and letter == open_marks[-1]:
            open_marks.pop()
        elif letter == "," and not open_marks:
            yield part
            part = ""
            continue
        part += letter
    yield part


def sweep_values(swept: Sequence[SweptKey], *, draws: int | None = None, seed: int = 0) -> list[Values]:
    """Return the values of every point: the whole grid, or `draws` of them by a seed."""
    if not swept:
        raise InputError(
            "no key has several values",
            hint="write one with commas: train.optimizer.lr=1e-4,3e-4 (or a..b and --random)",
        )
    ranges = [key.key for key in swept if key.is_range]
    if draws is None:
        if ranges:
            raise InputError(
                f"`{ranges[0]}` is a range, and a grid has no values of it",
                where=ranges[0],
                hint=f"write --random 8 to draw from it, or the values themselves: {ranges[0]}=a,b,c",
            )
        _check_size(math.prod(len(key.values) for key in swept))
        return [_point(swept, values) for values in product(*(key.values for key in swept))]
    if draws < 1:
        raise InputError(f"{draws} points are none", where="--random", hint="write 1 or more")
    _check_size(draws)
    generator = random.Random(seed)
    if not ranges:
        size = math.prod(len(key.values) for key in swept)
        if draws > size:
            raise InputError(
                f"{draws} points of a grid that has {size}",
                where="--random",
                hint="leave it out: the grid is the whole",
            )
        return [_grid_point(swept, place) for place in sorted(generator.sample(range(size), draws))]
    points: dict[Values, None] = {}  # in the order in which they are drawn; one that comes again is drawn anew
    for _ in range(_DRAWS_PER_POINT * draws):
        points[_point(swept, [key.draw(generator) for key in swept])] = None
        if len(points) == draws:
            return list(points)
    raise InputError(
        f"{_DRAWS_PER_POINT * draws:,} draws gave only {len(points)} different points, and {draws} are wanted",
        where="--random",
        hint="write fewer, or a wider range",
    )


def _check_size(points: int) -> None:
    if points > MOST_POINTS:
        raise InputError(f"these are {points:,} runs", hint=f"at most {MOST_POINTS:,}; --random N takes some of a grid")


def _point(swept: Sequence[SweptKey], values: Sequence[str]) -> Values:
    return tuple((key.key, value) for key, value in zip(swept, values, strict=True))


def _grid_point(swept: Sequence[SweptKey], place: int) -> Values:
    """Return a point of the grid by its place, without making the grid."""
    values = []
    for key in reversed(swept):
        place, choice = divmod(place, len(key.values))
        values.append(key.values[choice])
    return _point(swept, values[::-1])


def values_text(values: Values) -> str:
    """Write a point for people, by the last words of its keys where these are different: `lr=1e-4 tp=2`."""
    short = [key.rpartition(".")[2] for key, _ in values]
    names = short if len(set(short)) == len(short) else [key for key, _ in values]
    return " ".join(f"{name}={value}" for name, (_, value) in zip(names, values, strict=True))

"""Split expressions as `datasets` writes them: `train`, `train[:95%]`, `train[10:200]`, and sums of them with `+`.

The name before the bracket picks files, by the names that datasets on the Hub have. The slice is of the rows of all
these files together. Percentages are rounded to the nearest row, halves to the even one, as `datasets` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainshed.errors import InputError

_TERM = re.compile(r"(?P<name>\w+(?:[.-]\w+)*)(?:\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5}\b")

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of files and folders that say to which split they belong."""

_WORD = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:$|[-._ 0-9])", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}


@dataclass(frozen=True)
class SplitTerm:
    """One term of an expression. A bound is a number of rows, or with `percent` of percents; None is the end there."""

    name: str
    first: int | None = None
    last: int | None = None
    percent: bool = False

    @property
    def whole(self) -> bool:
        """Whether all rows are meant."""
        return self.first is None and self.last is None

    def rows(self, count: int) -> tuple[int, int]:
        """Return the rows [first, last) of `count` that are meant."""
        first = 0 if self.first is None else self._row(self.first, count)
        last = count if self.last is None else self._row(self.last, count)
        return first, max(first, last)

    def _row(self, bound: int, count: int) -> int:
        row = round(bound * count / 100) if self.percent else bound
        return min(max(row + count, 0) if row < 0 else row, count)


def parse_split(expression: str) -> list[SplitTerm]:
    """Read an expression, or say what to write."""
    return [_parse_term(term.strip(), expression) for term in expression.split("+")]


def _parse_term(text: str, expression: str) -> SplitTerm:
    match = _TERM.fullmatch(text)
    if match is None:
        raise InputError(
            f"`{text}` in the split `{expression}` is not understood",
            hint="write for example train, train[:95%], train[95%:], train[10:200], or train[:10%]+test",
        )
    bounds = [match["first"], match["last"]]
    percents = {bound.endswith("%") for bound in bounds if bound}
    if len(percents) > 1:
        raise InputError(
            f"`{text}` has a bound in percent and one in rows", hint="write both in percent, or both in rows"
        )
    first, last = (int(bound.rstrip("%")) if bound else None for bound in bounds)
    percent = percents == {True}
    for bound in (first, last):
        if percent and bound is not None and abs(bound) > 100:
            raise InputError(f"`{text}` asks for more than 100%", hint="write percentages from -100 to 100")
    return SplitTerm(match["name"], first, last, percent)


def split_of(path: str) -> str | None:
    """Return the split that a file belongs to by its path; None where its path says nothing."""
    *folders, name = path.split("/")
    shard = _SHARD.match(name)
    if shard:
        return shard["name"]
    for part in (name, *reversed(folders)):
        split = next((split for split, word in _WORD.items() if word.search(part)), None)
        if split is not None:
            return split
    return None


def pick_files(paths: Sequence[str], name: str, *, named: bool, where: str) -> list[int]:
    """Return which files belong to a split. With `named`, a person has named them: then all may be `train`."""
    splits = [split_of(path) for path in paths]
    picked = [number for number, split in enumerate(splits) if split == name]
    if not picked and name == "train":
        picked = [number for number, split in enumerate(splits) if split is None]
        if not picked and named:
            picked = list(range(len(paths)))
    if not picked:
        others = sorted({split or "train" for split in splits})
        raise InputError(
            f"there are no files of the split `{name}`",
            where=where,
            hint=f"by their names they belong to {', '.join(others)}; or name the files",
        )
    return picked

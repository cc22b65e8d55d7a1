"""How a broken rule is said: the key, the numbers that clash, and sizes that would do."""

from __future__ import annotations

from trainshed.recipe.section import Problem


def problem(key: str, what: str, hint: str) -> Problem:
    """Return a problem of one key of the layout."""
    return Problem(("layout", key), what, hint)


def divisors(number: int) -> list[int]:
    """Return every size that divides a number, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def one_of(key: str, sizes: list[int], *, limit: int | None = None) -> str:
    """Name sizes to write, the largest six where there are many: `tp: 1, 2 or 4`."""
    shown = [str(size) for size in sizes if limit is None or size <= limit][-6:]
    return f"{key}: {shown[0]}" if len(shown) == 1 else f"{key}: {', '.join(shown[:-1])} or {shown[-1]}"


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple from a number on."""
    return -(-number // multiple) * multiple

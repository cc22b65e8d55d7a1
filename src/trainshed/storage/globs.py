"""Patterns on any store: `*` and `?` stay inside a folder, `**` crosses folders, `[a-z]` and `[!a-z]` are sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainshed.errors import AddressError, NotFound
from trainshed.redaction import shown_address
from trainshed.storage import address as addresses
from trainshed.storage.address import Address, join
from trainshed.storage.opening import open_store
from trainshed.storage.options import StoreOptions
from trainshed.storage.store import ObjectInfo, Store

MARKS = ".trainshed"
"""The folder in which copies keep their journal and manifest; no pattern finds it unless it names it."""


@dataclass(frozen=True)
class Found:
    """One object and its full address (for the Hub with the commit in it)."""

    address: str
    info: ObjectInfo


def expand(address: str, options: StoreOptions | None = None) -> list[Found]:
    """All objects that an address means, sorted by path: a file, all files below a folder, or a pattern's matches."""
    parsed = addresses.parse(address)
    store, _ = open_store(parsed, options)
    infos = matches(store, parsed)
    if not infos:
        raise NotFound("nothing found", where=shown_address(str(parsed)), hint=_missing_hint(parsed))
    if parsed.scheme in ("http", "https"):
        return [Found(str(parsed), infos[0])]
    return [Found(join(store.url, info.path), info) for info in infos]


def matches(store: Store, address: Address) -> list[ObjectInfo]:
    """What `expand` finds, as the store describes it."""
    path = address.path
    if address.scheme in ("http", "https"):
        if "*" in path:
            raise AddressError(
                "a pattern needs a listing, and a web server has none",
                where=shown_address(str(address)),
                hint="name one file, or put the URLs one per line into a text file and write @that-file",
            )
        info = store.head(path)
        return [info] if info else []
    if has_pattern(path):
        wanted = compiled(path)
        infos = [info for info in store.list(literal_folder(path)) if wanted.fullmatch(info.path)]
        if infos:
            return [info for info in infos if not _is_mark(info.path, path)]
    if path:
        info = store.head(path)  # also a file whose name holds a bracket
        if info is not None:
            return [info]
    return [info for info in store.list(path) if not _is_mark(info.path, path)]


def has_pattern(path: str) -> bool:
    """Whether a path holds a glob character."""
    return any(character in path for character in "*?[")


def literal_folder(path: str) -> str:
    """The folder before the first glob character: all that must be listed."""
    first = min((path.index(character) for character in "*?[" if character in path), default=len(path))
    return path[:first].rpartition("/")[0]


def selected(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a relative path is asked for. A pattern without a slash is about the file's name alone."""
    return (not include or any(_hits(path, pattern) for pattern in include)) and not any(
        _hits(path, pattern) for pattern in exclude
    )


def _hits(path: str, pattern: str) -> bool:
    pattern = pattern.strip("/")
    if "/" not in pattern:
        return bool(compiled(pattern).fullmatch(path.rpartition("/")[2]))
    return bool(compiled(pattern).fullmatch(path))


@lru_cache(maxsize=256)
def compiled(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression."""
    out, index = [], 0
    while index < len(pattern):
        character = pattern[index]
        if pattern.startswith("**/", index) and (index == 0 or pattern[index - 1] == "/"):
            out.append("(?:.*/)?")
            index += 3
        elif pattern.startswith("**", index):
            out.append(".*")
            index += 2
        elif character == "*":
            out.append("[^/]*")
            index += 1
        elif character == "?":
            out.append("[^/]")
            index += 1
        elif character == "[" and (close := pattern.find("]", index + 2)) > 0:
            body = pattern[index + 1 : close].replace("\\", "\\\\").replace("[", "\\[")
            out.append("(?!/)[" + ("^" + body[1:] if body[0] in "!^" else body) + "]")
            index = close + 1
        else:
            out.append(re.escape(character))
            index += 1
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        raise AddressError("a pattern nobody can read", where=pattern, hint="check what is in its brackets") from None


def _is_mark(path: str, asked: str) -> bool:
    return MARKS in path.split("/") and MARKS not in asked.split("/")


def _missing_hint(address: Address) -> str:
    if has_pattern(address.path) and address.scheme not in ("http", "https"):
        folder = join(address.url, literal_folder(address.path))
        return f"look into {folder} and check the pattern; '*' does not cross folders, '**' does"
    return "check the path"

"""Which objects an address means: one file, all files below a folder, the matches of a pattern, or a list of URLs.

Patterns work on any store: `*` and `?` stay inside a folder, `**` crosses folders, `[a-z]` and `[!a-z]` are sets.
`find_source` lists what a copy is to move.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from trainshed.errors import AddressError, InputError, NotFound
from trainshed.redaction import shown_address
from trainshed.reporting import Reporter
from trainshed.storage import address as addresses
from trainshed.storage.address import Address, join
from trainshed.storage.checksum import SHA256_PREFIX, is_sha256
from trainshed.storage.open import open_store
from trainshed.storage.store import ObjectInfo, Store, StoreOptions

STATE_FOLDER = ".trainshed"
"""The folder in which copies keep their journal and manifest; no pattern finds it unless it names it."""


@dataclass(frozen=True)
class MatchedObject:
    """One object and its full address (for the Hub with the commit in it)."""

    address: str
    info: ObjectInfo


def expand(address: str, options: StoreOptions | None = None) -> list[MatchedObject]:
    """All objects that an address means, sorted by path: a file, all files below a folder, or a pattern's matches."""
    parsed = addresses.parse(address)
    store, _ = open_store(parsed, options)
    infos = list_matches(store, parsed)
    if not infos:
        raise NotFound("nothing found", where=shown_address(str(parsed)), hint=_missing_hint(parsed))
    if parsed.scheme in ("http", "https"):
        return [MatchedObject(str(parsed), infos[0])]
    return [MatchedObject(join(store.url, info.path), info) for info in infos]


def list_matches(store: Store, address: Address) -> list[ObjectInfo]:
    """What `expand` finds, as the store describes it."""
    infos = _matching_objects(store, address)
    for info in infos:
        _check_name(info.path, store)
    return infos


def _check_name(path: str, store: Store) -> None:
    """Refuse a file name that no manifest could hold: one of a disk may be any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise AddressError("the name of a file is not UTF-8", where=join(store.url, shown), hint="rename it") from None


def _matching_objects(store: Store, address: Address) -> list[ObjectInfo]:
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
        wanted = compile_glob(path)
        infos = [info for info in store.list(literal_folder(path)) if wanted.fullmatch(info.path)]
        if infos:
            return [info for info in infos if not _is_state_file(info.path, path)]
    if path:
        info = store.head(path)  # also a file whose name holds a bracket
        if info is not None:
            return [info]
    return [info for info in store.list(path) if not _is_state_file(info.path, path)]


def has_pattern(path: str) -> bool:
    """Whether a path holds a glob character."""
    return any(character in path for character in "*?[")


def literal_folder(path: str) -> str:
    """The folder before the first glob character: all that must be listed."""
    first = min((path.index(character) for character in "*?[" if character in path), default=len(path))
    return path[:first].rpartition("/")[0]


def is_selected(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a relative path is asked for. A pattern without a slash is about the file's name alone."""
    return (not include or any(_matches_pattern(path, pattern) for pattern in include)) and not any(
        _matches_pattern(path, pattern) for pattern in exclude
    )


def _matches_pattern(path: str, pattern: str) -> bool:
    pattern = pattern.strip("/")
    if "/" not in pattern:
        return bool(compile_glob(pattern).fullmatch(path.rpartition("/")[2]))
    return bool(compile_glob(pattern).fullmatch(path))


@lru_cache(maxsize=256)
def compile_glob(pattern: str) -> re.Pattern[str]:
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


def _is_state_file(path: str, asked: str) -> bool:
    return STATE_FOLDER in path.split("/") and STATE_FOLDER not in asked.split("/")


def _missing_hint(address: Address) -> str:
    if has_pattern(address.path) and address.scheme not in ("http", "https"):
        folder = join(address.url, literal_folder(address.path))
        return f"look into {folder} and check the pattern; '*' does not cross folders, '**' does"
    return "check the path"


# Longer than any list we know of (RedPajama's has 2,084 lines), shorter than a corpus by mistake.
_LONGEST_LIST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class CopyItem:
    """One object to copy; `path` is where it goes below the destination.

    The size and the version are None and empty for a URL, which has not been asked yet.
    """

    path: str
    store: Store
    info: ObjectInfo | None
    source_path: str
    sha256: str | None = None

    @property
    def size(self) -> int | None:
        """The size, where a listing gave it."""
        return self.info.size if self.info is not None and self.info.size >= 0 else None


@dataclass(frozen=True)
class CopySource:
    """`address` is what was asked for, `pinned` the same with the Hub's commit in it."""

    address: str
    pinned: str
    items: tuple[CopyItem, ...]
    separate: bool = False  # a list of URLs: being refused one says nothing about the others


def find_source(text: str, options: StoreOptions | None, reporter: Reporter) -> CopySource:
    """List a source. `@file` is a list of URLs; so is a single `.txt` in which every line is one."""
    if text.startswith("@"):
        return _url_list(text[1:], options)
    address = addresses.parse(text)
    store, path = open_store(address, options)
    if address.scheme in ("http", "https"):
        if path.partition("?")[0].endswith(".txt") and _is_url_list(store, path):
            reporter.note(f"{shown_address(text)} is a list of URLs: copying what it names")
            return _url_list(text, options)
        name = urlsplit(text).path.rpartition("/")[2]
        if not name:
            raise AddressError("the URL names no file", where=shown_address(text), hint="write the URL of one file")
        item = CopyItem(unquote(name), store, None, path)
        return CopySource(shown_address(text), shown_address(text), (item,))
    infos = list_matches(store, address)
    if not infos:
        raise NotFound("nothing to copy", where=text, hint="check the path; '*' does not cross folders, '**' does")
    if [info.path for info in infos] == [path]:
        base = path.rpartition("/")[0]
        if path.endswith(".txt") and _is_url_list(store, path):
            reporter.note(f"{text} is a list of URLs: copying what it names")
            return _url_list(text, options)
    else:
        base = literal_folder(path) if has_pattern(path) else path
    skip = len(base) + 1 if base else 0
    items = tuple(CopyItem(info.path[skip:], store, info, info.path, info.sha256) for info in infos)
    return CopySource(str(address), join(store.url, path), items)


def select_items(
    source: CopySource,
    include: Sequence[str],
    exclude: Sequence[str],
    limit: int | None,
    task: tuple[int, int] | None,
) -> list[CopyItem]:
    """The part of a source that is asked for: patterns first, then the first `limit`, then every n-th."""
    chosen = [item for item in source.items if is_selected(item.path, include, exclude)]
    if not chosen:
        raise NotFound(
            f"none of the {len(source.items)} files is asked for",
            where=source.address,
            hint=f"check --include and --exclude; the first file is {source.items[0].path}",
        )
    if limit is not None:
        if limit < 1:
            raise InputError(f"a limit of {limit}", hint="write a limit of at least 1")
        chosen = chosen[:limit]
    return chosen if task is None else chosen[task[0] :: task[1]]


def _url_list(text: str, options: StoreOptions | None) -> CopySource:
    address = addresses.parse(text)
    store, path = open_store(address, options)
    shown = shown_address(text)
    items: dict[str, CopyItem] = {}
    for number, line in enumerate(_lines(store.read(path, 0, _LONGEST_LIST_BYTES)), start=1):
        where = f"{shown}:{number}"
        url, _, checksum = line.partition(" ")
        checksum = checksum.strip()
        if not url or url.startswith("#"):
            continue
        item = _item_of_url(url, checksum, options, where)
        if item.path in items:
            raise AddressError(f"a second URL for {item.path}", where=where, hint="remove one of the two")
        items[item.path] = item
    if not items:
        raise NotFound("the list names no URL", where=shown, hint="write one URL per line")
    ordered = tuple(items[path] for path in sorted(items))
    return CopySource(f"@{shown}", f"@{shown}", ordered, separate=True)


def _item_of_url(url: str, checksum: str, options: StoreOptions | None, where: str) -> CopyItem:
    address = addresses.parse(url)
    if address.scheme == "file":
        raise AddressError("not a URL", where=where, hint="write one URL per line, each with http:// or https://")
    if checksum:
        checksum = checksum if checksum.startswith(SHA256_PREFIX) else SHA256_PREFIX + checksum.lower()
        if not is_sha256(checksum):
            raise AddressError("what follows the URL is no SHA-256", where=where, hint="write 64 hex digits or nothing")
    store, path = open_store(address, options)
    return CopyItem(_destination_path(address, where), store, None, path, checksum or None)


def _destination_path(address: Address, where: str) -> str:
    """Host and path, as `wget -x` does: stable whatever else the list holds, and never two URLs in one place."""
    host = address.root.rpartition("@")[2].replace(":", "_")
    parts = []
    for part in address.path.partition("?")[0].partition("#")[0].split("/"):
        plain = unquote(part)
        parts.append(part if "/" in plain or any(ord(character) < 32 for character in plain) else plain)
    if any(part in ("", ".", "..") for part in parts):
        raise AddressError("the URL names no file", where=where, hint="write the URL of one file")
    return "/".join([host, *parts])


def _is_url_list(store: Store, path: str) -> bool:
    start = store.read(path, 0, 65536)
    lines = _lines(start)
    urls = [line for line in (lines if len(start) < 65536 else lines[:-1]) if line and not line.startswith("#")]
    return bool(urls) and all(line.startswith(("http://", "https://")) for line in urls)


def _lines(data: bytes) -> list[str]:
    return [line.strip() for line in data.decode("utf-8", "replace").splitlines()]


def total_size(items: Sequence[CopyItem]) -> int | None:
    """The bytes of all items, or None if a size is not known."""
    sizes = [item.size for item in items]
    return None if None in sizes else sum(size for size in sizes if size is not None)

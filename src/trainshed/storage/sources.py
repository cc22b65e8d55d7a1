"""What there is to copy: everything an address means, or a list of URLs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from trainshed.errors import AddressError, InputError, NotFound
from trainshed.redaction import shown_address
from trainshed.reporting import Reporter
from trainshed.storage import address as addresses
from trainshed.storage.address import Address, join
from trainshed.storage.globs import has_pattern, literal_folder, matches, selected
from trainshed.storage.hashing import PREFIX, is_sha256
from trainshed.storage.opening import open_store
from trainshed.storage.options import StoreOptions
from trainshed.storage.store import ObjectInfo, Store

# Longer than any list we know of (RedPajama's has 2,084 lines), shorter than a corpus by mistake.
_LONGEST_LIST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Item:
    """One object to copy; `path` is where it goes below the destination.

    The size and the version are None and empty for a URL, which nobody has asked about yet.
    """

    path: str
    store: Store
    info: ObjectInfo | None
    source_path: str
    sha256: str | None = None

    @property
    def size(self) -> int | None:
        """The size, where a listing told it."""
        return self.info.size if self.info is not None and self.info.size >= 0 else None


@dataclass(frozen=True)
class Source:
    """`address` is what was asked for, `pinned` the same with the Hub's commit in it."""

    address: str
    pinned: str
    items: tuple[Item, ...]
    separate: bool = False  # a list of URLs: being refused one says nothing about the others


def find_source(text: str, options: StoreOptions | None, reporter: Reporter) -> Source:
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
        item = Item(unquote(name), store, None, path)
        return Source(shown_address(text), shown_address(text), (item,))
    infos = matches(store, address)
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
    items = tuple(Item(info.path[skip:], store, info, info.path, info.sha256) for info in infos)
    return Source(str(address), join(store.url, path), items)


def choose(
    source: Source,
    include: Sequence[str],
    exclude: Sequence[str],
    limit: int | None,
    task: tuple[int, int] | None,
) -> list[Item]:
    """The part of a source that is asked for: patterns first, then the first `limit`, then every n-th."""
    chosen = [item for item in source.items if selected(item.path, include, exclude)]
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


def _url_list(text: str, options: StoreOptions | None) -> Source:
    address = addresses.parse(text)
    store, path = open_store(address, options)
    shown = shown_address(text)
    items: dict[str, Item] = {}
    for number, line in enumerate(_lines(store.read(path, 0, _LONGEST_LIST_BYTES)), start=1):
        where = f"{shown}:{number}"
        url, _, checksum = line.partition(" ")
        checksum = checksum.strip()
        if not url or url.startswith("#"):
            continue
        item = _listed(url, checksum, options, where)
        if item.path in items:
            raise AddressError(f"a second URL for {item.path}", where=where, hint="remove one of the two")
        items[item.path] = item
    if not items:
        raise NotFound("the list names no URL", where=shown, hint="write one URL per line")
    ordered = tuple(items[path] for path in sorted(items))
    return Source(f"@{shown}", f"@{shown}", ordered, separate=True)


def _listed(url: str, checksum: str, options: StoreOptions | None, where: str) -> Item:
    address = addresses.parse(url)
    if address.scheme == "file":
        raise AddressError("not a URL", where=where, hint="write one URL per line, each with http:// or https://")
    if checksum:
        checksum = checksum if checksum.startswith(PREFIX) else PREFIX + checksum.lower()
        if not is_sha256(checksum):
            raise AddressError("what follows the URL is no SHA-256", where=where, hint="write 64 hex digits or nothing")
    store, path = open_store(address, options)
    return Item(_destination(address, where), store, None, path, checksum or None)


def _destination(address: Address, where: str) -> str:
    """Host and path, as `wget -x` does: stable whatever else the list holds, and never two URLs in one place."""
    host = address.root.rpartition("@")[2].replace(":", "_")
    parts = []
    for part in address.path.partition("?")[0].partition("#")[0].split("/"):
        plain = unquote(part)
        parts.append(part if "/" in plain or any(ord(each) < 32 for each in plain) else plain)
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


def known_size(items: Sequence[Item]) -> int | None:
    """The bytes of all items, or None if a size is not known."""
    sizes = [item.size for item in items]
    return None if None in sizes else sum(size for size in sizes if size is not None)

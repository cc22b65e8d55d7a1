"""The files of an index: int64 arrays, written piece by piece and memory-mapped, and their manifest."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainshed.data.tokens.atomic_file import replace_file
from trainshed.errors import CorruptData, NotFound
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, sha256_of

KIND = "index"
INDEX_FORMAT = 1
ORDER_VERSION = 1
MANIFEST = "manifest.json"
REBUILD = "run `trainshed run RECIPE`, which makes what is missing; remove the folder first if it is damaged"


def save_array(path: Path, length: int, pieces: Iterator[np.ndarray]) -> FileEntry:
    """Write an int64 array piece by piece (never by a map: a full disk would be a SIGBUS)."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (length,)})
    hasher = Hasher("sha256")
    with replace_file(path, last=False) as file:
        hasher.update(header.getvalue())
        file.write(header.getvalue())
        for piece in pieces:
            data = piece.astype("<i8", copy=False).tobytes()
            hasher.update(data)
            file.write(data)
    written = (hasher.size - len(header.getvalue())) // 8
    if written != length:
        raise CorruptData(f"{written} values where {length} were counted", where=str(path), hint=REBUILD)
    return FileEntry(path.name, hasher.size, hasher.checksum)


def save_manifest(folder: Path, spec: Mapping[str, Any], facts: Mapping[str, Any], files: Iterable[FileEntry]) -> None:
    """Write the manifest: from here on the index exists."""
    Manifest.of(KIND, spec, files, {**facts, "order": ORDER_VERSION}).write(LocalStore(folder), MANIFEST)


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index that this version understands."""
    try:
        manifest = Manifest.read(LocalStore(folder), MANIFEST)
    except NotFound:
        raise NotFound("no index here", where=str(folder), hint=REBUILD) from None
    order = manifest.facts.get("order")
    if manifest.kind != KIND or order != ORDER_VERSION:
        raise CorruptData(
            f"is '{manifest.kind}' with order {order}; this version reads '{KIND}' with order {ORDER_VERSION}",
            where=str(folder / MANIFEST),
            hint="install the version of Trainshed that wrote it, or prepare again",
        )
    return manifest


def open_array(folder: Path, entry: FileEntry) -> np.ndarray:
    """Map one array of the index, read-only."""
    path = folder / entry.path
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptData(f"cannot be read: {error}", where=str(path), hint=REBUILD) from None
    size = path.stat().st_size
    if size != entry.size or array.dtype != np.dtype("<i8"):
        raise CorruptData(
            f"holds {size} bytes of {array.dtype}, not what its manifest says", where=str(path), hint=REBUILD
        )
    return array.view(np.ndarray)


def check_array(folder: Path, entry: FileEntry) -> None:
    """Compare an array with its hash."""
    if sha256_of(LocalStore(folder).stream(entry.path)) != entry.checksum:
        raise CorruptData("is not what its manifest says", where=str(folder / entry.path), hint=REBUILD)

"""The files of an index: int64 arrays, written piece by piece and memory-mapped, and their manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainshed.data.tokens.atomic_file import replace_file
from trainshed.errors import CorruptData, NotFound

INDEX_FORMAT = 1
ORDER_VERSION = 1
MANIFEST = "manifest.json"
REBUILD = "run `trainshed run RECIPE`, which makes what is missing; remove the folder first if it is damaged"


def save_array(path: Path, length: int, pieces: Iterator[np.ndarray]) -> dict[str, Any]:
    """Write an int64 array piece by piece (never by a map: a full disk would be a SIGBUS)."""
    digest = hashlib.sha256()
    written = 0
    with replace_file(path, last=False) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (length,)})
        for piece in pieces:
            data = piece.astype("<i8", copy=False).tobytes()
            digest.update(data)
            file.write(data)
            written += len(piece)
    if written != length:
        raise CorruptData(f"{written} values where {length} were counted", where=str(path), hint=REBUILD)
    return {"length": length, "sha256": digest.hexdigest()}


def save_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest: from here on the index exists."""
    with replace_file(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n")


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an index that this version understands."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound("no index here", where=str(folder), hint=REBUILD) from None
    except ValueError as error:
        raise CorruptData(f"is not JSON: {error}", where=str(path), hint=REBUILD) from None
    if manifest.get("schema") != f"trainshed.index/{INDEX_FORMAT}" or manifest.get("order") != ORDER_VERSION:
        raise CorruptData(
            f"is {manifest.get('schema')} with order {manifest.get('order')}; this version reads "
            f"trainshed.index/{INDEX_FORMAT} with order {ORDER_VERSION}",
            where=str(path),
            hint="install the version of Trainshed that wrote it, or prepare again",
        )
    return manifest


def open_array(folder: Path, name: str, manifest: dict[str, Any]) -> np.ndarray:
    """Map one array of the index, read-only."""
    path = folder / name
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptData(f"cannot be read: {error}", where=str(path), hint=REBUILD) from None
    if array.shape != (manifest["files"][name]["length"],) or array.dtype != np.dtype("<i8"):
        raise CorruptData(
            f"holds {array.shape} {array.dtype}, not what its manifest says", where=str(path), hint=REBUILD
        )
    return array.view(np.ndarray)


def check_array(folder: Path, name: str, manifest: dict[str, Any]) -> None:
    """Compare an array with its hash."""
    digest = hashlib.sha256()
    array = open_array(folder, name, manifest)
    for start in range(0, len(array), 1 << 20):
        digest.update(array[start : start + (1 << 20)].tobytes())
    if digest.hexdigest() != manifest["files"][name]["sha256"]:
        raise CorruptData("is not what its manifest says", where=str(folder / name), hint=REBUILD)

"""The header of a safetensors file: which tensors it holds and where; read without the library.

A file is 8 bytes of little-endian header length, the header (JSON: name → dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.errors import CorruptData
from trainshed.storage import CHUNK_BYTES

# The limit of the safetensors library itself.
_LONGEST_HEADER_BYTES = 100_000_000
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_AGAIN = "fetch or write the file again"


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a file; `start` and `end` are byte offsets in the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file by name; a file that is cut short or damaged is an error."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
                raise CorruptData("is not a safetensors file, or only its beginning", where=str(path), hint=_AGAIN)
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CorruptData("is named by the index and not there", where=str(path), hint=_AGAIN) from None
    except ValueError:
        raise CorruptData("has a header that is not JSON", where=str(path), hint=_AGAIN) from None
    try:
        tensors = {
            name: _entry(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CorruptData("has a header nobody can read", where=str(path), hint=_AGAIN) from None
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        short = "cut short" if size < end else "longer than its tensors"
        raise CorruptData(f"is {short}: {size} bytes where its header counts {end}", where=str(path), hint=_AGAIN)
    for name, tensor in tensors.items():
        bytes_each = _DTYPE_BYTES.get(tensor.dtype)
        if bytes_each is not None and tensor.end - tensor.start != math.prod(tensor.shape) * bytes_each:
            raise CorruptData(f"`{name}` has another size than its shape says", where=str(path), hint=_AGAIN)
    return tensors


def same_bytes(one: SafetensorsEntry, other: SafetensorsEntry) -> bool:
    """Whether two tensors are equal bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        rest = one.end - one.start
        while rest:
            length = min(rest, CHUNK_BYTES)
            if left.read(length) != right.read(length):
                return False
            rest -= length
    return True


def _entry(path: Path, name: str, entry: Mapping[str, Any], data: int) -> SafetensorsEntry:
    start, end = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    return SafetensorsEntry(path, name, str(entry["dtype"]), shape, data + int(start), data + int(end))

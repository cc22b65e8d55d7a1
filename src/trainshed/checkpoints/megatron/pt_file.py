"""The files of torch.save, read without unpickling anything unknown and without touching the bytes of tensors."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainshed.checkpoints.megatron.pickled import unpickle
from trainshed.errors import CorruptData, NotFound

_AGAIN = "fetch or write the file again"


@dataclass(frozen=True)
class PtFile:
    """A file of torch.save, or a stretch of one: its document, and where in the file its storages begin."""

    path: Path
    document: Any
    storages: dict[str, int]


def open_pt(path: Path, start: int = 0, length: int | None = None) -> PtFile:
    """Read everything but the tensors' bytes."""
    try:
        with path.open("rb") as file:
            whole = file.seek(0, io.SEEK_END)
            if start + (length or 0) > whole:
                raise zipfile.BadZipFile
            window: Any = io.BufferedReader(_Window(file, start, whole - start if length is None else length))
            with zipfile.ZipFile(window) as archive:
                return _opened(path, archive, window, start)
    except FileNotFoundError:
        raise NotFound(f"there is no {path.name}", where=str(path.parent), hint="fetch the checkpoint again") from None
    except (zipfile.BadZipFile, KeyError, EOFError, struct.error):
        raise CorruptData("is no file of torch.save, or only its beginning", where=str(path), hint=_AGAIN) from None


def _opened(path: Path, archive: zipfile.ZipFile, window: IO[bytes], start: int) -> PtFile:
    names = archive.namelist()
    root = next(name for name in names if name.endswith("data.pkl")).removesuffix("data.pkl")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise CorruptData("was written on a big-endian machine", where=str(path))
    storages = {}
    for info in archive.infolist():
        if info.filename.startswith(f"{root}data/"):
            window.seek(info.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", window.read(4))
            key = info.filename.removeprefix(f"{root}data/")
            storages[key] = start + info.header_offset + 30 + name_bytes + extra_bytes
    return PtFile(path, unpickle(archive.read(f"{root}data.pkl"), str(path)), storages)


class _Window(io.RawIOBase):
    """A stretch of a file, seen as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

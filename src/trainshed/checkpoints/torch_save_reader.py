"""Read the files of torch.save without running anything in them and without reading the bytes of tensors.

A pickle names classes and functions to call. Here a name is one of a few plain containers, or becomes an inert
`PickledObject` that only keeps its state, or is refused. So neither torch nor Megatron is needed.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from trainshed.errors import CorruptData, InputError, NotFound

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes of tensors in files, and the bytes of one element."""
_STORAGE_DTYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
# Classes that a pickle may name; each is read as a `PickledObject`: what Megatron's checkpoints hold beside the weights
# (arguments, random states, the optimizer's settings), and the metadata of torch.distributed.checkpoint.
_PACKAGES = ("megatron.", "transformer_engine.", "torch.distributed.checkpoint.")
_MODULES = frozenset(
    {"torch.serialization", "torch.storage", "torch.torch_version", "numpy", "numpy.dtypes", "pathlib", "signal"}
    | {"numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
)
_NAMES = frozenset(
    {("torch", name) for name in ("device", "Generator", "strided", "ScriptObject")}
    | {("_codecs", "encode"), ("_io", "BytesIO"), ("builtins", "getattr"), ("builtins", "slice")}
    | {("functools", "partial"), ("datetime", "timedelta"), ("enum", "Enum"), ("copyreg", "_reconstructor")}
)

_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # the names in protocol 2, which torch.save uses


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as a pickle describes it; its bytes are in the storage with this key."""

    storage: str
    dtype: str
    storage_offset: int
    """How many elements of the storage come before its first."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class PickledObject:
    """An object that a pickle names. It is not created; only its state is kept."""

    class_name = ""
    state: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Accept an element of a list; it is not kept."""

    def extend(self, values: Any) -> None:
        """Accept elements of a list; they are not kept."""

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


def restricted_unpickle(data: bytes, where: str) -> Any:
    """Return the contents of a pickle: plain values, `PickledTensor`s, `PickledObject`s. Anything else is an error."""
    try:
        return _Unpickler(io.BytesIO(data), where).load()
    except (InputError, CorruptData):
        raise
    except Exception as error:
        raise CorruptData(
            f"holds a broken pickle: {error}", where=where, hint="fetch or write the file again"
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        module = _PYTHON_2_MODULES.get(module, module)
        safe_callable = _SAFE_CALLABLES.get((module, name))
        if safe_callable is not None:
            return safe_callable
        if module == "torch" and name in DTYPE_BYTES:
            return name
        if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module.startswith(_PACKAGES) or module in _MODULES or (module, name) in _NAMES:
            return _object_class(f"{module}.{name}")
        raise InputError(
            f"its pickle asks for `{module}.{name}`, which no checkpoint of Megatron needs",
            where=self._where,
            hint="it is not opened: a pickle can run anything; ask where this file comes from",
        )

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise CorruptData(f"names a storage of an unknown kind: {pid!r}", where=self._where)
        return str(key), dtype


@cache
def _object_class(class_name: str) -> type[PickledObject]:
    return type("PickledObject", (PickledObject,), {"class_name": class_name})


def _rebuild_tensor(storage: tuple[str, str], storage_offset: int, shape: Any, stride: Any, *_: Any) -> PickledTensor:
    key, dtype = storage
    return PickledTensor(key, dtype, storage_offset, tuple(shape), tuple(stride))


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _rebuild_size(lengths: Any = ()) -> tuple[int, ...]:
    return tuple(lengths)


_SAFE_CALLABLES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): _rebuild_size,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): dict,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
}


_AGAIN = "fetch or write the file again"


@dataclass(frozen=True)
class TorchSaveFile:
    """A file of torch.save, or one inside a larger file: its document, and where in the file its storages start."""

    path: Path
    document: Any
    storages: dict[str, int]


def read_torch_save(path: Path, start: int = 0, length: int | None = None) -> TorchSaveFile:
    """Read everything but the tensors' bytes."""
    try:
        with open_zip_window(path, start, length) as archive:
            assert archive.fp is not None
            return _read_archive(path, archive, archive.fp, start)
    except FileNotFoundError:
        raise NotFound(f"there is no {path.name}", where=str(path.parent), hint="fetch the checkpoint again") from None
    except (zipfile.BadZipFile, KeyError, EOFError, struct.error):
        raise CorruptData("is not a file of torch.save, or only its beginning", where=str(path), hint=_AGAIN) from None


@contextmanager
def open_zip_window(path: Path, start: int = 0, length: int | None = None) -> Generator[zipfile.ZipFile]:
    """Open a file of torch.save, or one inside a larger file, as the zip archive that it is."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        if start + (length or 0) > size:
            raise zipfile.BadZipFile
        window: Any = io.BufferedReader(_FileWindow(file, start, size - start if length is None else length))
        with zipfile.ZipFile(window) as archive:
            yield archive


def _read_archive(path: Path, archive: zipfile.ZipFile, window: IO[bytes], start: int) -> TorchSaveFile:
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
    return TorchSaveFile(path, restricted_unpickle(archive.read(f"{root}data.pkl"), str(path)), storages)


class _FileWindow(io.RawIOBase):
    """A range of a file's bytes as a file."""

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


_END_RECORD_BYTES, _MAX_32_BITS = 22, 0xFFFFFFFF  # of a zip's directory; a number that does not fit into 32 bits


def find_tensor_bytes(saved: memoryview) -> memoryview:
    """Return the bytes of the one tensor in a file of torch.save; it must have been saved contiguous."""
    # The directory says where the record is. It is read by hand: `zipfile` takes longer than reading the item.
    end = len(saved) - _END_RECORD_BYTES
    if end < 0 or saved[end : end + 4] != b"PK\x05\x06":
        raise ValueError("no directory at the end")
    at = struct.unpack_from("<I", saved, end + 16)[0]
    while at != _MAX_32_BITS and saved[at : at + 4] == b"PK\x01\x02":
        size, name_bytes, extra_bytes, note_bytes = struct.unpack_from("<IHHH", saved, at + 24)
        header = struct.unpack_from("<I", saved, at + 42)[0]
        if bytes(saved[at + 46 : at + 46 + name_bytes]).endswith(b"/data/0") and _MAX_32_BITS not in (size, header):
            return _record_bytes(saved, header, size)
        at += 46 + name_bytes + extra_bytes + note_bytes
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:  # one of 4 GiB or more
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    return _record_bytes(saved, record.header_offset, record.file_size)


def _record_bytes(saved: memoryview, header: int, size: int) -> memoryview:
    # The local header is followed by the name and by padding, whose lengths it holds.
    name, padding = struct.unpack_from("<HH", saved, header + 26)
    start = header + 30 + name + padding
    return saved[start : start + size]

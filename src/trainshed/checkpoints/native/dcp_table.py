"""The `.metadata` file of torch.distributed.checkpoint (DCP), written from arrays.

DCP's table is a pickle with three objects for every item. Pickling a million items as objects takes half a minute, so
their opcodes are written directly: all items of a tensor have the same bytes except for their numbers, which numpy
fills in. No torch here. What an unpickler makes of it equals what DCP's own classes pickle (`checkpoints/dcp.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trainshed.checkpoints.native.index import IndexedTensor

_DCP_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION
_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = (
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
)
_KEYS = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")
_NEW_OBJECT, _DICT, _END_DICT = b")\x81", b"}(", b"u"
_BUILD = b"b"
_NUMBER = b"\x8a\x08" + bytes(8)
"""An integer of eight bytes; they are filled in later."""
_FILE = b"j\xff\xff\xff\xff"
"""The name of a file by its number in the memo, which is filled in later."""
_SMALL_NUMBERS = 2**31


class _Memo:
    """Numbers what is pickled once and then named: classes, keys, tensors' names, files."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def put(self, key: object, pickled: bytes) -> bytes:
        number = self._numbers[key] = len(self._numbers)
        return pickled + b"r" + struct.pack("<I", number)

    def get(self, key: object) -> bytes:
        return b"j" + struct.pack("<I", self._numbers[key])

    def number(self, key: object) -> int:
        return self._numbers[key]


def encode_dcp_metadata(files: Sequence[str], tensors: Mapping[str, IndexedTensor]) -> bytes:
    """Return the `.metadata` file of these tensors."""
    return b"".join(_pickle(files, tensors))


def _pickle(files: Sequence[str], tensors: Mapping[str, IndexedTensor]) -> Iterator[bytes]:
    memo = _Memo()
    yield b"\x80\x04"
    yield _global(_METADATA, "Metadata") + _NEW_OBJECT + _DICT
    # What is named later is put into the memo first, and popped from the stack again.
    for module, name in _CLASSES:
        yield memo.put((module, name), _global(module, name)) + b"0"
    for text in (*_KEYS, *(("file", file) for file in files), *(("tensor", name) for name in tensors)):
        yield memo.put(text, _text(text if isinstance(text, str) else text[1])) + b"0"
    layout = _text("torch.strided") + b"\x85R"
    yield memo.put("layout", memo.get(("torch.serialization", "_get_layout")) + layout) + b"0"
    yield memo.put("memory_format", memo.get((_METADATA, "_MEM_FORMAT_ENCODING")) + b"K\x00\x85R") + b"0"

    yield _text("state_dict_metadata") + _DICT
    for name, tensor in tensors.items():
        yield memo.get(("tensor", name)) + memo.get((_METADATA, "TensorStorageMetadata")) + _NEW_OBJECT + _DICT
        yield memo.get("properties") + memo.get((_METADATA, "TensorProperties")) + _NEW_OBJECT
        dtype = _global("torch", tensor.dtype)
        yield b"(" + dtype + memo.get("layout") + b"\x89" + memo.get("memory_format") + b"\x89t" + _BUILD
        yield memo.get("size") + _filled(_size(memo, len(tensor.shape)), np.array([tensor.shape], np.int64))
        yield memo.get("chunks") + b"](" + _chunks(memo, tensor) + b"e"
        yield _END_DICT + _BUILD
    yield _END_DICT

    yield _text("planner_data") + _DICT
    for name in tensors:  # names are kept whole where PyTorch would make nested dictionaries of them
        yield 2 * memo.get(("tensor", name)) + b"\x85"
    yield _END_DICT

    yield _text("storage_data") + _DICT
    file_memo = np.array([memo.number(("file", file)) for file in files], np.int64)
    for name, tensor in tensors.items():
        yield _storage(memo, name, tensor, file_memo)
    yield _END_DICT

    yield _text("storage_meta") + _global(_METADATA, "StorageMeta") + _NEW_OBJECT + _DICT
    for key in ("checkpoint_id", "save_id", "load_id"):
        yield _text(key) + b"N"
    yield _text("modules") + b"]" + _END_DICT + _BUILD
    yield _text("version") + _text(_DCP_VERSION)
    yield _END_DICT + _BUILD + b"."


def _chunks(memo: _Memo, tensor: IndexedTensor) -> bytes:
    size = _size(memo, len(tensor.shape))
    head = memo.get((_METADATA, "ChunkStorageMetadata")) + _NEW_OBJECT + _DICT
    template = head + memo.get("offsets") + size + memo.get("sizes") + size + _END_DICT + _BUILD
    return _filled(template, np.hstack([tensor.table.offsets, tensor.table.sizes]))


def _storage(memo: _Memo, name: str, tensor: IndexedTensor, file_memo: np.ndarray) -> bytes:
    size = _size(memo, len(tensor.shape))
    index = memo.get((_METADATA, "MetadataIndex")) + _NEW_OBJECT + _DICT
    index += memo.get("fqn") + memo.get(("tensor", name)) + memo.get("offset") + size
    index += memo.get("index") + _NUMBER + _END_DICT + _BUILD
    info = memo.get((_FILESYSTEM, "_StorageInfo")) + _NEW_OBJECT + _DICT + memo.get("relative_path")
    place = memo.get("offset") + _NUMBER + memo.get("length") + _NUMBER + _END_DICT + _BUILD
    table = tensor.table
    numbers = np.hstack([table.offsets, np.arange(len(table))[:, None], table.rows[:, -2:]])
    file_numbers = table.rows[:, -3] & 0xFFFFFFFF
    return _filled(index + info + _FILE + place, numbers, file_memo[file_numbers])


def _filled(template: bytes, numbers: np.ndarray, file_memo: np.ndarray | None = None) -> bytes:
    """Repeat a template once per row of int64 [N, M], and put the row's values into its M numbers.

    A column of small values takes four bytes a number, others eight. `file_memo` [N] goes where `_FILE` is.
    """
    first, *parts = template.split(_NUMBER)
    whole, places = first, []
    for column, part in enumerate(parts):
        small = not len(numbers) or numbers[:, column].max() < _SMALL_NUMBERS
        opcode, width = (b"J" + bytes(4), 4) if small else (_NUMBER, 8)
        places.append((len(whole) + len(opcode) - width, width, numbers[:, column]))
        whole += opcode + part
    if file_memo is not None:
        places.append((whole.index(_FILE) + 1, 4, file_memo))
    rows = np.tile(np.frombuffer(whole, np.uint8), (len(numbers), 1))
    for start, width, values in places:
        rows[:, start : start + width] = values.astype(f"<i{width}").view(np.uint8).reshape(-1, width)
    return rows.tobytes()


def _size(memo: _Memo, dims: int) -> bytes:
    """Return the opcodes of a torch.Size of this many dims."""
    return memo.get(("torch", "Size")) + b"(" + dims * _NUMBER + b"t\x85R"


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data

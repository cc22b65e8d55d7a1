"""Weights as transformers saves them: safetensors headers, config.json, and tensors read box by box.

Opening reads only the config and the headers, checks that the tensors are those of the config, and needs neither torch
nor safetensors. `read` reads only the bytes that a box needs, so every rank of any layout reads its own part from the
same files. Files are not mapped: memory holds only the box, whatever the size of a file.

A safetensors file: 8 bytes of little-endian header length, the header (JSON: name → dtype, shape, data_offsets),
the data.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainshed.checkpoints.weights import box_ends, dtype_name, join_names
from trainshed.errors import CorruptData, InputError, NoSuchName
from trainshed.models.families import HF_FAMILIES, read_hf_config
from trainshed.models.hf_tensors import HfTensor, RowMapping, hf_row_mappings, hf_tensors
from trainshed.models.parameters import Parameter, parameter_count
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import family_decoder
from trainshed.storage import CHUNK_BYTES

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.io import BufferPool


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
                raise CorruptData("is no safetensors file, or only its beginning", where=str(path), hint=_AGAIN)
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


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The safetensors dtypes that are read, and torch's names for them."""
# Older versions of transformers saved these although they can be computed: rotary frequencies, GPT-2's causal masks.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")


def read_folder_config(folder: Path) -> ModelConfig:
    """Return the architecture that a folder's config.json describes."""
    return read_hf_config(_json_object(folder / CONFIG), str(folder / CONFIG))


def list_tensors(folder: Path) -> dict[str, SafetensorsEntry]:
    """Return all tensors of a folder; like transformers, from the single file if it exists, otherwise by the index."""
    if (folder / WEIGHTS).exists():
        return read_safetensors_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise NoSuchName(
            f"there is neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            hint="pickled weights (.bin, .pth) are never opened: save them as safetensors with save_pretrained",
        )
    index = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) and name for name in index.values()):
        raise CorruptData("has no `weight_map`", where=str(folder / INDEX), hint="fetch the folder again")
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            raise CorruptData(f"names `{name}`, which is no file beside it", where=str(folder / INDEX))
    files = {name: read_safetensors_header(folder / name) for name in sorted(set(index.values()))}
    lost = sorted(tensor for tensor, name in index.items() if tensor not in files[name])
    if lost:
        raise CorruptData(
            f"does not fit its files: {join_names(lost)} not where it says",
            where=str(folder / INDEX),
            hint="fetch the folder again",
        )
    tensors = {name: tensor for header in files.values() for name, tensor in header.items()}
    return tensors | {tensor: files[name][tensor] for tensor, name in index.items()}


def match_tensors(
    config: ModelConfig, stored: dict[str, SafetensorsEntry], folder: Path
) -> dict[str, SafetensorsEntry]:
    """Return every tensor of an architecture by its full name, or raise: missing, left over, or of another kind."""
    wanted = {tensor.name: tensor for tensor in hf_tensors(config)}
    base = HF_FAMILIES[config.family].names.base
    if not any(name.startswith(base) for name in stored):
        # Saved from the base model, without the head around it, like OpenAI's GPT-2.
        stored = {name if name in wanted else base + name: tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in stored]
    extra = sorted(name for name in stored if name not in wanted and not _BUFFERS.search(name))
    if missing or extra:
        by_state = ((missing, "missing"), (extra, "left over"))
        parts = [f"{join_names(names)} {state}" for names, state in by_state if names]
        raise InputError(
            f"the tensors are not those of its config: {'; '.join(parts)}",
            where=str(folder),
            hint=f"compare them with {CONFIG}; one that is left over would have been lost in silence",
        )
    checked = (_mismatch(tensor, stored[tensor.name]) for tensor in wanted.values())
    mismatches = [mismatch for mismatch in checked if mismatch]
    if mismatches:
        raise InputError(
            f"the tensors are not those of its config: {join_names(mismatches)}",
            where=str(folder),
            hint=f"read are {', '.join(SAFETENSORS_DTYPES.values())}, in the shapes that {CONFIG} gives",
        )
    return {name: stored[name] for name in wanted}


def _is_mtp_tensor(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to one of DeepSeek-V3's layers after the last, which transformers leaves out too."""
    if family_decoder(config.family) != "deepseek_v3":
        return False
    prefix = HF_FAMILIES[config.family].names.layer.partition("{layer}")[0]
    number = name.removeprefix(prefix).partition(".")[0]
    return name.startswith(prefix) and number.isdecimal() and int(number) >= config.layers


def _mismatch(wanted: HfTensor, stored: SafetensorsEntry) -> str | None:
    if stored.shape != wanted.shape:
        return f"`{stored.name}` is {list(stored.shape)}, not {list(wanted.shape)}"
    return None if stored.dtype in SAFETENSORS_DTYPES else f"`{stored.name}` is {stored.dtype}"


def _json_object(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NoSuchName(
            f"there is no {path.name}", where=str(path.parent), hint="name a folder with a model"
        ) from None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CorruptData("is not a JSON object", where=str(path), hint="fetch the file again")
    return body


HEAD = "lm_head.weight"
# Small enough to stay in a processor's cache between reading and copying, large enough that reads do not matter.
_BUFFER_BYTES = 2 * 1024 * 1024


class HfWeights:
    """The weights in a folder.

    `config` replaces the architecture in config.json. Names, shapes and dtypes of all tensors are checked against it.
    """

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        self.folder = folder
        self.config = read_folder_config(folder) if config is None else config
        stored = list_tensors(folder)
        self.left_out = [name for name in stored if _is_mtp_tensor(self.config, name)]
        """Tensors that are not read: of layers that predict more than the next token."""
        stored = {name: tensor for name, tensor in stored.items() if name not in set(self.left_out)}
        self._tied_head = stored.pop(HEAD, None) if self.config.tied_embeddings else None
        self._tensors = match_tensors(self.config, stored, folder)
        self._open_files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._mappings: dict[str, tuple[RowMapping, ...]] = {}
        self._buffer_pool: BufferPool | None = None
        weakref.finalize(self, _close_files, self._open_files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            _close_files(self._open_files)
            self._buffer_pool = None

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored weights, by torch's names."""
        buffers = {tensor.name for tensor in hf_tensors(self.config) if tensor.buffer}
        stored = (tensor.dtype for name, tensor in self._tensors.items() if name not in buffers)
        return sorted({SAFETENSORS_DTYPES[dtype] for dtype in stored})

    @property
    def entries(self) -> Mapping[str, SafetensorsEntry]:
        """Where each tensor is stored, by the name that transformers saves it under today."""
        return self._tensors

    @property
    def parameter_count(self) -> int:
        """The number of weights, tied ones counted once."""
        return parameter_count(self.config)

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU."""
        import torch

        box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill(box, parameter, offset)
        return box

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs."""
        box_ends(parameter, offset, shape)
        with self._buffers.borrow(shape, dtype) as box:
            self._fill(box, parameter, offset)
            yield box

    def check_tied_head(self) -> None:
        """Check that a tied head which is stored all the same equals the embedding. Reads both."""
        name = HF_FAMILIES[self.config.family].names.tensors["embedding"][0] + ".weight"
        if self._tied_head is not None and not same_bytes(self._tied_head, self._tensors[name]):
            raise InputError(
                f"`tie_word_embeddings` says that `{HEAD}` and `{name}` are one, and they differ",
                where=str(self.folder),
                hint="if the head was trained by itself, its config.json should say `tie_word_embeddings: false`",
            )

    @property
    def _buffers(self) -> BufferPool:
        from trainshed.checkpoints.io import BufferPool

        with self._lock:
            self._buffer_pool = self._buffer_pool or BufferPool()
            return self._buffer_pool

    def _fill(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int]) -> None:
        """Read all stored rows of a box to their places in it."""
        if not box.numel():
            return
        ends = [start + length for start, length in zip(offset, box.shape, strict=True)]
        dim = 1 if parameter.expert else 0
        columns = slice(offset[dim + 1], ends[dim + 1]) if box.dim() > dim + 1 else None
        whole_rows = columns is None or columns == slice(0, parameter.shape[dim + 1])
        for mapping in self._sources(parameter):
            if mapping.expert is not None and not offset[0] <= mapping.expert < ends[0]:
                continue
            target = box if mapping.expert is None else box[mapping.expert - offset[0]]
            part = mapping.within(offset[dim], ends[dim])
            if (
                whole_rows
                and not mapping.transposed
                and SAFETENSORS_DTYPES[self._tensors[mapping.hf_name].dtype] == dtype_name(box.dtype)
            ):
                self._read_directly(target, mapping, *part, offset[dim])
            else:
                self._read_by_block(target, mapping, *part, columns, offset[dim])

    def _sources(self, parameter: Parameter) -> tuple[RowMapping, ...]:
        if parameter.name not in self._mappings:  # experts have hundreds
            self._mappings[parameter.name] = hf_row_mappings(self.config, parameter)
        return self._mappings[parameter.name]

    def _read_directly(self, target: torch.Tensor, mapping: RowMapping, first: int, last: int, origin: int) -> None:
        """Read rows that are the same in the file and in memory: each run of them goes directly to its place."""
        from trainshed.checkpoints.io import read_rows

        stored = self._tensors[mapping.hf_name]
        row_bytes = (stored.end - stored.start) // stored.shape[0]
        descriptor, buffers = self._descriptor(stored.file), self._buffers
        for start, rows in mapping.runs(first, last):
            try:
                into = target[rows.start - origin : rows.stop - origin : rows.step]
                read_rows(descriptor, stored.start + (mapping.hf_start + start) * row_bytes, into, buffers)
            except EOFError:
                raise _cut_short(stored) from None

    def _read_by_block(
        self, target: torch.Tensor, mapping: RowMapping, first: int, last: int, columns: slice | None, origin: int
    ) -> None:
        """Read rows through a buffer, where they are cast, transposed or only partly needed."""
        import torch

        for start, stop, block in self._blocks(mapping, first, last, columns):
            rows = mapping.native_rows(start, stop)
            if isinstance(rows, slice):
                target[rows.start - origin : rows.stop - origin : rows.step] = block
            else:
                target[torch.from_numpy(rows - origin)] = block.to(target.dtype)

    def _blocks(
        self, mapping: RowMapping, first: int, last: int, columns: slice | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the rows [first, last) of a mapping in blocks: (start, stop, rows); the next block overwrites it."""
        if first == last:
            return
        stored = self._tensors[mapping.hf_name]
        if not mapping.transposed:
            for start, stop, rows in self._stored_rows(stored, mapping.hf_start + first, mapping.hf_start + last):
                block = rows if columns is None else rows[:, columns]
                yield start - mapping.hf_start, stop - mapping.hf_start, block
            return
        import torch

        # Our columns are its rows, and our rows are a range of its columns. All of it is read: such models are small.
        assert columns is not None
        part = slice(mapping.hf_start + first, mapping.hf_start + last)
        parts = [rows[:, part].clone() for _, _, rows in self._stored_rows(stored, columns.start, columns.stop)]
        if parts:
            yield first, last, torch.cat(parts).T

    def _stored_rows(self, stored: SafetensorsEntry, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Read rows of a stored tensor into a buffer that is reused; mapped pages would count as memory."""
        import torch

        from trainshed.checkpoints.io import read_rows

        dtype = getattr(torch, SAFETENSORS_DTYPES[stored.dtype])
        width = stored.shape[1:]
        row_bytes = math.prod(width) * dtype.itemsize
        count = max(1, _BUFFER_BYTES // row_bytes)
        buffers, descriptor = self._buffers, self._descriptor(stored.file)
        for start in range(first, last, count):
            stop = min(start + count, last)
            with buffers.borrow((stop - start, *width), dtype) as rows:
                try:
                    read_rows(descriptor, stored.start + start * row_bytes, rows, buffers)
                except EOFError:
                    raise _cut_short(stored) from None
                yield start, stop, rows

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open_files:
                self._open_files[file] = os.open(file, os.O_RDONLY)
            return self._open_files[file]


def _cut_short(stored: SafetensorsEntry) -> CorruptData:
    return CorruptData(f"ends before `{stored.name}` does", where=str(stored.file), hint="fetch the file again")


def _close_files(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])

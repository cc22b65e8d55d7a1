"""A model's weights as transformers saves them: checked against its config, read box by box.

Opening reads the config and the headers alone and needs no torch; `read` touches the bytes a box needs and no others,
so that every rank of any layout reads its own part from the same files. Nothing is mapped: memory holds what was asked
for, whatever the size of a file.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainshed.checkpoints.hf.safetensors_file import StoredTensor, read_header, same_bytes
from trainshed.checkpoints.weights import box_ends
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_config import read_hf_config
from trainshed.models.hf_tensors import HfTensor, Strip, hf_tensors, sources
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The safetensors dtypes that are read, and torch's names for them."""
HEAD = "lm_head.weight"
# What older versions of transformers saved although it can be computed: rotary frequencies, GPT-2's causal masks.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")
# Small enough to stay in a processor's cache between reading and laying out, large enough that reads do not count.
_BUFFER_BYTES = 2 * 1024 * 1024
_NAMED = 5  # how many tensors an error names before it only counts


class HfWeights:
    """The weights in a folder.

    `config` is what the config.json beside them describes, unless it is given; names, shapes and dtypes of all tensors
    have been held against it.
    """

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        self.folder = folder
        self.config = read_config(folder) if config is None else config
        stored = _stored_tensors(folder)
        self._tied_head = stored.pop(HEAD, None) if self.config.tied_embeddings else None
        self._tensors = _matched(self.config, stored, folder)
        self._open_files: dict[Path, int] = {}
        self._lock, self._mine = threading.Lock(), threading.local()
        weakref.finalize(self, _close, self._open_files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            _close(self._open_files)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        return sorted({DTYPES[tensor.dtype] for tensor in self._tensors.values()})

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Where each tensor lies, by the name that transformers saves it under today."""
        return self._tensors

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones counted once."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU."""
        import torch

        ends = box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        if not box.numel():
            return box
        dim = 1 if parameter.expert else 0
        columns = slice(offset[dim + 1], ends[dim + 1]) if len(shape) > dim + 1 else None
        for strip in sources(self.config, parameter):
            if strip.expert is not None and not offset[0] <= strip.expert < ends[0]:
                continue
            target = box if strip.expert is None else box[strip.expert - offset[0]]
            for first, last, block in self._blocks(strip, *strip.within(offset[dim], ends[dim]), columns):
                rows = strip.native_rows(first, last)
                if isinstance(rows, slice):
                    target[rows.start - offset[dim] : rows.stop - offset[dim] : rows.step] = block
                else:
                    target[torch.from_numpy(rows - offset[dim])] = block.to(dtype)
        return box

    def check_tied_head(self) -> None:
        """Compare a head that is stored although it is tied with the embedding it should be. Reads both."""
        name = HF_FAMILIES[self.config.family].names.tensors["embedding"][0] + ".weight"
        if self._tied_head is not None and not same_bytes(self._tied_head, self._tensors[name]):
            raise InputError(
                f"`tie_word_embeddings` says that `{HEAD}` and `{name}` are one, and they differ",
                where=str(self.folder),
                hint="if the head was trained by itself, its config.json should say `tie_word_embeddings: false`",
            )

    def _blocks(
        self, strip: Strip, first: int, last: int, columns: slice | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the rows [first, last) of a strip, some at a time: (from, to, rows); each is gone with the next."""
        if first == last:
            return
        stored = self._tensors[strip.hf_name]
        if not strip.transposed:
            for start, stop, rows in self._stored_rows(stored, strip.hf_start + first, strip.hf_start + last):
                block = rows if columns is None else rows[:, columns]
                yield start - strip.hf_start, stop - strip.hf_start, block
            return
        import torch

        # There our columns are the rows, and our rows a range of its columns: such models are small.
        assert columns is not None
        part = slice(strip.hf_start + first, strip.hf_start + last)
        parts = [rows[:, part].clone() for _, _, rows in self._stored_rows(stored, columns.start, columns.stop)]
        if parts:
            yield first, last, torch.cat(parts).T

    def _stored_rows(self, stored: StoredTensor, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Read rows of a stored tensor into a buffer that is used again: what is mapped would count as memory."""
        import torch

        dtype = getattr(torch, DTYPES[stored.dtype])
        width = stored.shape[1:]
        row_bytes = math.prod(width) * dtype.itemsize
        count = max(1, _BUFFER_BYTES // row_bytes)
        for start in range(first, last, count):
            stop = min(start + count, last)
            buffer = self._buffer(stored, stored.start + start * row_bytes, (stop - start) * row_bytes)
            yield (
                start,
                stop,
                torch.frombuffer(buffer, dtype=dtype, count=(stop - start) * math.prod(width)).view(
                    stop - start, *width
                ),
            )

    def _buffer(self, stored: StoredTensor, start: int, length: int) -> bytearray:
        """The bytes [start, start + length) of a file, in this thread's buffer."""
        buffer = getattr(self._mine, "buffer", None)
        if buffer is None or len(buffer) < length:
            # A new one rather than a longer one: the last may still be looked at.
            buffer = self._mine.buffer = bytearray(max(length, _BUFFER_BYTES))
        view, done = memoryview(buffer)[:length], 0
        while done < length:
            read = os.preadv(self._descriptor(stored.file), [view[done:]], start + done)
            if not read:
                raise CorruptData(
                    f"ends before `{stored.name}` does", where=str(stored.file), hint="fetch the file again"
                )
            done += read
        return buffer

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open_files:
                self._open_files[file] = os.open(file, os.O_RDONLY)
            return self._open_files[file]


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def read_config(folder: Path) -> ModelConfig:
    """Return the architecture that a folder's config.json describes."""
    return read_hf_config(_json_object(folder / CONFIG), str(folder / CONFIG))


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder; as transformers, the single file first, then the index."""
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise NotFound(
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
    files = {name: read_header(folder / name) for name in sorted(set(index.values()))}
    lost = sorted(tensor for tensor, name in index.items() if tensor not in files[name])
    if lost:
        raise CorruptData(
            f"does not fit its files: {_listed(lost)} not where it says",
            where=str(folder / INDEX),
            hint="fetch the folder again",
        )
    found = {name: tensor for header in files.values() for name, tensor in header.items()}
    return found | {tensor: files[name][tensor] for tensor, name in index.items()}


def _matched(config: ModelConfig, stored: dict[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor of an architecture by its full name, or say what is missing, left over or of another kind."""
    wanted = {tensor.name: tensor for tensor in hf_tensors(config)}
    base = HF_FAMILIES[config.family].names.base
    if not any(name.startswith(base) for name in stored):
        # Saved without the language model around it, as OpenAI's GPT-2s are.
        stored = {name if name in wanted else base + name: tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in stored]
    extra = sorted(name for name in stored if name not in wanted and not _BUFFERS.search(name))
    if missing or extra:
        parts = [f"{_listed(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
        raise InputError(
            f"the tensors are not those of its config: {'; '.join(parts)}",
            where=str(folder),
            hint=f"compare them with {CONFIG}; one that is left over would have been lost in silence",
        )
    wrong = [_misfit(tensor, stored[tensor.name]) for tensor in wanted.values()]
    if any(wrong):
        raise InputError(
            f"the tensors are not those of its config: {_listed([each for each in wrong if each])}",
            where=str(folder),
            hint=f"read are {', '.join(DTYPES.values())}, in the shapes that {CONFIG} gives",
        )
    return {name: stored[name] for name in wanted}


def _misfit(wanted: HfTensor, stored: StoredTensor) -> str | None:
    if stored.shape != wanted.shape:
        return f"`{stored.name}` is {list(stored.shape)}, not {list(wanted.shape)}"
    return None if stored.dtype in DTYPES else f"`{stored.name}` is {stored.dtype}"


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"there is no {path.name}", where=str(path.parent), hint="name a folder with a model") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorruptData("is not a JSON object", where=str(path), hint="fetch the file again")
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")

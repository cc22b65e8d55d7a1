"""Weights as transformers saves them: safetensors headers, config.json, and tensors read box by box.

Opening reads only the config and the headers, checks that the tensors are those of the config, and needs neither torch
nor safetensors. `read` reads only the bytes that a box needs, so every rank of any layout reads its own part from the
same files. Files are not mapped: memory holds only the box, whatever the size of a file.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainshed.checkpoints.hf.safetensors_header import SafetensorsEntry, read_safetensors_header, same_bytes
from trainshed.checkpoints.weights import box_ends, dtype_name, join_names
from trainshed.errors import CorruptData, InputError, NoSuchName
from trainshed.models.families import HF_FAMILIES, read_hf_config
from trainshed.models.hf_family_keys import float8_block
from trainshed.models.hf_tensors import HfTensor, RowMapping, hf_row_mappings, hf_tensors
from trainshed.models.parameters import Parameter, parameter_count
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import family_decoder

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.io import BufferPool


@dataclass(frozen=True)
class Mxfp4Entry(SafetensorsEntry):
    """Stacked matrices in blocks of 4 bits (`mxfp4.py`), as if they were stored in bfloat16, transposed.

    `start` and `end` are those of the blocks.
    """

    scales: SafetensorsEntry


@dataclass(frozen=True)
class Float8Entry(SafetensorsEntry):
    """A matrix in E4M3 with a scale for each row (compressed-tensors) or block, as if it were stored in float32.

    `start` and `end` are those of the values. `block` is the rows and columns of a block; None: each row has a scale.
    """

    scales: SafetensorsEntry
    block: tuple[int, int] | None = None


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The safetensors dtypes that are read, and torch's names for them."""
SCALE_SUFFIX = ".weight_scale"
"""What compressed-tensors calls the scales of a matrix, in place of `.weight`."""
_BLOCK_SCALE_SUFFIX = ".weight_scale_inv"
"""What DeepSeek and Qwen call the scales of a matrix's blocks; values are multiplied by them despite the name."""
_FLOAT8 = "F8_E4M3"
# Parts of models that see pictures too: Llama 4's, Gemma 3's; newer versions of transformers put both into one `model`.
_WITH_PICTURES = ("llama4_text", "gemma3_text")
_PICTURE_PART = re.compile(r"(model\.)?(vision_model|vision_tower|multi_modal_projector)\.")
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What DeepSeek-V3 stores again in each layer for multi-token prediction: it shares the embedding and the head."""
_MXFP4_BLOCKS, _MXFP4_SCALES, _MXFP4_BLOCK_BYTES = "_blocks", "_scales", 16
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
            raise CorruptData(f"names `{name}`, which is not a file beside it", where=str(folder / INDEX))
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


def _join_mxfp4(stored: dict[str, SafetensorsEntry], folder: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors with one for each pair of `_blocks` and `_scales`."""
    joined = dict(stored)
    for blocks_name in [name for name in stored if name.endswith(_MXFP4_BLOCKS)]:
        name = blocks_name.removesuffix(_MXFP4_BLOCKS)
        blocks, scales = joined.pop(blocks_name), joined.pop(name + _MXFP4_SCALES, None)
        if (
            scales is None
            or {blocks.dtype, scales.dtype} != {"U8"}
            or len(blocks.shape) != 4
            or blocks.shape[:3] != scales.shape
            or blocks.shape[3] != _MXFP4_BLOCK_BYTES
            or any(entry.end - entry.start != math.prod(entry.shape) for entry in (blocks, scales))
        ):
            shapes = list(blocks.shape), None if scales is None else list(scales.shape)
            raise CorruptData(
                f"`{blocks_name}` {shapes[0]} and its scales {shapes[1]} are not weights in MXFP4",
                where=str(folder),
                hint="fetch the folder again",
            )
        experts, rows, groups = scales.shape
        shape = (experts, groups * 2 * _MXFP4_BLOCK_BYTES, rows)
        joined[name] = Mxfp4Entry(blocks.file, name, "BF16", shape, blocks.start, blocks.end, scales)
    return joined


def _join_float8(stored: dict[str, SafetensorsEntry], folder: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors with one for each matrix in E4M3 and its scales."""
    block = None
    if any(name.endswith(_BLOCK_SCALE_SUFFIX) for name in stored):
        block = float8_block(_json_object(folder / CONFIG))
    suffix = SCALE_SUFFIX if block is None else _BLOCK_SCALE_SUFFIX
    joined = dict(stored)
    for name, values in stored.items():
        if values.dtype != _FLOAT8 or len(values.shape) != 2:
            continue
        scales = joined.pop(name.removesuffix(".weight") + suffix, None)
        shape = (values.shape[0], 1)
        if block is not None:
            shape = (-(-values.shape[0] // block[0]), -(-values.shape[1] // block[1]))
        if (
            scales is None
            or scales.shape != shape
            or scales.dtype not in SAFETENSORS_DTYPES
            or values.end - values.start != math.prod(values.shape)
        ):
            parts = "rows" if block is None else f"blocks of {block[0]} x {block[1]}"
            raise CorruptData(
                f"`{name}` is in 8 bits, and has no scale for each of its {parts}",
                where=str(folder),
                hint="fetch the folder again; scales are read by row (`weight_scale`, channel), or by block "
                "(`weight_scale_inv`, with `quantization_config.weight_block_size` in config.json)",
            )
        joined[name] = Float8Entry(values.file, name, "F32", values.shape, values.start, values.end, scales, block)
    return joined


def _stored_mtp_layers(config: ModelConfig, stored: Container[str]) -> int:
    """Count DeepSeek-V3's layers for multi-token prediction, which transformers leaves out."""
    names = HF_FAMILIES[config.family].names
    if "mtp.projection" not in names.tensors:
        return 0
    ending = f"{names.tensors['mtp.projection'][0]}.weight"
    count = 0
    while f"{names.layer.format(layer=config.layers + count)}{ending}" in stored:
        count += 1
    return count


def _is_unused_mtp(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer for multi-token prediction that is not read, or a copy of embedding or head."""
    names = HF_FAMILIES[config.family].names
    if "mtp.projection" not in names.tensors:
        return False
    prefix = names.layer.partition("{layer}")[0]
    number, _, local = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or not number.isdecimal() or int(number) < config.layers:
        return False
    return int(number) >= config.layers + config.mtp_layers or local in _MTP_COPIES


def _text_name(name: str) -> str:
    """Return the name that a tensor has in the text model alone."""
    for prefix, ours in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


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
        stored = list_tensors(folder)
        if config is None:
            config = read_folder_config(folder)
            config = config.with_mtp_layers(_stored_mtp_layers(config, stored))
        self.config = config
        self.left_out = [name for name in stored if _is_unused_mtp(self.config, name)]
        """Tensors that are not read: of layers that predict more than the next token, or of what sees pictures."""
        left_out = set(self.left_out)
        if family_decoder(self.config.family) in _WITH_PICTURES:
            left_out = {name for name in stored if _PICTURE_PART.match(name)}
            self.left_out = sorted(left_out)
            stored = {_text_name(name): tensor for name, tensor in stored.items() if name not in left_out}
        stored = {name: tensor for name, tensor in stored.items() if name not in left_out}
        self._tied_head = stored.pop(HEAD, None) if self.config.tied_embeddings else None
        if family_decoder(self.config.family) == "gpt_oss":
            stored = _join_mxfp4(stored, folder)
        stored = _join_float8(stored, folder)
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
    def left_out_part(self) -> str:
        """What the tensors that are not read belong to."""
        if family_decoder(self.config.family) in _WITH_PICTURES:
            return "the part that sees pictures"
        return "multi-token prediction"

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
            if isinstance(stored := self._tensors[mapping.hf_name], Mxfp4Entry):
                self._read_mxfp4(target, mapping, stored, *part, columns, offset[dim])
            elif isinstance(stored, Float8Entry):
                self._read_float8(target, mapping, stored, *part, columns, offset[dim])
            elif whole_rows and not mapping.transposed and SAFETENSORS_DTYPES[stored.dtype] == dtype_name(box.dtype):
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
        row_bytes = (stored.end - stored.start) // math.prod(stored.shape[: 2 if mapping.stacked else 1])
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

    def _read_mxfp4(
        self,
        target: torch.Tensor,
        mapping: RowMapping,
        stored: Mxfp4Entry,
        first: int,
        last: int,
        columns: slice | None,
        origin: int,
    ) -> None:
        """Read rows of an expert that are stored in 4 bits; their blocks are along our rows."""
        import torch

        from trainshed.checkpoints.hf.mxfp4 import dequantize_mxfp4
        from trainshed.checkpoints.io import read_rows

        assert mapping.expert is not None, "only experts are stored so"
        assert columns is not None, "only matrices are stored so"
        assert mapping.run == mapping.rows, "gate and up alternate there as they do here"
        _, width, rows = stored.shape
        groups, buffers = width // (2 * _MXFP4_BLOCK_BYTES), self._buffers
        count = max(1, _BUFFER_BYTES // (groups * _MXFP4_BLOCK_BYTES))
        for start in range(first, last, count):
            stop = min(start + count, last)
            row = mapping.expert * rows + start
            with (
                buffers.borrow((stop - start, groups, _MXFP4_BLOCK_BYTES), torch.uint8) as blocks,
                buffers.borrow((stop - start, groups), torch.uint8) as scales,
            ):
                for entry, into in ((stored, blocks), (stored.scales, scales)):
                    try:
                        read_rows(
                            self._descriptor(entry.file), entry.start + row * math.prod(into.shape[1:]), into, buffers
                        )
                    except EOFError:
                        raise _cut_short(entry) from None
                values = dequantize_mxfp4(blocks, scales)[:, columns]
            target[start - origin : stop - origin] = values

    def _read_float8(
        self,
        target: torch.Tensor,
        mapping: RowMapping,
        stored: Float8Entry,
        first: int,
        last: int,
        columns: slice | None,
        origin: int,
    ) -> None:
        """Read rows of a matrix in E4M3, multiplied by their scales."""
        import torch

        assert not mapping.transposed, "only plain matrices are stored so"
        all_scales = self._whole(stored.scales).float()
        width = stored.shape[1]
        count = max(1, _BUFFER_BYTES // width)
        for start in range(first, last, count):
            stop = min(start + count, last)
            place = mapping.hf_start + start
            data = os.pread(self._descriptor(stored.file), (stop - start) * width, stored.start + place * width)
            if len(data) < (stop - start) * width:
                raise _cut_short(stored)
            values = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).view(-1, width).float()
            if stored.block is None:
                scales = all_scales[place : place + stop - start]
            else:
                block_rows = all_scales[torch.arange(place, place + stop - start) // stored.block[0]]
                scales = block_rows.repeat_interleave(stored.block[1], dim=1)[:, :width]
            values = (values * scales)[:, columns or slice(None)]
            rows = mapping.native_rows(start, stop)
            index = (
                slice(rows.start - origin, rows.stop - origin, rows.step)
                if isinstance(rows, slice)
                else torch.from_numpy(rows - origin)
            )
            target[index] = values.to(target.dtype)

    def _whole(self, stored: SafetensorsEntry) -> torch.Tensor:
        """Read a small tensor whole."""
        import torch

        data = os.pread(self._descriptor(stored.file), stored.end - stored.start, stored.start)
        if len(data) < stored.end - stored.start:
            raise _cut_short(stored)
        dtype = getattr(torch, SAFETENSORS_DTYPES[stored.dtype])
        return torch.frombuffer(bytearray(data), dtype=dtype).view(stored.shape)

    def _blocks(
        self, mapping: RowMapping, first: int, last: int, columns: slice | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the rows [first, last) of a mapping in blocks: (start, stop, rows); the next block overwrites it."""
        if first == last:
            return
        stored = self._tensors[mapping.hf_name]
        if not mapping.transposed:
            ends = mapping.hf_start + first, mapping.hf_start + last
            for start, stop, rows in self._stored_rows(stored, *ends, stacked=mapping.stacked):
                block = rows if columns is None else rows[:, columns]
                yield start - mapping.hf_start, stop - mapping.hf_start, block
            return
        import torch

        # Our columns are its rows, and our rows are a range of its columns. All columns are read: such matrices are
        # small, or those of one expert.
        assert columns is not None
        part = slice(mapping.hf_start + first, mapping.hf_start + last)
        matrix = mapping.expert * stored.shape[1] if mapping.stacked and mapping.expert is not None else 0
        ends = matrix + columns.start, matrix + columns.stop
        stored_rows = self._stored_rows(stored, *ends, stacked=mapping.stacked)
        parts = [rows[:, part].clone() for _, _, rows in stored_rows]
        if parts:
            yield first, last, torch.cat(parts).T

    def _stored_rows(
        self, stored: SafetensorsEntry, first: int, last: int, *, stacked: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Read rows of a stored tensor into a buffer that is reused; mapped pages would count as memory.

        Rows are those of all matrices of a stack, or elements of all its vectors.
        """
        import torch

        from trainshed.checkpoints.io import read_rows

        dtype = getattr(torch, SAFETENSORS_DTYPES[stored.dtype])
        width = stored.shape[2 if stacked else 1 :]
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

"""Megatron's legacy `torch` format: a folder per rank (`mp_rank_TT[_PPP][_EEE]`) with a torch.save file.

Folders are named by tensor-, pipeline- and expert-parallel rank. Megatron numbers the ranks of a pipeline stage
twice: with tp fastest for dense layers; with etp fastest, then ep, for experts. So not every pair of tp and ep rank
exists, and a layout in which two ranks with the same name hold different experts cannot be stored.

Reading: the layers may be split in any way (evenly or not, in virtual stages or by hand), but model chunks always have
one order: the first of every pipeline rank, then the second. So the files themselves say which layers they hold.

Writing: the pickle is written first, with the place of every tensor's bytes; then the bytes, tensor by tensor.
"""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.io import HashedFile, run_in_threads
from trainshed.checkpoints.megatron.args import (
    MegatronLayout,
    computed_args,
    has_zero_centered_norms,
    read_args,
    read_layout,
    to_args,
)
from trainshed.checkpoints.megatron.iterations import LATEST_ITERATION, RELEASE, iteration_folder
from trainshed.checkpoints.megatron.weights import (
    READ_DTYPES,
    FullTensor,
    MegatronWeights,
    RowCopier,
    RowShare,
    StoredMatrix,
    StoredRegion,
    refuse_mismatches,
)
from trainshed.checkpoints.torch_save_reader import (
    DTYPE_BYTES,
    PickledObject,
    PickledTensor,
    TorchSaveFile,
    read_torch_save,
)
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout, TorchSaveWriter
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights, stored_dtype
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import (
    EMBEDDING_NAME,
    HEAD_NAME,
    LAYER_PREFIX,
    ExpertNaming,
    LayerSpec,
    MegatronTensor,
    expert_linear,
    expert_name,
    layer_name,
    layer_name_variants,
    non_layer_name,
    padded_vocab_size,
    parameters_by_layer,
    shard_tensor,
    whole_tensors,
)
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

RANK_FILE = "model_optim_rng.pt"
_COMPARED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class LegacyRank:
    """The rank of a file in both numberings."""

    tp: int
    pp: int
    ep: int
    etp: int


def legacy_ranks(layout: MegatronLayout) -> list[LegacyRank]:
    """Return a rank for each file of a checkpoint."""
    etp_ranks: dict[tuple[int, int], int] = {}
    for rank in range(math.lcm(layout.tp, layout.etp * layout.ep)):
        name, etp = (rank % layout.tp, rank // layout.etp % layout.ep), rank % layout.etp
        if etp_ranks.setdefault(name, etp) != etp:
            raise InputError(
                f"with tp {layout.tp}, ep {layout.ep} and etp {layout.etp}, ranks with different parts of an expert "
                "share one file of the legacy format",
                hint="choose an etp that divides tp, or write torch_dist",
            )
    return [LegacyRank(tp, pp, ep, etp) for pp in range(layout.pp) for (tp, ep), etp in sorted(etp_ranks.items())]


def rank_folder_name(rank: LegacyRank, layout: MegatronLayout) -> str:
    """Return the folder of a file: Megatron's `get_checkpoint_name`."""
    name = f"mp_rank_{rank.tp:02d}"
    name += f"_{rank.pp:03d}" if layout.pp > 1 else ""
    return name + (f"_{rank.ep:03d}" if layout.ep > 1 else "")


def model_chunk_key(layout: MegatronLayout, virtual: int) -> str:
    """Return the key of a model chunk in its file."""
    return f"model{virtual}" if layout.vp > 1 else "model"


def check_layout(config: ModelConfig, layout: MegatronLayout) -> None:
    """Raise where Megatron could not load such a checkpoint."""
    tp, kv_heads = layout.tp, config.kv_heads
    if config.layers % (layout.pp * layout.vp):
        raise _illegal_layout(f"{config.layers} layers cannot be shared out evenly by pp {layout.pp} · vp {layout.vp}")
    if layout.vp > 1 and layout.pp == 1:
        raise _illegal_layout(f"vp {layout.vp} needs a pipeline")
    if config.heads % tp or (kv_heads % tp and tp % kv_heads):
        raise _illegal_layout(f"tp {tp} does not go with {config.heads} heads and {kv_heads} key/value heads")
    refuse_latent_shards(config, layout)
    experts = config.moe.experts if config.moe else 0
    if not experts and layout.ep > 1:
        raise _illegal_layout(f"ep {layout.ep} needs experts")
    if experts % layout.ep:
        raise _illegal_layout(f"ep {layout.ep} does not divide the {experts} experts")


def refuse_latent_shards(config: ModelConfig, layout: MegatronLayout) -> None:
    """Raise for what this format has no one form of: it depends on Megatron's version, or on who loads it."""
    if config.mla is not None and layout.tp > 1:
        raise InputError(
            f"the legacy format has no one form of latent attention for tp {layout.tp}: versions of Megatron cut its "
            "down projections, or keep them whole",
            hint="choose tp 1, or torch_dist, which is the same for all",
        )
    if config.mtp_layers:
        raise InputError(
            f"`mtp_layers: {config.mtp_layers}`: layers for multi-token prediction are converted in torch_dist only",
            hint="write --format torch_dist, or leave --format out",
        )


def _illegal_layout(what: str) -> InputError:
    return InputError(
        f"Megatron has no such layout: {what}", hint="choose another, or write torch_dist, which has none"
    )


_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
_LAYER = re.compile(rf"{re.escape(LAYER_PREFIX)}(\d+)\.")
# What a module stores beside its weights: TransformerEngine's scales (of fp8), rotary frequencies.
_NOT_WEIGHTS = re.compile(r"\._extra_state\d*$|rotary_pos_emb\.")


class MegatronLegacyWeights(MegatronWeights):
    """The weights in a legacy checkpoint: its root, or the folder of one iteration.

    `config` replaces the architecture in its args; `vocab_size` is the true one, needed where the args do not hold it.
    """

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.folder = iteration_folder(folder)
        where = str(self.folder)
        names = sorted(path.name for path in self.folder.glob("mp_rank_*") if _RANK.fullmatch(path.name))
        if not names:
            raise NotFound("there is no mp_rank folder", where=where, hint="name a legacy checkpoint of Megatron's")
        first = read_torch_save(self.folder / names[0] / RANK_FILE)
        args = _args_of(first)
        self.args, self.layout = args, read_layout(args)
        config = config or read_args(computed_args(args), where, vocab_size)
        refuse_latent_shards(config, self.layout)
        files = self._open(names, first)
        matcher = _TensorMatcher(config, self.layout, files)
        matcher.match(where)
        self.padded_vocab_size = matcher.padded_vocab_size
        super().__init__(config, matcher.regions, list(matcher.dtypes), has_zero_centered_norms(args))
        self._replicas = matcher.replicas

    def _fill_box(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int], shape: Sequence[int]) -> None:
        with self._lock:
            replicas = self._replicas.pop(parameter.name, ())
        for first, other in replicas:
            self._compare(parameter.name, first, other)
        super()._fill_box(box, parameter, offset, shape)

    def _compare(self, name: str, first: StoredMatrix, other: StoredMatrix) -> None:
        """Raise where two ranks do not hold the same bytes of a tensor that all of them have whole."""
        length = first.rows * first.columns * DTYPE_BYTES[first.dtype]
        for start in range(0, length, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, length - start)
            one, two = (
                os.pread(self._descriptor(matrix.file), count, matrix.start + start) for matrix in (first, other)
            )
            if first.dtype != other.dtype or one != two:
                ranks = " and ".join(matrix.file.parent.name for matrix in (first, other))
                raise CorruptData(
                    f"`{name}` is not the same in {ranks}, and all ranks have it: which is right is not known",
                    where=str(self.folder),
                    hint="ranks computed different models, or files of two runs are mixed: take an earlier checkpoint",
                )

    def _open(self, folders: list[str], first: TorchSaveFile) -> dict[LegacyRank, TorchSaveFile]:
        wanted = {rank_folder_name(rank, self.layout): rank for rank in legacy_ranks(self.layout)}
        missing = [name for name in wanted if name not in folders]
        extra = [name for name in folders if name not in wanted]
        if missing or extra:
            by_state = ((missing, "missing"), (extra, "left over"))
            problems = [f"{', '.join(names)} {state}" for names, state in by_state if names]
            raise NotFound(
                f"its args say {_layout_text(self.layout)}, and of its ranks' folders {'; '.join(problems)}",
                where=str(self.folder),
                hint="fetch the checkpoint again",
            )
        return {
            rank: first if name == folders[0] else read_torch_save(self.folder / name / RANK_FILE)
            for name, rank in wanted.items()
        }


@dataclass
class _TensorMatcher:
    """Matches the tensors of all files with those of an architecture, and collects their regions."""

    config: ModelConfig
    layout: MegatronLayout
    files: Mapping[LegacyRank, TorchSaveFile]
    regions: dict[FullTensor, list[StoredRegion]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    padded_vocab_size: int = 0
    replicas: dict[str, list[tuple[StoredMatrix, StoredMatrix]]] = field(default_factory=dict)
    """By parameter, what several ranks hold alike: the one that is read, and another."""
    _seen: dict[tuple[str, int | None, int], StoredMatrix] = field(default_factory=dict)

    def match(self, where: str) -> None:
        """Find every tensor in every file, or raise: missing, left over, or of another shape or dtype."""
        counts = self._layer_counts()
        if sum(counts.values()) != self.config.layers:
            raise InputError(
                f"the files hold {sum(counts.values())} layers, and the args say {self.config.layers}", where=where
            )
        groups = parameters_by_layer(self.config)
        starts, total = {}, 0
        for virtual in range(self.layout.vp):
            for pp in range(self.layout.pp):
                starts[pp, virtual] = total
                total += counts[pp, virtual]
        for rank, file in self.files.items():
            for virtual in range(self.layout.vp):
                place = rank.pp, virtual
                layers = [groups[starts[place] + number] for number in range(counts[place])]
                self._match_chunk(rank, file, virtual, groups[None], layers)

    def _layer_counts(self) -> dict[tuple[int, int], int]:
        counts: dict[tuple[int, int], int] = {}
        for rank, file in self.files.items():
            for virtual in range(self.layout.vp):
                numbers = [
                    int(match[1]) for key in _model_chunk(file, self.layout, virtual) if (match := _LAYER.match(key))
                ]
                counts[rank.pp, virtual] = max(numbers, default=-1) + 1
        return counts

    def _match_chunk(
        self,
        rank: LegacyRank,
        file: TorchSaveFile,
        virtual: int,
        outside: list[Parameter],
        layers: list[list[Parameter]],
    ) -> None:
        stored = _model_chunk(file, self.layout, virtual)
        number, last = virtual * self.layout.pp + rank.pp, self.layout.pp * self.layout.vp - 1
        missing: list[str] = []
        wrong: list[str] = []
        read = {HEAD_NAME} if self.config.tied_embeddings and number == last else set()
        wanted = [
            ("", parameter)
            for parameter in outside
            if number == (0 if parameter.name in ("embedding.weight", "positions.weight") else last)
        ]
        wanted += [(f"{LAYER_PREFIX}{local}.", parameter) for local, group in enumerate(layers) for parameter in group]
        for prefix, parameter in wanted:
            if parameter.expert:
                self._match_experts(rank, file, stored, prefix, parameter, read, missing, wrong)
                continue
            names = (
                [non_layer_name(parameter)] if not prefix else [prefix + end for end in layer_name_variants(parameter)]
            )
            name = next((name for name in names if name in stored), None)
            if name is None:
                missing.append(names[-1])
                continue
            read.add(name)
            padded = (
                _row_count(stored[name]) * self.layout.tp
                if name in (EMBEDDING_NAME, HEAD_NAME)
                else self.config.vocab_size
            )
            if name == EMBEDDING_NAME:
                self.padded_vocab_size = padded
            full = next(whole_tensors(self.config, parameter, max(padded, self.config.vocab_size)))
            shard = shard_tensor(full, name, self.layout.tp, rank.tp)
            self._add_tensor(shard, file, stored[name], wrong, rank.tp if parameter.tp_dim is not None else 0)
        if self.config.tied_embeddings and number == last and HEAD_NAME in stored:
            self._add_tied_head(rank, file, stored[HEAD_NAME], outside, wrong)
        extra = sorted(name for name in stored if name not in read and not _NOT_WEIGHTS.search(name))
        refuse_mismatches(missing, extra, wrong, str(file.path))

    def _add_tied_head(
        self, rank: LegacyRank, file: TorchSaveFile, tensor: Any, outside: list[Parameter], wrong: list[str]
    ) -> None:
        """Keep the last stage's copy of a tied embedding to be compared with the first stage's."""
        embedding = next(parameter for parameter in outside if parameter.name == "embedding.weight")
        padded = max(_row_count(tensor) * self.layout.tp, self.config.vocab_size)
        full = next(whole_tensors(self.config, embedding, padded))
        self._add_tensor(shard_tensor(full, HEAD_NAME, self.layout.tp, rank.tp), file, tensor, wrong, rank.tp)

    def _match_experts(
        self,
        rank: LegacyRank,
        file: TorchSaveFile,
        stored: Mapping[str, Any],
        prefix: str,
        parameter: Parameter,
        read: set[str],
        missing: list[str],
        wrong: list[str],
    ) -> None:
        """Match experts one by one, or all of a rank in one transposed matrix (the old grouped layer)."""
        local_experts = parameter.shape[0] // self.layout.ep
        full_tensors = list(whole_tensors(self.config, parameter, self.config.vocab_size))
        shards = [
            shard_tensor(full_tensors[rank.ep * local_experts + local], "", self.layout.etp, rank.etp)
            for local in range(local_experts)
        ]
        old = f"{prefix}mlp.experts.{'weight1' if expert_linear(parameter) == 'linear_fc1' else 'weight2'}"
        if old in stored:
            read.add(old)
            self._add_grouped_experts(shards, old, file, stored[old], wrong, rank.etp)
            return
        for local, shard in enumerate(shards):
            names = [prefix + expert_name(parameter, local, kind) for kind in ("grouped", "sequential")]
            name = next((name for name in names if name in stored), None)
            if name is None:
                missing.append(names[-1])
                continue
            read.add(name)
            self._add_tensor(replace(shard, name=name), file, stored[name], wrong, rank.etp)

    def _add_tensor(self, shard: MegatronTensor, file: TorchSaveFile, tensor: Any, wrong: list[str], rank: int) -> None:
        if (problem := _mismatch(shard, shard.shape, tensor)) is not None:
            wrong.append(problem)
            return
        columns = shard.shape[1] if len(shard.shape) > 1 else 1
        self._add_region(shard, _stored_matrix(file, tensor, shard.shape[0], columns), rank)

    def _add_grouped_experts(
        self, shards: list[MegatronTensor], name: str, file: TorchSaveFile, tensor: Any, wrong: list[str], rank: int
    ) -> None:
        """Add `weight1` [H, experts · rows] or `weight2` [experts · columns, H]; in memory expert after expert."""
        rows, columns = shards[0].shape
        shape = (columns, len(shards) * rows) if name.endswith("weight1") else (len(shards) * columns, rows)
        if (problem := _mismatch(replace(shards[0], name=name), shape, tensor)) is not None:
            wrong.append(problem)
            return
        for number, shard in enumerate(shards):
            matrix = _stored_matrix(file, tensor, columns, rows)
            start = matrix.start + number * rows * columns * DTYPE_BYTES[matrix.dtype]
            self._add_region(shard, replace(matrix, start=start), rank, transposed=True)

    def _add_region(self, shard: MegatronTensor, matrix: StoredMatrix, rank: int, *, transposed: bool = False) -> None:
        """Add the region of a rank's shard once; what other ranks have of it is kept to be compared."""
        full: FullTensor = shard.parameter.name, shard.expert
        first_seen = self._seen.setdefault((*full, rank), matrix)
        if first_seen is not matrix:
            self.replicas.setdefault(shard.parameter.name, []).append((first_seen, matrix))
            return
        if not shard.parameter.buffer:
            self.dtypes.add(matrix.dtype)
        first, count = shard.rows[0], shard.rows[1] - shard.rows[0]
        column = shard.columns[0] if shard.columns else 0
        columns = shard.shape[1] if shard.columns else 1
        regions = self.regions.setdefault(full, [])
        if not shard.gated:
            regions.append(StoredRegion(lambda: matrix, first, column, count, columns, 0, transposed))
            return
        half = shard.parameter.shape[1 if shard.parameter.expert else 0] // 2
        for part in (0, 1):
            row, skip = part * half + first // 2, part * count // 2
            regions.append(StoredRegion(lambda: matrix, row, column, count // 2, columns, skip, transposed))


def _args_of(file: TorchSaveFile) -> Namespace:
    args = file.document.get("args") if isinstance(file.document, dict) else None
    if not isinstance(args, Namespace):
        raise InputError("holds no `args`", where=str(file.path), hint="only checkpoints with their arguments are read")
    return args


def _model_chunk(file: TorchSaveFile, layout: MegatronLayout, virtual: int) -> Mapping[str, Any]:
    name = model_chunk_key(layout, virtual)
    chunk = file.document.get(name)
    if not isinstance(chunk, Mapping):
        raise InputError(f"holds no `{name}`", where=str(file.path), hint="its args and its content do not go together")
    return chunk


def _row_count(tensor: Any) -> int:
    return tensor.shape[0] if isinstance(tensor, PickledTensor) and tensor.shape else 0


def _mismatch(shard: MegatronTensor, shape: tuple[int, ...], tensor: Any) -> str | None:
    if not isinstance(tensor, PickledTensor):
        kind = tensor.class_name if isinstance(tensor, PickledObject) else type(tensor).__name__
        return f"`{shard.name}` is {kind}, no tensor"
    if tensor.shape != shape:
        return f"`{shard.name}` is {list(tensor.shape)}, not {list(shape)}"
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if tensor.stride != stride:
        return f"`{shard.name}` is not stored row by row"
    return None if tensor.dtype in READ_DTYPES else f"`{shard.name}` is {tensor.dtype}"


def _stored_matrix(file: TorchSaveFile, tensor: PickledTensor, rows: int, columns: int) -> StoredMatrix:
    if tensor.storage not in file.storages:
        raise CorruptData(f"has no storage {tensor.storage}", where=str(file.path), hint="fetch the file again")
    start = file.storages[tensor.storage] + tensor.storage_offset * DTYPE_BYTES[tensor.dtype]
    return StoredMatrix(file.path, start, tensor.dtype, rows, columns)


def _layout_text(layout: MegatronLayout) -> str:
    return f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"


class MegatronLegacyWriter:
    """Writes a legacy checkpoint for one layout, as iteration `release`; `etp` defaults to `tp`, as in Megatron.

    The names of tensors depend on how Megatron will load it: `spec` is its `--transformer-impl`, `experts` says whether
    it uses `--moe-grouped-gemm`. The vocabulary is padded to a multiple of `vocab_divisible_by` · tp; Megatron must
    be started with the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        tp: int = 1,
        pp: int = 1,
        vp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        spec: LayerSpec = "te",
        experts: ExpertNaming | None = None,
        vocab_divisible_by: int = 128,
    ) -> None:
        self.config = config
        self.layout = MegatronLayout(tp, pp, vp, ep, etp or tp)
        self._dtype = dtype
        self._spec: LayerSpec = spec
        self._experts: ExpertNaming = experts or ("grouped" if spec == "te" else "sequential")
        if spec == "local" and self._experts == "grouped":
            raise InputError("the local spec has no grouped experts", hint="write experts: sequential, or spec: te")
        check_layout(config, self.layout)
        self._padded = padded_vocab_size(config.vocab_size, vocab_divisible_by, tp)
        self._args = to_args(
            config,
            layout=self.layout,
            spec=spec,
            experts=self._experts,
            dtype=dtype,
            padded_vocab_size=self._padded,
            vocab_divisible_by=vocab_divisible_by,
            checkpoint_format="torch",
        )
        self._groups = parameters_by_layer(config)
        self._ranks = {
            f"{RELEASE}/{rank_folder_name(rank, self.layout)}/{RANK_FILE}": rank for rank in legacy_ranks(self.layout)
        }

    def output_files(self) -> list[OutputFile]:
        """Return the ranks' files."""
        return [OutputFile(path, self._file_layout(rank)[0].length) for path, rank in self._ranks.items()]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write the file of one rank; return its checksum."""
        layout, tensors = self._file_layout(self._ranks[output.path])
        with HashedFile(file) as hashed:
            writer, copier = TorchSaveWriter(layout, hashed), RowCopier(source, self._dtype, advance)
            jobs = (job for number, tensor in enumerate(tensors) for job in _write_jobs(number, tensor, writer, copier))
            run_in_threads(jobs, threads)
            return hashed.checksum(layout.length)

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the pointer to the iteration."""
        (folder / LATEST_ITERATION).write_text(RELEASE)

    def _file_layout(self, rank: LegacyRank) -> tuple[TorchSaveLayout, list[MegatronTensor]]:
        document: dict[str, Any] = {"args": self._args, "checkpoint_version": 3.0, "iteration": 0}
        tensors: list[MegatronTensor] = []
        for virtual in range(self.layout.vp):
            chunk = list(self._chunk(rank, virtual))
            tensors += chunk
            placeholders = OrderedDict(
                (tensor.name, TensorPlaceholder(tensor.shape, stored_dtype(tensor.parameter, self._dtype)))
                for tensor in chunk
            )
            document[model_chunk_key(self.layout, virtual)] = placeholders
        return TorchSaveLayout(document, RANK_FILE.removesuffix(".pt")), tensors

    def _chunk(self, rank: LegacyRank, virtual: int) -> Iterator[MegatronTensor]:
        """Yield the tensors of one model chunk; layers are counted from 0 in each."""
        layout, chunks = self.layout, self.layout.pp * self.layout.vp
        chunk = virtual * layout.pp + rank.pp
        outside = {parameter.name: parameter for parameter in self._groups[None]}
        if chunk == 0:
            for name in ("embedding.weight", "positions.weight"):
                if name in outside:
                    yield from self._rank_tensors(outside[name], rank)
        layers_per_chunk = self.config.layers // chunks
        for local in range(layers_per_chunk):
            for parameter in self._groups[chunk * layers_per_chunk + local]:
                yield from self._rank_tensors(parameter, rank, f"{LAYER_PREFIX}{local}.")
        if chunk == chunks - 1:
            for name in ("norm.weight", "norm.bias", "head.weight"):
                if name in outside:
                    yield from self._rank_tensors(outside[name], rank)
            if self.config.tied_embeddings and chunks > 1:
                # The last stage holds its own copy of the tied embedding, to compute logits with.
                full = next(whole_tensors(self.config, outside["embedding.weight"], self._padded))
                yield shard_tensor(full, HEAD_NAME, layout.tp, rank.tp)

    def _rank_tensors(self, parameter: Parameter, rank: LegacyRank, prefix: str = "") -> Iterator[MegatronTensor]:
        layout = self.layout
        for full in whole_tensors(self.config, parameter, self._padded):
            if full.expert is None:
                in_layer = parameter.layer is not None
                name = layer_name(self.config, parameter, self._spec, stacked=False) if in_layer else ""
                yield shard_tensor(full, prefix + name if in_layer else non_layer_name(parameter), layout.tp, rank.tp)
                continue
            ep_rank, local = divmod(full.expert, parameter.shape[0] // layout.ep)
            if ep_rank == rank.ep:
                yield shard_tensor(full, prefix + expert_name(parameter, local, self._experts), layout.etp, rank.etp)


def _write_jobs(
    number: int, tensor: MegatronTensor, writer: TorchSaveWriter, copier: RowCopier
) -> Iterator[Callable[[], None]]:
    """Yield the jobs that write one tensor: its rows, gate and up rows of a gated one separated, then its padding."""
    first, last = tensor.rows
    row_bytes = math.prod(tensor.shape[1:]) * stored_dtype(tensor.parameter, copier.dtype).itemsize

    def write_at(offset: int, start: int, data: memoryview) -> None:
        writer.write(number, offset + start, data)

    stride = 2 if tensor.gated else 1
    half = (last - first) // 2 * row_bytes
    shares = [RowShare(partial(write_at, index * half), index, stride) for index in range(stride)]
    yield from copier.row_jobs(tensor, first, last, shares)
    rows = last - first
    if tensor.padding or not rows:
        shape = (tensor.padding, *tensor.shape[1:])
        yield partial(copier.write_zeros, shape, partial(write_at, rows * row_bytes))

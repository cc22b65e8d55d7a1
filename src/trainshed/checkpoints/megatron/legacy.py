"""Megatron's legacy `torch` format: a folder per rank (`mp_rank_TT[_PPP][_EEE]`) with a torch.save file.

Folders are named by tensor-, pipeline- and expert-parallel rank. Megatron numbers the ranks of a pipeline stage
twice, with tp fastest for dense layers and etp fastest, then ep, for experts. So not every pair of tp and ep rank
exists, and a layout in which two ranks of one name would hold different experts cannot be stored.

Reading: however the layers were cut (evenly or not, in virtual stages or by hand), model chunks follow each other in
one order: the first of every pipeline rank, then the second. So the files themselves say which layers they hold.

Writing: the pickle comes first, in which tensors only name where their bytes will be; then tensor by tensor.
"""

from __future__ import annotations

import math
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
from trainshed.checkpoints.megatron.args import MegatronLayout, has_zero_centered_norms, read_args, read_layout, to_args
from trainshed.checkpoints.megatron.weights import (
    LATEST_ITERATION,
    READ_DTYPES,
    RELEASE,
    FullTensor,
    MegatronWeights,
    RowCopier,
    RowShare,
    StoredMatrix,
    StoredRegion,
    iteration_folder,
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
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights
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


@dataclass(frozen=True)
class LegacyRank:
    """The place of a file's ranks in both orders."""

    tp: int
    pp: int
    ep: int
    etp: int


def legacy_ranks(layout: MegatronLayout) -> list[LegacyRank]:
    """Return a rank for each file of a checkpoint."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(math.lcm(layout.tp, layout.etp * layout.ep)):
        name, etp = (rank % layout.tp, rank // layout.etp % layout.ep), rank % layout.etp
        if found.setdefault(name, etp) != etp:
            raise InputError(
                f"with tp {layout.tp}, ep {layout.ep} and etp {layout.etp}, ranks with different parts of an expert "
                "share one file of the legacy format",
                hint="choose an etp that divides tp, or write torch_dist",
            )
    return [LegacyRank(tp, pp, ep, etp) for pp in range(layout.pp) for (tp, ep), etp in sorted(found.items())]


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
    experts = config.moe.experts if config.moe else 0
    if not experts and layout.ep > 1:
        raise _illegal_layout(f"ep {layout.ep} needs experts")
    if experts % layout.ep:
        raise _illegal_layout(f"ep {layout.ep} does not divide the {experts} experts")


def _illegal_layout(what: str) -> InputError:
    return InputError(
        f"Megatron has no such layout: {what}", hint="choose another, or write torch_dist, which has none"
    )


_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
_LAYER = re.compile(rf"{re.escape(LAYER_PREFIX)}(\d+)\.")
# What a module keeps beside its weights: TransformerEngine's scales (of fp8), rotary frequencies.
_BESIDE = re.compile(r"\._extra_state\d*$|rotary_pos_emb\.")


class MegatronLegacyWeights(MegatronWeights):
    """The weights in a legacy checkpoint: its root, or the folder of one iteration.

    `config` is what its args describe, unless it is given; `vocab_size` is the true one, needed where they do not say.
    """

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.folder = iteration_folder(folder)
        where = str(self.folder)
        found = sorted(each.name for each in self.folder.glob("mp_rank_*") if _RANK.fullmatch(each.name))
        if not found:
            raise NotFound("there is no mp_rank folder", where=where, hint="name a legacy checkpoint of Megatron's")
        first = read_torch_save(self.folder / found[0] / RANK_FILE)
        self.args = _args_of(first)
        self.layout = read_layout(self.args)
        config = config or read_args(self.args, where, vocab_size)
        files = self._open(found, first)
        matching = _TensorMatcher(config, self.layout, files)
        matching.run(where)
        self.padded_vocab_size = matching.padded_vocab_size
        less_one = has_zero_centered_norms(self.args)
        super().__init__(config, matching.patches, list(matching.dtypes), less_one)

    def _open(self, found: list[str], first: TorchSaveFile) -> dict[LegacyRank, TorchSaveFile]:
        wanted = {rank_folder_name(rank, self.layout): rank for rank in legacy_ranks(self.layout)}
        missing, extra = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
        if missing or extra:
            told = [f"{', '.join(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
            raise NotFound(
                f"its args say {_layout_text(self.layout)}, and of its ranks' folders {'; '.join(told)}",
                where=str(self.folder),
                hint="fetch the checkpoint again",
            )
        return {
            rank: first if name == found[0] else read_torch_save(self.folder / name / RANK_FILE)
            for name, rank in wanted.items()
        }


@dataclass
class _TensorMatcher:
    """The tensors of all files on their way to their places."""

    config: ModelConfig
    layout: MegatronLayout
    files: Mapping[LegacyRank, TorchSaveFile]
    patches: dict[FullTensor, list[StoredRegion]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    padded_vocab_size: int = 0
    _held: set[tuple[str, int | None, int]] = field(default_factory=set)

    def run(self, where: str) -> None:
        """Find every tensor in every file, or say what is missing, left over or of another kind."""
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
        found: dict[tuple[int, int], int] = {}
        for rank, file in self.files.items():
            for virtual in range(self.layout.vp):
                numbers = [
                    int(match[1]) for key in _model_chunk(file, self.layout, virtual) if (match := _LAYER.match(key))
                ]
                found[rank.pp, virtual] = max(numbers, default=-1) + 1
        return found

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
            whole = next(whole_tensors(self.config, parameter, max(padded, self.config.vocab_size)))
            share = shard_tensor(whole, name, self.layout.tp, rank.tp)
            self._take(share, file, stored[name], wrong, rank.tp if parameter.tp_dim is not None else 0)
        extra = sorted(name for name in stored if name not in read and not _BESIDE.search(name))
        refuse_mismatches(missing, extra, wrong, str(file.path))

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
        """Experts one by one, or all of a rank in one transposed matrix (the grouped layer of old)."""
        here = parameter.shape[0] // self.layout.ep
        wholes = list(whole_tensors(self.config, parameter, self.config.vocab_size))
        shares = [shard_tensor(wholes[rank.ep * here + local], "", self.layout.etp, rank.etp) for local in range(here)]
        old = f"{prefix}mlp.experts.{'weight1' if expert_linear(parameter) == 'linear_fc1' else 'weight2'}"
        if old in stored:
            read.add(old)
            self._take_old(shares, old, file, stored[old], wrong, rank.etp)
            return
        for local, share in enumerate(shares):
            names = [prefix + expert_name(parameter, local, kind) for kind in ("grouped", "sequential")]
            name = next((name for name in names if name in stored), None)
            if name is None:
                missing.append(names[-1])
                continue
            read.add(name)
            self._take(replace(share, name=name), file, stored[name], wrong, rank.etp)

    def _take(self, share: MegatronTensor, file: TorchSaveFile, tensor: Any, wrong: list[str], rank: int) -> None:
        if (told := _mismatch(share, share.shape, tensor)) is not None:
            wrong.append(told)
            return
        columns = share.shape[1] if len(share.shape) > 1 else 1
        self._lay(share, _stored_matrix(file, tensor, share.shape[0], columns), rank)

    def _take_old(
        self, shares: list[MegatronTensor], name: str, file: TorchSaveFile, tensor: Any, wrong: list[str], rank: int
    ) -> None:
        """`weight1` [H, experts · rows], `weight2` [experts · columns, H]; in memory, experts one after the other."""
        rows, columns = shares[0].shape
        shape = (columns, len(shares) * rows) if name.endswith("weight1") else (len(shares) * columns, rows)
        if (told := _mismatch(replace(shares[0], name=name), shape, tensor)) is not None:
            wrong.append(told)
            return
        for number, share in enumerate(shares):
            located = _stored_matrix(file, tensor, columns, rows)
            start = located.start + number * rows * columns * DTYPE_BYTES[located.dtype]
            self._lay(share, replace(located, start=start), rank, transposed=True)

    def _lay(self, share: MegatronTensor, located: StoredMatrix, rank: int, *, transposed: bool = False) -> None:
        """Note a rank's share once; other ranks hold the same."""
        whole: FullTensor = share.parameter.name, share.expert
        if (*whole, rank) in self._held:
            return
        self._held.add((*whole, rank))
        self.dtypes.add(located.dtype)
        first, count = share.rows[0], share.rows[1] - share.rows[0]
        column = share.columns[0] if share.columns else 0
        columns = share.shape[1] if share.columns else 1
        patches = self.patches.setdefault(whole, [])
        if not share.gated:
            patches.append(StoredRegion(lambda: located, first, column, count, columns, 0, transposed))
            return
        half = share.parameter.shape[1 if share.parameter.expert else 0] // 2
        for part in (0, 1):
            row, skip = part * half + first // 2, part * count // 2
            patches.append(StoredRegion(lambda: located, row, column, count // 2, columns, skip, transposed))


def _args_of(file: TorchSaveFile) -> Namespace:
    args = file.document.get("args") if isinstance(file.document, dict) else None
    if not isinstance(args, Namespace):
        raise InputError("holds no `args`", where=str(file.path), hint="only checkpoints with their arguments are read")
    return args


def _model_chunk(file: TorchSaveFile, layout: MegatronLayout, virtual: int) -> Mapping[str, Any]:
    name = model_chunk_key(layout, virtual)
    found = file.document.get(name)
    if not isinstance(found, Mapping):
        raise InputError(f"holds no `{name}`", where=str(file.path), hint="its args and its content do not go together")
    return found


def _row_count(tensor: Any) -> int:
    return tensor.shape[0] if isinstance(tensor, PickledTensor) and tensor.shape else 0


def _mismatch(share: MegatronTensor, shape: tuple[int, ...], tensor: Any) -> str | None:
    if not isinstance(tensor, PickledTensor):
        kind = tensor.kind if isinstance(tensor, PickledObject) else type(tensor).__name__
        return f"`{share.name}` is {kind}, no tensor"
    if tensor.shape != shape:
        return f"`{share.name}` is {list(tensor.shape)}, not {list(shape)}"
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if tensor.strides != strides:
        return f"`{share.name}` is not stored row by row"
    return None if tensor.dtype in READ_DTYPES else f"`{share.name}` is {tensor.dtype}"


def _stored_matrix(file: TorchSaveFile, tensor: PickledTensor, rows: int, columns: int) -> StoredMatrix:
    if tensor.storage not in file.storages:
        raise CorruptData(f"has no storage {tensor.storage}", where=str(file.path), hint="fetch the file again")
    start = file.storages[tensor.storage] + tensor.start * DTYPE_BYTES[tensor.dtype]
    return StoredMatrix(file.path, start, tensor.dtype, rows, columns)


def _layout_text(layout: MegatronLayout) -> str:
    return f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"


class MegatronLegacyWriter:
    """A legacy checkpoint for one layout, as iteration `release`; `etp` is `tp` unless said, as Megatron has it.

    `spec` is who will load it (`--transformer-impl`), `experts` whether with `--moe-grouped-gemm`: names must fit. The
    vocabulary is padded to a multiple of `vocab_divisible_by` · tp, and Megatron must be told the same.
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

    def units(self) -> list[OutputFile]:
        """Return the ranks' files."""
        return [OutputFile(path, self._frame(rank)[0].length) for path, rank in self._ranks.items()]

    def write(self, unit: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write the file of one rank; return its checksum."""
        frame, tensors = self._frame(self._ranks[unit.path])
        with HashedFile(file) as made:
            framing, laying = TorchSaveWriter(frame, made), RowCopier(source, self._dtype, advance)
            run_in_threads((job for each in enumerate(tensors) for job in _write_jobs(*each, framing, laying)), threads)
            return made.checksum(frame.length)

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write what names the iteration."""
        (folder / LATEST_ITERATION).write_text(RELEASE)

    def _frame(self, rank: LegacyRank) -> tuple[TorchSaveLayout, list[MegatronTensor]]:
        document: dict[str, Any] = {"args": self._args, "checkpoint_version": 3.0, "iteration": 0}
        tensors: list[MegatronTensor] = []
        for virtual in range(self.layout.vp):
            chunk = list(self._chunk(rank, virtual))
            tensors += chunk
            stubs = OrderedDict((tensor.name, TensorPlaceholder(tensor.shape, self._dtype)) for tensor in chunk)
            document[model_chunk_key(self.layout, virtual)] = stubs
        return TorchSaveLayout(document, RANK_FILE.removesuffix(".pt")), tensors

    def _chunk(self, rank: LegacyRank, virtual: int) -> Iterator[MegatronTensor]:
        """Yield the tensors of one model chunk; layers are counted from 0 in each."""
        layout, chunks = self.layout, self.layout.pp * self.layout.vp
        chunk = virtual * layout.pp + rank.pp
        outside = {parameter.name: parameter for parameter in self._groups[None]}
        if chunk == 0:
            for name in ("embedding.weight", "positions.weight"):
                if name in outside:
                    yield from self._shares(outside[name], rank)
        each = self.config.layers // chunks
        for local in range(each):
            for parameter in self._groups[chunk * each + local]:
                yield from self._shares(parameter, rank, f"{LAYER_PREFIX}{local}.")
        if chunk == chunks - 1:
            for name in ("norm.weight", "norm.bias", "head.weight"):
                if name in outside:
                    yield from self._shares(outside[name], rank)
            if self.config.tied_embeddings and chunks > 1:
                # The last stage holds its own copy of the tied embedding, to compute logits with.
                whole = next(whole_tensors(self.config, outside["embedding.weight"], self._padded))
                yield shard_tensor(whole, HEAD_NAME, layout.tp, rank.tp)

    def _shares(self, parameter: Parameter, rank: LegacyRank, prefix: str = "") -> Iterator[MegatronTensor]:
        layout = self.layout
        for whole in whole_tensors(self.config, parameter, self._padded):
            if whole.expert is None:
                inside = parameter.layer is not None
                name = layer_name(self.config, parameter, self._spec, stacked=False) if inside else ""
                yield shard_tensor(whole, prefix + name if inside else non_layer_name(parameter), layout.tp, rank.tp)
                continue
            place, local = divmod(whole.expert, parameter.shape[0] // layout.ep)
            if place == rank.ep:
                yield shard_tensor(whole, prefix + expert_name(parameter, local, self._experts), layout.etp, rank.etp)


def _write_jobs(
    number: int, tensor: MegatronTensor, framing: TorchSaveWriter, laying: RowCopier
) -> Iterator[Callable[[], None]]:
    """The jobs that lay one tensor into a file: its rows, those of a gated one put apart, then its padding."""
    first, last = tensor.rows
    row_bytes = math.prod(tensor.shape[1:]) * laying.dtype.itemsize

    def put_behind(before: int, start: int, data: memoryview) -> None:
        framing.write(number, before + start, data)

    step = 2 if tensor.gated else 1
    half = (last - first) // 2 * row_bytes
    shares = [RowShare(partial(put_behind, part * half), part, step) for part in range(step)]
    yield from laying.rows(tensor, first, last, shares)
    real = last - first
    if tensor.padding or not real:
        shape = (tensor.padding, *tensor.shape[1:])
        yield partial(laying.zeros, shape, partial(put_behind, real * row_bytes))

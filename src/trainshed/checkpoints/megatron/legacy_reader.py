"""Megatron's legacy `torch` format, read: the ranks' files found by their arguments, and their shares put together.

Whatever cut the layers (evenly or not, in virtual stages or by hand), model chunks follow each other in one order: the
first of every pipeline rank, then the second. So the files themselves say which layers they hold.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainshed.checkpoints.megatron.args import Layout, norm_weights_less_one, read_args, read_layout
from trainshed.checkpoints.megatron.patches import (
    READ_DTYPES,
    Located,
    Patch,
    PatchedWeights,
    Whole,
    iteration_folder,
    refuse_misfits,
)
from trainshed.checkpoints.megatron.pickled import DTYPE_BYTES, PickledTensor, Record
from trainshed.checkpoints.megatron.pt_file import PtFile, open_pt
from trainshed.checkpoints.megatron.ranks import FILE, Rank, chunk_name, folder_name, ranks
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import (
    EMBEDDING,
    HEAD,
    LAYERS,
    MegatronTensor,
    expert_linear,
    expert_name,
    layer_groups,
    layer_spellings,
    outside_name,
    shard,
    whole_tensors,
)
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
_LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.")
# What a module keeps beside its weights: TransformerEngine's scales (of fp8), rotary frequencies.
_BESIDE = re.compile(r"\._extra_state\d*$|rotary_pos_emb\.")


class MegatronLegacyWeights(PatchedWeights):
    """The weights in a legacy checkpoint: its root, or the folder of one iteration.

    `config` is what its args describe, unless it is given; `vocab_size` is the true one, needed where they do not say.
    """

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.folder = iteration_folder(folder)
        where = str(self.folder)
        found = sorted(each.name for each in self.folder.glob("mp_rank_*") if _RANK.fullmatch(each.name))
        if not found:
            raise NotFound("there is no mp_rank folder", where=where, hint="name a legacy checkpoint of Megatron's")
        first = open_pt(self.folder / found[0] / FILE)
        self.args = _args(first)
        self.layout = read_layout(self.args)
        config = config or read_args(self.args, where, vocab_size)
        files = self._open(found, first)
        matching = _Matching(config, self.layout, files)
        matching.run(where)
        self.padded_vocab_size = matching.padded_vocab_size
        less_one = norm_weights_less_one(self.args)
        super().__init__(config, matching.patches, list(matching.dtypes), less_one)

    def _open(self, found: list[str], first: PtFile) -> dict[Rank, PtFile]:
        wanted = {folder_name(rank, self.layout): rank for rank in ranks(self.layout)}
        missing, extra = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
        if missing or extra:
            told = [f"{', '.join(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
            raise NotFound(
                f"its args say {_shown(self.layout)}, and of its ranks' folders {'; '.join(told)}",
                where=str(self.folder),
                hint="fetch the checkpoint again",
            )
        return {
            rank: first if name == found[0] else open_pt(self.folder / name / FILE) for name, rank in wanted.items()
        }


@dataclass
class _Matching:
    """The tensors of all files on their way to their places."""

    config: ModelConfig
    layout: Layout
    files: Mapping[Rank, PtFile]
    patches: dict[Whole, list[Patch]] = field(default_factory=dict)
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
        groups = layer_groups(self.config)
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
                numbers = [int(match[1]) for key in _chunk(file, self.layout, virtual) if (match := _LAYER.match(key))]
                found[rank.pp, virtual] = max(numbers, default=-1) + 1
        return found

    def _match_chunk(
        self, rank: Rank, file: PtFile, virtual: int, outside: list[Parameter], layers: list[list[Parameter]]
    ) -> None:
        stored = _chunk(file, self.layout, virtual)
        number, last = virtual * self.layout.pp + rank.pp, self.layout.pp * self.layout.vp - 1
        missing: list[str] = []
        wrong: list[str] = []
        read = {HEAD} if self.config.tied_embeddings and number == last else set()
        wanted = [
            ("", parameter)
            for parameter in outside
            if number == (0 if parameter.name in ("embedding.weight", "positions.weight") else last)
        ]
        wanted += [(f"{LAYERS}{local}.", parameter) for local, group in enumerate(layers) for parameter in group]
        for prefix, parameter in wanted:
            if parameter.expert:
                self._match_experts(rank, file, stored, prefix, parameter, read, missing, wrong)
                continue
            names = [outside_name(parameter)] if not prefix else [prefix + end for end in layer_spellings(parameter)]
            name = next((name for name in names if name in stored), None)
            if name is None:
                missing.append(names[-1])
                continue
            read.add(name)
            padded = _rows(stored[name]) * self.layout.tp if name in (EMBEDDING, HEAD) else self.config.vocab_size
            if name == EMBEDDING:
                self.padded_vocab_size = padded
            whole = next(whole_tensors(self.config, parameter, max(padded, self.config.vocab_size)))
            share = shard(whole, name, self.layout.tp, rank.tp)
            self._take(share, file, stored[name], wrong, rank.tp if parameter.split is not None else 0)
        extra = sorted(name for name in stored if name not in read and not _BESIDE.search(name))
        refuse_misfits(missing, extra, wrong, str(file.path))

    def _match_experts(
        self,
        rank: Rank,
        file: PtFile,
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
        shares = [shard(wholes[rank.ep * here + local], "", self.layout.etp, rank.etp) for local in range(here)]
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

    def _take(self, share: MegatronTensor, file: PtFile, tensor: Any, wrong: list[str], rank: int) -> None:
        if (told := _misfit(share, share.shape, tensor)) is not None:
            wrong.append(told)
            return
        columns = share.shape[1] if len(share.shape) > 1 else 1
        self._lay(share, _located(file, tensor, share.shape[0], columns), rank)

    def _take_old(
        self, shares: list[MegatronTensor], name: str, file: PtFile, tensor: Any, wrong: list[str], rank: int
    ) -> None:
        """`weight1` [H, experts · rows], `weight2` [experts · columns, H]; in memory, experts one after the other."""
        rows, columns = shares[0].shape
        shape = (columns, len(shares) * rows) if name.endswith("weight1") else (len(shares) * columns, rows)
        if (told := _misfit(replace(shares[0], name=name), shape, tensor)) is not None:
            wrong.append(told)
            return
        for number, share in enumerate(shares):
            located = _located(file, tensor, columns, rows)
            start = located.start + number * rows * columns * DTYPE_BYTES[located.dtype]
            self._lay(share, replace(located, start=start), rank, transposed=True)

    def _lay(self, share: MegatronTensor, located: Located, rank: int, *, transposed: bool = False) -> None:
        """Note a rank's share once; other ranks hold the same."""
        whole: Whole = share.parameter.name, share.expert
        if (*whole, rank) in self._held:
            return
        self._held.add((*whole, rank))
        self.dtypes.add(located.dtype)
        first, count = share.rows[0], share.rows[1] - share.rows[0]
        column = share.columns[0] if share.columns else 0
        columns = share.shape[1] if share.columns else 1
        patches = self.patches.setdefault(whole, [])
        if not share.gated:
            patches.append(Patch(lambda: located, first, column, count, columns, 0, transposed))
            return
        half = share.parameter.shape[1 if share.parameter.expert else 0] // 2
        for part in (0, 1):
            row, skip = part * half + first // 2, part * count // 2
            patches.append(Patch(lambda: located, row, column, count // 2, columns, skip, transposed))


def _args(file: PtFile) -> Namespace:
    args = file.document.get("args") if isinstance(file.document, dict) else None
    if not isinstance(args, Namespace):
        raise InputError("holds no `args`", where=str(file.path), hint="only checkpoints with their arguments are read")
    return args


def _chunk(file: PtFile, layout: Layout, virtual: int) -> Mapping[str, Any]:
    name = chunk_name(layout, virtual)
    found = file.document.get(name)
    if not isinstance(found, Mapping):
        raise InputError(f"holds no `{name}`", where=str(file.path), hint="its args and its content do not go together")
    return found


def _rows(tensor: Any) -> int:
    return tensor.shape[0] if isinstance(tensor, PickledTensor) and tensor.shape else 0


def _misfit(share: MegatronTensor, shape: tuple[int, ...], tensor: Any) -> str | None:
    if not isinstance(tensor, PickledTensor):
        return f"`{share.name}` is {tensor.kind if isinstance(tensor, Record) else type(tensor).__name__}, no tensor"
    if tensor.shape != shape:
        return f"`{share.name}` is {list(tensor.shape)}, not {list(shape)}"
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if tensor.strides != strides:
        return f"`{share.name}` is not stored row by row"
    return None if tensor.dtype in READ_DTYPES else f"`{share.name}` is {tensor.dtype}"


def _located(file: PtFile, tensor: PickledTensor, rows: int, columns: int) -> Located:
    if tensor.storage not in file.storages:
        raise CorruptData(f"has no storage {tensor.storage}", where=str(file.path), hint="fetch the file again")
    start = file.storages[tensor.storage] + tensor.start * DTYPE_BYTES[tensor.dtype]
    return Located(file.path, start, tensor.dtype, rows, columns)


def _shown(layout: Layout) -> str:
    return f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"

"""Megatron's legacy `torch` format, written: a folder per rank (`mp_rank_TT[_PPP][_EEE]`) with a file of torch.save.

A file is written tensor by tensor: its pickle, in which tensors only name where their bytes will be, comes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.framing import Framing
from trainshed.checkpoints.hashed_file import HashedFile, in_threads
from trainshed.checkpoints.megatron.args import Layout, to_args
from trainshed.checkpoints.megatron.blocks import Laying, Share
from trainshed.checkpoints.megatron.legacy_reader import MegatronLegacyWeights as MegatronLegacyWeights
from trainshed.checkpoints.megatron.patches import LATEST, RELEASE
from trainshed.checkpoints.megatron.ranks import FILE, Rank, check, chunk_name, folder_name, ranks
from trainshed.checkpoints.pt_frame import PtFrame, Stub
from trainshed.checkpoints.weights import Advance, Unit, Weights
from trainshed.errors import InputError
from trainshed.models.megatron_tensors import (
    HEAD,
    LAYERS,
    Experts,
    MegatronTensor,
    Spec,
    expert_name,
    layer_groups,
    layer_name,
    outside_name,
    padded_vocab_size,
    shard,
    whole_tensors,
)
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry


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
        spec: Spec = "te",
        experts: Experts | None = None,
        vocab_divisible_by: int = 128,
    ) -> None:
        self.config = config
        self.layout = Layout(tp, pp, vp, ep, etp or tp)
        self._dtype = dtype
        self._spec: Spec = spec
        self._experts: Experts = experts or ("grouped" if spec == "te" else "sequential")
        if spec == "local" and self._experts == "grouped":
            raise InputError("the local spec has no grouped experts", hint="write experts: sequential, or spec: te")
        check(config, self.layout)
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
        self._groups = layer_groups(config)
        self._ranks = {f"{RELEASE}/{folder_name(rank, self.layout)}/{FILE}": rank for rank in ranks(self.layout)}

    def units(self) -> list[Unit]:
        """Return the ranks' files."""
        return [Unit(path, self._frame(rank)[0].length) for path, rank in self._ranks.items()]

    def write(self, unit: Unit, source: Weights, file: Path, advance: Advance, threads: int = 1) -> str:
        """Write the file of one rank; return its checksum."""
        frame, tensors = self._frame(self._ranks[unit.path])
        with HashedFile(file) as made:
            framing, laying = Framing(frame, made), Laying(source, self._dtype, advance)
            in_threads((job for each in enumerate(tensors) for job in _jobs(*each, framing, laying)), threads)
            return made.checksum(frame.length)

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write what names the iteration."""
        (folder / LATEST).write_text(RELEASE)

    def _frame(self, rank: Rank) -> tuple[PtFrame, list[MegatronTensor]]:
        document: dict[str, Any] = {"args": self._args, "checkpoint_version": 3.0, "iteration": 0}
        tensors: list[MegatronTensor] = []
        for virtual in range(self.layout.vp):
            chunk = list(self._chunk(rank, virtual))
            tensors += chunk
            stubs = OrderedDict((tensor.name, Stub(tensor.shape, self._dtype)) for tensor in chunk)
            document[chunk_name(self.layout, virtual)] = stubs
        return PtFrame(document, FILE.removesuffix(".pt")), tensors

    def _chunk(self, rank: Rank, virtual: int) -> Iterator[MegatronTensor]:
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
                yield from self._shares(parameter, rank, f"{LAYERS}{local}.")
        if chunk == chunks - 1:
            for name in ("norm.weight", "norm.bias", "head.weight"):
                if name in outside:
                    yield from self._shares(outside[name], rank)
            if self.config.tied_embeddings and chunks > 1:
                # The last stage holds its own copy of the tied embedding, to compute logits with.
                whole = next(whole_tensors(self.config, outside["embedding.weight"], self._padded))
                yield shard(whole, HEAD, layout.tp, rank.tp)

    def _shares(self, parameter: Parameter, rank: Rank, prefix: str = "") -> Iterator[MegatronTensor]:
        layout = self.layout
        for whole in whole_tensors(self.config, parameter, self._padded):
            if whole.expert is None:
                inside = parameter.layer is not None
                name = layer_name(self.config, parameter, self._spec, stacked=False) if inside else ""
                yield shard(whole, prefix + name if inside else outside_name(parameter), layout.tp, rank.tp)
                continue
            place, local = divmod(whole.expert, parameter.shape[0] // layout.ep)
            if place == rank.ep:
                yield shard(whole, prefix + expert_name(parameter, local, self._experts), layout.etp, rank.etp)


def _jobs(number: int, tensor: MegatronTensor, framing: Framing, laying: Laying) -> Iterator[Callable[[], None]]:
    """The jobs that lay one tensor into a file: its rows, those of a gated one put apart, then its padding."""
    first, last = tensor.rows
    row_bytes = math.prod(tensor.shape[1:]) * laying.dtype.itemsize

    def put_behind(before: int, start: int, data: memoryview) -> None:
        framing.write(number, before + start, data)

    step = 2 if tensor.gated else 1
    half = (last - first) // 2 * row_bytes
    shares = [Share(partial(put_behind, part * half), part, step) for part in range(step)]
    yield from laying.rows(tensor, first, last, shares)
    real = last - first
    if tensor.padding or not real:
        shape = (tensor.padding, *tensor.shape[1:])
        yield partial(laying.zeros, shape, partial(put_behind, real * row_bytes))

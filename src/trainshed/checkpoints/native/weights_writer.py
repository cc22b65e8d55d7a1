"""Weights alone as one of our checkpoints: step 0 of a folder laid out as a run's, without an optimiser's state.

Whatever reads checkpoints reads it: `trainshed checkpoints`, the engine's base weights, PyTorch's own DCP.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from trainshed.checkpoints.hashed_file import BLOCK_BYTES, HashedFile, in_threads
from trainshed.checkpoints.native import pieces_file
from trainshed.checkpoints.native.commit import assembled, dcp_metadata
from trainshed.checkpoints.native.folder import (
    FORMAT,
    KIND,
    LATEST,
    MANIFEST,
    METADATA,
    Latest,
    checkpoints_folder,
    part_name,
    pieces_name,
    step_folder,
)
from trainshed.checkpoints.native.part import Part, Span, framed, item_bytes
from trainshed.checkpoints.native.plan import DTYPES, Item, WritePlan, write_plan
from trainshed.checkpoints.native.weights import PREFIX
from trainshed.checkpoints.pieces import Piece
from trainshed.checkpoints.scratch import bytes_of
from trainshed.checkpoints.weights import Advance, Unit, Weights
from trainshed.errors import InputError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, checksum_of

UNIT_BYTES = 256_000_000
"""How much goes into one file: enough that requests do not count, and files enough for every thread."""
STEP, ATTEMPT = 0, 1
_TOLD = ".part.json"  # beside a unit: what is in it, for the tables that are written once all are there


class NativeWriter:
    """A checkpoint of weights in one dtype."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, unit_bytes: int | None = None) -> None:
        if dtype not in DTYPES.values() or not dtype.is_floating_point:
            raise InputError(f"weights are not stored as {dtype}", hint="write bf16, fp16, fp32 or fp64")
        self.config = config
        self._dtype = dtype
        self._folder = step_folder(checkpoints_folder(""), STEP)
        self._parameters = {
            f"{self._folder}/{part_name(number, ATTEMPT)}": group
            for number, group in enumerate(_groups(config, dtype, unit_bytes or UNIT_BYTES))
        }

    def units(self) -> list[Unit]:
        """Return the files of items."""
        return [Unit(path, self._plan(group).size) for path, group in self._parameters.items()]

    def write(self, unit: Unit, source: Weights, file: Path, advance: Advance, threads: int = 1) -> str:
        """Write one file of items, and beside it what is in it; return its checksum."""
        group = {PREFIX + parameter.name: parameter for parameter in self._parameters[unit.path]}
        plan = self._plan(self._parameters[unit.path])
        starts = [0, *accumulate(map(item_bytes, plan.items))]
        spans: dict[int, Span] = {}
        with HashedFile(file) as made:

            def lay(number: int, item: Item) -> None:
                with source.lent(group[item.name], item.offset, item.box, self._dtype) as box:
                    data, hasher = bytes_of(box), Hasher()
                    before, behind = framed(item, zlib.crc32(data))
                    for part in (before, data, behind):
                        hasher.update(part)
                    made.write(starts[number], before, data, behind)
                spans[number] = Span(starts[number], hasher.size, hasher.checksum)
                advance(item.size)

            in_threads((partial(lay, *each) for each in enumerate(plan.items)), threads)
            entry = FileEntry(Path(unit.path).name, starts[-1], made.checksum(starts[-1]))
        part = Part(plan.digest, plan.items, tuple(spans[number] for number in range(len(plan.items))), entry)
        file.with_name(file.name + _TOLD).write_bytes(part.to_bytes())
        return entry.checksum

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the tables of contents and the checkpoint's manifest, then `latest`."""
        store = LocalStore(folder)
        # The manifest is there once all tables are; a finish that was killed after it only tidies up.
        if store.head(f"{self._folder}/{MANIFEST}") is None:
            self._write_tables(store, [self._told(folder / path, group) for path, group in self._parameters.items()])
        store.put(f"{checkpoints_folder('')}/{LATEST}", Latest(STEP, ATTEMPT, ATTEMPT).to_bytes())
        for path in self._parameters:
            store.delete(f"{path}{_TOLD}")

    def _told(self, file: Path, group: Sequence[Parameter]) -> Part:
        """What is in a unit; where the record did not reach the disk before a machine died, read from the unit."""
        plan = self._plan(group)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            part = Part.from_bytes(file.with_name(file.name + _TOLD).read_bytes())
            if part.plan == plan.digest:
                return part
        whole, spans = Hasher(), []
        with file.open("rb") as handle:
            for item in plan.items:
                saved = handle.read(item_bytes(item))
                spans.append(Span(whole.size, len(saved), checksum_of(saved)))
                whole.update(saved)
        return Part(plan.digest, plan.items, tuple(spans), FileEntry(file.name, whole.size, whole.checksum))

    def _write_tables(self, store: LocalStore, parts: list[Part]) -> None:
        tensors = assembled(parts)
        table = pieces_name(ATTEMPT)
        written = {table: pieces_file.to_bytes(tensors), METADATA: dcp_metadata(tensors)}
        for name, data in written.items():
            store.put(f"{self._folder}/{name}", data)
        files = [part.file for part in parts]
        files += [FileEntry(name, len(data), checksum_of(data)) for name, data in written.items()]
        facts = {
            "format": FORMAT,
            "step": STEP,
            "attempt": ATTEMPT,
            "pieces": table,
            "tensors": {name: {"shape": list(each.shape), "dtype": each.dtype} for name, each in tensors.items()},
        }
        spec = {"model": self.config.model_dump(mode="json", by_alias=True, exclude_none=True)}
        Manifest.of(KIND, spec, files, facts).write(store, f"{self._folder}/{MANIFEST}")

    def _plan(self, group: Sequence[Parameter]) -> WritePlan:
        whole = {
            PREFIX + each.name: Piece(
                each.shape, (0,) * len(each.shape), torch.empty(each.shape, dtype=self._dtype, device="meta")
            )
            for each in group
        }
        return write_plan(whole, BLOCK_BYTES)


def _groups(config: ModelConfig, dtype: torch.dtype, unit_bytes: int) -> list[list[Parameter]]:
    groups: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in parameters(config):
        size = parameter.size * dtype.itemsize
        if groups[-1] and filled + size > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups

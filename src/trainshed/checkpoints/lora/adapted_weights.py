"""A base with an adapter in it, read like any other weights: nothing is written, whatever format the base is in.

A box of a native tensor is read from the base and changed. The change of a matrix is computed once and for all of it,
so that the result does not depend on how a tensor is cut into boxes; the last few are kept.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from trainshed.checkpoints.lora.adapter import LoraAdapter, MatrixChange
from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec, holds_adapters, prepared_base
from trainshed.checkpoints.lora.native_adapter import NativeAdapter
from trainshed.checkpoints.native.folder import CompleteCheckpoint
from trainshed.checkpoints.weights import Weights, box_ends
from trainshed.errors import InputError
from trainshed.models.families import config_differences
from trainshed.models.hf_tensors import RowMapping, hf_table_name
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import Store, join

_KEPT_CHANGES = 4
"""Each is as large as a matrix; threads read boxes of neighbouring ones."""


class AdaptedWeights:
    """The weights of `base` with `adapter` merged into them.

    A changed tensor is computed in float32 or better; `stored_dtype` says what it is rounded to before it is read as
    anything else (None: nothing in between).
    """

    def __init__(
        self, base: Weights, adapter: LoraAdapter, *, stored_dtype: Callable[[str], torch.dtype] | None = None
    ) -> None:
        refuse_another_base(adapter, base)
        self.config, self.base, self.adapter = base.config, base, adapter
        self._stored_dtype = stored_dtype
        self._parameters = {parameter.name: parameter for parameter in parameters(base.config)}
        self._mappings: dict[str, list[RowMapping]] = defaultdict(list)
        for name in sorted(adapter.changed_tensors):
            for mapping in adapter.tensors[name].row_mappings:
                self._mappings[mapping.native_name].append(mapping)
        self._wide = torch.float64 if "float64" in base.dtypes else torch.float32
        self._changes: dict[str, MatrixChange] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the base."""
        self._changes.clear()
        self.base.close()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the base: merged weights are stored in these."""
        return self.base.dtypes

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a tensor, on the CPU."""
        if parameter.name not in self._mappings:
            return self.base.read(parameter, offset, shape, dtype)
        box_ends(parameter, offset, shape)
        box = self.base.read(parameter, offset, shape, self._wide)
        for mapping in self._mappings[parameter.name]:
            if mapping.expert is None:
                self._change(box, mapping, offset)
            elif offset[0] <= mapping.expert < offset[0] + shape[0]:
                self._change(box[mapping.expert - offset[0]], mapping, offset[1:])
        return box.to(dtype)

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs."""
        if parameter.name not in self._mappings:
            with self.base.borrow(parameter, offset, shape, dtype) as box:
                yield box
            return
        yield self.read(parameter, offset, shape, dtype)

    @torch.no_grad()
    def _change(self, box: torch.Tensor, mapping: RowMapping, offset: Sequence[int]) -> None:
        """Change the rows of a mapping in a box [rows, …] at `offset` of their matrix, in place."""
        first, last = mapping.within(offset[0], offset[0] + box.shape[0])
        if first == last:
            return
        name, native_rows = mapping.hf_name, mapping.native_rows(first, last)
        rows = slice(mapping.hf_start + first, mapping.hf_start + last)
        columns = slice(offset[1], offset[1] + box.shape[1]) if box.dim() > 1 else None
        if isinstance(native_rows, slice):
            index = slice(native_rows.start - offset[0], native_rows.stop - offset[0], native_rows.step)
        else:
            index = torch.from_numpy(native_rows - offset[0])
        part = box[index]
        if name in self.adapter.replaced:
            whole = self.adapter.replacement(name)
            whole = whole.T if mapping.transposed else whole
            part = (whole[rows] if columns is None else whole[rows, columns]).to(box.dtype)
        if name in self.adapter.adapted:
            assert columns is not None, "only matrices have factors"
            part = self._matrix_change(name).applied(part, rows, columns)
        if (trained := self.adapter.token_rows.get(name)) is not None:
            assert columns is not None, "embeddings are matrices"
            part = trained.put_into(part, rows.start, columns)
        if self._stored_dtype is not None:
            part = part.to(self._stored_dtype(name))
        box[index] = part.to(box.dtype)

    def _matrix_change(self, name: str) -> MatrixChange:
        with self._lock:
            if (change := self._changes.pop(name, None)) is not None:
                self._changes[name] = change  # the one used last is the last to go
                return change
        factors = self.adapter.factors(name)
        change = MatrixChange.of(factors, None if factors.magnitude is None else self._base_matrix(name))
        with self._lock:
            self._changes[name] = change
            while len(self._changes) > _KEPT_CHANGES:
                del self._changes[next(iter(self._changes))]
        return change

    def _base_matrix(self, name: str) -> torch.Tensor:
        """Read a whole matrix of the base: rows in Hugging Face's order."""
        if name in self.adapter.replaced:
            whole = self.adapter.replacement(name)
            return whole.T if self.adapter.tensors[name].row_mappings[0].transposed else whole
        parts = []
        for mapping in self.adapter.tensors[name].row_mappings:
            parameter = self._parameters[mapping.native_name]
            offset, shape = (0,) * len(parameter.shape), parameter.shape
            if mapping.expert is not None:
                offset, shape = (mapping.expert, *offset[1:]), (1, *shape[1:])
            native = self.base.read(parameter, offset, shape, self._wide)
            native_rows = mapping.native_rows(0, mapping.rows)
            index = native_rows if isinstance(native_rows, slice) else torch.from_numpy(native_rows)
            parts.append((native if mapping.expert is None else native[0])[index])
        return torch.cat(parts)


def refuse_another_base(adapter: LoraAdapter, base: Weights) -> None:
    """Refuse an adapter of another architecture, and one that changes an embedding that is the head as well."""
    differences = config_differences(adapter.config, base.config)
    if differences:
        raise adapter.error(
            f"the adapter was trained on another model: {'; '.join(differences)}",
            "name the base it was trained on with --base",
        )
    embedding = hf_table_name(base.config, "embedding")
    if base.config.tied_embeddings and embedding in adapter.adapted | adapter.replaced:
        raise adapter.error(
            f"the adapter changes `{embedding}`, which is the head of this model too, and PEFT changed it only as one",
            "untie them first: save the base with transformers under `tie_word_embeddings: false`",
        )


def open_adapted_checkpoint(
    store: Store, checkpoint: CompleteCheckpoint, config: ModelConfig | None = None
) -> AdaptedWeights:
    """Open the weights of a LoRA run's checkpoint: its base, as far as it is on this disk, with its adapters in it."""
    from trainshed.checkpoints.added_rows import open_with_added_rows

    assert holds_adapters(checkpoint), "whole weights are opened by NativeWeights"
    where = join(store.url, checkpoint.path)
    spec = AdapterSpec.read(checkpoint.manifest.spec, where)
    base: str | Path | None = prepared_base(where, spec.base_sha256)
    if base is None and "://" in spec.base_address:
        raise InputError(
            f"these are adapters to {spec.base_address}, which is not on this disk",
            where=where,
            hint=f"`trainshed model fetch {spec.base_address} FOLDER`, then `trainshed model merge FOLDER {where} OUT`",
        )
    adapter = NativeAdapter(store, checkpoint)
    # The run may have stretched the base's positions: its own architecture counts.
    weights = open_with_added_rows(base or spec.base_address, config or adapter.config, spec.added)
    return AdaptedWeights(weights, adapter)


def open_adapted_folder(folder: Path, config: ModelConfig | None = None) -> AdaptedWeights:
    """Open the weights of a LoRA run of another engine: the base that the engine was given, with its adapters in it."""
    from trainshed.checkpoints.hf.weights import HfWeights
    from trainshed.checkpoints.lora.peft_adapter import PeftAdapter

    base = prepared_base(str(folder))
    if base is None:
        raise InputError(
            "this is an adapter, and the base it was trained on is not beside it",
            where=str(folder),
            hint=f"`trainshed model merge BASE {folder} OUT` merges it into a base that you name",
        )
    weights = HfWeights(base, config)
    return AdaptedWeights(weights, PeftAdapter(folder, weights.config))

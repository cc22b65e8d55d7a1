"""The weights in one of our checkpoints, read box by box: of a run in training, or of weights alone.

Items are read whole, because their checksum covers them whole; the last ones are kept, since whoever reads a tensor in
boxes asks for the same item again and again. An item is held against its checksum when it is first read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from trainshed.checkpoints.native.folder import Found
from trainshed.checkpoints.native.loading import overlap, read_pieces, read_saved
from trainshed.checkpoints.native.pieces_file import StoredItem, StoredTensor
from trainshed.checkpoints.native.plan import DTYPES
from trainshed.checkpoints.native.resuming import locate
from trainshed.checkpoints.scratch import Scratch
from trainshed.checkpoints.weights import box_ends
from trainshed.errors import InputError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, join

PREFIX = "model."
"""Of the names of weights in a checkpoint; whatever else is there is the optimiser's."""
_SLOTS = 4  # items kept; more only while more threads read
_NAMED = 5  # how many tensors an error names before it only counts


class NativeWeights:
    """The weights of a checkpoint: a step's folder, a run's folder (its latest), or weights that were converted.

    `config` is the one its manifest holds, unless it is given.
    """

    def __init__(self, store: Store, path: str, config: ModelConfig | None = None, reporter: Reporter = SILENT) -> None:
        self.found: Found = locate(store, path, reporter)
        self._store = store
        self.config = read_config(store, self.found) if config is None else config
        self._tensors = _matched(self.config, read_pieces(store, self.found), join(store.url, self.found.path))
        self._items = _Items(store, self.found)
        self._scratch = Scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is kept in memory."""
        self._items.clear()
        self._scratch.clear()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        return sorted({tensor.dtype for tensor in self._tensors.values()})

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones counted once."""
        return sum(parameter.size for parameter in parameters(self.config))

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a tensor, on the CPU."""
        box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill(box, parameter, offset)
        return box

    @contextmanager
    def lent(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box, to look at for as long as the block runs: where it can be, a part of an item in memory."""
        box_ends(parameter, offset, shape)
        stored = self._tensors[parameter.name]
        first = next(((item, shared) for item in stored.items if (shared := overlap(item, offset, shape))), None)
        if first is not None and DTYPES[stored.dtype] == dtype:
            item, (inside_item, inside_box) = first
            if all(part == slice(0, length) for part, length in zip(inside_box, shape, strict=True)):
                with self._items.held(parameter.name, stored.dtype, item) as tensor:
                    yield tensor[inside_item]
                return
        with self._scratch.lent(shape, dtype) as box:
            self._fill(box, parameter, offset)
            yield box

    def _fill(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int]) -> None:
        stored = self._tensors[parameter.name]
        for item in stored.items:
            shared = overlap(item, offset, box.shape)
            if shared is not None:
                inside_item, inside_box = shared
                with self._items.held(parameter.name, stored.dtype, item) as tensor:
                    box[inside_box] = tensor[inside_item]


def read_config(store: Store, found: Found) -> ModelConfig:
    """Return the architecture that a checkpoint's manifest holds."""
    where = join(store.url, f"{found.path}/manifest.json")
    model = found.manifest.spec.get("model")
    if not isinstance(model, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where, hint="convert it by its run")
    return validate(ModelConfig, Document(model, Places(where)))


class _Slot:
    """One item in memory, read into a buffer that the next item uses again."""

    def __init__(self) -> None:
        self.key: tuple[str, int] | None = None
        self.users = 0
        self.filling = threading.Lock()
        self.tensor: torch.Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """The buffer, large enough for an item."""
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory


class _Items:
    """The last items read. Buffers are kept rather than made: the heap would grow by many times what is in use."""

    def __init__(self, store: Store, found: Found) -> None:
        self._store, self._found = store, found
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._checked: set[tuple[str, int]] = set()

    @contextmanager
    def held(self, name: str, dtype: str, item: StoredItem) -> Iterator[torch.Tensor]:
        """Give out an item, for as long as the block runs; of two who want it one reads and the other waits."""
        key = item.file, item.start
        slot = self._taken(key)
        try:
            with slot.filling:
                if slot.tensor is None:
                    memory, check = slot.memory(item.length), key not in self._checked
                    slot.tensor = read_saved(self._store, self._found, name, dtype, item, memory, check=check)
                    self._checked.add(key)
            assert slot.tensor is not None
            yield slot.tensor
        finally:
            with self._lock:
                slot.users -= 1
                if slot.tensor is None:  # it could not be read
                    slot.key = None

    def clear(self) -> None:
        with self._lock:
            self._slots.clear()

    def _taken(self, key: tuple[str, int]) -> _Slot:
        with self._lock:
            slot = next((each for each in self._slots if each.key == key), None)
            if slot is None:
                slot = next((each for each in self._slots if not each.users), None)
                if slot is None or len(self._slots) < _SLOTS:
                    slot = _Slot()
                slot.key, slot.tensor = key, None
            if slot in self._slots:
                self._slots.remove(slot)
            self._slots.append(slot)  # the one used last is the last to be taken for another
            slot.users += 1
            return slot


def _matched(config: ModelConfig, stored: dict[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Hold what is stored against an architecture: every tensor there, in its shape, and none left over."""
    wanted = {parameter.name: parameter for parameter in parameters(config)}
    found = {name.removeprefix(PREFIX): each for name, each in stored.items() if name.startswith(PREFIX)}
    problems = list(_problems(wanted, found))
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise InputError(
            f"the tensors are not those of its model: {', '.join(problems[:_NAMED])}{more}",
            where=where,
            hint="load it as the model that wrote it",
        )
    return {name: found[name] for name in wanted}


def _problems(wanted: dict[str, Parameter], found: dict[str, StoredTensor]) -> Iterator[str]:
    yield from (f"`{name}` is missing" for name in wanted if name not in found)
    yield from (f"`{name}` is left over" for name in found if name not in wanted)
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            yield f"`{name}` is {list(found[name].shape)}, not {list(wanted[name].shape)}"
        elif not DTYPES[found[name].dtype].is_floating_point:
            yield f"`{name}` is {found[name].dtype}"

"""The weights in one of our checkpoints, read box by box: of a run in training, or of weights alone.

Items are read whole, because their checksum covers them whole; the last ones are kept, since whoever reads a tensor in
boxes asks for the same item again and again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Self

import torch

from trainshed.checkpoints.native.folder import Found
from trainshed.checkpoints.native.loading import overlap, read_item, read_pieces
from trainshed.checkpoints.native.pieces_file import StoredItem, StoredTensor
from trainshed.checkpoints.native.plan import DTYPES
from trainshed.checkpoints.native.resuming import locate
from trainshed.errors import InputError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, join

PREFIX = "model."
"""Of the names of weights in a checkpoint; whatever else is there is the optimiser's."""
_KEPT_BYTES = 512 * 1024 * 1024
_NAMED = 5  # how many tensors an error names before it only counts


class NativeWeights:
    """The weights of a checkpoint: a step's folder, a run's folder (its latest), or weights that were converted.

    `config` is the one its manifest holds, unless it is given.
    """

    def __init__(
        self, store: Store, path: str, config: ModelConfig | None = None, reporter: Reporter = SILENT
    ) -> None:
        self.found: Found = locate(store, path, reporter)
        self._store = store
        self.config = read_config(store, self.found) if config is None else config
        self._tensors = _matched(self.config, read_pieces(store, self.found), join(store.url, self.found.path))
        self._items = _Items(store, self.found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is kept in memory."""
        self._items.clear()

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
        stored = self._tensors[parameter.name]
        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        if any(not 0 <= a <= b <= whole for a, b, whole in zip(offset, ends, parameter.shape, strict=True)):
            raise ValueError(f"{parameter.name} of shape {parameter.shape} has no box {shape} at {offset}")
        box = torch.empty(tuple(shape), dtype=dtype)
        for item in stored.items:
            shared = overlap(item, offset, shape)
            if shared is not None:
                inside_item, inside_box = shared
                box[inside_box] = self._items.get(parameter.name, item)[inside_item].to(dtype)
        return box


def read_config(store: Store, found: Found) -> ModelConfig:
    """Return the architecture that a checkpoint's manifest holds."""
    where = join(store.url, f"{found.path}/manifest.json")
    model = found.manifest.spec.get("model")
    if not isinstance(model, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where, hint="convert it by its run")
    return validate(ModelConfig, Document(model, Places(where)))


class _Items:
    """The last items read, a few hundred megabytes of them; each is read by one thread while others wait for it."""

    def __init__(self, store: Store, found: Found) -> None:
        self._store, self._found = store, found
        self._lock = threading.Lock()
        self._reading: dict[tuple[str, int], threading.Lock] = {}
        self._kept: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def get(self, name: str, item: StoredItem) -> torch.Tensor:
        key = (item.file, item.start)
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    return kept
            tensor = read_item(self._store, self._found, name, item)
            with self._lock:
                self._kept[key] = tensor
                while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
        return tensor

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


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

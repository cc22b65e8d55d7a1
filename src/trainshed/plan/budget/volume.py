"""Whether what a run leaves fits on its volume: checkpoints, base weights, exported weights, prepared tokens.

What counts is the most that is there at one time. A checkpoint is removed when a newer one is complete, so there is one
more than the recipe keeps. Tokens that the run prepares itself have a known size only then: an estimate of one reading
of them is reported, and no run is refused for it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from trainshed.errors import RecipeError
from trainshed.plan.budget.storage import TIB, bytes_per_token
from trainshed.recipe import Cluster, Recipe
from trainshed.recipe.section import quantity_bytes

_EXPORT_BYTES = {"bf16": 2, "fp32": 4, "fp16": 2, "fp8": 1, "q8_0": 34 / 32}
_BASE_BYTES = 2
"""A weight of a base as it is fetched: bf16, in almost every published model."""


@dataclass(frozen=True)
class VolumeTerms:
    """The volume of a run's store, and what the recipe leaves there besides checkpoints."""

    capacity_bytes: float
    capacity_key: str
    """Where its size is written."""
    keep_key: str
    """Where the number of kept checkpoints is written, or would be."""
    keep: int | None
    """How many are kept; None: all."""
    every: int | None
    """Steps between two; None: one, at the end."""
    checkpoints_here: bool
    base_copies: int
    """Copies of the base weights: as fetched, and as another engine reads them."""
    export_bytes_per_weight: float
    tokens_bytes: int | None
    """Of tokens that are prepared already and lie there; None: not known."""


@dataclass(frozen=True)
class VolumeUse:
    """The most that lies on the volume at once, in bytes."""

    capacity_bytes: float
    checkpoint_bytes: int
    checkpoints: int
    base_bytes: int
    export_bytes: int
    tokens_bytes: int
    """Of tokens that are prepared already; others come on top."""
    read_once_bytes: int | None
    """Of tokens that the run prepares, if it reads each once; None: they are prepared already, or there are none."""

    @property
    def total_bytes(self) -> int:
        """All that is known."""
        return self.checkpoints * self.checkpoint_bytes + self.base_bytes + self.export_bytes + self.tokens_bytes

    @property
    def fits(self) -> bool:
        """Whether the volume holds what is known."""
        return self.total_bytes <= self.capacity_bytes

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self) | {"total_bytes": self.total_bytes, "fits": self.fits}

    def __str__(self) -> str:
        return f"{_tib(self.total_bytes)} of {_tib(self.capacity_bytes)} TiB: {', '.join(self._parts())}"

    def _parts(self) -> Iterator[str]:
        yield f"{self.checkpoints} checkpoints of {_tib(self.checkpoint_bytes)}"
        for what, size in (("base weights", self.base_bytes), ("export", self.export_bytes)):
            if size:
                yield f"{what} {_tib(size)}"
        if self.tokens_bytes:
            yield f"tokens {_tib(self.tokens_bytes)}"
        if self.read_once_bytes:
            yield f"the prepared tokens on top ({_tib(self.read_once_bytes)} if each is read once)"


def _tib(size: float) -> str:
    return f"{size / TIB:.3g}"


def volume_terms(recipe: Recipe, cluster: Cluster) -> VolumeTerms | None:
    """Return the terms of a recipe on a cluster; None where the size of its volume is not written."""
    capacity = _capacity(recipe, cluster)
    if capacity is None:
        return None
    size, key = capacity
    checkpoint, export = recipe.checkpoint, recipe.export
    converted = recipe.engine.name == "megatron"
    return VolumeTerms(
        capacity_bytes=size,
        capacity_key=key,
        keep_key=recipe.where("checkpoint.keep"),
        keep=checkpoint.kept,
        every=checkpoint.every,
        checkpoints_here=checkpoint.save and (checkpoint.to is None or _is_on_store(checkpoint.to, recipe, cluster)),
        base_copies=0 if recipe.model.from_ is None else 1 + converted,
        export_bytes_per_weight=0
        if export is None or (export.to is not None and not recipe.publishes)
        else _EXPORT_BYTES[export.dtype],
        tokens_bytes=_prepared_bytes(recipe, cluster),
    )


def _store(recipe: Recipe, cluster: Cluster) -> str:
    return recipe.store or cluster.store or ""


def _is_on_store(address: str, recipe: Recipe, cluster: Cluster) -> bool:
    """Whether an address lies on the volume of the store."""
    mount = next((volume.mount for volume in _volumes(recipe, cluster)), _store(recipe, cluster))
    return bool(mount) and "://" not in address and _is_inside(address, mount)


def _is_inside(path: str, mount: str) -> bool:
    path, mount = posixpath.normpath(path), posixpath.normpath(mount)
    return path == mount or path.startswith(mount.rstrip("/") + "/")


def _volumes(recipe: Recipe, cluster: Cluster) -> Iterator[Any]:
    store = _store(recipe, cluster)
    yield from (volume for volume in cluster.volumes if store and _is_inside(store, volume.mount))


def _capacity(recipe: Recipe, cluster: Cluster) -> tuple[float, str] | None:
    """Return the size of the store's volume and where it is written: how it is made, or what the plan is told."""
    for number, volume in enumerate(cluster.volumes):
        if volume.create is not None and volume in _volumes(recipe, cluster):
            return quantity_bytes(volume.create.size), cluster.where(f"volumes.{number}.create.size")
    if cluster.storage is not None and cluster.storage.size_tib is not None:
        return cluster.storage.size_tib * TIB, cluster.where("storage.size_tib")
    return None


def _prepared_bytes(recipe: Recipe, cluster: Cluster) -> int | None:
    """Return the size of tokens that lie on the volume already; None where some are yet to be prepared."""
    if recipe.data.synthetic:
        return 0
    total = 0
    training = (source for path, source in recipe.sources() if path[:2] != ("data", "validation"))
    for source in training:
        if source.tokens is None:
            return None
        for prefix in source.tokens:
            if _is_on_store(prefix, recipe, cluster):
                total += sum(file.stat().st_size for file in Path(prefix).parent.glob(f"{Path(prefix).name}*.bin"))
    return total


def volume_use(
    terms: VolumeTerms,
    *,
    checkpoint_bytes: int,
    weights: int,
    exported_weights: int,
    steps: int | None,
    tokens_per_step: int,
    vocab_size: int,
) -> VolumeUse | None:
    """Return what a run leaves on its volume; None where all checkpoints of a run of unknown length are kept."""
    if terms.keep is None and steps is None and terms.every is not None:
        return None
    saves = 1 if terms.every is None else ceil(steps / terms.every) if steps is not None else None
    limits = [saves, None if terms.keep is None else terms.keep + 1]
    count = min(limit for limit in limits if limit is not None) if terms.checkpoints_here else 0
    prepares = terms.tokens_bytes is None and steps is not None
    return VolumeUse(
        capacity_bytes=terms.capacity_bytes,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=count,
        base_bytes=terms.base_copies * _BASE_BYTES * weights,
        export_bytes=int(terms.export_bytes_per_weight * exported_weights),
        tokens_bytes=terms.tokens_bytes or 0,
        read_once_bytes=(steps or 0) * tokens_per_step * bytes_per_token(vocab_size) if prepares else None,
    )


def check_volume(use: VolumeUse, terms: VolumeTerms) -> None:
    """Refuse a run whose files do not fit on its volume."""
    if use.fits:
        return
    others = use.total_bytes - use.checkpoints * use.checkpoint_bytes
    room = int((use.capacity_bytes - others) // max(use.checkpoint_bytes, 1)) if use.checkpoints else 0
    # One more than is kept lies there while it is written.
    smaller = f"write `checkpoint: {{keep: {min(3, room - 1)}}}`, or " if room > 1 else ""
    raise RecipeError(
        f"the run leaves more than its volume holds, {use}",
        where=terms.keep_key,
        hint=f"{smaller}make it larger: {terms.capacity_key} says {_tib(use.capacity_bytes)} TiB, and "
        f"{_tib(use.total_bytes)} are needed",
    )

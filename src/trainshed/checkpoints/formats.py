"""Which format a folder of weights is in, and the reader or writer for it.

    hf                      config.json and safetensors, as transformers saves them
    native                  our checkpoints: a run's folder, one of its steps, weights alone
    megatron-torch_dist     Megatron's sharded checkpoints, without a layout in them
    megatron-torch          Megatron's legacy checkpoints, one file per tensor- and pipeline-parallel rank

Looking at a folder needs no torch; reading tensors does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainshed.checkpoints.hf.weights import CONFIG, INDEX, WEIGHTS, HfWeights
from trainshed.checkpoints.native.folder import LATEST, MANIFEST
from trainshed.checkpoints.weights import Weights, WeightsWriter
from trainshed.errors import InputError, NoSuchName
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, StoreOptions, open_folder, open_store, parse

if TYPE_CHECKING:
    import torch


WeightsFormat = Literal["hf", "native", "megatron-torch_dist", "megatron-torch"]
MEGATRON_POINTER = "latest_checkpointed_iteration.txt"
_LAYOUT_KEYS = ("tp", "pp", "vp", "ep", "etp")


@dataclass(frozen=True)
class TargetFormat:
    """What weights are converted to.

    The layout is only for Megatron's legacy files, which have it baked in (`etp` is `tp` unless said, as Megatron has
    it). `spec` is who will load what is written for Megatron: Transformer Engine's layers or its own (`local`). The
    vocabulary there is padded to a multiple of `vocab_divisible_by` · tp.
    """

    to: Literal["hf", "native", "megatron"]
    format: Literal["torch", "torch_dist"] | None = None
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int | None = None
    spec: Literal["te", "local"] | None = None
    vocab_divisible_by: int | None = None

    def __post_init__(self) -> None:
        given = {key: getattr(self, key) for key in (*_LAYOUT_KEYS, "format", "spec", "vocab_divisible_by")}
        sizes = {key: value for key, value in given.items() if isinstance(value, int)}
        wrong = [f"--{_flag(key)} {size}" for key, size in sizes.items() if size < 1]
        if wrong:
            raise InputError(f"{', '.join(wrong)} is no size", hint="write whole numbers from 1 up")
        foreign = [key for key in ("format", "spec", "vocab_divisible_by") if given[key] is not None]
        if foreign and self.to != "megatron":
            shown = ", ".join(f"--{_flag(key)} {given[key]}" for key in foreign)
            raise InputError(f"{shown}: that is Megatron's", hint="write --to megatron, or leave it out")
        if self._cut and self.to != "megatron":
            raise InputError(
                f"{self.name} has no layout in its files, so there is nothing for {', '.join(self._cut)}",
                hint="leave it out: every layout reads the same files (only --to megatron --format torch is cut)",
            )

    @property
    def _cut(self) -> list[str]:
        return [f"--{key} {size}" for key in _LAYOUT_KEYS if (size := getattr(self, key) or 1) > 1]

    @property
    def remark(self) -> str | None:
        """What to tell somebody who gives a layout to a format that every layout reads."""
        if self.name != "megatron-torch_dist" or not self._cut:
            return None
        return (
            f"torch_dist has no layout in its files: {', '.join(self._cut)} changes nothing, any layout loads them "
            "(--format torch is the one that is cut)"
        )

    @property
    def name(self) -> WeightsFormat:
        """The format that is written; Megatron's own default is `torch_dist`."""
        if self.to != "megatron":
            return self.to
        return "megatron-torch" if self.format == "torch" else "megatron-torch_dist"

    def to_plain(self) -> dict[str, Any]:
        """What a manifest says of it."""
        if self.to != "megatron":
            return {"to": self.name}
        layout = {key: getattr(self, key) for key in _LAYOUT_KEYS} if self.name == "megatron-torch" else {}
        return {"to": self.name, **layout, **self._megatron}

    @property
    def _megatron(self) -> dict[str, Any]:
        return {"spec": self.spec or "te", "vocab_divisible_by": self.vocab_divisible_by or 128}

    def writer(self, config: ModelConfig, dtype: torch.dtype, companions: Mapping[str, bytes]) -> WeightsWriter:
        """Return the writer of this format for one model."""
        if self.name == "hf":
            from trainshed.checkpoints.hf.writer import HfWeightsWriter

            return HfWeightsWriter(config, dtype=dtype, companions=companions)
        if self.name == "native":
            from trainshed.checkpoints.native.weights import NativeWeightsWriter

            return NativeWeightsWriter(config, dtype=dtype)
        if self.name == "megatron-torch_dist":
            from trainshed.checkpoints.megatron.torch_dist import MegatronDistWriter

            return MegatronDistWriter(config, dtype=dtype, **self._megatron)
        from trainshed.checkpoints.megatron.legacy import MegatronLegacyWriter

        layout = {key: getattr(self, key) for key in _LAYOUT_KEYS}
        return MegatronLegacyWriter(config, dtype=dtype, **layout, **self._megatron)


def detect_format(address: str | Path, options: StoreOptions | None = None) -> WeightsFormat:
    """Say what format the folder at an address is in, by the files that name it."""
    place = open_folder(str(address), options)
    if any(place.head(name) is not None for name in (CONFIG, WEIGHTS, INDEX)):
        return "hf"
    megatron = _detect_megatron(place)
    if megatron is not None:
        return megatron
    if any(place.head(name) is not None for name in (f"checkpoints/{LATEST}", LATEST, ".metadata")):
        return "native"
    if any(info.path.rpartition("/")[2] == MANIFEST for info in place.list("checkpoints")):
        return "native"  # a run that was stopped between its first manifest and `latest`
    raise NoSuchName(
        f"there are no weights that anyone here can read ({', '.join(get_args(WeightsFormat))})",
        where=str(address),
        hint=f"name a folder with {CONFIG}, with {MEGATRON_POINTER}, or of a run with checkpoints",
    )


def open_weights(
    address: str | Path,
    *,
    config: ModelConfig | None = None,
    vocab_size: int | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Weights:
    """Open weights in any format; with `config` they are held against that architecture instead of their own.

    `vocab_size` is the true one, for Megatron's where their args do not say it. Our own checkpoints are read in any
    store, the other formats on a disk.
    """
    format = detect_format(address, options)
    if vocab_size is not None and not format.startswith("megatron"):
        raise InputError(f"weights in {format} say their vocabulary themselves", hint="leave --vocab-size out")
    if format == "native":
        from trainshed.checkpoints.native.weights import NativeWeights

        store, path = open_store(str(address), options)
        return NativeWeights(store, path, config, reporter)
    folder = local_folder(address)
    if format == "hf":
        return HfWeights(folder, config)
    if format == "megatron-torch_dist":
        from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights

        return MegatronDistWeights(folder, config=config, vocab_size=vocab_size)
    from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights

    return MegatronLegacyWeights(folder, config=config, vocab_size=vocab_size)


def local_folder(address: str | Path) -> Path:
    """Return the folder of an address on this machine's disk."""
    parsed = parse(str(address))
    if parsed.scheme != "file":
        raise InputError(
            "weights in this format are read from a disk",
            where=str(address),
            hint=f"write `trainshed model fetch {address} FOLDER` first",
        )
    return Path(str(parsed))


def _detect_megatron(place: Store) -> WeightsFormat | None:
    """The format of a Megatron checkpoint: its root, or the folder of one iteration."""
    folder = ""
    if place.head(MEGATRON_POINTER) is not None:
        named = place.read(MEGATRON_POINTER).decode("utf-8", "replace").strip()
        folder = f"{named}/" if named == "release" else f"iter_{int(named):07d}/" if named.isdigit() else f"{named}/"
    if place.head(f"{folder}metadata.json") is not None:
        return "megatron-torch_dist"
    ranks = (info for info in place.list(folder.rstrip("/")) if info.path.startswith(f"{folder}mp_rank_"))
    # Only a folder that says so itself is listed to its end: anything else may be a home directory.
    if folder or _is_iteration(place):
        return "megatron-torch" if next(ranks, None) is not None else None
    return None


def _is_iteration(place: Store) -> bool:
    name = place.url.rstrip("/").rpartition("/")[2]
    return name == "release" or name.startswith("iter_")


def _flag(key: str) -> str:
    return key.replace("_", "-")

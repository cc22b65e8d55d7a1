"""Which format a folder of weights is in, and the reader or writer for it.

    hf                      config.json and safetensors, as transformers saves them
    native                  our checkpoints: a run's folder, one of its steps, weights alone
    megatron-torch_dist     Megatron's sharded checkpoints, without a layout in them
    megatron-torch          Megatron's legacy checkpoints, one file per tensor- and pipeline-parallel rank

Looking at a folder needs no torch; reading tensors does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainshed.checkpoints.hf import CONFIG, INDEX, WEIGHTS, HfWeights
from trainshed.checkpoints.native.folder import LATEST, MANIFEST
from trainshed.checkpoints.weights import Weights, WeightsWriter
from trainshed.errors import InputError, NotFound
from trainshed.models.hf_config import config_differences
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, StoreOptions, open_folder, open_store, parse

if TYPE_CHECKING:
    import torch

Format = Literal["hf", "native", "megatron-torch_dist", "megatron-torch"]
MEGATRON_POINTER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Target:
    """What weights are converted to; the layout is only for Megatron's legacy files, which have it baked in."""

    to: Literal["hf", "native", "megatron"]
    format: Literal["torch", "torch_dist"] | None = None
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        layout = {key: size for key, size in asdict(self).items() if key in ("tp", "pp", "vp", "ep", "etp")}
        wrong = [f"--{key} {size}" for key, size in layout.items() if size < 1]
        if wrong:
            raise InputError(f"{', '.join(wrong)}: no such layout", hint="write whole numbers from 1 up")
        if self.format is not None and self.to != "megatron":
            raise InputError(f"--format {self.format} is Megatron's", hint="write --to megatron, or leave it out")
        cut = [f"--{key} {size}" for key, size in layout.items() if size > 1]
        if cut and self.name != "megatron-torch":
            raise InputError(
                f"{self.name} has no layout in its files, so there is nothing for {', '.join(cut)}",
                hint="leave it out: every layout reads the same files (only --to megatron --format torch is cut)",
            )

    @property
    def name(self) -> Format:
        """The format that is written; Megatron's own default is `torch_dist`."""
        if self.to != "megatron":
            return self.to
        return "megatron-torch" if self.format == "torch" else "megatron-torch_dist"

    def to_plain(self) -> dict[str, Any]:
        """What a manifest says of it."""
        layout = {key: value for key, value in asdict(self).items() if key not in ("to", "format")}
        return {"to": self.name, **(layout if self.name == "megatron-torch" else {})}

    def writer(self, config: ModelConfig, dtype: torch.dtype, companions: Mapping[str, bytes]) -> WeightsWriter:
        """Return the writer of this format for one model."""
        if self.name == "hf":
            from trainshed.checkpoints.hf_writer import HfWriter

            return HfWriter(config, dtype=dtype, companions=companions)
        if self.name == "native":
            from trainshed.checkpoints.native.weights_writer import NativeWriter

            return NativeWriter(config, dtype=dtype)
        if self.name == "megatron-torch_dist":
            from trainshed.checkpoints.megatron.dist import MegatronDistWriter

            return MegatronDistWriter(config, dtype=dtype)
        from trainshed.checkpoints.megatron.legacy import MegatronLegacyWriter

        return MegatronLegacyWriter(
            config, dtype=dtype, tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp
        )


def detect(address: str | Path, options: StoreOptions | None = None) -> Format:
    """Say what format the folder at an address is in, by the files that name it."""
    place = open_folder(str(address), options)
    if any(place.head(name) is not None for name in (CONFIG, WEIGHTS, INDEX)):
        return "hf"
    megatron = _megatron(place)
    if megatron is not None:
        return megatron
    if any(place.head(name) is not None for name in (f"checkpoints/{LATEST}", LATEST, ".metadata")):
        return "native"
    if any(info.path.rpartition("/")[2] == MANIFEST for info in place.list("checkpoints")):
        return "native"  # a run that was stopped between its first manifest and `latest`
    raise NotFound(
        f"there are no weights that anyone here can read ({', '.join(get_args(Format))})",
        where=str(address),
        hint=f"name a folder with {CONFIG}, with {MEGATRON_POINTER}, or of a run with checkpoints",
    )


def open_weights(
    address: str | Path,
    *,
    config: ModelConfig | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Weights:
    """Open weights in any format; with `config` they are held against that architecture.

    Our own checkpoints are read in any store, the other formats on a disk.
    """
    format = detect(address, options)
    if format == "native":
        from trainshed.checkpoints.native.weights import NativeWeights

        store, path = open_store(str(address), options)
        return NativeWeights(store, path, config, reporter)
    folder = local_folder(address)
    if format == "hf":
        return HfWeights(folder, config)
    if format == "megatron-torch_dist":
        from trainshed.checkpoints.megatron.dist import MegatronDistWeights

        weights: Weights = MegatronDistWeights(folder)
    else:
        from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights

        weights = MegatronLegacyWeights(folder)
    differences = [] if config is None else config_differences(config, weights.config)
    if differences:
        weights.close()
        raise InputError(
            f"these weights are of another architecture: {'; '.join(differences)}",
            where=str(address),
            hint="name the weights that belong to it",
        )
    return weights


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


def _megatron(place: Store) -> Format | None:
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

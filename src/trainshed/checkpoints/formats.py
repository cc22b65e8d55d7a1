"""The formats of weights: which one a folder is in, and the reader or writer for it.

    hf                      config.json and safetensors, as transformers saves them
    native                  our checkpoints: a run's folder, one of its steps, weights alone
    megatron-torch_dist     Megatron's sharded checkpoints, without a layout in them
    megatron-torch          Megatron's legacy checkpoints, one file per tensor- and pipeline-parallel rank
    gguf                    llama.cpp's single file, as `gguf/writer.py` makes it

Detecting a format needs no torch; reading tensors does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainshed.checkpoints.hf.weights import CONFIG, INDEX, WEIGHTS, HfWeights
from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG
from trainshed.checkpoints.megatron.iterations import LATEST_ITERATION, is_iteration_name, read_latest_iteration
from trainshed.checkpoints.native.folder import LATEST, find_checkpoint
from trainshed.checkpoints.weights import Weights, WeightsWriter, join_names
from trainshed.errors import InputError, NoSuchName
from trainshed.recipe import ModelConfig
from trainshed.recipe.serving import EXPORT_DTYPES
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CHECKPOINTS
from trainshed.storage import Store, StoreOptions, open_folder, open_store, parse
from trainshed.storage.manifest import MANIFEST

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.quantization import WeightQuantization


WeightsFormat = Literal["hf", "native", "megatron-torch_dist", "megatron-torch", "gguf"]
FORMAT_DTYPES = EXPORT_DTYPES | {"native": ("bf16", "fp32")}
"""The dtypes that each format is written in."""

GGUF_FILE = "model.gguf"
_LAYOUT_KEYS = ("tp", "pp", "vp", "ep", "etp")


@dataclass(frozen=True)
class TargetFormat:
    """The format that weights are converted to, with its options.

    Only Megatron's legacy files depend on a layout (`etp` defaults to `tp`, as in Megatron). `spec` says which layers
    load what is written for Megatron: Transformer Engine's (`te`) or Megatron's own (`local`). Megatron's vocabulary
    is padded to a multiple of `vocab_divisible_by` · tp.
    """

    to: Literal["hf", "native", "megatron", "gguf"]
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
            raise InputError(f"{', '.join(wrong)} is not a size", hint="write whole numbers from 1 up")
        foreign = [key for key in ("format", "spec", "vocab_divisible_by") if given[key] is not None]
        if foreign and self.to != "megatron":
            shown = ", ".join(f"--{_flag(key)} {given[key]}" for key in foreign)
            raise InputError(f"{shown}: that is Megatron's", hint="write --to megatron, or leave it out")
        if self._given_layout and self.to != "megatron":
            raise InputError(
                f"{self.name} has no layout in its files, so there is nothing for {', '.join(self._given_layout)}",
                hint="leave it out: every layout reads the same files (only --to megatron --format torch is cut)",
            )

    def check_dtype(self, dtype: str | None) -> None:
        """Refuse a dtype that this format is not written in."""
        if dtype is not None and dtype not in FORMAT_DTYPES[self.to]:
            formats = " or ".join(f"--to {to}" for to, dtypes in FORMAT_DTYPES.items() if dtype in dtypes)
            raise InputError(
                f"{self.to} is not written in {dtype}",
                where="--dtype",
                hint=f"write {', '.join(FORMAT_DTYPES[self.to])}; or {formats}",
            )

    @property
    def _given_layout(self) -> list[str]:
        return [f"--{key} {size}" for key in _LAYOUT_KEYS if (size := getattr(self, key) or 1) > 1]

    @property
    def layout_note(self) -> str | None:
        """A note for a person who gives a layout to a format that every layout reads, otherwise None."""
        if self.name != "megatron-torch_dist" or not self._given_layout:
            return None
        return (
            f"torch_dist has no layout in its files: {', '.join(self._given_layout)} changes nothing, "
            "any layout loads them (--format torch is the one that is cut)"
        )

    @property
    def name(self) -> WeightsFormat:
        """The format that is written; Megatron's own default is `torch_dist`."""
        if self.to != "megatron":
            return self.to
        return "megatron-torch" if self.format == "torch" else "megatron-torch_dist"

    def to_plain(self) -> dict[str, Any]:
        """The format as a manifest stores it."""
        if self.to != "megatron":
            return {"to": self.name}
        layout = {key: getattr(self, key) for key in _LAYOUT_KEYS} if self.name == "megatron-torch" else {}
        return {"to": self.name, **layout, **self._megatron_options}

    @property
    def _megatron_options(self) -> dict[str, Any]:
        return {"spec": self.spec or "te", "vocab_divisible_by": self.vocab_divisible_by or 128}

    def writer(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        companions: Mapping[str, bytes],
        scheme: WeightQuantization | None = None,
    ) -> WeightsWriter:
        """Return the writer of this format for one model; `scheme` is how its weights are quantised, if they are."""
        if self.name == "gguf":
            from trainshed.checkpoints.gguf.writer import GgufWriter

            return GgufWriter(config, dtype=dtype, scheme=scheme, companions=companions)
        if self.name == "hf" and scheme is not None:
            from trainshed.checkpoints.hf.float8_writer import Float8WeightsWriter

            return Float8WeightsWriter(config, companions=companions)
        if self.name == "hf":
            from trainshed.checkpoints.hf.writer import HfWeightsWriter

            return HfWeightsWriter(config, dtype=dtype, companions=companions)
        if self.name == "native":
            from trainshed.checkpoints.native.weights import NativeWeightsWriter

            return NativeWeightsWriter(config, dtype=dtype)
        if self.name == "megatron-torch_dist":
            from trainshed.checkpoints.megatron.torch_dist import MegatronDistWriter

            return MegatronDistWriter(config, dtype=dtype, **self._megatron_options)
        from trainshed.checkpoints.megatron.legacy import MegatronLegacyWriter

        layout = {key: getattr(self, key) for key in _LAYOUT_KEYS}
        return MegatronLegacyWriter(config, dtype=dtype, **layout, **self._megatron_options)


def detect_format(address: str | Path, options: StoreOptions | None = None) -> WeightsFormat:
    """Return the format of the folder at an address, by the names of its files."""
    folder = open_folder(str(address), options)
    if folder.head(GGUF_FILE) is not None:
        return "gguf"
    if any(folder.head(name) is not None for name in (CONFIG, WEIGHTS, INDEX)):
        return "hf"
    megatron = _detect_megatron(folder)
    if megatron is not None:
        return megatron
    if any(folder.head(name) is not None for name in (f"checkpoints/{LATEST}", LATEST, ".metadata")):
        return "native"
    if any(info.path.rpartition("/")[2] == MANIFEST for info in folder.list(CHECKPOINTS)):
        return "native"  # a run that was stopped between its first manifest and `latest`
    raise NoSuchName(
        f"there are no weights that anyone here can read ({', '.join(get_args(WeightsFormat))})",
        where=str(address),
        hint=f"name a folder with {CONFIG}, with {LATEST_ITERATION}, or of a run with checkpoints",
    )


def open_weights(
    address: str | Path,
    *,
    config: ModelConfig | None = None,
    vocab_size: int | None = None,
    averaged: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Weights:
    """Open weights in any format; with `config` they are checked against that architecture instead of their own.

    `vocab_size` is the true one, for Megatron's checkpoints whose args do not hold it. `averaged` asks for the averages
    (EMA) that a run of ours has saved beside its weights. Our own checkpoints are read
    from any store, the other formats from a disk.
    """
    format = detect_format(address, options)
    if vocab_size is not None and not format.startswith("megatron"):
        raise InputError(f"weights in {format} say their vocabulary themselves", hint="leave --vocab-size out")
    if averaged and format != "native":
        raise InputError(f"weights in {format} have no averages beside them", where=str(address))
    if format == "native":
        from trainshed.checkpoints.native.weights import EMA_PREFIX, MODEL_PREFIX, NativeWeights

        store, path = open_store(str(address), options)
        checkpoint = find_checkpoint(store, path, reporter)
        if "lora" in checkpoint.manifest.spec:
            from trainshed.checkpoints.lora.adapted_weights import open_adapted_checkpoint

            return open_adapted_checkpoint(store, checkpoint, config)
        return NativeWeights(store, checkpoint.path, config, prefix=EMA_PREFIX if averaged else MODEL_PREFIX)
    folder = local_folder(address)
    if format == "hf" and is_adapter_alone(folder):
        from trainshed.checkpoints.lora.adapted_weights import open_adapted_folder

        return open_adapted_folder(folder, config)
    if format == "hf":
        weights = HfWeights(folder, config)
        if weights.left_out:
            reporter.note(
                f"{len(weights.left_out)} tensors of {weights.left_out_part} are left out: "
                + join_names(weights.left_out)
            )
        return weights
    if format == "gguf":
        from trainshed.checkpoints.gguf.weights import GgufWeights

        return GgufWeights(folder, config)
    if format == "megatron-torch_dist":
        from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights

        return MegatronDistWeights(folder, config=config, vocab_size=vocab_size)
    from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights

    return MegatronLegacyWeights(folder, config=config, vocab_size=vocab_size)


def is_adapter_alone(folder: Path) -> bool:
    """Whether a folder with a model's config holds an adapter to it, and no weights: torchtune saves so."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).is_file() for name in (WEIGHTS, INDEX))


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


def _detect_megatron(root: Store) -> WeightsFormat | None:
    """Return the format of a Megatron checkpoint, given its root or the folder of one iteration."""
    latest = read_latest_iteration(root)
    folder = "" if latest is None else f"{latest}/"
    if root.head(f"{folder}metadata.json") is not None:
        return "megatron-torch_dist"
    ranks = (info for info in root.list(folder.rstrip("/")) if info.path.startswith(f"{folder}mp_rank_"))
    # Only a folder that is Megatron's by its name is listed: any other may be a home directory.
    if folder or is_iteration_name(root.url.rstrip("/").rpartition("/")[2]):
        return "megatron-torch" if next(ranks, None) is not None else None
    return None


def _flag(key: str) -> str:
    return key.replace("_", "-")

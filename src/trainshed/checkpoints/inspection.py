"""Describe a folder of weights: format, architecture, parameters of each part, dtypes, files, and its verdict.

Of Hugging Face weights and our own checkpoints only headers and manifests are read, without torch. Megatron's
checkpoints need torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE
from trainshed.checkpoints.formats import WeightsFormat, detect_format, local_folder, open_weights
from trainshed.checkpoints.hf.companion_files import COMPANIONS_FOLDER
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec, holds_adapters
from trainshed.checkpoints.native.folder import find_checkpoint, read_checkpoint_config
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import MissingExtra, NotFound, TrainshedError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import StoreOptions, join, open_folder, open_store, parse
from trainshed.storage.listing import is_selected

PARTS = ("embedding", "positions", "attention", "router", "experts", "mlp", "norms", "head")


@dataclass(frozen=True)
class WeightsFile:
    """One file of a folder of weights."""

    path: str
    bytes: int


@dataclass(frozen=True)
class AdaptersInspection:
    """The adapters in the checkpoint of a LoRA run: how many weights they have, and where the others are."""

    rank: int
    targets: tuple[str, ...]
    parameters: int
    base: str
    added_tokens: int = 0
    """Tokens whose rows are among these weights."""


@dataclass(frozen=True)
class WeightsInspection:
    """The weights at an address.

    `vocab_size` is the model's true vocabulary, `padded_vocab_size` the rows of the embedding in the files, `tokens`
    the number of tokens of the tokenizer beside them (None without one). `layout` is the layout that the files depend
    on, `step` the training step of a checkpoint.
    """

    address: str
    format: WeightsFormat
    config: ModelConfig
    parts: dict[str, int]
    dtypes: tuple[str, ...]
    padded_vocab_size: int
    tokens: int | None
    layout: dict[str, int] | None
    step: int | None
    files: tuple[WeightsFile, ...]
    verdict: Verdict | None
    adapters: AdaptersInspection | None = None
    """Of the checkpoint of a LoRA run, which holds no other weights."""

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones counted once."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        plain = asdict(self) | {"config": self.config.model_dump(mode="json", exclude_none=True)}
        facts = {"family": self.config.family, "vocab_size": self.config.vocab_size}
        return plain | facts | {"parameters": self.parameters, "bytes": self.bytes}


def inspect_weights(address: str, options: StoreOptions | None = None) -> WeightsInspection:
    """Describe the weights at an address, in any format."""
    format = detect_format(address, options)
    layout: dict[str, int] | None = None
    step: int | None = None
    padded: int | None = None
    adapters: AdaptersInspection | None = None
    if format == "hf":
        with HfWeights(local_folder(address)) as weights:
            config, dtypes = weights.config, weights.dtypes
            files = _list_files(address, options, HF_INCLUDE, HF_EXCLUDE)
    elif format == "native":
        config, dtypes, step, files, adapters = _inspect_native(address, options)
    else:
        config, dtypes, padded, layout = _inspect_megatron(address, options)
        layout = layout if format == "megatron-torch" else None  # only these files depend on the layout
        files = _list_files(address, options)
    return WeightsInspection(
        address=address,
        format=format,
        config=config,
        parts=_count_parts(config),
        dtypes=tuple(dtypes),
        padded_vocab_size=padded or config.vocab_size,
        tokens=_count_tokens(address, format, options),
        layout=layout,
        step=step,
        files=files,
        verdict=_read_verdict(address, options),
        adapters=adapters,
    )


def model_part(parameter: Parameter) -> str:
    """The part of a model that a tensor belongs to: one of PARTS."""
    words = parameter.name.split(".")
    if words[-2].endswith("norm"):
        return "norms"
    if parameter.layer is None:
        return words[0]
    if words[2] == "attention":
        return "attention"
    return words[3] if words[3] in ("router", "experts") else "mlp"


def _count_parts(config: ModelConfig) -> dict[str, int]:
    counts = dict.fromkeys(PARTS, 0)
    for parameter in parameters(config):
        counts[model_part(parameter)] += parameter.size
    return {part: count for part, count in counts.items() if count}


def _inspect_native(
    address: str, options: StoreOptions | None
) -> tuple[ModelConfig, list[str], int, tuple[WeightsFile, ...], AdaptersInspection | None]:
    """Describe a checkpoint by its manifest alone."""
    store, path = open_store(address, options)
    checkpoint = find_checkpoint(store, path)
    config = read_checkpoint_config(store, checkpoint)
    tensors = checkpoint.facts.get("tensors", {})
    stored = [tensor for name, tensor in tensors.items() if name.startswith("model.")]
    dtypes = {tensor["dtype"] for tensor in stored}
    adapters = None
    if holds_adapters(checkpoint):
        spec = AdapterSpec.read(checkpoint.manifest.spec, join(store.url, checkpoint.path))
        count = sum(math.prod(tensor["shape"]) for tensor in stored)
        added = 0 if spec.added is None else spec.added.count
        adapters = AdaptersInspection(spec.lora.rank, spec.lora.targets, count, spec.base_address, added)
    files = tuple(WeightsFile(entry.path, entry.size) for entry in checkpoint.manifest.files)
    return config, sorted(dtypes), checkpoint.step, files, adapters


def _inspect_megatron(
    address: str, options: StoreOptions | None
) -> tuple[ModelConfig, list[str], int | None, dict[str, int] | None]:
    """Describe a Megatron checkpoint by its arguments and metadata, which are pickles."""
    try:
        with open_weights(address, options=options) as weights:
            layout = getattr(weights, "layout", None)
            padded = getattr(weights, "padded_vocab_size", None)
            return weights.config, weights.dtypes, padded, None if layout is None else asdict(layout)
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "looking into Megatron's checkpoints") from None


def _list_files(
    address: str, options: StoreOptions | None, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> tuple[WeightsFile, ...]:
    infos = open_folder(address, options).list()
    return tuple(WeightsFile(info.path, info.size) for info in infos if is_selected(info.path, include, exclude))


def tokenizer_address(address: str, format: WeightsFormat) -> str:
    """Return where the tokenizer of weights is, if they have one; a relative path would mean one on the Hub."""
    folder = os.path.abspath(str(parse(address))) if parse(address).scheme == "file" else address
    return folder if format == "hf" else join(folder, COMPANIONS_FOLDER)


def _count_tokens(address: str, format: WeightsFormat, options: StoreOptions | None) -> int | None:
    """Return the number of tokens of the tokenizer beside weights, None where it cannot be loaded."""
    try:
        return load_tokenizer(tokenizer_address(address, format), options).vocab_size
    except (TrainshedError, ImportError):
        return None


def _read_verdict(address: str, options: StoreOptions | None) -> Verdict | None:
    folder = open_folder(address, options)
    try:
        return Verdict.from_bytes(folder.read(VERDICT), str(Path(folder.url) / VERDICT))
    except NotFound:
        return None

"""What a folder of weights is: format, architecture, parameters of each part, dtypes, files, and what was proven.

Hugging Face weights and our own checkpoints are looked at by their headers and manifests alone, without torch.
Megatron's hold their facts in pickles, which only torch opens.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.base import EXCLUDE, INCLUDE
from trainshed.checkpoints.converting.companions import FOLDER as COMPANIONS_FOLDER
from trainshed.checkpoints.formats import Format, detect, local_folder, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.native.resuming import locate
from trainshed.checkpoints.proving.verdict import VERDICT, Verdict
from trainshed.data.encode.tokenizer import load_tokenizer
from trainshed.errors import InputError, MissingExtra, NotFound, TrainshedError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.storage import StoreOptions, join, open_folder, open_store, parse
from trainshed.storage.globs import selected

PARTS = ("embedding", "positions", "attention", "router", "experts", "mlp", "norms", "head")


@dataclass(frozen=True)
class WeightsFile:
    """One file of a folder of weights."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What there is at an address.

    `vocab_size` is the model's true vocabulary, `padded_vocab_size` the rows that lie in the files, `tokens` how many
    the tokenizer beside them knows (None where there is none). `layout` is what the files are cut for, `step` the step
    of a checkpoint in training.
    """

    address: str
    format: Format
    config: ModelConfig
    parts: dict[str, int]
    dtypes: tuple[str, ...]
    padded_vocab_size: int
    tokens: int | None
    layout: dict[str, int] | None
    step: int | None
    files: tuple[WeightsFile, ...]
    verdict: Verdict | None

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


def inspect_weights(address: str, options: StoreOptions | None = None) -> Inspection:
    """Look at the weights at an address, in any format."""
    format = detect(address, options)
    layout: dict[str, int] | None = None
    step: int | None = None
    padded: int | None = None
    if format == "hf":
        with HfWeights(local_folder(address)) as weights:
            config, dtypes = weights.config, weights.dtypes
            files = _listed(address, options, INCLUDE, EXCLUDE)
    elif format == "native":
        config, dtypes, step, files = _native(address, options)
    else:
        config, dtypes, padded, layout = _megatron(address, options)
        layout = layout if format == "megatron-torch" else None  # only there it is baked into the files
        files = _listed(address, options)
    return Inspection(
        address=address,
        format=format,
        config=config,
        parts=_parts(config),
        dtypes=tuple(dtypes),
        padded_vocab_size=padded or config.vocab_size,
        tokens=_tokens(address, format, options),
        layout=layout,
        step=step,
        files=files,
        verdict=_verdict(address, options),
    )


def part_of(parameter: Parameter) -> str:
    """The part of a model that a tensor belongs to: one of PARTS."""
    words = parameter.name.split(".")
    if words[-2].endswith("norm"):
        return "norms"
    if parameter.layer is None:
        return words[0]
    if words[2] == "attention":
        return "attention"
    return words[3] if words[3] in ("router", "experts") else "mlp"


def _parts(config: ModelConfig) -> dict[str, int]:
    counted = dict.fromkeys(PARTS, 0)
    for parameter in parameters(config):
        counted[part_of(parameter)] += parameter.size
    return {part: count for part, count in counted.items() if count}


def _native(address: str, options: StoreOptions | None) -> tuple[ModelConfig, list[str], int, tuple[WeightsFile, ...]]:
    """A checkpoint by its manifest alone."""
    store, path = open_store(address, options)
    found = locate(store, path)
    where = join(store.url, f"{found.path}/manifest.json")
    model, tensors = found.manifest.spec.get("model"), found.facts.get("tensors")
    if not isinstance(model, dict) or not isinstance(tensors, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where)
    dtypes = {each["dtype"] for name, each in tensors.items() if name.startswith("model.")}
    files = tuple(WeightsFile(entry.path, entry.size) for entry in found.manifest.files)
    return validate(ModelConfig, Document(model, Places(where))), sorted(dtypes), found.step, files


def _megatron(
    address: str, options: StoreOptions | None
) -> tuple[ModelConfig, list[str], int | None, dict[str, int] | None]:
    """A Megatron checkpoint by its arguments and tables, which are pickles."""
    try:
        with open_weights(address, options=options) as weights:
            layout = getattr(weights, "layout", None)
            padded = getattr(weights, "padded_vocab_size", None)
            return weights.config, weights.dtypes, padded, None if layout is None else asdict(layout)
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "looking into Megatron's checkpoints") from None


def _listed(
    address: str, options: StoreOptions | None, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> tuple[WeightsFile, ...]:
    infos = open_folder(address, options).list()
    return tuple(WeightsFile(info.path, info.size) for info in infos if selected(info.path, include, exclude))


def tokenizer_address(address: str, format: Format) -> str:
    """Where the tokenizer of weights lies, if they have one; a path in full, or it would be taken for the Hub's."""
    here = os.path.abspath(str(parse(address))) if parse(address).scheme == "file" else address
    return here if format == "hf" else join(here, COMPANIONS_FOLDER)


def _tokens(address: str, format: Format, options: StoreOptions | None) -> int | None:
    """How many tokens the tokenizer beside weights knows; it is only asked where it can be."""
    try:
        return load_tokenizer(tokenizer_address(address, format), options).vocab_size
    except (TrainshedError, ImportError):
        return None


def _verdict(address: str, options: StoreOptions | None) -> Verdict | None:
    place = open_folder(address, options)
    try:
        return Verdict.from_bytes(place.read(VERDICT), str(Path(place.url) / VERDICT))
    except NotFound:
        return None

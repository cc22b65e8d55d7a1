"""What a folder of weights is: format, architecture, parameters of each part, dtypes, files, and what was proven.

Hugging Face weights and our own checkpoints are looked at by their headers and manifests alone, without torch.
Megatron's hold their facts in pickles, which only torch opens.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE
from trainshed.checkpoints.formats import WeightsFormat, detect_format, local_folder, open_weights
from trainshed.checkpoints.hf.companion_files import COMPANIONS_FOLDER
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import InputError, MissingExtra, NotFound, TrainshedError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.storage import StoreOptions, join, open_folder, open_store, parse
from trainshed.storage.listing import is_selected

PARTS = ("embedding", "positions", "attention", "router", "experts", "mlp", "norms", "head")


@dataclass(frozen=True)
class WeightsFile:
    """One file of a folder of weights."""

    path: str
    bytes: int


@dataclass(frozen=True)
class WeightsInspection:
    """What there is at an address.

    `vocab_size` is the model's true vocabulary, `padded_vocab_size` the rows that lie in the files, `tokens` how many
    the tokenizer beside them knows (None where there is none). `layout` is what the files are cut for, `step` the step
    of a checkpoint in training.
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
    """Look at the weights at an address, in any format."""
    format = detect_format(address, options)
    layout: dict[str, int] | None = None
    step: int | None = None
    padded: int | None = None
    if format == "hf":
        with HfWeights(local_folder(address)) as weights:
            config, dtypes = weights.config, weights.dtypes
            files = _list_files(address, options, HF_INCLUDE, HF_EXCLUDE)
    elif format == "native":
        config, dtypes, step, files = _inspect_native(address, options)
    else:
        config, dtypes, padded, layout = _inspect_megatron(address, options)
        layout = layout if format == "megatron-torch" else None  # only there it is baked into the files
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
    counted = dict.fromkeys(PARTS, 0)
    for parameter in parameters(config):
        counted[model_part(parameter)] += parameter.size
    return {part: count for part, count in counted.items() if count}


def _inspect_native(
    address: str, options: StoreOptions | None
) -> tuple[ModelConfig, list[str], int, tuple[WeightsFile, ...]]:
    """A checkpoint by its manifest alone."""
    store, path = open_store(address, options)
    found = find_checkpoint(store, path)
    where = join(store.url, f"{found.path}/manifest.json")
    model, tensors = found.manifest.spec.get("model"), found.facts.get("tensors")
    if not isinstance(model, dict) or not isinstance(tensors, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where)
    dtypes = {each["dtype"] for name, each in tensors.items() if name.startswith("model.")}
    files = tuple(WeightsFile(entry.path, entry.size) for entry in found.manifest.files)
    return validate(ModelConfig, YamlDocument(model, SourceMap(where))), sorted(dtypes), found.step, files


def _inspect_megatron(
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


def _list_files(
    address: str, options: StoreOptions | None, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> tuple[WeightsFile, ...]:
    infos = open_folder(address, options).list()
    return tuple(WeightsFile(info.path, info.size) for info in infos if is_selected(info.path, include, exclude))


def tokenizer_address(address: str, format: WeightsFormat) -> str:
    """Where the tokenizer of weights lies, if they have one; a path in full, or it would be taken for the Hub's."""
    here = os.path.abspath(str(parse(address))) if parse(address).scheme == "file" else address
    return here if format == "hf" else join(here, COMPANIONS_FOLDER)


def _count_tokens(address: str, format: WeightsFormat, options: StoreOptions | None) -> int | None:
    """How many tokens the tokenizer beside weights knows; it is only asked where it can be."""
    try:
        return load_tokenizer(tokenizer_address(address, format), options).vocab_size
    except (TrainshedError, ImportError):
        return None


def _read_verdict(address: str, options: StoreOptions | None) -> Verdict | None:
    place = open_folder(address, options)
    try:
        return Verdict.from_bytes(place.read(VERDICT), str(Path(place.url) / VERDICT))
    except NotFound:
        return None

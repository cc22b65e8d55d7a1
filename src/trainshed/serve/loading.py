"""A model ready to be asked, from weights in any format: a folder for transformers, a run, Megatron's, an adapter."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import torch

from trainshed.checkpoints.converting.source import ConversionSource
from trainshed.checkpoints.formats import Format, local_folder
from trainshed.checkpoints.lora.adapter import CONFIG as ADAPTER_CONFIG
from trainshed.checkpoints.lora.adapter import AdapterConfig
from trainshed.checkpoints.lora.merge import merge
from trainshed.checkpoints.proving.verdict import VERDICT, Verdict, read_verdict
from trainshed.checkpoints.weights import Weights
from trainshed.errors import InputError, NotFound
from trainshed.models.cached import put_gates_first
from trainshed.models.collectives import Axes
from trainshed.models.decoder import Chunk, ChunkSpec, Losses, StepScale
from trainshed.models.parameters import parameter_count, parameters
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.belongings import name_of, words_of
from trainshed.serve.cache import choose_room
from trainshed.serve.generator import ModelGenerator
from trainshed.serve.words import Words
from trainshed.storage import StoreOptions, open_folder, parse

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READERS = 4
_Proof = Callable[[str, StoreOptions | None], None]
"""Looks at the verdict beside weights."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with its words (None where no tokenizer was found)."""

    name: str
    address: str
    format: Format
    chunk: Chunk
    words: Words | None

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.chunk.config

    def generator(
        self,
        *,
        max_sequences: int | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> ModelGenerator:
        """Begin to answer; what is left open is chosen by the free memory, and told."""
        spec = self.chunk.spec
        room = choose_room(
            self.config,
            spec.dtype,
            spec.device,
            max_sequences=max_sequences,
            max_length=max_length,
            cache_tokens=cache_tokens,
            reporter=reporter,
        )
        words = self.words
        return ModelGenerator(
            self.chunk,
            room,
            decode=None if words is None else words.plain,
            ends=frozenset() if words is None else words.ends,
            eager=eager,
            reporter=reporter,
        )


def load_model(
    address: str,
    *,
    dtype: Dtype | None = None,
    device: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
    vocab_size: int | None = None,
    ignore_verdict: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> LoadedModel:
    """Load the model at an address, in any format that is known and from any store.

    `dtype`: as stored on a GPU, fp32 on a CPU, unless it is said. `tokenizer` names another than the one beside the
    weights, `base` the weights that a LoRA adapter belongs to. Weights whose conversion was not proven are refused.
    """
    place = _device(device)
    is_adapter = open_folder(address, options).head(ADAPTER_CONFIG) is not None
    if base is not None and not is_adapter:
        raise InputError(
            "--base is for a LoRA adapter, and these are whole weights", where=address, hint="leave it out"
        )
    proven = _heed_no_verdict if ignore_verdict else _refuse_failed
    opened = (
        _merged(address, base, proven, options, reporter)
        if is_adapter
        else _opened(ConversionSource(address, options, vocab_size), proven, options, reporter)
    )
    with opened as (weights, origin):
        chosen = _dtype(weights, dtype, place, reporter)
        words = words_of(address, "hf", tokenizer=tokenizer, options=options) if is_adapter else None
        words = words or words_of(origin.address, origin.format, tokenizer=tokenizer, options=options)
        _compare_vocabularies(words, weights.config, reporter)
        chunk = _filled(weights, chosen, place, reporter)
    return LoadedModel(name_of(address), address, origin.format, chunk, words)


def build_chunk(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Chunk:
    """Lay out a whole decoder without memory, with its tables of positions on the device."""
    spec = ChunkSpec(range(config.layers), True, True, config.max_positions, dtype, device)
    scale = StepScale(torch.ones(()), torch.ones(()))
    with torch.device("meta"):
        return Chunk(config, Axes(), spec, Losses(), scale).to(dtype).requires_grad_(False)


@contextmanager
def _opened(
    origin: ConversionSource, proven: _Proof, options: StoreOptions | None, reporter: Reporter
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open weights; those elsewhere are fetched first."""
    with origin.opened(_fetched(origin.pinned), reporter) as weights:
        proven(origin.address, options)
        yield weights, origin


@contextmanager
def _merged(
    adapter: str, base: str | None, proven: _Proof, options: StoreOptions | None, reporter: Reporter
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open the weights that an adapter and its base are together."""
    folder = local_folder(adapter)
    with tempfile.TemporaryDirectory(prefix="trainshed-adapter-") as made:
        origin = ConversionSource(base or _base_of(folder, reporter), options)
        with _opened(origin, proven, options, reporter):
            merge(local_folder(origin.address), folder, Path(made) / folder.name, reporter=reporter)
        merged = ConversionSource(str(Path(made) / folder.name), options)
        with merged.opened(Path(made), reporter) as weights:
            yield weights, merged


def _base_of(adapter: Path, reporter: Reporter) -> str:
    """Where the base of an adapter is: PEFT keeps a path, or a name on the Hub."""
    named = AdapterConfig.read(adapter).base
    if not named:
        raise InputError("the adapter does not say what it was trained on", where=str(adapter), hint="write --base")
    found = named if Path(named).expanduser().is_dir() else f"hf://{named}"
    reporter.note(f"the adapter says that its base is {found}")
    return found


def _fetched(address: str) -> Path:
    """Where weights that are fetched stay, so that they are fetched once."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainshed" / "weights" / hashlib.sha256(address.encode()).hexdigest()[:16]


def _refuse_failed(address: str, options: StoreOptions | None) -> None:
    """Refuse weights of which it is known that they are not those they were made from."""
    if parse(address).scheme == "file":
        verdict = read_verdict(Path(str(parse(address))))
    else:
        try:
            verdict = Verdict.from_bytes(open_folder(address, options).read(VERDICT), f"{address}/{VERDICT}")
        except NotFound:
            verdict = None
    if verdict is not None and not verdict.passed:
        raise InputError(
            f"these weights failed the proof of their conversion: {'; '.join(verdict.words())}",
            where=address,
            hint="convert them again, or write --ignore-verdict to try them all the same",
        )


def _device(wanted: str | None) -> torch.device:
    """The device that is asked for; otherwise a GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if wanted is not None and wanted not in known:
        raise InputError(f"there is no device `{wanted}` here", hint=f"write one of {', '.join(known)}")
    return torch.device(wanted or ("cuda" if gpus else "cpu"))


def _heed_no_verdict(address: str, options: StoreOptions | None) -> None:
    """What somebody wants who tries weights all the same."""


def _dtype(weights: Weights, wanted: Dtype | None, device: torch.device, reporter: Reporter) -> torch.dtype:
    if wanted is not None:
        return DTYPES[wanted]
    stored = reduce(torch.promote_types, (getattr(torch, name) for name in weights.dtypes))
    chosen = torch.float32 if device.type == "cpu" or stored not in DTYPES.values() else stored
    named = next(name for name, each in DTYPES.items() if each == chosen)
    reporter.note(
        f"{parameter_count(weights.config):,} weights in {named} on {device.type} "
        f"(stored in {' and '.join(weights.dtypes)}; --dtype changes it)"
    )
    return chosen


def _compare_vocabularies(words: Words | None, config: ModelConfig, reporter: Reporter) -> None:
    known = 0 if words is None else words.tokenizer.vocab_size
    if known > config.vocab_size:
        reporter.warn(
            f"the tokenizer has {known:,} tokens and the model knows {config.vocab_size:,}: it may be another model's"
        )


def _filled(weights: Weights, dtype: torch.dtype, device: torch.device, reporter: Reporter) -> Chunk:
    """Read every tensor onto the device."""
    chunk = build_chunk(weights.config, dtype, device)
    table = list(parameters(weights.config))
    state: dict[str, torch.Tensor] = {}
    total = sum(parameter.size * dtype.itemsize for parameter in table)
    with reporter.task("loading", total=total, unit="B") as task, ThreadPoolExecutor(_READERS) as pool:
        read = pool.map(lambda each: weights.read(each, (0,) * len(each.shape), each.shape, dtype).to(device), table)
        for parameter, tensor in zip(table, read, strict=True):
            state[parameter.name] = tensor
            task.advance(tensor.nbytes)
    chunk.load_state_dict(state, assign=True)
    put_gates_first(chunk)
    return chunk.eval()

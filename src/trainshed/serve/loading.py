"""A model ready to generate, from weights in any format: a folder for transformers, a run, Megatron's, an adapter.

Its tokenizer and its name are found beside the weights or with the run that trained them.
"""

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

import orjson
import torch

from trainshed.checkpoints.convert.source import ConversionSource
from trainshed.checkpoints.formats import WeightsFormat, local_folder
from trainshed.checkpoints.hf.companion_files import has_tokenizer, read_companions
from trainshed.checkpoints.lora import ADAPTER_CONFIG, LoraAdapterConfig, merge_adapter
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict, read_verdict
from trainshed.checkpoints.weights import Weights
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.data.tokens.prepared_data import PreparedData
from trainshed.errors import InputError, NotFound
from trainshed.models.cached_decoder import put_gates_first
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import DecoderStage, DecoderStageSpec, LossNormalization, Regularization
from trainshed.models.parameters import parameter_count, parameters
from trainshed.plugins import plugins_not_run
from trainshed.recipe import ModelConfig, Recipe, load_recipe
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.kv_cache import choose_limits
from trainshed.serve.scheduler import ModelGenerator
from trainshed.serve.tokenizer import ChatTokenizer
from trainshed.storage import StoreOptions, open_folder, parse

ServingDtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READ_THREADS = 4
_VerdictCheck = Callable[[str, StoreOptions | None], None]
"""Looks at the verdict beside weights."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with its words (None where no tokenizer was found)."""

    name: str
    address: str
    format: WeightsFormat
    chunk: DecoderStage
    words: ChatTokenizer | None

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
        room = choose_limits(
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
    dtype: ServingDtype | None = None,
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
    place = _choose_device(device)
    is_adapter = open_folder(address, options).head(ADAPTER_CONFIG) is not None
    if base is not None and not is_adapter:
        raise InputError(
            "--base is for a LoRA adapter, and these are whole weights", where=address, hint="leave it out"
        )
    proven = _accept_any_verdict if ignore_verdict else _refuse_failed_verdict
    opened = (
        _merged_weights(address, base, proven, options, reporter)
        if is_adapter
        else _opened_weights(ConversionSource(address, options, vocab_size), proven, options, reporter)
    )
    with opened as (weights, origin):
        chosen = _choose_dtype(weights, dtype, place, reporter)
        words = find_tokenizer(address, "hf", tokenizer=tokenizer, options=options) if is_adapter else None
        words = words or find_tokenizer(origin.address, origin.format, tokenizer=tokenizer, options=options)
        _compare_vocabularies(words, weights.config, reporter)
        chunk = _load_weights(weights, chosen, place, reporter)
    return LoadedModel(model_name(address), address, origin.format, chunk, words)


def build_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderStage:
    """Lay out a whole decoder without memory, with its tables of positions on the device."""
    spec = DecoderStageSpec(range(config.layers), True, True, config.max_positions, dtype, device)
    scale = LossNormalization(torch.ones(()), torch.ones(()))
    with torch.device("meta"):
        return DecoderStage(config, ParallelAxes(), spec, Regularization(), scale).to(dtype).requires_grad_(False)


@contextmanager
def _opened_weights(
    origin: ConversionSource, proven: _VerdictCheck, options: StoreOptions | None, reporter: Reporter
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open weights; those elsewhere are fetched first."""
    with origin.opened(_download_folder(origin.pinned), reporter) as weights:
        proven(origin.address, options)
        yield weights, origin


@contextmanager
def _merged_weights(
    adapter: str, base: str | None, proven: _VerdictCheck, options: StoreOptions | None, reporter: Reporter
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open the weights that an adapter and its base are together."""
    folder = local_folder(adapter)
    with tempfile.TemporaryDirectory(prefix="trainshed-adapter-") as made:
        origin = ConversionSource(base or _adapter_base(folder, reporter), options)
        with _opened_weights(origin, proven, options, reporter):
            merge_adapter(local_folder(origin.address), folder, Path(made) / folder.name, reporter=reporter)
        merged = ConversionSource(str(Path(made) / folder.name), options)
        with merged.opened(Path(made), reporter) as weights:
            yield weights, merged


def _adapter_base(adapter: Path, reporter: Reporter) -> str:
    """Where the base of an adapter is: PEFT keeps a path, or a name on the Hub."""
    named = LoraAdapterConfig.read(adapter).base
    if not named:
        raise InputError("the adapter does not say what it was trained on", where=str(adapter), hint="write --base")
    found = named if Path(named).expanduser().is_dir() else f"hf://{named}"
    reporter.note(f"the adapter says that its base is {found}")
    return found


def _download_folder(address: str) -> Path:
    """Where weights that are fetched stay, so that they are fetched once."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainshed" / "weights" / hashlib.sha256(address.encode()).hexdigest()[:16]


def _refuse_failed_verdict(address: str, options: StoreOptions | None) -> None:
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


def _choose_device(wanted: str | None) -> torch.device:
    """The device that is asked for; otherwise a GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if wanted is not None and wanted not in known:
        raise InputError(f"there is no device `{wanted}` here", hint=f"write one of {', '.join(known)}")
    return torch.device(wanted or ("cuda" if gpus else "cpu"))


def _accept_any_verdict(address: str, options: StoreOptions | None) -> None:
    """What somebody wants who tries weights all the same."""


def _choose_dtype(
    weights: Weights, wanted: ServingDtype | None, device: torch.device, reporter: Reporter
) -> torch.dtype:
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


def _compare_vocabularies(words: ChatTokenizer | None, config: ModelConfig, reporter: Reporter) -> None:
    known = 0 if words is None else words.tokenizer.vocab_size
    if known > config.vocab_size:
        reporter.warn(
            f"the tokenizer has {known:,} tokens and the model knows {config.vocab_size:,}: it may be another model's"
        )


def _load_weights(weights: Weights, dtype: torch.dtype, device: torch.device, reporter: Reporter) -> DecoderStage:
    """Read every tensor onto the device."""
    chunk = build_decoder(weights.config, dtype, device)
    table = list(parameters(weights.config))
    state: dict[str, torch.Tensor] = {}
    total = sum(parameter.size * dtype.itemsize for parameter in table)
    with reporter.task("loading", total=total, unit="B") as task, ThreadPoolExecutor(_READ_THREADS) as pool:
        read = pool.map(lambda each: weights.read(each, (0,) * len(each.shape), each.shape, dtype).to(device), table)
        for parameter, tensor in zip(table, read, strict=True):
            state[parameter.name] = tensor
            task.advance(tensor.nbytes)
    chunk.load_state_dict(state, assign=True)
    put_gates_first(chunk)
    return chunk.eval()


_RECIPE_FILE, _PREPARED_FILE = "recipe.yaml", "prepared.json"


def find_tokenizer(
    address: str, format: WeightsFormat, *, tokenizer: str | None = None, options: StoreOptions | None = None
) -> ChatTokenizer | None:
    """Return the words of weights: of the tokenizer that is named, else the one beside them, else their run's."""
    if tokenizer is not None:
        return _read_tokenizer(tokenizer, "hf", options, must=True)
    for home in _tokenizer_folders(address):
        found = _read_tokenizer(home, format, options)
        if found is not None:
            return found
    run = _run_folder(address)
    tokenizer = None if run is None else _run_tokenizer(run)
    return None if tokenizer is None else _read_tokenizer(tokenizer, "hf", options)


def model_name(address: str) -> str:
    """Return what weights are called: as the run that trained them, else as the folder they lie in."""
    run = _run_folder(address)
    if run is not None:
        with plugins_not_run():
            return load_recipe(str(run / _RECIPE_FILE)).name
    return parse(address).path.rstrip("/").rpartition("/")[2] or address


def _read_tokenizer(
    address: str, format: str, options: StoreOptions | None, *, must: bool = False
) -> ChatTokenizer | None:
    """The words in a folder; a lone tokenizer.json is in one, too."""
    if address.endswith("tokenizer.json"):
        address = address.removesuffix("tokenizer.json").rstrip("/") or "."
    files = read_companions(address, format, tokenizer=address if must else None, options=options)
    return ChatTokenizer(address, files) if has_tokenizer(files) else None


def _tokenizer_folders(address: str) -> Iterator[str]:
    """Where what goes with weights may lie: one step of a checkpoint shares it with the others."""
    yield address
    if parse(address).scheme == "file":
        folder = Path(os.path.abspath(str(parse(address))))
        if folder.name.startswith("step-"):
            yield from (str(each) for each in folder.parents[1:2])
        elif folder.name == "release" or folder.name.startswith("iter_"):
            yield str(folder.parent)


def _run_folder(address: str) -> Path | None:
    """The folder of the run that weights belong to: its own, or one that they (an export, a checkpoint) lie in."""
    if parse(address).scheme != "file":
        return None
    folder = Path(os.path.abspath(str(parse(address))))
    return next((each for each in (folder, *folder.parents[:2]) if (each / _RECIPE_FILE).is_file()), None)


def _run_tokenizer(run: Path) -> str | None:
    """Where the tokenizer of a run is: where its recipe says, or where its tokens say that it was learned."""
    with plugins_not_run():
        recipe: Recipe = load_recipe(str(run / _RECIPE_FILE))
    if isinstance(recipe.tokenizer, str):
        return recipe.tokenizer
    if not (run / _PREPARED_FILE).is_file():
        return None
    data = PreparedData.from_plain(orjson.loads((run / _PREPARED_FILE).read_bytes())["data"])
    for prefix in (prefix for source in data.sources for prefix in source.prefixes):
        manifest = read_token_manifest(_local_artefact(prefix, run))
        if manifest is not None:
            return _local_artefact(manifest.tokenizer, run)
    return None


def _local_artefact(path: str, run: Path) -> str:
    """A path of an artefact, which a run may have written as seen from where it was started."""
    if parse(path).scheme != "file" or Path(path).is_absolute() or "artefacts" not in Path(path).parts:
        return path
    parts = Path(path).parts
    return str(run.parents[2].joinpath(*parts[len(parts) - 1 - parts[::-1].index("artefacts") :]))

"""Load a model that can generate, from weights in any format: a transformers folder, a run, Megatron's, an adapter.

An adapter alone (PEFT's folder, a LoRA run) is merged into its base in memory. Several adapters by name stay beside one
copy of the base (`adapters.py`). Tokenizer and name come from beside the weights or from the run that trained them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import torch

from trainshed.checkpoints.convert.source import ConversionSource
from trainshed.checkpoints.formats import WeightsFormat
from trainshed.checkpoints.hf.companion_files import has_tokenizer, read_companions
from trainshed.checkpoints.lora.adapted_weights import AdaptedWeights, refuse_another_base
from trainshed.checkpoints.lora.adapter import LoraAdapter
from trainshed.checkpoints.lora.checkpoint_spec import run_folder_of
from trainshed.checkpoints.lora.find import (
    adapter_base,
    is_adapter,
    local_adapter,
    open_adapter,
    trained_config,
    with_rows_of,
)
from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict, read_verdict
from trainshed.checkpoints.weights import Weights, stored_dtype
from trainshed.data.prompts import chat_format
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.data.tokens.token_source import RunTokens
from trainshed.errors import InputError, NotFound, TokenizerError
from trainshed.models.cached_decoder import CachedDecoder, PerSequenceAttention, SequenceSpan, put_gates_first
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import DecoderStage, DecoderStageSpec, LossNormalization, Regularization
from trainshed.models.parameters import parameter_count, parameters
from trainshed.plugins import plugins_not_run
from trainshed.recipe import ModelConfig, Recipe, load_recipe
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import PREPARED_FILE, RECIPE_FILE, read_prepared, step_number, store_of
from trainshed.serve.adapters import AdapterBank, refuse_unserved
from trainshed.serve.generate import GenerationOutput, generate_text
from trainshed.serve.kv_cache import choose_limits
from trainshed.serve.request import SamplingParams
from trainshed.serve.scheduler import ModelGenerator, OutputText
from trainshed.serve.tokenizer import ChatTokenizer
from trainshed.storage import StoreOptions, open_folder, parse

ServingDtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READ_THREADS = 4
_VerdictCheck = Callable[[str, StoreOptions | None], None]
"""Checks the verdict that is stored beside weights."""


@dataclass(frozen=True)
class LoadedAdapters:
    """The adapters beside a model, and the tokenizers that they bring (None: the model's own)."""

    bank: AdapterBank
    tokenizers: Mapping[str, ChatTokenizer | None]


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with its tokenizer (None if there is none) and the adapters that requests may name."""

    name: str
    address: str
    format: WeightsFormat
    decoder: DecoderStage
    tokenizer: ChatTokenizer | None
    adapters: LoadedAdapters | None = None

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.decoder.config

    def encode(self, prompt: str | Sequence[int], *, chat: bool = False) -> list[int]:
        """Return the tokens of a prompt; with `chat` it is what a user says, in the words of the chat template."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise no_tokenizer(self.address, self.format)
        try:
            prompt.encode()
        except UnicodeEncodeError:  # bytes of a command line, or half of a surrogate pair
            raise InputError("the prompt is not UTF-8", hint="write it as UTF-8") from None
        return (
            self.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else self.tokenizer.encode(prompt)
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        chat: bool = False,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> GenerationOutput:
        """Go on with a text or with token ids, or answer in a chat; by default always the likeliest token."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop),
            ignore_eos=ignore_eos,
        )
        return generate_text(self, self.encode(prompt, chat=chat), sampling)

    def logits(self, prompt: str | Sequence[int]) -> torch.Tensor:
        """Return what the model gives each token of the vocabulary after each token of a prompt, in fp32: [S, V]."""
        tokens = self.encode(prompt)
        if not 0 < len(tokens) <= self.config.max_positions:
            raise InputError(
                f"{len(tokens):,} tokens, and {self.name} takes 1 to {self.config.max_positions:,}",
                hint="cut the prompt into parts",
            )
        with torch.inference_mode():
            rows = torch.tensor([tokens, range(len(tokens))], device=self.decoder.spec.device)
            ids, positions = rows.unbind(0)
            cached = CachedDecoder(self.decoder, len(tokens))
            attention = PerSequenceAttention([SequenceSpan(0, len(tokens), 0, len(tokens))])
            table_rows = torch.tensor(cached.table_rows(range(len(tokens)), len(tokens)), device=ids.device)
            return cached.logits(cached.hidden(ids, positions, positions, attention, table_rows=table_rows))

    def generator(
        self,
        *,
        max_sequences: int | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        eager: bool = False,
        reporter: Reporter = SILENT,
    ) -> ModelGenerator:
        """Start a generator; limits that are not given are chosen by the free memory, and reported."""
        spec = self.decoder.spec
        limits = choose_limits(
            self.config,
            spec.dtype,
            spec.device,
            max_sequences=max_sequences,
            max_length=max_length,
            cache_tokens=cache_tokens,
            reporter=reporter,
        )
        tokenizer, adapters = self.tokenizer, self.adapters
        own = {} if adapters is None else adapters.tokenizers
        return ModelGenerator(
            self.decoder,
            limits,
            decode=None if tokenizer is None else tokenizer.decode_plain,
            eos_tokens=frozenset() if tokenizer is None else tokenizer.eos_tokens,
            adapters=None if adapters is None else adapters.bank,
            adapter_texts={
                name: OutputText(words.decode_plain, words.eos_tokens)
                for name, words in own.items()
                if words is not None
            },
            eager=eager,
            reporter=reporter,
        )


def load_model(
    address: str,
    *,
    name: str | None = None,
    dtype: ServingDtype | None = None,
    device: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
    adapters: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
    ignore_verdict: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> LoadedModel:
    """Load the model at an address, in any format that is known and from any store.

    `name` is what requests call it (default: the name of its run, else of its folder). Without a `dtype` weights are as
    stored on a GPU, and fp32 on a CPU. `tokenizer` names another one than that beside the weights, `base` the weights
    that a LoRA adapter belongs to. Weights with a failed verdict are refused.

    `adapters` are the addresses of LoRA adapters over the same weights, by the names that requests call them. Where the
    model is an adapter itself it becomes one of them, and the base alone is called `NAME-base`.
    """
    torch_device = _choose_device(device)
    name = name or model_name(address)
    places, alone = dict(adapters or {}), is_adapter(address, options)
    if base is not None and not alone:
        raise InputError(
            "--base is for a LoRA adapter, and these are whole weights", where=address, hint="leave it out"
        )
    if name in places:
        raise InputError(
            f"the model and an adapter are both called `{name}`", hint="give one of them another name with --name"
        )
    if places and alone:
        places = {name: address, **places}
        config = None if base is not None else trained_config(address, options)
        base = base or adapter_base(address, downloads=_downloads(), options=options, reporter=reporter)
        address, name, alone = base, f"{name}-base", False
    else:
        config = None
    proven = _accept_any_verdict if ignore_verdict else _refuse_failed_verdict
    opened = (
        _adapted_weights(address, base, proven, options, reporter)
        if alone
        else _opened_weights(ConversionSource(address, options, vocab_size), config, proven, options, reporter)
    )
    with opened as (weights, origin):
        chosen = _choose_dtype(weights, dtype, torch_device, reporter)
        chat_tokenizer = _adapter_tokenizer(address, tokenizer, options, reporter) if alone else None
        chat_tokenizer = chat_tokenizer or find_tokenizer(
            origin.address, origin.format, tokenizer=tokenizer, options=options
        )
        _compare_vocabularies(chat_tokenizer, weights.config, reporter)
        named = {
            other: _open_named_adapter(other, place, weights, proven, options, reporter)
            for other, place in places.items()
        }
        decoder = _load_weights(weights, chosen, torch_device, reporter)
    loaded = None
    if named:
        own = {other: _adapter_tokenizer(place, tokenizer, options, reporter) for other, place in places.items()}
        for words in own.values():
            _compare_vocabularies(words, decoder.config, reporter)
        loaded = LoadedAdapters(AdapterBank(decoder, named), own)
    return LoadedModel(name, address, origin.format, decoder, chat_tokenizer, loaded)


def build_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderStage:
    """Build a whole decoder on the meta device, with its tables of positions on the real one."""
    config = config.with_mtp_layers(0)  # an answer is computed by the layers before
    spec = DecoderStageSpec(range(config.layers), True, True, config.max_positions, dtype, device)
    normalization = LossNormalization(torch.ones(()), torch.ones(()))
    with torch.device("meta"):
        return (
            DecoderStage(config, ParallelAxes(), spec, Regularization(), normalization).to(dtype).requires_grad_(False)
        )


@contextmanager
def _opened_weights(
    origin: ConversionSource,
    config: ModelConfig | None,
    proven: _VerdictCheck,
    options: StoreOptions | None,
    reporter: Reporter,
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open weights, as their own files describe them or as `config` does; those in another store are fetched first."""
    with origin.open(
        _downloads() / hashlib.sha256(origin.pinned.encode()).hexdigest()[:16], reporter, config
    ) as weights:
        proven(origin.address, options)
        yield weights, origin


@contextmanager
def _adapted_weights(
    adapter: str, base: str | None, proven: _VerdictCheck, options: StoreOptions | None, reporter: Reporter
) -> Iterator[tuple[Weights, ConversionSource]]:
    """Open the base of an adapter with the adapter in it."""
    downloads, config = _downloads(), None
    if base is None:
        base = adapter_base(adapter, downloads=downloads, options=options, reporter=reporter)
        config = trained_config(adapter, options)
    proven(adapter, options)
    with _opened_weights(ConversionSource(base, options), config, proven, options, reporter) as (weights, origin):
        weights = with_rows_of(adapter, weights, downloads=downloads, options=options, reporter=reporter)
        opened = open_adapter(adapter, weights.config, downloads=downloads, options=options, reporter=reporter)
        yield AdaptedWeights(weights, opened), origin


def _open_named_adapter(
    name: str, address: str, weights: Weights, proven: _VerdictCheck, options: StoreOptions | None, reporter: Reporter
) -> LoraAdapter:
    """Open one of several adapters over the same base."""
    proven(address, options)
    adapter = open_adapter(address, weights.config, downloads=_downloads(), options=options, reporter=reporter)
    refuse_unserved(name, adapter)
    refuse_another_base(adapter, weights)
    reporter.note(f"adapter {name}: {address}, rank {adapter.rank}, {len(adapter.adapted)} matrices")
    return adapter


def _adapter_tokenizer(
    address: str, tokenizer: str | None, options: StoreOptions | None, reporter: Reporter
) -> ChatTokenizer | None:
    """Return the tokenizer that an adapter brings: beside it, or that of its run."""
    if tokenizer is not None:
        return find_tokenizer(address, "hf", tokenizer=tokenizer, options=options)
    if open_folder(address, options).head(ADAPTER_CONFIG) is None:
        return find_tokenizer(address, "native", options=options)
    return find_tokenizer(str(local_adapter(address, _downloads(), options, reporter)), "hf", options=options)


def _downloads() -> Path:
    """Return where fetched weights are kept, so that they are fetched once."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainshed" / "weights"


def _refuse_failed_verdict(address: str, options: StoreOptions | None) -> None:
    """Refuse weights whose verdict says that they differ from their source."""
    if parse(address).scheme == "file":
        verdict = read_verdict(Path(str(parse(address))))
    else:
        try:
            verdict = Verdict.from_bytes(open_folder(address, options).read(VERDICT), f"{address}/{VERDICT}")
        except NotFound:
            verdict = None
    if verdict is not None and not verdict.passed:
        raise InputError(
            f"these weights failed the proof of their conversion: {'; '.join(verdict.lines())}",
            where=address,
            hint="convert them again, or write --ignore-verdict to try them all the same",
        )


def _choose_device(wanted: str | None) -> torch.device:
    """Return the requested device, or else a GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if wanted is not None and wanted not in known:
        raise InputError(f"there is no device `{wanted}` here", hint=f"write one of {', '.join(known)}")
    return torch.device(wanted or ("cuda" if gpus else "cpu"))


def _accept_any_verdict(address: str, options: StoreOptions | None) -> None:
    """Accept weights whatever their verdict, for `--ignore-verdict`."""


def _choose_dtype(
    weights: Weights, wanted: ServingDtype | None, device: torch.device, reporter: Reporter
) -> torch.dtype:
    if wanted is not None:
        return DTYPES[wanted]
    stored = reduce(torch.promote_types, (getattr(torch, name) for name in weights.dtypes))
    chosen = torch.float32 if device.type == "cpu" or stored not in DTYPES.values() else stored
    named = next(name for name, dtype in DTYPES.items() if dtype == chosen)
    reporter.note(
        f"{parameter_count(weights.config):,} weights in {named} on {device.type} "
        f"(stored in {' and '.join(weights.dtypes)}; --dtype changes it)"
    )
    return chosen


def _compare_vocabularies(chat_tokenizer: ChatTokenizer | None, config: ModelConfig, reporter: Reporter) -> None:
    known = 0 if chat_tokenizer is None else chat_tokenizer.tokenizer.vocab_size
    if known > config.vocab_size:
        reporter.warn(
            f"the tokenizer has {known:,} tokens and the model knows {config.vocab_size:,}: it may be another model's"
        )


def _load_weights(weights: Weights, dtype: torch.dtype, device: torch.device, reporter: Reporter) -> DecoderStage:
    """Read every tensor onto the device."""
    decoder = build_decoder(weights.config, dtype, device)
    table = list(parameters(decoder.config))
    state: dict[str, torch.Tensor] = {}
    total = sum(parameter.size * dtype.itemsize for parameter in table)
    with reporter.task("loading", total=total, unit="B") as task, ThreadPoolExecutor(_READ_THREADS) as pool:
        read = pool.map(
            lambda parameter: weights.read(
                parameter, (0,) * len(parameter.shape), parameter.shape, stored_dtype(parameter, dtype)
            ).to(device),
            table,
        )
        for parameter, tensor in zip(table, read, strict=True):
            state[parameter.name] = tensor
            task.advance(tensor.nbytes)
    decoder.load_state_dict(state, assign=True)
    put_gates_first(decoder)
    return decoder.eval()


@dataclass(frozen=True)
class RunTokenizerFolder:
    """The folder of a run's tokenizer; the chat template of its conversations, and the tokens that end an answer."""

    folder: str
    chat_template: str | None
    end_tokens: Sequence[int]


def find_tokenizer(
    address: str, format: WeightsFormat, *, tokenizer: str | None = None, options: StoreOptions | None = None
) -> ChatTokenizer | None:
    """Return the tokenizer of weights: the one that is named, else the one beside them, else that of their run."""
    if tokenizer is not None:
        return _read_tokenizer(tokenizer, "hf", options, must=True)
    for folder in _tokenizer_folders(address):
        beside = _read_tokenizer(folder, format, options)
        if beside is not None:
            return beside
    run = run_folder_of(address)
    return None if run is None else _run_tokenizer(run, options)


def no_tokenizer(address: str, format: WeightsFormat) -> TokenizerError:
    """Return the error for weights whose tokenizer is not found, by their address as it may be shown."""
    how = "--tokenizer FOLDER (or hf://org/name); in Python `load_model(…, tokenizer=…)`"
    if format == "gguf":
        return TokenizerError(
            "the tokenizer inside a GGUF file is not read back, only its weights",
            where=address,
            hint=f"name that of the model it was converted from: {how}",
        )
    return TokenizerError("there is no tokenizer beside these weights", where=address, hint=f"write {how}")


def run_tokenizer_folder(address: str, options: StoreOptions | None = None) -> RunTokenizerFolder | None:
    """Return the tokenizer that an export of a run's checkpoint takes along; None where no folder holds it.

    One with added tokens is in no folder but an export's.
    """
    run = run_folder_of(address)
    if run is None:
        return None
    with plugins_not_run():
        recipe = load_recipe(str(run / RECIPE_FILE))
    folder = None if recipe.model.added_tokens else _run_tokenizer_address(run, recipe)
    own = None if folder is None else _read_tokenizer(folder, "hf", options)
    if folder is None or own is None:
        return None
    return RunTokenizerFolder(folder.removesuffix("tokenizer.json"), *chat_format(recipe, own.tokenizer, options))


def model_name(address: str) -> str:
    """Return the name of weights: that of the run that trained them, else that of their folder."""
    run = run_folder_of(address)
    if run is not None:
        with plugins_not_run():
            return load_recipe(str(run / RECIPE_FILE)).name
    return parse(address).path.rstrip("/").rpartition("/")[2] or address


def _read_tokenizer(
    address: str, format: str, options: StoreOptions | None, *, must: bool = False
) -> ChatTokenizer | None:
    """Read the tokenizer of a folder; the address may also be a tokenizer.json."""
    if address.endswith("tokenizer.json"):
        address = address.removesuffix("tokenizer.json").rstrip("/") or "."
    files = read_companions(address, format, tokenizer=address if must else None, options=options)
    return ChatTokenizer(address, files) if has_tokenizer(files) else None


def _tokenizer_folders(address: str) -> Iterator[str]:
    """Yield the folders that may hold the tokenizer: the checkpoints of a run share one."""
    yield address
    if parse(address).scheme == "file":
        folder = Path(os.path.abspath(str(parse(address))))
        if step_number(folder.name) is not None:
            yield from map(str, folder.parents[1:2])
        elif folder.name == "release" or folder.name.startswith("iter_"):
            yield str(folder.parent)


def _run_tokenizer(run: Path, options: StoreOptions | None) -> ChatTokenizer | None:
    """Return the tokenizer of a run, with the chat template that its conversations were written with."""
    with plugins_not_run():
        recipe: Recipe = load_recipe(str(run / RECIPE_FILE))
    address = _run_tokenizer_address(run, recipe)
    own = None if address is None else _read_tokenizer(address, "hf", options)
    if own is None:
        return None
    if recipe.model.added_tokens and isinstance(recipe.tokenizer, str):
        own = own.with_added_tokens(recipe.model.added_tokens)
    template, end_tokens = chat_format(recipe, own.tokenizer, options)
    return own.with_chat_template(template, end_tokens)


def _run_tokenizer_address(run: Path, recipe: Recipe) -> str | None:
    """Return the address of a run's tokenizer: from its recipe, or from the manifest of its tokens."""
    if isinstance(recipe.tokenizer, str):
        return recipe.tokenizer
    prepared = run / PREPARED_FILE
    if not prepared.is_file():
        return None
    data = RunTokens.from_plain(read_prepared(prepared.read_bytes(), prepared)["data"])
    for prefix in (prefix for source in data.sources for prefix in source.prefixes):
        manifest = read_token_manifest(_local_artefact(prefix, run))
        if manifest is not None:
            return _local_artefact(manifest.tokenizer, run)
    return None


def _local_artefact(path: str, run: Path) -> str:
    """Return the path of an artefact; a run may have stored it relative to where it was started."""
    if parse(path).scheme != "file" or Path(path).is_absolute() or "artefacts" not in Path(path).parts:
        return path
    parts = Path(path).parts
    return str(store_of(run).joinpath(*parts[len(parts) - 1 - parts[::-1].index("artefacts") :]))

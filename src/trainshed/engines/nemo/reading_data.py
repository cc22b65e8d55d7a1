"""Data and tokenizer of a NeMo file as `data` and `tokenizer`."""

from __future__ import annotations

from typing import Any

from trainshed.engines.foreign_settings import ForeignSettings
from trainshed.engines.nemo.reading_model import GPT2_VOCABULARY

_GPT2 = "hf://openai-community/gpt2"
_SECTION = "model.data"


def read_tokenizer(settings: ForeignSettings) -> None:
    """Write `tokenizer`, and the vocabulary where only the tokenizer tells it."""
    library, kind = settings.get("model.tokenizer.library"), settings.get("model.tokenizer.type")
    model = settings.get("model.tokenizer.model")
    config = settings.recipe["model"]["config"]
    if library == "huggingface" and kind:
        address = kind if "://" in kind or kind.startswith(("/", ".")) else f"hf://{kind}"
        settings.take("model.tokenizer.type", "tokenizer", address)
        if "/" not in kind:
            settings.ask(f"model.tokenizer.type is {kind}: write the organisation too, tokenizer: hf://org/{kind}")
        if config["vocab_size"] == GPT2_VOCABULARY:
            settings.ask("the file does not say the size of the vocabulary: write model.config.vocab_size")
    elif kind == "GPT2BPETokenizer":
        settings.take("model.tokenizer.type", "tokenizer", _GPT2)
    else:
        settings.write("tokenizer", _GPT2)
        said = f"{library} {kind or model or ''}".strip()
        settings.ask(f"the tokenizer is {said}: write its address as `tokenizer`, and model.config.vocab_size")
    settings.mapped("model.tokenizer.library", "tokenizer")
    for key in ("vocab_file", "merge_file", "model", "delimiter", "use_fast", "sentencepiece_legacy"):
        settings.drop(f"model.tokenizer.{key}", "files come with the tokenizer's address")
    unpinned = str(settings.recipe["tokenizer"])
    if unpinned.startswith("hf://") and "@" not in unpinned:
        settings.ask(f"no revision is named: pin it, tokenizer: {unpinned}@<commit>")


def read_data(settings: ForeignSettings) -> None:
    """Write `data`: sources, split and validation."""
    length = settings.get(f"{_SECTION}.seq_length") or settings.get("model.encoder_seq_length", 512)
    settings.take("model.encoder_seq_length", "data.sequence_length", length)
    settings.mapped(f"{_SECTION}.seq_length", f"data.sequence_length: {length}")
    settings.drop(f"{_SECTION}.index_mapping_dir", "the index is an artefact of the store")
    if settings.get(f"{_SECTION}.data_impl") == "mock":
        settings.write("data.synthetic", True)
        settings.drop(f"{_SECTION}.data_prefix", "mock data has no files")
        settings.drop(f"{_SECTION}.splits_string", "mock data is not split")
        for key in ("val_check_interval", "limit_val_batches"):
            settings.drop(f"trainer.{key}", "mock data is not validated on")
        return
    _read_prefixes(settings)
    _read_validation(settings)
    if settings.get(f"{_SECTION}.index_mapping_dir"):
        settings.mistake(
            f"{_SECTION}.index_mapping_dir",
            "the sample index is built by the first rank while all GPUs wait, on a file system that all must see",
            "nothing to write: Trainshed keeps it in the run",
        )


def _read_prefixes(settings: ForeignSettings) -> None:
    # A list, which `splits_string` cuts, or a list for each of train, validation and test.
    key = f"{_SECTION}.data_prefix"
    key = f"{key}.train" if f"{key}.train" in settings else key
    prefixes = settings.get(key)
    if not isinstance(prefixes, list) or not prefixes:
        settings.write("data.train", [{"tokens": "corpus_text_document"}])
        settings.ask("the file names no data: write data.train: [{tokens: PREFIX}] or [{path: corpus/*.jsonl}]")
        settings.drop(key, "names no data")
        return
    sources: list[dict[str, Any]] = []
    for weight, prefix in _pairs(prefixes):
        source: dict[str, Any] = {"tokens": _original(settings, str(prefix))}
        sources.append(source if weight is None else source | {"weight": float(weight)})
    total = sum(source.get("weight", 0.0) for source in sources)
    if total and abs(total - 1.0) > 1e-3:
        settings.mistake(key, f"the weights sum to {total:g}", "weights that sum to 1; Trainshed scales them")
    settings.take(key, "data.train", sources)


def _pairs(prefixes: list[Any]) -> list[tuple[Any, Any]]:
    """Return weights and prefixes; None for the weights of a list that has prefixes only."""
    if len(prefixes) % 2 == 0 and _is_number(prefixes[0]):
        return list(zip(prefixes[::2], prefixes[1::2], strict=False))
    return [(None, prefix) for prefix in prefixes]


def _original(settings: ForeignSettings, prefix: str) -> str:
    """Return the address that a local copy of the tokens comes from, where the file says it."""
    cache, local = settings.get(f"{_SECTION}.data_cache_gcs_dir"), settings.get(f"{_SECTION}.data_cache_local_dir")
    if not cache or not local or not prefix.startswith(f"{local.rstrip('/')}/"):
        return prefix
    settings.mapped(f"{_SECTION}.data_cache_gcs_dir", "data.train")
    settings.drop(f"{_SECTION}.data_cache_local_dir", "no copy is made on local disks: tokens are read from the store")
    return f"{cache.rstrip('/')}/{prefix.removeprefix(local.rstrip('/')).lstrip('/')}"


def _read_validation(settings: ForeignSettings) -> None:
    every, batches = settings.get("trainer.val_check_interval"), settings.get("trainer.limit_val_batches")
    steps = settings.get("trainer.max_steps", 0)
    own = settings.get(f"{_SECTION}.data_prefix.validation")
    if own:
        tokens = [_original(settings, str(prefix)) for _, prefix in _pairs(own)]
        settings.take(f"{_SECTION}.data_prefix.validation", "data.validation.tokens", tokens)
        settings.drop(f"{_SECTION}.data_prefix.test", "nothing is tested during training")
        settings.drop(f"{_SECTION}.splits_string", "validation has documents of its own")
    split = None if own else _split(settings.get(f"{_SECTION}.splits_string"))
    documents = bool(own) or (split is not None and split["validation"] > 0)
    validated = documents and isinstance(every, int) and isinstance(batches, int)
    if split is not None:
        settings.take(f"{_SECTION}.splits_string", "data.split", split)
    if not validated:
        if split is not None and split["validation"] > 0:
            # `split` alone would validate at Trainshed's own interval: keep the documents apart, as the file does.
            test = split["test"] + split["validation"]
            settings.write("data.split", {"train": split["train"], "test": round(test, 6)})
        settings.drop("trainer.val_check_interval", "nothing is validated")
        settings.drop("trainer.limit_val_batches", "nothing is validated")
        return
    settings.take("trainer.val_check_interval", "data.validation.every", every)
    settings.take("trainer.limit_val_batches", "data.validation.batches", batches)
    if steps and every > steps:
        settings.mistake(
            "trainer.val_check_interval",
            f"{every} is more than the {steps} steps of the run: the loss is never measured on other documents",
            "a smaller data.validation.every",
        )


def _split(text: Any) -> dict[str, float] | None:
    try:
        parts = [float(part) for part in str(text).split(",")]
    except ValueError:
        return None
    total = sum(parts)
    if len(parts) != 3 or total <= 0 or parts[0] <= 0:
        return None
    return {name: round(part / total, 6) for name, part in zip(("train", "validation", "test"), parts, strict=True)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True

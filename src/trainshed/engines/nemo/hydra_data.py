"""Data and tokenizer in NeMo 24.07's Hydra file: functions of both directions, for the rows of `hydra_keys.py`."""

from __future__ import annotations

from typing import Any

from trainshed.engines.importing import GPT2_TOKENIZER, GPT2_VOCABULARY, ConfigImport
from trainshed.engines.key_table import OMIT
from trainshed.engines.keys import format_value
from trainshed.engines.launch import EngineTask
from trainshed.recipe import Recipe

_GPT2_TOKENIZER_NAME = "gpt2"
"""The Hub's name of the tokenizer that NeMo has a class of its own for."""
_SECTION = "model.data"


def is_gpt2(task: EngineTask) -> bool:
    """Whether the recipe's tokenizer is GPT-2's own."""
    name = task.recipe.tokenizer if isinstance(task.recipe.tokenizer, str) else ""
    return name.startswith("hf://") and name.rpartition("/")[2].partition("@")[0] == _GPT2_TOKENIZER_NAME


def is_not_gpt2(task: EngineTask) -> bool:
    """Whether the tokenizer is read from files of the Hub's form."""
    return not is_gpt2(task)


def read_tokenizer(config: ConfigImport) -> str:
    """Return `tokenizer`, and ask for the vocabulary where only the tokenizer tells it."""
    library, kind = config.get("model.tokenizer.library"), config.get("model.tokenizer.type")
    address = GPT2_TOKENIZER
    if library == "huggingface" and kind:
        address = kind if "://" in kind or kind.startswith(("/", ".")) else f"hf://{kind}"
        config.note_mapped(f"tokenizer: {address}", "model.tokenizer.type")
        if "/" not in kind:
            config.ask(f"model.tokenizer.type is {kind}: write the organisation too, tokenizer: hf://org/{kind}")
        if config.recipe["model"]["config"]["vocab_size"] == GPT2_VOCABULARY:
            config.ask("the file does not say the size of the vocabulary: write model.config.vocab_size")
    elif kind == "GPT2BPETokenizer":
        config.note_mapped(f"tokenizer: {address}", "model.tokenizer.type")
    else:
        named = f"{library} {kind or config.get('model.tokenizer.model') or ''}".strip()
        config.ask(f"the tokenizer is {named}: write its address as `tokenizer`, and model.config.vocab_size")
    if address.startswith("hf://") and "@" not in address:
        config.ask(f"no revision is named: pin it, tokenizer: {address}@<commit>")
    return address


def read_length(config: ConfigImport) -> int:
    """Return `data.sequence_length`."""
    length = config.get(f"{_SECTION}.seq_length") or config.get("model.encoder_seq_length", 512)
    config.note_mapped(f"data.sequence_length: {length}", "model.encoder_seq_length", f"{_SECTION}.seq_length")
    return length


READS_MASK = {"model.transformer_engine": False, "model.get_attention_mask_from_fusion": False}
"""With these megatron-core's own attention reads the mask that `reset_attention_mask` makes."""


def reads_mask(config: ConfigImport) -> bool:
    """Whether a file's attention reads the mask that `reset_attention_mask` makes."""
    return all(config.get(key) == value for key, value in READS_MASK.items())


def is_synthetic(config: ConfigImport) -> bool:
    """Whether a file trains on random tokens."""
    return config.get(f"{_SECTION}.data_impl") == "mock"


def read_synthetic(config: ConfigImport) -> Any:
    """Return `data.synthetic`, and drop what is not read with it."""
    if not is_synthetic(config):
        return OMIT
    config.drop("mock data has no files", f"{_SECTION}.data_prefix")
    config.drop("mock data is not split", f"{_SECTION}.splits_string")
    config.drop("mock data is not validated on", "trainer.val_check_interval", "trainer.limit_val_batches")
    return True


def split_text(recipe: Recipe) -> str | None:
    """Return the parts of one corpus; None where validation has documents of its own and prefixes are by split."""
    split = recipe.data.split
    if split is None:
        own = recipe.data.validation is not None and recipe.data.validation.kind is not None
        return None if own else "100,0,0"
    return ",".join(f"{100 * part:g}" for part in (split.train, split.validation, split.test))


def read_split(text: Any) -> dict[str, float] | None:
    """Read the parts of one corpus, None where there is one part only."""
    try:
        parts = [float(part) for part in str(text).split(",")]
    except ValueError:
        return None
    total = sum(parts)
    if len(parts) != 3 or total <= 0 or parts[0] <= 0:
        return None
    return {name: round(part / total, 6) for name, part in zip(("train", "validation", "test"), parts, strict=True)}


def read_prefixes(config: ConfigImport) -> Any:
    """Return `data.train`."""
    if is_synthetic(config):
        return OMIT
    # A list, which `splits_string` cuts, or a list for each of train, validation and test.
    key = f"{_SECTION}.data_prefix"
    key = f"{key}.train" if f"{key}.train" in config else key
    prefixes = config.get(key)
    if not isinstance(prefixes, list) or not prefixes:
        config.ask("the file names no data: write data.train: [{tokens: PREFIX}] or [{path: corpus/*.jsonl}]")
        config.drop("names no data", key)
        return [{"tokens": "corpus_text_document"}]
    sources: list[dict[str, Any]] = []
    for weight, prefix in _weights_and_prefixes(prefixes):
        source: dict[str, Any] = {"tokens": _source_address(config, str(prefix))}
        sources.append(source if weight is None else source | {"weight": float(weight)})
    total = sum(source.get("weight", 0.0) for source in sources)
    if total and abs(total - 1.0) > 1e-3:
        config.add_mistake(key, f"the weights sum to {total:g}", "weights that sum to 1; Trainshed scales them")
    config.note_mapped(f"data.train: {format_value(sources)}", key)
    return sources


def _weights_and_prefixes(prefixes: list[Any]) -> list[tuple[Any, Any]]:
    """Return weights and prefixes; None for the weights of a list that has prefixes only."""
    if prefixes and len(prefixes) % 2 == 0 and _is_number(prefixes[0]):
        return list(zip(prefixes[::2], prefixes[1::2], strict=False))
    return [(None, prefix) for prefix in prefixes]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _source_address(config: ConfigImport, prefix: str) -> str:
    """Return the address that a local copy of the tokens comes from, where the file says it."""
    cache, local = config.get(f"{_SECTION}.data_cache_gcs_dir"), config.get(f"{_SECTION}.data_cache_local_dir")
    if not cache or not local or not prefix.startswith(f"{local.rstrip('/')}/"):
        return prefix
    config.note_mapped("data.train", f"{_SECTION}.data_cache_gcs_dir")
    config.drop("no copy is made on local disks: tokens are read from the store", f"{_SECTION}.data_cache_local_dir")
    return f"{cache.rstrip('/')}/{prefix.removeprefix(local.rstrip('/')).lstrip('/')}"


def _measured(config: ConfigImport) -> tuple[Any, Any] | None:
    """Return how often and how long the loss is measured, None where it is not."""
    every, batches = config.get("trainer.val_check_interval"), config.get("trainer.limit_val_batches")
    split = read_split(config.get(f"{_SECTION}.splits_string"))
    documents = config.get(f"{_SECTION}.data_prefix.validation") or (split is not None and split["validation"] > 0)
    return (every, batches) if documents and isinstance(every, int) and isinstance(batches, int) else None


def read_documents(config: ConfigImport) -> Any:
    """Return `data.split`."""
    if is_synthetic(config) or config.get(f"{_SECTION}.data_prefix.validation"):
        config.drop("validation has documents of its own", f"{_SECTION}.splits_string")
        return OMIT
    split = read_split(config.get(f"{_SECTION}.splits_string"))
    if split is None or split["train"] == 1:
        return OMIT
    if _measured(config) is None:
        # `split` alone would validate at Trainshed's own interval: keep the documents apart, as the file does.
        return {"train": split["train"], "test": round(split["test"] + split["validation"], 6)}
    return split


def read_validation(config: ConfigImport) -> Any:
    """Return `data.validation`."""
    if is_synthetic(config):
        return OMIT
    own = config.get(f"{_SECTION}.data_prefix.validation")
    tokens = [_source_address(config, str(prefix)) for _, prefix in _weights_and_prefixes(own or [])]
    if own:
        config.note_mapped(f"data.validation.tokens: {format_value(tokens)}", f"{_SECTION}.data_prefix.validation")
        config.drop("nothing is tested during training", f"{_SECTION}.data_prefix.test")
    if (measured := _measured(config)) is None:
        config.drop("nothing is validated", "trainer.val_check_interval", "trainer.limit_val_batches")
        return OMIT
    every, batches = measured
    config.note_mapped(f"data.validation.every: {every}", "trainer.val_check_interval")
    config.note_mapped(f"data.validation.batches: {batches}", "trainer.limit_val_batches")
    steps = config.get("trainer.max_steps", 0)
    if steps and every > steps:
        config.add_mistake(
            "trainer.val_check_interval",
            f"{every} is more than the {steps} steps of the run: the loss is never measured on other documents",
            "a smaller data.validation.every",
        )
    return ({"tokens": tokens} if own else {}) | {"every": every, "batches": batches}


def note_index(config: ConfigImport) -> None:
    """Note that the index of samples is built while all GPUs wait."""
    if config.get(f"{_SECTION}.index_mapping_dir") and not is_synthetic(config):
        config.add_mistake(
            f"{_SECTION}.index_mapping_dir",
            "the sample index is built by the first rank while all GPUs wait, on a file system that all must see",
            "nothing to write: Trainshed keeps it in the run",
        )

"""Chat data in the words of torchtune: where it lies (the recipe says), and what form it has (`engine.args` says)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from trainshed.engines.engine_arguments import Setting
from trainshed.recipe import DataSection, Recipe
from trainshed.recipe.data import TEXT_DEFAULTS, SourceKeys, ValidationSource
from trainshed.recipe.places import KeyPath
from trainshed.recipe.section import Problem

_ROOM = "torchtune.datasets"
FORMS = {
    f"{_ROOM}.chat_dataset": ("source", "conversation_column", "conversation_style"),
    f"{_ROOM}.instruct_dataset": ("source",),
    f"{_ROOM}.alpaca_dataset": ("source",),
    f"{_ROOM}.alpaca_cleaned_dataset": ("source",),
}
"""The components that fine-tune on answers, and the keys that each must be given."""
STYLES = ("openai", "sharegpt")
HUB = "hf://datasets/"
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HOW_TO_SAY = (
    "engine.args: {dataset.conversation_style: openai, dataset.conversation_column: messages} (or sharegpt, "
    "conversations), or {dataset._component_: torchtune.datasets.instruct_dataset} (input, output), or "
    "{dataset._component_: torchtune.datasets.alpaca_dataset} (instruction, input, output)"
)


def form_of(recipe: Recipe) -> str | None:
    """Return the component that reads the data, None where nobody said its form."""
    said = recipe.engine.args.get("dataset._component_")
    if isinstance(said, str):
        return said
    return f"{_ROOM}.chat_dataset" if "dataset.conversation_style" in recipe.engine.args else None


def dataset_settings(recipe: Recipe) -> Iterator[Setting]:
    """Yield the keys of the data to train on and, where there is any, to validate on."""
    data, form = recipe.data, form_of(recipe)
    yield Setting("dataset._component_", form, "the form of the data")
    yield from _source("dataset", data.train[0], "data.train")
    # The recipe's fine-tuning: loss on the answers only. alpaca_dataset would train on prompts if not told.
    yield Setting("dataset.train_on_input", False, "train.mode")
    yield Setting("dataset.split", _share(data, "train"), "data.split")
    if data.validation is None:
        yield Setting("run_val_every_n_steps", None, "data.validation")
        return
    yield Setting("run_val_every_n_steps", data.validation.every, "data.validation.every")
    yield Setting("dataset_val._component_", form, "the form of the data")
    own = data.validation if data.validation.kind is not None else data.train[0]
    yield from _source("dataset_val", own, "data.validation")
    yield Setting("dataset_val.train_on_input", False, "train.mode")
    yield Setting("dataset_val.split", _share(data, "validation"), "data.split")


def dataset_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what torchtune cannot read."""
    data, form = recipe.data, form_of(recipe)
    if data.synthetic:
        yield Problem(("data",), "torchtune has no synthetic data", "write data.train: {path: hf://datasets/…}")
        return
    if len(data.train) > 1:
        yield Problem(("data", "train", 1), "torchtune is rendered for one source", "join them into one file")
    sources: list[tuple[SourceKeys, tuple[str | int, ...]]] = [(data.train[0], ("data", "train", 0))]
    if data.validation is not None and data.validation.kind is not None:
        sources.append((data.validation, ("data", "validation")))
    for source, path in sources:
        yield from _source_problems(source, path)
    yield from _unread(data)
    if data.split is not None and any(100 * part % 1 > 1e-9 for part in (data.split.train, data.split.validation)):
        yield Problem(("data", "split"), "torchtune cuts data at whole percents", "{train: 0.95, validation: 0.05}")
    if form is None:
        yield Problem(("engine", "args"), "torchtune must be told what form the chat data has", HOW_TO_SAY)
    elif form not in FORMS:
        yield Problem(
            ("engine", "args", "dataset._component_"), f"{form} is not known here", f"one of {', '.join(FORMS)}"
        )
    else:
        missing = [key for key in FORMS[form][1:] if f"dataset.{key}" not in recipe.engine.args]
        if missing:
            yield Problem(("engine", "args"), f"{form} needs dataset.{missing[0]}", HOW_TO_SAY)
    style = recipe.engine.args.get("dataset.conversation_style")
    if style is not None and style not in STYLES:
        yield Problem(
            ("engine", "args", "dataset.conversation_style"), f"`{style}` is not a style", " or ".join(STYLES)
        )


def _unread(data: DataSection) -> Iterator[Problem]:
    """Yield the keys by which text becomes tokens: torchtune does that itself, in the form that `engine.args` says."""
    usual = DataSection.model_fields
    for key in ("shards", "eod", "bos", "on_bad_line"):
        if getattr(data, key) != usual[key].default:
            yield Problem(("data", key), "torchtune tokenises by itself, and does not read it", "delete it")
    sources: list[tuple[KeyPath, SourceKeys]] = [(("data", "train", n), source) for n, source in enumerate(data.train)]
    if data.validation is not None:
        sources.append((("data", "validation"), data.validation))
    for path, source in sources:
        for key in ("key", "documents", "name"):
            if getattr(source, key) not in (None, TEXT_DEFAULTS.get(key)):
                what = "torchtune finds its data by the form that `engine.args` says, and does not read it"
                yield Problem((*path, key), what, "delete it")
    if data.validation is not None and data.validation.batches != ValidationSource.model_fields["batches"].default:
        what = "torchtune validates on all of the validation data, not on `batches` of it"
        yield Problem(("data", "validation", "batches"), what, "delete it")


def _source_problems(source: SourceKeys, path: tuple[str | int, ...]) -> Iterator[Problem]:
    hint = "write path: hf://datasets/org/name, or the path of a .jsonl file that every node sees"
    if source.path is None:
        yield Problem(path, "torchtune reads chat data itself: neither tokens nor a script", hint)
        return
    if source.format is not None:
        yield Problem((*path, "format"), "torchtune tells formats by the names of files", "delete it")
    for address in source.path:
        if "://" in address and not address.startswith(HUB):
            yield Problem((*path, "path"), f"torchtune cannot read {address}", hint)
        elif "://" not in address and PurePosixPath(address).suffix not in _READERS:
            known = ", ".join(_READERS)
            yield Problem((*path, "path"), f"torchtune cannot read {address}", f"write one of {known}")
    if len(source.path) > 1 and any(address.startswith(HUB) for address in source.path):
        yield Problem((*path, "path"), "torchtune reads one dataset of the Hub", "write one address")


def _source(section: str, source: SourceKeys, key: str) -> Iterator[Setting]:
    addresses = list(source.path or ())
    if addresses and addresses[0].startswith(HUB):
        name, _, revision = addresses[0].removeprefix(HUB).partition("@")
        revision, _, inside = revision.partition("/")
        org_name = "/".join(name.split("/")[:2])
        inside = inside or "/".join(name.split("/")[2:])
        yield Setting(f"{section}.source", org_name, key)
        if revision:
            yield Setting(f"{section}.revision", revision, key)
        if inside:
            yield Setting(f"{section}.data_files", inside, key)
        return
    yield Setting(f"{section}.source", _READERS.get(PurePosixPath(addresses[0]).suffix), key)
    files: Any = addresses[0] if len(addresses) == 1 else addresses
    yield Setting(f"{section}.data_files", files, key)


def _share(data: DataSection, part: str) -> str:
    if data.split is None or (data.validation is not None and data.validation.kind is not None):
        return "train"
    first = round(100 * data.split.train)
    last = first + round(100 * data.split.validation)
    if part == "train":
        return f"train[:{first}%]" if first < 100 else "train"
    return f"train[{first}%:]" if last >= 100 else f"train[{first}%:{last}%]"

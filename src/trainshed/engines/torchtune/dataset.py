"""The data of a torchtune configuration: the component that reads it, its source, columns, split and validation.

Functions of both directions, for the rows of `keys.py`, and what torchtune cannot read. A `dataset` section may read a
dataset of the Hub or files; `data.format` says which component does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import OMIT
from trainshed.engines.launch import EngineTask
from trainshed.recipe import DataSection, Recipe
from trainshed.recipe.data import TEXT_DEFAULTS, SourceKeys, ValidationSource
from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import KeyPath

FOLLOWS_VALIDATION = "follows data.validation"
_DATASETS = "torchtune.datasets"
COMPONENTS = {form: f"{_DATASETS}.{form}_dataset" for form in ("chat", "instruct", "alpaca")}
"""The components that fine-tune on answers, by `data.format`."""
_READ_COMPONENTS = {component: form for form, component in COMPONENTS.items()} | {
    f"{_DATASETS}.alpaca_cleaned_dataset": "alpaca",
    f"{_DATASETS}.text_completion_dataset": "text",
}
_BUILT_IN_DATASETS = {
    f"{_DATASETS}.alpaca_dataset": "tatsu-lab/alpaca",
    f"{_DATASETS}.alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
}
"""Datasets of the Hub that a component stands for. They train on prompts too, unless they are told not to."""
HUB_DATASETS = "hf://datasets/"
READER_OF_SUFFIX = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

CONVERSATION_STYLES = {"openai": ("role", "content"), "sharegpt": ("from", "value")}
"""What torchtune's styles of conversations call the role and the text of a message."""
_COLUMN_MAPS = {
    "instruct": {"prompt": "input", "answer": "output"},
    "alpaca": {"instruction": "instruction", "input": "input", "output": "output"},
}
"""The recipe's columns to the keys of `column_map`, by `data.format`; torchtune's columns are called as its keys."""
_MAPPED_COLUMNS = ("input", "output", "instruction")


def dataset_keys(section: str) -> tuple[str, ...]:
    """Return the keys of a section that a source of the recipe stands for."""
    columns = ("conversation_column", "conversation_style", *(f"column_map.{key}" for key in _MAPPED_COLUMNS))
    return tuple(f"{section}.{key}" for key in ("source", "revision", "data_files", *columns))


def read_format(config: ConfigImport) -> Any:
    """Return `data.format`, unless it is chat, which fine-tuning reads anyway."""
    component = config.get("dataset._component_", "")
    form = _READ_COMPONENTS.get(component)
    if form is None:
        config.ask(f"the dataset is {component or 'not named'}, which is not read here: data.format is written as chat")
        config.drop("is not read here", "dataset._component_")
        return OMIT
    config.note_mapped(f"data.format: {form}", "dataset._component_")
    return OMIT if form == "chat" else form


def _style(columns: Mapping[str, str]) -> str | None:
    """Return torchtune's style of conversations whose messages have these columns, None where it has none."""
    named = (columns.get("role", "role"), columns.get("content", "content"))
    return next((style for style, names in CONVERSATION_STYLES.items() if names == named), None)


def _render_columns(form: str, source: SourceKeys) -> dict[str, Any]:
    columns = source.columns or {}
    if form == "chat":
        return {"conversation_column": columns.get("messages", "messages"), "conversation_style": _style(columns)}
    if form == "alpaca" and not columns:
        return {}
    return {f"column_map.{theirs}": columns.get(ours, ours) for ours, theirs in _COLUMN_MAPS[form].items()}


def _read_columns(config: ConfigImport, section: str) -> dict[str, str]:
    """Return what the columns of a section are called, where that is not what the recipe calls them."""
    form = _READ_COMPONENTS.get(config.get(f"{section}._component_") or config.get("dataset._component_", ""))
    columns: dict[str, str] = {}
    if form == "chat":
        style = config.get(f"{section}.conversation_style", "openai")
        if style not in CONVERSATION_STYLES:
            config.ask(f"{section}.conversation_style is {style}: write data.train.0.columns for its roles and texts")
        role, content = CONVERSATION_STYLES.get(style, ("role", "content"))
        messages = config.get(f"{section}.conversation_column", "messages")
        columns = {"messages": messages, "role": role, "content": content}
    elif form in _COLUMN_MAPS:
        columns = {
            ours: config.get(f"{section}.column_map.{theirs}", theirs) for ours, theirs in _COLUMN_MAPS[form].items()
        }
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def render_source(section: str, recipe: Recipe, source: SourceKeys) -> dict[str, Any]:
    """Return the keys of a `dataset` section that name its data and its columns."""
    addresses = list(source.path or ())
    if addresses and addresses[0].startswith(HUB_DATASETS):
        name, _, revision = addresses[0].removeprefix(HUB_DATASETS).partition("@")
        revision, _, inside = revision.partition("/")
        inside = inside or "/".join(name.split("/")[2:])
        values = {"source": "/".join(name.split("/")[:2]), "revision": revision or OMIT, "data_files": inside or OMIT}
    else:
        files: Any = addresses[0] if len(addresses) == 1 else addresses
        values = {"source": READER_OF_SUFFIX.get(PurePosixPath(addresses[0]).suffix), "data_files": files}
    values |= _render_columns(recipe.sample_format, source)
    return {f"{section}.{key}": value for key, value in values.items()}


def _read_path(config: ConfigImport, section: str) -> Any:
    """Return the addresses that a dataset reads, None where it names none."""
    component = config.get(f"{section}._component_", "")
    source = config.get(f"{section}.source") or _BUILT_IN_DATASETS.get(component)
    files, revision = config.get(f"{section}.data_files"), config.get(f"{section}.revision")
    if source in READER_OF_SUFFIX.values() and files:
        return files
    if source is None:
        return None
    return f"{HUB_DATASETS}{source}" + (f"@{revision}" if revision else "") + (f"/{files}" if files else "")


def _read_split(config: ConfigImport, section: str) -> str:
    return config.get(f"{section}.split", "train")


def _read_source(config: ConfigImport, section: str) -> dict[str, Any]:
    """Return the columns of a source, where they are not called as in a recipe."""
    columns = _read_columns(config, section)
    return {"columns": columns} if columns else {}


def read_training_data(config: ConfigImport) -> list[dict[str, Any]]:
    """Return `data.train`."""
    path = _read_path(config, "dataset")
    config.note_mapped("data.train.path", "dataset.source", "dataset.data_files", "dataset.revision")
    if path is None:
        config.ask("the file names no data: write data.train: [{path: hf://datasets/org/name}]")
        path = f"{HUB_DATASETS}org/name"
    elif str(path).startswith(HUB_DATASETS) and config.get("dataset.revision") is None:
        address = str(path).removeprefix(HUB_DATASETS)
        name = "/".join(address.split("/")[:2])
        config.ask(f"no revision is named: pin the data, data.train.0.path: {HUB_DATASETS}{name}@<commit>")
    source = {"path": path} | _read_source(config, "dataset")
    config.note_mapped("data.train.columns", *dataset_keys("dataset"))
    split = _read_split(config, "dataset")
    if split != "train" and _shares(config) is None:
        source["split"] = split
        config.note_mapped(f"data.train.split: {split}", "dataset.split")
    return [source]


def _has_own_validation(data: DataSection) -> bool:
    return data.validation is not None and data.validation.kind is not None


def split_text(data: DataSection, part: str) -> str:
    """Return the part of a dataset that training or validation reads: as its source says, or in whole percents."""
    if part == "validation" and data.validation is not None and _has_own_validation(data):
        return data.validation.split or "train"
    if data.split is None or _has_own_validation(data):
        return data.train[0].split or "train"
    first = round(100 * data.split.train)
    last = first + round(100 * data.split.validation)
    if part == "train":
        return f"train[:{first}%]" if first < 100 else "train"
    return f"train[{first}%:]" if last >= 100 else f"train[{first}%:{last}%]"


_TRAINED_SHARE = re.compile(r"^train\[:(\d+)%\]$")
_MEASURED_SHARE = re.compile(r"^train\[(\d+)%:(\d*)%?\]$")


def _shares(config: ConfigImport) -> dict[str, int] | None:
    """Return the percents of one dataset that training and validation read, None where it is not shared out so."""
    if not config.get("run_val_every_n_steps") or _validates_on_own(config):
        return None
    trained = _TRAINED_SHARE.match(_read_split(config, "dataset"))
    measured = _MEASURED_SHARE.match(_read_split(config, "dataset_val"))
    if not trained or not measured or trained[1] != measured[1]:
        return None
    first, last = int(trained[1]), int(measured[2] or 100)
    return {"train": first, "validation": last - first, "test": 100 - last}


def _validates_on_own(config: ConfigImport) -> bool:
    """Whether validation reads another dataset than training does."""
    own = _read_path(config, "dataset_val")
    return own is not None and own != _read_path(config, "dataset")


def read_shares(config: ConfigImport) -> Any:
    """Return `data.split`, where one dataset feeds training and validation."""
    shares = _shares(config)
    if shares is None:
        config.drop("the whole of it", "dataset.split")
        return OMIT
    config.note_mapped(f"data.split.train: {shares['train'] / 100}", "dataset.split")
    return {name: percent / 100 for name, percent in shares.items() if percent}


def validates(task: EngineTask) -> bool:
    """Whether a task measures the loss on other documents."""
    return task.recipe.data.validation is not None


def render_validation_source(task: EngineTask) -> dict[str, Any]:
    """Return the keys of `dataset_val` that name its data: files of its own, or a share of the training data."""
    data = task.recipe.data
    assert data.validation is not None, "asked for validation"
    source = data.validation if _has_own_validation(data) else data.train[0]
    return render_source("dataset_val", task.recipe, source)


def read_validation(config: ConfigImport) -> Any:
    """Return `data.validation`, where something is measured."""
    every = config.get("run_val_every_n_steps")
    if not every:
        if "dataset_val._component_" in config:
            config.add_mistake(
                "run_val_every_n_steps" if "run_val_every_n_steps" in config else "dataset_val",
                "dataset_val is set up and never measured: run_val_every_n_steps is null",
                "data.validation: {path: …, split: …, every: …}",
            )
        config.drop("nothing is validated", "run_val_every_n_steps", "dataset_val.*", "batch_size_val")
        return OMIT
    config.note_mapped(f"data.validation.every: {every}", "run_val_every_n_steps")
    validation: dict[str, Any] = {}
    if _shares(config) is None:
        validation = {"path": _read_path(config, "dataset_val") or _read_path(config, "dataset")}
        validation |= _read_source(config, "dataset_val")
        if (split := _read_split(config, "dataset_val")) != "train":
            validation["split"] = split
        config.note_mapped("data.validation", *dataset_keys("dataset_val"), "dataset_val.split")
    config.drop(FOLLOWS_VALIDATION, "dataset_val.*")
    return validation | {"every": every}


def read_train_on(config: ConfigImport) -> Any:
    """Return `data.train_on` where prompts are learned too, which some components do unless they are told not to."""
    component = config.get("dataset._component_")
    if not config.get("dataset.train_on_input", component in _BUILT_IN_DATASETS):
        config.note_mapped("data.train_on: answers", "dataset.train_on_input")
        return OMIT
    if "dataset.train_on_input" not in config:
        config.add_mistake(
            "dataset._component_",
            f"{str(component).rpartition('.')[2]} learns prompts too: train_on_input is true unless said otherwise",
            "data.train_on: answers",
        )
    return "all"


def read_system(config: ConfigImport) -> Any:
    """Return `data.system`."""
    prompt = config.get("dataset.new_system_prompt")
    if prompt is None:
        return OMIT
    config.ask(
        "new_system_prompt takes the place of the data's own system prompts; data.system is for conversations that "
        "have none"
    )
    return prompt


def dataset_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what torchtune cannot read."""
    data = recipe.data
    if data.synthetic:
        yield Problem(("data",), "torchtune has no synthetic data", "write data.train: {path: hf://datasets/…}")
        return
    if recipe.train.mode == "finetune" and recipe.sample_format not in COMPONENTS:
        known = ", ".join(COMPONENTS)
        yield Problem(("data", "format"), f"torchtune is not rendered for {recipe.sample_format}", f"one of {known}")
    if len(data.train) > 1:
        yield Problem(("data", "train", 1), "torchtune is rendered for one source", "join them into one file")
    sources: list[tuple[SourceKeys, KeyPath]] = [(data.train[0], ("data", "train", 0))]
    if data.validation is not None and data.validation.kind is not None:
        sources.append((data.validation, ("data", "validation")))
    for source, path in sources:
        yield from _source_problems(source, path)
        yield from _column_problems(recipe, source, path)
        if source.limit is not None:
            yield Problem((*path, "limit"), "torchtune reads all files of a source", "delete it, or name fewer files")
    yield from _unread_key_problems(recipe)
    if data.split is not None:
        if any(100 * part % 1 > 1e-9 for part in (data.split.train, data.split.validation)):
            yield Problem(("data", "split"), "torchtune cuts data at whole percents", "{train: 0.95, validation: 0.05}")
        if data.train[0].split is not None and not _has_own_validation(data):
            yield Problem(("data", "split"), "torchtune reads one part of a dataset", "delete `split` of the source")


def _column_problems(recipe: Recipe, source: SourceKeys, path: KeyPath) -> Iterator[Problem]:
    columns, form = source.columns or {}, recipe.sample_format
    if form == "chat":
        if _style(columns) is None:
            known = " or ".join(f"{role}/{content}" for role, content in CONVERSATION_STYLES.values())
            yield Problem((*path, "columns"), f"torchtune knows messages as {known}", "rename them in the data")
        if "tools" in columns:
            yield Problem((*path, "columns", "tools"), "torchtune reads no column of tools", "delete it")
    if "system" in columns:
        yield Problem((*path, "columns", "system"), "torchtune reads no column of system prompts", "delete it")


def _unread_key_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys that torchtune does not read, or reads as something else."""
    data, usual = recipe.data, DataSection.model_fields
    for key in ("shards", "eod", "bos", "on_bad_line"):
        if getattr(data, key) != usual[key].default:
            yield Problem(("data", key), "torchtune tokenises by itself, and does not read it", "delete it")
    absent: tuple[tuple[bool, str, str, str], ...] = (
        (
            data.template is not None,
            "template",
            "formats conversations as its tokenizer of the model does",
            "delete it",
        ),
        (data.train_on == "last", "train_on", "learns all answers of a conversation", "answers or all"),
        (data.thinking == "drop", "thinking", "learns answers as they stand", "thinking: keep"),
        (
            data.on_too_long not in (None, "truncate"),
            "on_too_long",
            "truncates what is longer than sequence_length, and does not say so",
            "on_too_long: truncate",
        ),
        (
            data.system is not None and recipe.sample_format == "alpaca",
            "system",
            "gives the prompts of Alpaca no system prompt",
            "delete it",
        ),
    )
    for is_asked, key, what, hint in absent:
        if is_asked:
            yield Problem(("data", key), f"torchtune {what}", f"{hint}, or write engine: torch")
    sources: list[tuple[KeyPath, SourceKeys]] = [(("data", "train", n), source) for n, source in enumerate(data.train)]
    if data.validation is not None:
        sources.append((("data", "validation"), data.validation))
    for path, source in sources:
        for key in ("key", "documents", "name"):
            if getattr(source, key) not in (None, TEXT_DEFAULTS.get(key)):
                yield Problem((*path, key), "torchtune finds its data by `data.format`, and does not read it", "delete")
    if data.validation is not None and data.validation.kind is None:
        for key in ("columns", "split"):
            if getattr(data.validation, key) is not None:
                what = "validation reads a share of the training data, with its columns"
                yield Problem(("data", "validation", key), what, "delete it, or write `path` too")
    if data.validation is not None and data.validation.batches != ValidationSource.model_fields["batches"].default:
        what = "torchtune validates on all of the validation data, not on `batches` of it"
        yield Problem(("data", "validation", "batches"), what, "delete it")


def _source_problems(source: SourceKeys, path: KeyPath) -> Iterator[Problem]:
    hint = "write path: hf://datasets/org/name, or the path of a .jsonl file that every node sees"
    if source.path is None:
        yield Problem(path, "torchtune reads chat data itself: neither tokens nor a script", hint)
        return
    if source.format is not None:
        yield Problem((*path, "format"), "torchtune tells formats by the names of files", "delete it")
    for address in source.path:
        if "://" in address and not address.startswith(HUB_DATASETS):
            yield Problem((*path, "path"), f"torchtune cannot read {address}", hint)
        elif "://" not in address and PurePosixPath(address).suffix not in READER_OF_SUFFIX:
            known = ", ".join(READER_OF_SUFFIX)
            yield Problem((*path, "path"), f"torchtune cannot read {address}", f"write one of {known}")
    if len(source.path) > 1 and any(address.startswith(HUB_DATASETS) for address in source.path):
        yield Problem((*path, "path"), "torchtune reads one dataset of the Hub", "write one address")

"""The data of a torchtune configuration: the component that reads it, its source, its split and its validation.

Functions of both directions, for the rows of `keys.py`. A `dataset` section may read a dataset of the Hub or files.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import KEEP, OMIT
from trainshed.engines.launch import EngineTask
from trainshed.recipe import DataSection, Recipe
from trainshed.recipe.data import SourceKeys

FOLLOWS_VALIDATION = "follows data.validation"
_DATASETS = "torchtune.datasets"
_CHAT_DATASET = f"{_DATASETS}.chat_dataset"
DATASET_COMPONENTS = {
    _CHAT_DATASET: ("source", "conversation_column", "conversation_style"),
    f"{_DATASETS}.instruct_dataset": ("source",),
    f"{_DATASETS}.alpaca_dataset": ("source",),
    f"{_DATASETS}.alpaca_cleaned_dataset": ("source",),
}
"""The components that fine-tune on answers, and the keys that each must be given."""
_BUILT_IN_DATASETS = {
    f"{_DATASETS}.alpaca_dataset": "tatsu-lab/alpaca",
    f"{_DATASETS}.alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
}
"""Datasets of the Hub that a component stands for. They train on prompts too, unless they are told not to."""
HUB_DATASETS = "hf://datasets/"
READER_OF_SUFFIX = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def dataset_component(recipe: Recipe) -> str | None:
    """Return the component that reads the data, None where the recipe does not say its form."""
    component = recipe.engine.args.get("dataset._component_")
    if isinstance(component, str):
        return component
    return _CHAT_DATASET if "dataset.conversation_style" in recipe.engine.args else None


def read_component(config: ConfigImport) -> Any:
    """Leave the component to `engine.args`, unless the style of the conversations says it."""
    component = config.get("dataset._component_", "")
    if component not in DATASET_COMPONENTS:
        config.ask(f"the dataset is {component or 'not named'}, which is not read here: write its form as engine.args")
    if component == _CHAT_DATASET and "dataset.conversation_style" in config:
        config.note_mapped("follows engine.args.dataset.conversation_style", "dataset._component_")
    return KEEP


def render_source(section: str, source: SourceKeys) -> dict[str, Any]:
    """Return the keys of a `dataset` section that name its data."""
    addresses = list(source.path or ())
    if addresses and addresses[0].startswith(HUB_DATASETS):
        name, _, revision = addresses[0].removeprefix(HUB_DATASETS).partition("@")
        revision, _, inside = revision.partition("/")
        inside = inside or "/".join(name.split("/")[2:])
        values = {"source": "/".join(name.split("/")[:2]), "revision": revision or OMIT, "data_files": inside or OMIT}
    else:
        files: Any = addresses[0] if len(addresses) == 1 else addresses
        values = {"source": READER_OF_SUFFIX.get(PurePosixPath(addresses[0]).suffix), "data_files": files}
    return {f"{section}.{key}": value for key, value in values.items()}


def _read_source(config: ConfigImport, section: str) -> Any:
    """Return the addresses that a dataset reads, None where it names none."""
    component = config.get(f"{section}._component_", "")
    source = config.get(f"{section}.source") or _BUILT_IN_DATASETS.get(component)
    files, revision = config.get(f"{section}.data_files"), config.get(f"{section}.revision")
    if source in READER_OF_SUFFIX.values() and files:
        return files
    if source is None:
        return None
    return f"{HUB_DATASETS}{source}" + (f"@{revision}" if revision else "") + (f"/{files}" if files else "")


def read_training_data(config: ConfigImport) -> list[dict[str, Any]]:
    """Return `data.train`."""
    path = _read_source(config, "dataset")
    config.note_mapped("data.train.path", "dataset.source", "dataset.data_files", "dataset.revision")
    if path is None:
        config.ask("the file names no data: write data.train: [{path: hf://datasets/org/name}]")
        path = f"{HUB_DATASETS}org/name"
    elif str(path).startswith(HUB_DATASETS) and config.get("dataset.revision") is None:
        address = str(path).removeprefix(HUB_DATASETS)
        name = "/".join(address.split("/")[:2])
        config.ask(f"no revision is named: pin the data, data.train.0.path: {HUB_DATASETS}{name}@<commit>")
    return [{"path": path}]


def _has_own_validation(data: DataSection) -> bool:
    return data.validation is not None and data.validation.kind is not None


def split_text(data: DataSection, part: str) -> str:
    """Return the share of a dataset that training or validation reads, in whole percents."""
    if data.split is None or _has_own_validation(data):
        return "train"
    first = round(100 * data.split.train)
    last = first + round(100 * data.split.validation)
    if part == "train":
        return f"train[:{first}%]" if first < 100 else "train"
    return f"train[{first}%:]" if last >= 100 else f"train[{first}%:{last}%]"


_TRAINED_SHARE = re.compile(r"^train\[:(\d+)%\]$")
_MEASURED_SHARE = re.compile(r"^train\[\d+%:(\d*)%?\]$")


def read_split(config: ConfigImport) -> Any:
    """Return `data.split`, where the dataset is cut."""
    share = _TRAINED_SHARE.match(config.get("dataset.split", "train"))
    if not share:
        config.drop("the whole of it", "dataset.split")
        return OMIT
    trained = int(share[1])
    measured = _MEASURED_SHARE.match(config.get("dataset_val.split", ""))
    # Where nothing is validated, what was kept apart stays apart.
    validated = config.get("run_val_every_n_steps") is not None
    end = int(measured[1] or 100) if measured else 100
    parts = {"train": trained, "validation": end - trained if validated else 0}
    parts["test"] = 100 - sum(parts.values())
    config.note_mapped(f"data.split.train: {trained / 100}", "dataset.split")
    return {name: percent / 100 for name, percent in parts.items() if percent}


def validates(task: EngineTask) -> bool:
    """Tell whether a task measures the loss on other documents."""
    return task.recipe.data.validation is not None


def render_validation_source(task: EngineTask) -> dict[str, Any]:
    """Return the keys of `dataset_val` that name its data: files of its own, or a share of the training data."""
    data = task.recipe.data
    assert data.validation is not None, "asked for validation"
    return render_source("dataset_val", data.validation if _has_own_validation(data) else data.train[0])


def read_validation(config: ConfigImport) -> Any:
    """Return `data.validation`, where something is measured."""
    every = config.get("run_val_every_n_steps")
    if not every:
        if "dataset_val._component_" in config:
            config.add_mistake(
                "run_val_every_n_steps" if "run_val_every_n_steps" in config else "dataset_val",
                "dataset_val is set up and never measured: run_val_every_n_steps is null",
                "data.validation.every, and validation instead of test in data.split",
            )
        config.drop("nothing is validated", "run_val_every_n_steps", "dataset_val.*", "batch_size_val")
        return OMIT
    config.note_mapped(f"data.validation.every: {every}", "run_val_every_n_steps")
    validation: dict[str, Any] = {}
    own = _read_source(config, "dataset_val")
    if own is not None and own != _read_source(config, "dataset"):
        validation["path"] = own
        config.note_mapped(
            "data.validation.path", *(f"dataset_val.{key}" for key in ("source", "data_files", "revision"))
        )
    config.drop(FOLLOWS_VALIDATION, "dataset_val.*")
    return validation | {"every": every}


def read_mode(config: ConfigImport) -> str:
    """Return `train.mode`, and note where the loss is taken on prompts too."""
    on_prompts = config.get("dataset.train_on_input", config.get("dataset._component_") in _BUILT_IN_DATASETS)
    if on_prompts:
        config.add_mistake(
            "dataset.train_on_input" if "dataset.train_on_input" in config else "dataset._component_",
            "the loss is taken on prompts too (train_on_input is true unless said otherwise)",
            "nothing to write: train.mode: finetune takes it on the answers only",
        )
    return "finetune"

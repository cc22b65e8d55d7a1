"""The data of a torchtune file as `data`, and its form as `engine.args`."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.foreign_settings import ForeignSettings
from trainshed.engines.torchtune.datasets import FORMS, HUB

_BUILT_IN = {
    "torchtune.datasets.alpaca_dataset": "tatsu-lab/alpaca",
    "torchtune.datasets.alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
}
"""Datasets of the Hub that a component stands for."""
_TRAINS_ON_PROMPTS = tuple(_BUILT_IN)
_FILES = ("json", "parquet", "csv")
_SHARE = re.compile(r"^train\[:(\d+)%\]$")
_SEQUENCE_LENGTH = 8192


def read_data(settings: ForeignSettings) -> None:
    """Write `data`; what form the conversations have stays in `engine.args`."""
    _read_length(settings)
    component = settings.get("dataset._component_", "")
    if component not in FORMS:
        settings.ask(
            f"the dataset is {component or 'not named'}, which is not read here: write its form as engine.args"
        )
    settings.write("data.train", [{"path": _path(settings, component)}])
    share = _SHARE.match(settings.get("dataset.split", "train"))
    every = settings.get("run_val_every_n_steps")
    if share and every:
        part = round(int(share[1]) / 100, 2)
        settings.write("data.split", {"train": part, "validation": round(1 - part, 2)})
    elif share:
        # Nothing is validated, yet what was kept apart stays apart.
        part = round(int(share[1]) / 100, 2)
        settings.write("data.split", {"train": part, "test": round(1 - part, 2)})
    if "split" in settings.recipe["data"]:
        settings.mapped("dataset.split", f"data.split.train: {settings.recipe['data']['split']['train']}")
    if every:
        settings.take("run_val_every_n_steps", "data.validation.every", every)
    settings.drop("run_val_every_n_steps", "nothing is validated")
    settings.drop("dataset.split", "the whole of it")
    on_prompts = settings.get("dataset.train_on_input", component in _TRAINS_ON_PROMPTS)
    if on_prompts:
        settings.mistake(
            "dataset.train_on_input" if "dataset.train_on_input" in settings else "dataset._component_",
            "the loss is taken on prompts too (train_on_input is true unless said otherwise)",
            "nothing to write: train.mode: finetune takes it on the answers only",
        )
    settings.mapped("dataset.train_on_input", "train.mode: finetune")
    if not every and "dataset_val._component_" in settings:
        settings.mistake(
            "run_val_every_n_steps" if "run_val_every_n_steps" in settings else "dataset_val",
            "dataset_val is set up and never measured: run_val_every_n_steps is null",
            "data.validation.every, and validation instead of test in data.split",
        )
    settings.drop_section("dataset_val", "follows data.validation" if every else "nothing is validated")
    if not every:
        settings.drop("batch_size_val", "nothing is validated")


def _read_length(settings: ForeignSettings) -> None:
    length = settings.get("tokenizer.max_seq_len")
    if length is None:
        settings.ask(
            f"tokenizer.max_seq_len is null, so that no sample is cut: data.sequence_length is written as "
            f"{_SEQUENCE_LENGTH}; write the longest you want"
        )
    settings.take("tokenizer.max_seq_len", "data.sequence_length", length or _SEQUENCE_LENGTH)


def _path(settings: ForeignSettings, component: str) -> Any:
    source, files = settings.get("dataset.source") or _BUILT_IN.get(component), settings.get("dataset.data_files")
    settings.mapped("dataset.source", "data.train.path")
    settings.mapped("dataset.data_files", "data.train.path")
    if source in _FILES and files:
        return files
    if source is None:
        settings.ask("the file names no data: write data.train: [{path: hf://datasets/org/name}]")
        return f"{HUB}org/name"
    revision = settings.get("dataset.revision")
    settings.mapped("dataset.revision", "data.train.path")
    if revision is None:
        settings.ask(f"no revision is named: pin the data, data.train.0.path: {HUB}{source}@<commit>")
    return f"{HUB}{source}" + (f"@{revision}" if revision else "") + (f"/{files}" if files else "")

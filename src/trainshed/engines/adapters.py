"""The engines that are not ours by name: how a task is started, and whose configuration a file is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from trainshed.catalog import Gpu
from trainshed.engines.config_tree import flatten
from trainshed.engines.foreign import EngineLaunch, EngineTask
from trainshed.engines.imported import Imported
from trainshed.errors import InputError, RecipeError
from trainshed.recipe.yaml_source import decode, parse

ForeignKind = Literal["megatron", "nemo", "torchtune"]
_MEGATRON = re.compile(r"(^|[\s\"'=(\[])--[a-z][a-z0-9]*-[a-z0-9-]+|pretrain_gpt", re.MULTILINE)
"""An argument of several words, or the name of Megatron-LM's program."""
KINDS = "a NeMo or torchtune YAML file, or a Megatron-LM argument list or script"


def launch_of(task: EngineTask, *, gpu: Gpu | None = None) -> EngineLaunch:
    """Return how the engine that a recipe names is started; `gpu` is what it would run on, where that is known."""
    recipe = task.recipe
    if recipe.train.precision == "fp8" and gpu is not None and gpu.dense_tflops.fp8 is None:
        raise RecipeError(
            f"{recipe.engine.name} in fp8 needs GPUs that have it, and {gpu.name} has not",
            where=recipe.where("train.precision"),
            hint="write precision: bf16, or run it on an H100 or newer",
        )
    # Imported here: none of them needs what another one does.
    match recipe.engine.name:
        case "megatron":
            from trainshed.engines.megatron.launching import megatron_launch

            return megatron_launch(task)
        case "nemo":
            from trainshed.engines.nemo.launching import nemo_launch

            return nemo_launch(task)
        case "torchtune":
            from trainshed.engines.torchtune.launching import torchtune_launch

            return torchtune_launch(task)
    raise RecipeError(
        f"{recipe.engine.name} is our own engine: it needs no adapter",
        where=recipe.where("engine.name"),
        hint="engine: megatron, nemo or torchtune",
    )


def import_file(path: str | os.PathLike[str], *, gpus: int | None = None) -> Imported:
    """Read another engine's file as a recipe; `gpus` is how many the run had, where the file does not say it."""
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file), hint=f"write {KINDS}") from None
    return import_text(decode(data, str(file)), file.name, gpus=gpus)


def import_text(text: str, name: str, *, gpus: int | None = None) -> Imported:
    """Read another engine's configuration as a recipe; errors call it `name`."""
    match kind_of(text, name):
        case "nemo":
            from trainshed.engines.nemo.reading import read_nemo

            return read_nemo(text, name)
        case "torchtune":
            from trainshed.engines.torchtune.reading import read_torchtune

            return read_torchtune(text, name, gpus=gpus)
        case "megatron":
            from trainshed.engines.megatron.importing.reading import read_megatron

            return read_megatron(text, name)


def kind_of(text: str, name: str) -> ForeignKind:
    """Tell whose configuration a text is; raise `InputError` for one that is none of the three."""
    try:
        tree = parse(text, name).value
    except RecipeError:
        tree = {}
    keys = flatten(tree)
    if "trainshed" in tree or {"train", "data", "model"} <= set(tree):
        raise InputError("is already a recipe", where=name, hint=f"trainshed plan {name} shows what it would do")
    if any(key.endswith("._component_") for key in keys):
        return "torchtune"
    if isinstance(tree.get("model"), dict) and ({"trainer", "exp_manager"} & set(tree)):
        return "nemo"
    if _MEGATRON.search(text):
        return "megatron"
    raise InputError("is no configuration that Trainshed reads", where=name, hint=f"give {KINDS}")

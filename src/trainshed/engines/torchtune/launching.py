"""Starting torchtune: its configuration, and the small program that starts its recipe under ranks that are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshed.engines.config_tree import to_yaml
from trainshed.engines.engine_arguments import argument_problems
from trainshed.engines.foreign import EngineLaunch, EngineTask
from trainshed.engines.torchtune.builders import Builder, builder_of
from trainshed.engines.torchtune.rules import task_problems
from trainshed.engines.torchtune.settings import KNOWN, fixed_settings, task_settings
from trainshed.errors import RecipeError
from trainshed.recipe.messages import as_recipe_error

VERSION = "0.7.0"
CONFIG = "torchtune.yaml"
START = "start_torchtune.py"
_ENVIRONMENT = {
    # Compiled kernels on local disk: thousands of small files, and a network file system locks them.
    "TRITON_CACHE_DIR": "/tmp/triton_cache",
    "TORCH_DIST_INIT_BARRIER": "1",
    "LOGLEVEL": "INFO",
}


def torchtune_launch(task: EngineTask) -> EngineLaunch:
    """Return how torchtune is started for a task."""
    recipe, place = task.recipe, task.place
    version = recipe.engine.version or VERSION
    if version != VERSION:
        raise RecipeError(
            f"torchtune {version} is not known here", where=recipe.where("engine.version"), hint=f'version: "{VERSION}"'
        )
    problems = list(task_problems(task))
    builder = builder_of(recipe, task.config)
    if problems or builder is None:
        raise as_recipe_error(problems, recipe.places)
    name = "full_finetune_distributed" if recipe.train.lora is None else "lora_finetune_distributed"
    heading = f"torchtune {VERSION}, {name}, written by Trainshed for {recipe.name}."
    return EngineLaunch(
        program=f"{place.job}/{START}",
        arguments=(
            name,
            f"{place.job}/{CONFIG}",
            f"{place.engine}/base",
            f"{place.run}/checkpoints",
            recipe.checkpoint.resume,
        ),
        files={
            CONFIG: to_yaml(torchtune_config(task, builder), heading),
            START: Path(__file__).with_name("start.py").read_text(encoding="utf-8"),
        },
        environment=_ENVIRONMENT,
        wanted=("tokenizer", "base-hf"),
        notes=tuple(_notes(task, builder)),
    )


def torchtune_config(task: EngineTask, builder: Builder) -> dict[str, Any]:
    """Return the configuration by dotted key; the program that starts it adds what only the job can know."""
    recipe = task.recipe
    settings = task_settings(task, builder)
    decided = {setting.key: setting for setting in settings}
    wrong = list(argument_problems(recipe.engine.args, KNOWN, decided))
    if wrong:
        raise as_recipe_error(wrong, recipe.places)
    fixed = fixed_settings(lora=recipe.train.lora is not None, tied=task.config.tied_embeddings)
    extra = {key: value for key, value in recipe.engine.args.items() if key not in decided}
    own = {setting.key: setting.value for setting in settings}
    if recipe.data.validation is not None:
        # Validation data has the form of the training data, packed or not.
        same = {f"dataset_val.{key.removeprefix('dataset.')}": value for key, value in extra.items() if _is_form(key)}
        extra = same | extra
    return _in_order(own | fixed | extra)


def _is_form(key: str) -> bool:
    return key.startswith("dataset.") and key != "dataset.packed"


def _in_order(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the keys of a section together, sections in the order of torchtune's own files."""
    first = ("output_dir", "tokenizer", "dataset", "seed", "shuffle", "run_val_every_n_steps", "dataset_val", "model")
    sections = [*first, *dict.fromkeys(key.partition(".")[0] for key in values)]
    place = {section: number for number, section in reversed(list(enumerate(sections)))}
    return dict(sorted(values.items(), key=lambda item: place[item[0].partition(".")[0]]))


def _notes(task: EngineTask, builder: Builder) -> list[str]:
    train = task.recipe.train
    notes = [
        "torchtune is no longer maintained (its README, 2025): prefer engine: torch where it can do the same",
        "torchtune tokenises while the GPUs are held, orders samples its own way, and does not stop at a NaN",
    ]
    if train.precision != "fp32":
        notes.append("torchtune keeps weights and optimiser states in bf16: `precision: fp32` keeps them in fp32")
    if train.epochs is None:
        notes.append(f"torchtune ends with its data: fewer than {task.steps} steps where one pass has fewer")
    if task.recipe.data.validation is not None:
        notes.append("torchtune validates on all of the validation data, not on `batches` of it")
    if builder.family.files == "tiktoken":
        notes.append("torchtune reads Llama 3's tokenizer from original/tokenizer.model")
    return notes

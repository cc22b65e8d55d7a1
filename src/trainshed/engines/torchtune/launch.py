"""Starting torchtune: what it cannot be asked for, its configuration, and the small program that starts its recipe.

The program (`start.py`) runs under ranks that are already set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.keys import argument_problems, to_yaml
from trainshed.engines.launch import EngineLaunch, EngineTask
from trainshed.engines.torchtune.keys import (
    MLP_PROJECTIONS,
    TORCHTUNE_KEYS,
    TorchtuneBuilder,
    builder_of,
    dataset_problems,
    fixed_settings,
    known_presets,
    task_settings,
)
from trainshed.errors import RecipeError
from trainshed.plan import layout_problems
from trainshed.recipe import Profile, TrainedTokenizer
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error

TORCHTUNE_VERSION = "0.7.0"
CONFIG_FILE = "torchtune.yaml"
START_FILE = "start_torchtune.py"
_ENVIRONMENT = {
    # Compiled kernels on local disk: thousands of small files, and a network file system locks them.
    "TRITON_CACHE_DIR": "/tmp/triton_cache",
    "TORCH_DIST_INIT_BARRIER": "1",
    "LOGLEVEL": "INFO",
}


def torchtune_launch(task: EngineTask) -> EngineLaunch:
    """Return how torchtune is started for a task."""
    recipe, place = task.recipe, task.place
    version = recipe.engine.version or TORCHTUNE_VERSION
    if version != TORCHTUNE_VERSION:
        raise RecipeError(
            f"torchtune {version} is not known here",
            where=recipe.where("engine.version"),
            hint=f'version: "{TORCHTUNE_VERSION}"',
        )
    problems = list(task_problems(task))
    builder = builder_of(recipe, task.config)
    if problems or builder is None:
        raise recipe_error(problems, recipe.places)
    name = "full_finetune_distributed" if recipe.train.lora is None else "lora_finetune_distributed"
    heading = f"torchtune {TORCHTUNE_VERSION}, {name}, written by Trainshed for {recipe.name}."
    return EngineLaunch(
        program=f"{place.job}/{START_FILE}",
        arguments=(
            name,
            f"{place.job}/{CONFIG_FILE}",
            f"{place.engine}/base",
            f"{place.run}/checkpoints",
            recipe.checkpoint.resume,
        ),
        files={
            CONFIG_FILE: to_yaml(torchtune_config(task, builder), heading),
            START_FILE: Path(__file__).with_name("start.py").read_text(encoding="utf-8"),
        },
        environment=_ENVIRONMENT,
        wanted=("tokenizer", "base-hf"),
        notes=tuple(_notes(task, builder)),
    )


def torchtune_config(task: EngineTask, builder: TorchtuneBuilder) -> dict[str, Any]:
    """Return the configuration by dotted key; the program that starts it adds what only the job can know."""
    recipe = task.recipe
    settings = task_settings(task, builder)
    decided = {setting.key: setting for setting in settings}
    wrong = list(argument_problems(recipe.engine.args, TORCHTUNE_KEYS, decided))
    if wrong:
        raise recipe_error(wrong, recipe.places)
    fixed = fixed_settings(lora=recipe.train.lora is not None, tied=task.config.tied_embeddings)
    extra = {key: value for key, value in recipe.engine.args.items() if key not in decided}
    own = {setting.key: setting.value for setting in settings}
    if recipe.data.validation is not None:
        # Validation data has the form of the training data, packed or not.
        same = {
            f"dataset_val.{key.removeprefix('dataset.')}": value for key, value in extra.items() if _is_dataset_key(key)
        }
        extra = same | extra
    return _sort_sections(own | fixed | extra)


def _is_dataset_key(key: str) -> bool:
    return key.startswith("dataset.") and key != "dataset.packed"


def _sort_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the keys of a section together, sections in the order of torchtune's own files."""
    first = ("output_dir", "tokenizer", "dataset", "seed", "shuffle", "run_val_every_n_steps", "dataset_val", "model")
    sections = [*first, *dict.fromkeys(key.partition(".")[0] for key in values)]
    place = {section: number for number, section in reversed(list(enumerate(sections)))}
    return dict(sorted(values.items(), key=lambda item: place[item[0].partition(".")[0]]))


def _notes(task: EngineTask, builder: TorchtuneBuilder) -> list[str]:
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


def task_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield everything that torchtune would refuse, or do otherwise than the recipe says."""
    recipe, train = task.recipe, task.recipe.train
    if train.mode != "finetune":
        yield Problem(("train", "mode"), "torchtune fine-tunes; it does not pretrain", "mode: finetune")
    builder = builder_of(recipe, task.config)
    if builder is None:
        what = "a mixture of experts" if task.config.moe is not None else "this model"
        yield Problem(
            ("model",), f"torchtune is not rendered for {what}", f"model.preset: one of {', '.join(known_presets())}"
        )
    yield from layout_problems(
        task.layout,
        task.config,
        sequence_length=recipe.data.sequence_length or task.config.max_positions,
        batch_sizes=[train.global_batch],
        engine="torchtune",
        lora=train.lora is not None,
    )
    yield from dataset_problems(recipe)
    yield from _training_problems(task)
    if builder is not None:
        yield from _builder_problems(task, builder)
    if train.lora is not None:
        some = [name for name in MLP_PROJECTIONS if name in train.lora.targets]
        if some and len(some) < len(MLP_PROJECTIONS):
            yield Problem(
                ("train", "lora", "targets"),
                f"torchtune adapts all of {', '.join(MLP_PROJECTIONS)} or none",
                "write all three, or none of them",
            )


def _builder_problems(task: EngineTask, builder: TorchtuneBuilder) -> Iterator[Problem]:
    if task.layout.tp > 1 and builder.family.tp_plan is None:
        yield Problem(("layout", "tp"), f"torchtune has no tensor-parallel plan for {builder.preset}", "delete it")
    if isinstance(task.recipe.tokenizer, TrainedTokenizer):
        yield Problem(("tokenizer",), "torchtune's tokenizers are the models' own", "write the address of one")
    if "${" in task.place.run:
        yield Problem(("store",), f"torchtune would read `{task.place.run}` as a reference", "write another store")
    # FullModelHFCheckpointer takes a base whose path holds one of these words for a checkpoint to go on from.
    for word in ("step", "epoch"):
        if word in task.place.engine:
            yield Problem(
                ("name",),
                f"torchtune takes a path with `{word}` in it for a checkpoint: {task.place.engine}",
                "write another name or store",
            )


def _training_problems(task: EngineTask) -> Iterator[Problem]:
    recipe, train = task.recipe, task.recipe.train
    schedule = train.schedule
    absent = (
        (train.z_loss > 0, ("train", "z_loss"), "z-loss"),
        (train.dropout > 0, ("train", "dropout"), "dropout outside of adapters"),
        (train.batch_ramp is not None, ("train", "batch_ramp"), "batch that grows"),
        (train.deterministic, ("train", "deterministic"), "deterministic mode"),
        (train.non_finite == "skip", ("train", "non_finite"), "steps that are skipped"),
        (bool(recipe.data.skip), ("data", "skip"), "samples that are skipped"),
        (recipe.checkpoint.to is not None, ("checkpoint", "to"), "checkpoints outside of the run's folder"),
        (schedule.name in ("linear", "wsd"), ("train", "schedule", "name"), f"{schedule.name} schedule"),
        (schedule.min_lr > 0, ("train", "schedule", "min_lr"), "cosine that ends above 0"),
        (
            schedule.name == "cosine" and schedule.decay is not None,
            ("train", "schedule", "decay"),
            "cosine that ends before the run does",
        ),
        (
            schedule.name == "constant" and schedule.warmup > 0,
            ("train", "schedule", "warmup"),
            "warm-up without a cosine after it",
        ),
        (train.lora is not None and schedule.name == "constant", ("train", "schedule"), "LoRA without a cosine"),
        (
            train.lora is not None and train.precision == "fp8",
            ("train", "precision"),
            "LoRA in fp8",
        ),
        (train.precision not in ("fp32", "bf16", "fp8"), ("train", "precision"), train.precision),
        (recipe.checkpoint.async_, ("checkpoint", "async"), "way to go on from a checkpoint written beside the steps"),
        (recipe.data.stage != "direct", ("data", "stage"), "copy of the data on local disks or in memory"),
        (bool(recipe.observe.dllogger), ("observe", "dllogger"), "DLLogger file"),
        (
            recipe.observe.profile is not None and recipe.observe.profile.ranks != Profile().ranks,
            ("observe", "profile", "ranks"),
            "choice of ranks to profile: it profiles all of them",
        ),
    )
    for is_asked, path, what in absent:
        if is_asked:
            yield Problem(path, f"torchtune has no {what}", "change it, or write engine: torch")
    if recipe.seed != recipe.data.seed:
        yield Problem(
            ("data", "seed"),
            f"torchtune has one seed, and `seed: {recipe.seed}` is another",
            f"seed: {recipe.seed}",
        )

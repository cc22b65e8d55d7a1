"""Starting torchtune: what it refuses, its configuration, and the small program that starts its recipe.

The program (`start.py`) runs under ranks that are already set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.key_table import budget_problems, mirror_problems, unhonoured_problems
from trainshed.engines.keys import added_arguments, argument_problems, to_yaml
from trainshed.engines.launch import PROGRAMS, EngineLaunch, EngineTask, ImageExpectation
from trainshed.engines.profiles import profile_problems
from trainshed.engines.torchtune.adapters import adapter_problems
from trainshed.engines.torchtune.builders import TorchtuneBuilder, builder_of, known_presets, task_builder
from trainshed.engines.torchtune.dataset import dataset_problems
from trainshed.engines.torchtune.keys import TORCHTUNE_TABLE
from trainshed.engines.torchtune.versions import (
    DEFAULT_VERSION,
    SOURCE_VERSION,
    VERSIONS,
    TorchtuneVersion,
    recipe_version,
)
from trainshed.errors import RecipeError
from trainshed.plan import layout_problems
from trainshed.recipe import Checkpoint, TrainedTokenizer
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error

CONFIG_FILE = "torchtune.yaml"
START_FILE = f"{PROGRAMS}/start_torchtune.py"
_ENVIRONMENT = {
    # Compiled kernels on local disk: thousands of small files, and a network file system locks them.
    "TRITON_CACHE_DIR": "/tmp/triton_cache",
    "TORCH_DIST_INIT_BARRIER": "1",
    "LOGLEVEL": "INFO",
}


def torchtune_launch(task: EngineTask) -> EngineLaunch:
    """Return how torchtune is started for a task."""
    recipe, site = task.recipe, task.site
    if recipe.engine.version not in (None, *VERSIONS):
        raise RecipeError(
            f"torchtune {recipe.engine.version} is not known here",
            where=recipe.where("engine.version"),
            hint=" or ".join(f'version: "{version}"' for version in VERSIONS),
        )
    version = recipe_version(recipe)
    problems = list(task_problems(task))
    if problems:
        raise recipe_error(problems, recipe.places)
    name = "full_finetune_distributed" if recipe.train.lora is None else "lora_finetune_distributed"
    heading = f"torchtune {version.name}, {name}, written by Trainshed for {recipe.name}."
    return EngineLaunch(
        program=f"{site.job_folder}/{START_FILE}",
        arguments=(
            name,
            f"{site.job_folder}/{CONFIG_FILE}",
            f"{site.input_folder}/base",
            f"{site.run_folder}/checkpoints",
            recipe.checkpoint.resume,
            f"version={version.name}",
            _length(task),
            *_profiled_ranks(task),
        ),
        files={
            CONFIG_FILE: to_yaml(torchtune_config(task), heading),
            START_FILE: Path(__file__).with_name("start.py").read_text(encoding="utf-8"),
        },
        environment=_ENVIRONMENT,
        inputs=("tokenizer", "base-hf"),
        saves_when_stopped=False,
        expects=ImageExpectation(
            ("torch", "torchao", "torchtune"),
            "torchtune",
            version.name,
            parser="torchtune",
            config=CONFIG_FILE,
            program_in_image=False,
        ),
        notes=tuple(_notes(task)),
    )


def _length(task: EngineTask) -> str:
    """Return the length of a run, which only the job can put into passes, since it counts the data."""
    epochs = task.recipe.train.epochs
    return f"steps={task.steps}" if epochs is None else f"epochs={epochs:g}"


def _profiled_ranks(task: EngineTask) -> tuple[str, ...]:
    """Return which ranks are profiled; torchtune itself would profile all of them."""
    profile = task.recipe.observe.profile
    return () if profile is None else (f"profile_ranks={','.join(map(str, profile.ranks))}",)


def torchtune_config(task: EngineTask) -> dict[str, Any]:
    """Return the configuration by dotted key; the program that starts it adds what only the job can know."""
    recipe = task.recipe
    version = recipe_version(recipe)
    settings = TORCHTUNE_TABLE.render(task, version.name)
    problems = list(argument_problems(recipe.engine.args, version.keys, settings))
    if problems:
        raise recipe_error(problems, recipe.places)
    extra = added_arguments(recipe.engine.args, settings)
    if recipe.data.validation is not None:
        # Validation data is loaded as the training data is.
        same = {
            f"dataset_val.{key.removeprefix('dataset.')}": value
            for key, value in extra.items()
            if key.startswith("dataset.")
        }
        extra = same | extra
    return _sort_sections({setting.key: setting.value for setting in settings} | extra)


def _sort_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the keys of a section together, sections in the order of torchtune's own files."""
    first = ("output_dir", "tokenizer", "dataset", "seed", "shuffle", "run_val_every_n_steps", "dataset_val", "model")
    sections = [*first, *dict.fromkeys(key.partition(".")[0] for key in values)]
    position = {section: number for number, section in reversed(list(enumerate(sections)))}
    return dict(sorted(values.items(), key=lambda item: position[item[0].partition(".")[0]]))


def _notes(task: EngineTask) -> list[str]:
    train, version = task.recipe.train, recipe_version(task.recipe)
    notes = [
        "torchtune is no longer maintained (its README, 2025): prefer engine: torch where it can do the same",
        "torchtune tokenises while the GPUs are held, orders samples its own way, and does not stop at a NaN",
        "torchtune saves nothing when it is asked to stop: a new start goes on from its last checkpoint",
    ]
    if train.precision != "fp32":
        notes.append("torchtune keeps weights and optimiser states in bf16: `precision: fp32` keeps them in fp32")
    if train.epochs is None:
        notes.append(
            f"the job counts the samples and passes over them as often as {task.steps} steps need; `tune run` with the "
            "same file would end after one pass"
        )
    data = task.recipe.data
    if task.recipe.sample_format == "chat" and "role" not in (data.train[0].columns or {}):
        notes.append("messages are read as role and content; ShareGPT's are columns: {role: from, content: value}")
    if task.recipe.sample_format == "alpaca":
        notes.append("torchtune puts Alpaca's own prompt around instruction and input: Below is an instruction …")
    if data.system is not None:
        notes.append("torchtune puts `data.system` in the place of system prompts that the data has")
    if data.train_on == "all":
        notes.append("torchtune never learns system prompts, with `train_on: all` neither")
    if not version.saves_by_steps:
        notes.append(f"torchtune {version.name} saves after every pass over the data, and keeps all of its checkpoints")
        if task.recipe.checkpoint.to is not None and task.recipe.checkpoint.keep is not None:
            notes.append(f"of its checkpoints the newest {task.recipe.checkpoint.keep} stay in the bucket")
    elif train.lora is not None:
        notes.append("torchtune saves adapters after every pass over the data, not every so many steps")
    if task.recipe.data.validation is not None:
        notes.append("torchtune validates on all of the validation data, not on `batches` of it")
    if task_builder(task).family.files == "tiktoken":
        notes.append("torchtune reads Llama 3's tokenizer from original/tokenizer.model")
        notes.append("torchtune learns the header before an answer too, and ends conversations with <|end_of_text|>")
    return notes


def task_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield everything that torchtune would refuse, or do differently from what the recipe says."""
    recipe, train = task.recipe, task.recipe.train
    yield from unhonoured_problems(recipe, "torchtune")
    yield from budget_problems(recipe, "torchtune")
    yield from mirror_problems(recipe, "torchtune")
    if train.mode == "pretrain":
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
    yield from _version_problems(task, recipe_version(recipe), builder)
    if builder is not None:
        yield from _builder_problems(task, builder)
    yield from adapter_problems(task, builder)


def _version_problems(
    task: EngineTask, version: TorchtuneVersion, builder: TorchtuneBuilder | None
) -> Iterator[Problem]:
    """Yield what a version does not have, and torchtune's last state does, or the other way round."""
    recipe = task.recipe
    if recipe.checkpoint.to is not None and version.saves_by_steps:
        yield Problem(
            ("checkpoint", "to"),
            f"checkpoints of torchtune {version.name}, by steps and by passes, stay in the run's folder",
            f'delete it, or write engine: {{name: torchtune, version: "{DEFAULT_VERSION}"}}, or engine: torch',
        )
    usual = {name: field.default for name, field in Checkpoint.model_fields.items()}
    absent = (
        (
            recipe.data.validation is not None and not version.validates,
            ("data", "validation"),
            "validation during a run",
        ),
        (
            recipe.train.lora is None
            and recipe.checkpoint.every not in (None, usual["every"])
            and not version.saves_by_steps,
            ("checkpoint", "every"),
            "checkpoints by steps: it saves after every pass over the data",
        ),
        (
            recipe.checkpoint.keep not in (None, usual["keep"]) and not version.removes_old_checkpoints,
            ("checkpoint", "keep"),
            "way to remove old checkpoints",
        ),
        (recipe.train.precision == "fp8" and not version.has_fp8, ("train", "precision"), "fp8"),
        (task.layout.replicate > 1 and not version.has_replicas, ("layout", "replicate"), "replicas of its shards"),
        (
            builder is not None and builder.module in version.without_models,
            ("model",),
            f"builder of {'' if builder is None else builder.preset}",
        ),
    )
    for is_asked, path, what in absent:
        if is_asked:
            yield Problem(
                path,
                f"torchtune {version.name} has no {what}",
                f'delete it, or write engine: {{name: torchtune, version: "{SOURCE_VERSION}"}}, which is installed '
                "from its source",
            )


def _builder_problems(task: EngineTask, builder: TorchtuneBuilder) -> Iterator[Problem]:
    if task.layout.tp > 1 and builder.family.tp_plan is None:
        yield Problem(("layout", "tp"), f"torchtune has no tensor-parallel plan for {builder.preset}", "delete it")
    if isinstance(task.recipe.tokenizer, TrainedTokenizer):
        yield Problem(("tokenizer",), "torchtune's tokenizers are the models' own", "write the address of one")
    if "${" in task.site.run_folder:
        yield Problem(
            ("store",), f"torchtune would read `{task.site.run_folder}` as a reference", "write another store"
        )
    # FullModelHFCheckpointer takes a base whose path holds one of these words for a checkpoint to go on from.
    for word in ("step", "epoch"):
        if word in task.site.input_folder:
            yield Problem(
                ("name",),
                f"torchtune takes a path with `{word}` in it for a checkpoint: {task.site.input_folder}",
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
        (
            train.optimizer.states not in (None, "fp32" if train.precision == "fp32" else "bf16"),
            ("train", "optimizer", "states"),
            "states in another precision than the weights'",
        ),
        (recipe.checkpoint.async_, ("checkpoint", "async"), "way to go on from a checkpoint written beside the steps"),
        (recipe.data.stage != "direct", ("data", "stage"), "copy of the data on local disks or in memory"),
        (bool(recipe.observe.dllogger), ("observe", "dllogger"), "DLLogger file"),
    )
    for is_asked, path, what in absent:
        if is_asked:
            yield Problem(path, f"torchtune has no {what}", "change it, or write engine: torch")
    yield from profile_problems(recipe, "torchtune", {"wait": "waits before every cycle as long as before the first"})
    profile = recipe.observe.profile
    if profile is not None and profile.memory and 0 not in profile.ranks:
        yield Problem(
            ("observe", "profile", "memory"), "torchtune writes the memory of rank 0 alone", "add 0 to `ranks`"
        )
    if recipe.seed != recipe.data.seed:
        yield Problem(
            ("data", "seed"),
            f"torchtune has one seed, and `seed: {recipe.seed}` is another",
            f"seed: {recipe.seed}",
        )

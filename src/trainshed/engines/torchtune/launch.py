"""Starting torchtune: what it refuses, its configuration, and the small program that starts its recipe.

The program (`start.py`) runs under ranks that are already set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from trainshed.engines.keys import added_arguments, argument_problems, to_yaml
from trainshed.engines.launch import EngineLaunch, EngineTask
from trainshed.engines.torchtune.builders import TorchtuneBuilder, builder_of, known_presets, task_builder
from trainshed.engines.torchtune.dataset import (
    DATASET_COMPONENTS,
    HUB_DATASETS,
    READER_OF_SUFFIX,
    dataset_component,
)
from trainshed.engines.torchtune.keys import MLP_PROJECTIONS, TORCHTUNE_KEYS, TORCHTUNE_TABLE
from trainshed.errors import RecipeError
from trainshed.plan import layout_problems
from trainshed.recipe import DataSection, Profile, Recipe, TrainedTokenizer
from trainshed.recipe.data import TEXT_DEFAULTS, SourceKeys, ValidationSource
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error
from trainshed.recipe.yaml_io import KeyPath

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
    recipe, site = task.recipe, task.site
    version = recipe.engine.version or TORCHTUNE_VERSION
    if version != TORCHTUNE_VERSION:
        raise RecipeError(
            f"torchtune {version} is not known here",
            where=recipe.where("engine.version"),
            hint=f'version: "{TORCHTUNE_VERSION}"',
        )
    problems = list(task_problems(task))
    if problems:
        raise recipe_error(problems, recipe.places)
    name = "full_finetune_distributed" if recipe.train.lora is None else "lora_finetune_distributed"
    heading = f"torchtune {TORCHTUNE_VERSION}, {name}, written by Trainshed for {recipe.name}."
    return EngineLaunch(
        program=f"{site.job_folder}/{START_FILE}",
        arguments=(
            name,
            f"{site.job_folder}/{CONFIG_FILE}",
            f"{site.input_folder}/base",
            f"{site.run_folder}/checkpoints",
            recipe.checkpoint.resume,
        ),
        files={
            CONFIG_FILE: to_yaml(torchtune_config(task), heading),
            START_FILE: Path(__file__).with_name("start.py").read_text(encoding="utf-8"),
        },
        environment=_ENVIRONMENT,
        inputs=("tokenizer", "base-hf"),
        notes=tuple(_notes(task)),
    )


def torchtune_config(task: EngineTask) -> dict[str, Any]:
    """Return the configuration by dotted key; the program that starts it adds what only the job can know."""
    recipe = task.recipe
    settings = TORCHTUNE_TABLE.render(task)
    problems = list(argument_problems(recipe.engine.args, TORCHTUNE_KEYS, settings))
    if problems:
        raise recipe_error(problems, recipe.places)
    extra = added_arguments(recipe.engine.args, settings)
    if recipe.data.validation is not None:
        # Validation data has the form of the training data, packed or not.
        same = {
            f"dataset_val.{key.removeprefix('dataset.')}": value for key, value in extra.items() if _is_dataset_key(key)
        }
        extra = same | extra
    return _sort_sections({setting.key: setting.value for setting in settings} | extra)


def _is_dataset_key(key: str) -> bool:
    return key.startswith("dataset.") and key != "dataset.packed"


def _sort_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the keys of a section together, sections in the order of torchtune's own files."""
    first = ("output_dir", "tokenizer", "dataset", "seed", "shuffle", "run_val_every_n_steps", "dataset_val", "model")
    sections = [*first, *dict.fromkeys(key.partition(".")[0] for key in values)]
    position = {section: number for number, section in reversed(list(enumerate(sections)))}
    return dict(sorted(values.items(), key=lambda item: position[item[0].partition(".")[0]]))


def _notes(task: EngineTask) -> list[str]:
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
    if task_builder(task).family.files == "tiktoken":
        notes.append("torchtune reads Llama 3's tokenizer from original/tokenizer.model")
    return notes


def task_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield everything that torchtune would refuse, or do differently from what the recipe says."""
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


CONVERSATION_STYLES = ("openai", "sharegpt")
DATASET_HINT = (
    "engine.args: {dataset.conversation_style: openai, dataset.conversation_column: messages} (or sharegpt, "
    "conversations), or {dataset._component_: torchtune.datasets.instruct_dataset} (input, output), or "
    "{dataset._component_: torchtune.datasets.alpaca_dataset} (instruction, input, output)"
)


def dataset_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what torchtune cannot read."""
    data, form = recipe.data, dataset_component(recipe)
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
    yield from _unread_key_problems(data)
    if data.split is not None and any(100 * part % 1 > 1e-9 for part in (data.split.train, data.split.validation)):
        yield Problem(("data", "split"), "torchtune cuts data at whole percents", "{train: 0.95, validation: 0.05}")
    if form is None:
        yield Problem(("engine", "args"), "torchtune must be told what form the chat data has", DATASET_HINT)
    elif form not in DATASET_COMPONENTS:
        yield Problem(
            ("engine", "args", "dataset._component_"),
            f"{form} is not known here",
            f"one of {', '.join(DATASET_COMPONENTS)}",
        )
    else:
        missing = [key for key in DATASET_COMPONENTS[form][1:] if f"dataset.{key}" not in recipe.engine.args]
        if missing:
            yield Problem(("engine", "args"), f"{form} needs dataset.{missing[0]}", DATASET_HINT)
    style = recipe.engine.args.get("dataset.conversation_style")
    if style is not None and style not in CONVERSATION_STYLES:
        yield Problem(
            ("engine", "args", "dataset.conversation_style"),
            f"`{style}` is not a style",
            " or ".join(CONVERSATION_STYLES),
        )


def _unread_key_problems(data: DataSection) -> Iterator[Problem]:
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
        if "://" in address and not address.startswith(HUB_DATASETS):
            yield Problem((*path, "path"), f"torchtune cannot read {address}", hint)
        elif "://" not in address and PurePosixPath(address).suffix not in READER_OF_SUFFIX:
            known = ", ".join(READER_OF_SUFFIX)
            yield Problem((*path, "path"), f"torchtune cannot read {address}", f"write one of {known}")
    if len(source.path) > 1 and any(address.startswith(HUB_DATASETS) for address in source.path):
        yield Problem((*path, "path"), "torchtune reads one dataset of the Hub", "write one address")


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

"""What torchtune cannot be asked for, found before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.engines.foreign import EngineTask
from trainshed.engines.torchtune.builders import Builder, builder_of, known_presets
from trainshed.engines.torchtune.datasets import dataset_problems
from trainshed.engines.torchtune.settings import MLP
from trainshed.plan import layout_problems
from trainshed.recipe import Profile, TrainedTokenizer
from trainshed.recipe.section import Problem


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
        some = [name for name in MLP if name in train.lora.targets]
        if some and len(some) < len(MLP):
            yield Problem(
                ("train", "lora", "targets"),
                f"torchtune adapts all of {', '.join(MLP)} or none",
                "write all three, or none of them",
            )


def _builder_problems(task: EngineTask, builder: Builder) -> Iterator[Problem]:
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

"""What NeMo cannot be asked for, found before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.engines.foreign import EngineTask
from trainshed.engines.nemo.architecture import architecture_problems
from trainshed.plan import layout_problems
from trainshed.recipe import Recipe, TrainedTokenizer
from trainshed.recipe.section import Problem

_ADAM_EPSILON = 1e-8
"""What megatron-core's Adam uses; NeMo 24.07 hands no other on to it."""
_UNREADABLE = "$'\"\\\n"
"""Characters of a path that Hydra reads as its own."""


def shared_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what neither release takes."""
    recipe, train = task.recipe, task.recipe.train
    if task.place.vendor != "nvidia":
        yield Problem(("engine",), "NeMo's images run on NVIDIA GPUs only", "write engine: torch or megatron")
    if train.mode == "finetune":
        yield Problem(("train", "mode"), "NeMo is rendered for pretraining only", "write engine: torchtune")
    if train.lora is not None:
        yield Problem(("train", "lora"), "NeMo is rendered for training all weights", "write engine: torchtune")
    if train.precision not in ("bf16", "fp8"):
        yield Problem(
            ("train", "precision"), f"NeMo is rendered for bf16 and fp8, not for {train.precision}", "precision: bf16"
        )
    if train.z_loss:
        yield Problem(("train", "z_loss"), "NeMo has no z-loss on the logits", "delete it, or write engine: torch")
    if train.non_finite == "skip":
        yield Problem(
            ("train", "non_finite"), "megatron-core stops at a non-finite gradient in bf16, and cannot skip it", "stop"
        )
    if recipe.data.skip:
        yield Problem(("data", "skip"), "NeMo reads its samples in an order of its own", "delete it")
    if recipe.data.stage != "direct":
        yield Problem(("data", "stage"), "NeMo maps the token files where they lie in the store", "stage: direct")
    if recipe.checkpoint.to is not None:
        yield Problem(
            ("checkpoint", "to"), "NeMo writes its checkpoints into the run's folder", "delete it, or write store:"
        )
    yield from layout_problems(
        task.layout,
        task.config,
        sequence_length=recipe.data.sequence_length or task.config.max_positions,
        batch_sizes=[train.global_batch, *([train.batch_ramp.start] if train.batch_ramp else [])],
        engine="nemo",
        stages_written=True,
    )
    if len(set(task.layout.stages)) > 1:
        yield Problem(("layout", "stages"), "uneven stages are not rendered for NeMo", "write engine: megatron")
    if recipe.seed != recipe.data.seed:
        yield Problem(
            ("data", "seed"),
            f"NeMo has one seed for weights and data, and `seed: {recipe.seed}` is another",
            f"seed: {recipe.seed}",
        )
    yield from _tokenizer_problems(recipe)


def hydra_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what release 24.07 does not take."""
    recipe, train, layout = task.recipe, task.recipe.train, task.layout
    newer = 'write engine: {name: nemo, version: "26.06"}'
    yield from shared_problems(task)
    yield from architecture_problems(task.config)
    if recipe.model.from_ is not None:
        yield Problem(
            ("model", "from"),
            "NeMo 24.07 starts from .nemo archives only, which nothing here writes",
            f"{newer}, which starts from Hugging Face weights",
        )
    if train.deterministic:
        yield Problem(("train", "deterministic"), "NeMo 24.07 has no deterministic mode", "delete it")
    if train.optimizer.eps != _ADAM_EPSILON:
        yield Problem(("train", "optimizer", "eps"), "NeMo 24.07 does not hand an epsilon on", f"eps: {_ADAM_EPSILON}")
    if layout.dp > 1 and layout.shard != "zero1":
        yield Problem(
            ("layout", "shard"),
            f"NeMo 24.07 is rendered with megatron-core's distributed optimizer, and shard is {layout.shard}",
            "shard: zero1",
        )
    if layout.replicate > 1:
        yield Problem(("layout", "replicate"), "NeMo 24.07 has one instance of its distributed optimizer", "delete it")
    if task.config.moe is not None:
        if layout.etp != layout.tp:
            yield Problem(
                ("layout", "etp"),
                f"NeMo 24.07 cuts experts by tp: {layout.tp}, and etp is {layout.etp}",
                f"etp: {layout.tp}",
            )
        if layout.dp % layout.ep:
            yield Problem(
                ("layout", "ep"), f"NeMo 24.07 spreads experts over dp: {layout.dp} alone", "write a divisor of dp"
            )
    for path in (task.place.run, task.place.job):
        if any(letter in path for letter in _UNREADABLE):
            yield Problem(("store",), f"Hydra would not read `{path}` as a path", "use letters, digits and -_./:")


def bridge_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what the Megatron-Bridge script does not do."""
    config, layout = task.config, task.layout
    yield from shared_problems(task)
    if task.recipe.observe.dllogger:
        yield Problem(
            ("observe", "dllogger"), "Megatron-Bridge writes no DLLogger file", "delete it: its log has the figures"
        )
    if layout.shard != "zero1" and layout.dp > 1:
        yield Problem(
            ("layout", "shard"),
            f"NeMo is rendered with megatron-core's distributed optimizer, and shard is {layout.shard}",
            "shard: zero1, or engine: megatron",
        )
    schedule = task.recipe.train.schedule
    end = task.steps if schedule.name == "wsd" else schedule.decay or task.steps
    if schedule.warmup >= end:
        yield Problem(
            ("train", "schedule", "warmup"),
            f"Megatron-Bridge would cut a warm-up of {schedule.warmup} steps in silence: its schedule ends at {end}",
            "write a shorter one, or a later `decay`",
        )
    if config.activation != "silu" and config.gated:
        yield Problem(("model",), f"a gated {config.activation} is not rendered for NeMo", "write engine: megatron")
    scaling = config.rope.scaling if config.rope is not None else None
    if scaling is not None and scaling.kind == "llama3":
        # megatron-core has these three as constants of RotaryEmbedding; only the factor is a setting.
        given = (scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions)
        if given != (1.0, 4.0, 8192):
            yield Problem(("model",), "megatron-core stretches rotary frequencies as Llama 3.1 does only", "1, 4, 8192")


def _tokenizer_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tokenizer is None:
        yield Problem(
            ("tokenizer",),
            "is missing: NeMo takes the size of the vocabulary from a tokenizer, for synthetic data too",
            "tokenizer: hf://org/name",
        )
    if isinstance(recipe.tokenizer, TrainedTokenizer) and recipe.data.synthetic:
        yield Problem(("tokenizer",), "there is no text to learn a tokenizer from", "write the address of one")

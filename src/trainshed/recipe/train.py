"""`train`: how long, how large a batch, which optimiser, in which precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainshed.recipe.model import ModelConfig, family_decoder
from trainshed.recipe.optimizer import Ema, Optimizer, Spikes
from trainshed.recipe.phases import TrainPhase, phase_problems
from trainshed.recipe.registered import (
    EngineArgument,
    RegisteredName,
    choice_or_registered,
    option_problems,
    registered_class,
)
from trainshed.recipe.section import (
    Count,
    Fraction,
    NotNegativeFloat,
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
)

LENGTH_KEYS = ("steps", "tokens", "epochs")
LoraProjection = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "experts",
]
LATENT_PROJECTIONS: tuple[LoraProjection, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Of latent attention, by the names that transformers has for them."""
LoraTarget = Literal[LoraProjection, "attn", "mlp", "all-linear"]
LORA_GROUPS: dict[LoraTarget, tuple[LoraProjection, ...]] = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj", *LATENT_PROJECTIONS),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all-linear": (
        *("q_proj", "k_proj", "v_proj", "o_proj", *LATENT_PROJECTIONS),
        *("gate_proj", "up_proj", "down_proj", "experts"),
    ),
}
"""Names that stand for several projections. `experts` are the projections of all experts; the other names of a
feed-forward block are those of dense layers and of shared experts. The router is never adapted."""


NF4_BLOCK = 64
"""Columns of a weight that share a scale in nf4."""


class BatchRamp(Section):
    """A batch that grows in equal steps at the start of the run, as Megatron's `--rampup-batch-size` does."""

    start: PositiveInt = Field(description="Global batch of the first step", examples=[32])
    increment: PositiveInt = Field(description="Sequences added each time", examples=[32])
    samples: Count = Field(description="Samples over which the batch grows to `global_batch`", examples=[1000000])


class TrainingLoss(Section):
    """What is minimised."""

    name: Annotated[str, choice_or_registered("loss", Literal["cross_entropy"])] = Field(
        "cross_entropy", description="The loss: cross entropy, or one that a plugin registers"
    )
    options: dict[str, EngineArgument] | None = Field(None, description="Options of a loss that a plugin registers")

    def problems(self) -> Iterator[Problem]:
        """Options belong to registered losses."""
        if self.options is not None and self.name == "cross_entropy":
            yield Problem(("options",), "cross_entropy has none", "delete it; `train.z_loss` is a key of its own")
        yield from option_problems("loss", self.name, self.options or {}, ("options",), positional=0)


def expand_loss(value: Any) -> Any:
    """Let `loss: NAME` stand for `loss: {name: NAME}`."""
    return {"name": value} if isinstance(value, str) else value


class Schedule(Section):
    """How the learning rate changes."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field("constant", description="Shape after the warm-up")
    warmup: NotNegativeInt = Field(0, description="Steps of linear warm-up")
    decay: PositiveInt | None = Field(
        None,
        description="cosine, linear: the step at which `min_lr` is reached (default: the end of the run; a run that "
        "is made longer asks for it); wsd: how many steps the final decay takes",
    )
    min_lr: NotNegativeFloat = Field(0.0, description="Learning rate at the end of the decay")

    def problems(self) -> Iterator[Problem]:
        """`decay` and `min_lr` belong to schedules that decay."""
        if self.name == "constant":
            if self.decay is not None:
                yield Problem(("decay",), "a constant schedule has no decay", "delete it, or write `name: cosine`")
            if self.min_lr:
                yield Problem(("min_lr",), "a constant schedule has no decay", "delete it, or write `name: cosine`")
        if self.name == "wsd" and self.decay is None:
            yield Problem(("decay",), "is missing: wsd needs the length of its final decay", "decay: 1000")
        if self.name in ("cosine", "linear") and self.decay is not None and self.decay <= self.warmup:
            yield Problem(
                ("decay",),
                f"the decay ends at step {self.decay}, before the warm-up of {self.warmup} steps",
                "write the step at which `min_lr` is reached",
            )


class Lora(Section):
    """Train small adapters and leave the weights alone."""

    rank: PositiveInt = Field(description="Rank of the adapters", examples=[16])
    alpha: PositiveFloat = Field(description="Adapters are scaled by alpha / rank", examples=[32])
    dropout: Fraction = Field(0.0, description="Dropout before the adapters")
    targets: Annotated[tuple[LoraTarget, ...], Field(strict=False, min_length=1)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        description="Projections that get an adapter; attn, mlp and all-linear name several",
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rsLoRA)")
    dora: bool = Field(False, description="Learn the length of every weight row apart from its direction (DoRA)")
    quantize: Literal["int8", "nf4"] | None = Field(
        None, description="Hold the frozen weights in 8 or 4 bits (QLoRA); left out: in the precision of the products"
    )

    @property
    def projections(self) -> tuple[LoraProjection, ...]:
        """The projections that `targets` name, each once."""
        return tuple(dict.fromkeys(name for target in self.targets for name in lora_projections(target)))

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Dpo(Section):
    """Direct preference optimisation: make the better answer of a pair likelier than the worse."""

    beta: PositiveFloat = Field(0.1, description="How strongly the model is held to the reference")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs that are taken to be labelled the wrong way round"
    )
    length_normalized: bool = Field(False, description="Compare log-probabilities per token of the answer")


class EarlyStop(Section):
    """End the run where the validation loss no longer falls."""

    patience: PositiveInt = Field(description="Measurements without a better loss before the run ends", examples=[3])
    min_delta: NotNegativeFloat = Field(0.0, description="A loss is better if it is lower by more than this")


def lora_problems(lora: Lora, config: ModelConfig) -> Iterator[Problem]:
    """Yield what an architecture cannot do of adapters; paths are within `train.lora`."""
    moe = config.moe
    dense = ("gate_proj", "up_proj", "down_proj") if config.gated else ("up_proj", "down_proj")
    here: set[str] = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if config.mla is not None:
        here = {"o_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
        here |= {"q_proj"} if config.mla.query_rank is None else {"q_a_proj", "q_b_proj"}
    if config.has_dense_layers or (moe is not None and moe.shared_ffn):
        here |= {*dense}
    if moe is not None:
        here.add("experts")
    for target in lora.targets:
        if not here & {*lora_projections(target)}:
            yield Problem(("targets",), f"the model has no `{target}`", f"it has {', '.join(sorted(here))}")
    if "experts" in here & {*lora.projections}:
        for key in ("dora", "dropout"):
            if getattr(lora, key):
                yield Problem(
                    (key,),
                    f"adapters of experts have no `{key}`, here as in PEFT",
                    "delete it, or write targets without experts: [attn]",
                )
    if lora.quantize is not None and moe is not None:
        yield Problem(("quantize",), "weights of experts are not held in fewer bits", "delete it")
    widths = {config.hidden, config.heads * config.head_dim, config.ffn or NF4_BLOCK}
    if lora.quantize == "nf4" and (uneven := sorted(width for width in widths if width % NF4_BLOCK)):
        yield Problem(
            ("quantize",),
            f"nf4 has blocks of {NF4_BLOCK} columns, which do not divide {uneven[0]}",
            "write `quantize: int8`",
        )


def lora_projections(target: LoraTarget) -> tuple[LoraProjection, ...]:
    """Return the projections that a target names: itself, or those of a group."""
    if target in ("attn", "mlp", "all-linear"):
        return LORA_GROUPS[target]
    return (target,)


class MoeLosses(Section):
    """Losses that keep a router healthy."""

    balance_loss: NotNegativeFloat = Field(0.001, description="Factor of the load-balance loss (per sequence)")
    z_loss: NotNegativeFloat = Field(0.0, description="Factor of the router's z-loss")
    bias_update: NotNegativeFloat | None = Field(
        None,
        description="How far the bias of an expert's score moves in a step (`moe.score_bias`), towards even load; "
        "left out: 0.001",
        examples=[0.001],
    )


USUAL_BIAS_UPDATE = 0.001
"""`bias_update` where it is left out: DeepSeek-V3's for its first 14.3T tokens (section 4.2 of its report)."""


def score_bias_update(written: float | None, config: ModelConfig) -> float:
    """Return how far the biases of a model's routers move in a step, by its `bias_update`: 0 where they have none."""
    if config.moe is None or not config.moe.score_bias:
        return 0.0
    return USUAL_BIAS_UPDATE if written is None else written


class Mtp(Section):
    """Multi-token prediction: layers after the last, each of which learns to predict one token further."""

    layers: PositiveInt = Field(1, description="How many tokens further are predicted")
    weight: PositiveFloat = Field(0.3, description="Factor of the mean of their losses")

    def problems_of(self, config: ModelConfig) -> Iterator[Problem]:
        """Yield why a model has no such layers; paths are within `train.mtp`."""
        if family_decoder(config.family) != "deepseek_v3":
            yield Problem((), f"the family {config.family} has no layers for multi-token prediction", "delete it")


class TrainSection(Section):
    """The training itself."""

    mode: Literal["pretrain", "finetune", "dpo"] = Field(
        "pretrain",
        description="`finetune`: chat data, loss on the answers only; `dpo`: pairs of a better and a worse answer; "
        "both need `model.from`",
    )
    steps: PositiveInt | None = Field(None, description="Length of the run in steps", examples=[1000])
    tokens: Count | None = Field(None, description="Length of the run in tokens", examples=["20B"])
    epochs: PositiveFloat | None = Field(None, description="Length of the run in passes over the data", examples=[1])
    phases: Annotated[tuple[TrainPhase, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Train in parts that follow one another: a warm-up, an anneal on other data, longer sequences",
        examples=[[{"tokens": "20B"}, {"tokens": "1B", "lr": 0.0, "shape": "linear"}]],
    )
    global_batch: PositiveInt = Field(description="Sequences per step, over all ranks", examples=[1024])
    batch_ramp: BatchRamp | None = Field(None, description="Start with a smaller batch")
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        "bf16",
        description="Precision of the matrix products (weights of record: fp32 or more); fp64 is for proofs, "
        "fp16 (with a loss scale) for engines that are not ours",
    )
    optimizer: Optimizer = Field(description="What turns gradients into updates", examples=["{lr: 3.0e-4}"])
    schedule: Schedule = Field(default_factory=Schedule, description="How the learning rate changes")
    loss: (
        Annotated[TrainingLoss, BeforeValidator(expand_loss, json_schema_input_type=TrainingLoss | RegisteredName)]
        | None
    ) = Field(None, description="What is minimised: a name, or name and options; left out: cross entropy")
    z_loss: NotNegativeFloat = Field(0.0, description="Factor of the z-loss on the logits")
    moe: MoeLosses | None = Field(None, description="Losses of the router, for models with experts")
    mtp: Mtp | None = Field(
        None,
        description="Multi-token prediction (DeepSeek-V3); its layers are those of `model.from`, or fresh ones where "
        "it has none; left out: the model is trained without them",
    )
    dropout: Fraction = Field(0.0, description="Dropout of the residual stream (Megatron and NeMo: of attention too)")
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="At a non-finite loss or gradient: stop, or skip the step"
    )
    spikes: Spikes | None = Field(None, description="Skip steps whose loss or gradient norm is far above the last ones")
    ema: Ema | None = Field(None, description="Average the weights over the steps; left out: no average")
    deterministic: bool = Field(False, description="Bitwise repeatable on GPUs, at a cost")
    lora: Lora | None = Field(None, description="Train adapters only; needs `model.from`")
    dpo: Dpo | None = Field(None, description="The loss of `mode: dpo`")
    early_stop: EarlyStop | None = Field(None, description="End the run when validation no longer improves")

    @property
    def drops(self) -> bool:
        """Whether anything of a step is dropped, by the numbers of its samples."""
        return self.dropout > 0 or (self.lora is not None and self.lora.dropout > 0)

    def warmup_problem(self, steps: int) -> Problem | None:
        """Return what is wrong where a run of `steps` steps ends before its warm-up.

        Not where `decay` names a step of its own: the run is then one leg of a longer one.
        """
        schedule = self.schedule
        ends_with_run = schedule.name == "wsd" or (schedule.name != "constant" and schedule.decay is None)
        if schedule.warmup < steps or (not ends_with_run and (schedule.warmup == steps or schedule.decay is not None)):
            return None
        fitting = steps // 10
        return Problem(
            ("schedule", "warmup"),
            f"the warm-up of {schedule.warmup} steps leaves nothing of a run of {steps}: the learning rate would never "
            "reach its peak",
            f"write `warmup: {fitting}`, or a longer run; on the command line: train.schedule.warmup={fitting}",
        )

    def problems(self) -> Iterator[Problem]:
        """One length; a ramp that arrives; a schedule that goes down."""
        given = [key for key in LENGTH_KEYS if getattr(self, key) is not None]
        if self.phases is not None:
            yield from self._phase_problems(self.phases)
        elif not given:
            yield Problem(
                (),
                "says nothing about the length of the run",
                "write `steps: 1000`, `tokens: 20B` or `epochs: 1`",
            )
        elif len(given) > 1:
            yield Problem(
                (given[1],),
                f"`{given[0]}` and `{given[1]}` both say how long to train",
                f"keep one of them; on the command line: train.{given[0]}=null",
            )
        if self.z_loss and registered_class("loss", self.loss.name if self.loss is not None else None) is not None:
            yield Problem(("z_loss",), "a registered loss has its own terms", "delete it, or `loss`")
        if self.lora is not None and self.optimizer.name == "muon":
            yield Problem(
                ("optimizer", "name"),
                "muon makes the update of a whole matrix orthogonal, and adapters are the two factors of one",
                "write `name: adamw`, or delete `lora`",
            )
        if self.mtp is not None:
            if self.mode != "pretrain" or self.lora is not None:
                why = "adapters do not train its layers" if self.lora is not None else f"`mode: {self.mode}` has none"
                yield Problem(("mtp",), f"multi-token prediction is for pretraining: {why}", "delete it")
            elif registered_class("loss", self.loss.name if self.loss is not None else None) is not None:
                yield Problem(("mtp",), "a registered loss has its own terms", "delete it, or `loss`")
        if self.lora is not None and self.ema is not None:
            yield Problem(("ema",), "whole weights are averaged, and `lora` trains adapters", "delete it, or `lora`")
        if self.schedule.min_lr > self.optimizer.lr:
            yield Problem(
                ("schedule", "min_lr"),
                f"{self.schedule.min_lr:g} is above the peak `optimizer.lr` of {self.optimizer.lr:g}",
                "write a smaller one",
            )
        ramp = self.batch_ramp
        if ramp is None:
            return
        if ramp.start >= self.global_batch:
            yield Problem(
                ("batch_ramp", "start"),
                f"{ramp.start} is not below `global_batch: {self.global_batch}`",
                "write a smaller one, or delete `batch_ramp`",
            )
        elif (self.global_batch - ramp.start) % ramp.increment:
            yield Problem(
                ("batch_ramp", "increment"),
                f"steps of {ramp.increment} from {ramp.start} never meet {self.global_batch}",
                f"write a divisor of {self.global_batch - ramp.start}",
            )

    def _phase_problems(self, phases: tuple[TrainPhase, ...]) -> Iterator[Problem]:
        """Phases say how long the run is, how its learning rate goes and which batch it has."""
        yield from phase_problems(phases)
        for key in LENGTH_KEYS:
            if getattr(self, key) is not None:
                yield Problem((key,), "is not read with `phases`, whose lengths add up to the run's", "delete it")
        if self.schedule != Schedule():
            yield Problem(("schedule",), "is not read with `phases`: each says its own `lr` and `shape`", "delete it")
        if self.batch_ramp is not None:
            yield Problem(
                ("batch_ramp",), "is not read with `phases`", "write phases with a smaller `global_batch` instead"
            )

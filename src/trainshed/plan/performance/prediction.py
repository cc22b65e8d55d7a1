"""What is asked of the planner, and what it answers: a job, and the prediction of one layout for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.performance.stacks import Habits, Stack


@dataclass(frozen=True)
class Job:
    """One training job, before a layout is chosen for it."""

    model: Anatomy
    sequence_length: int
    global_batch: int
    """Sequences per step."""
    precision: str
    """The dtype of matrix products: fp32, fp16, bf16, fp8, mxfp8 or nvfp4."""
    hardware: Hardware
    gpus: int
    stack: Stack
    """The software that steps the model, and what is known of its habits."""
    habits: Habits = field(default_factory=Habits)
    """What this run does otherwise than the usual of its engine."""
    calibration: float = 1.0
    """Measured step seconds divided by predicted ones, from runs like this one."""
    memory_calibration: float = 1.0
    """The same for what tensors fill."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_batch * self.sequence_length

    def rank_tokens(self, layout: RankLayout) -> float:
        """Tokens of a micro-batch that one rank computes with: a context-parallel rank has its part of each."""
        return layout.micro_batch * self.sequence_length / layout.cp

    def stream_shards(self, layout: RankLayout) -> int:
        """Among how many ranks the residual stream of those tokens is shared out."""
        return layout.tp if self.habits.sequence_parallel else 1


@dataclass(frozen=True)
class Memory:
    """What fills one GPU at the peak of a step, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    """Logits and what the loss makes of them."""
    buffers: float
    """Gathered weights, communication buffers, workspaces."""
    reserve: float
    """What the allocator holds and does not use, and the driver's own share."""
    capacity: float

    @property
    def allocated(self) -> float:
        """What tensors fill: `torch.cuda.max_memory_allocated`."""
        return self.total - self.reserve

    @property
    def total(self) -> float:
        """What the card must have."""
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "capacity")

    @property
    def fits(self) -> bool:
        """Whether the card has it."""
        return self.total <= self.capacity


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step go on the slowest pipeline rank; they add up to the step."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp_bubble: float
    """Waiting for other stages, and handing over to them."""
    dp_exposed: float
    """Reducing gradients and gathering weights, as far as nothing hides it."""
    optimizer: float
    """The update, and adding up the gradients of micro-batches where that is a pass of its own."""
    other: float
    """Launches the GPU waits for, and what every step costs whatever its size."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(getattr(self, part.name) for part in fields(self))

    def scaled(self, factor: float) -> StepTimes:
        """Return every part times a factor."""
        return replace(self, **{part.name: factor * getattr(self, part.name) for part in fields(self)})


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline rank."""

    stage: int
    layers: int
    forward_seconds: float
    """One micro-batch through all chunks of the rank, without waiting."""
    backward_seconds: float
    memory: Memory


@dataclass(frozen=True)
class Prediction:
    """What one layout would do."""

    layout: RankLayout
    step_seconds: float
    times: StepTimes
    stages: tuple[StagePrediction, ...]
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs with causal attention, as `plan/flops.py` counts them; recomputation is not counted."""
    mfu: float
    """Against the dense peak of the dtype of the products."""
    peak_tflops: float
    risk_seconds: float = 0.0
    """What stalls that come and go add on average; not in the step, and what choices are made with."""
    stall_likelihood: float = 0.0
    """How likely a run of its kind is held up."""
    stall_seconds: float = 0.0
    """What a step of it then takes besides."""

    @property
    def ranking_seconds(self) -> float:
        """What layouts are chosen by."""
        return self.step_seconds + self.risk_seconds

    @property
    def memory(self) -> Memory:
        """The fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its card."""
        return self.memory.fits

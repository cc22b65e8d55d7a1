"""A plan with figures of our own, so that pictures and words can be compared whatever the planner predicts."""

from __future__ import annotations

from dataclasses import replace

from trainshed.catalog import gpu, model_preset
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StagePrediction, StepTimes
from trainshed.plan.planner import Plan, PlanRequest
from trainshed.plan.search.search import RejectedLayout
from trainshed.plan.training_shape import Hardware, TrainingShape
from trainshed.recipe import Layout

GPUS = 128
CONFIG = model_preset("llama3-70b")
HARDWARE = Hardware("h100-sxm", gpu("h100-sxm"), 8, 8, 450.0, 50.0, "gpudirect-tcpxo", "a3-mega")
JOB = TrainingShape(model_shape(CONFIG, "llama3-70b"), 8192, 1024, "fp8", HARDWARE, GPUS, engine_constants("megatron"))
TIMES = StepTimes(compute=30.2, tp=4.1, cp=1.2, ep=0.0, pp_bubble=5.1, dp_exposed=1.3, optimizer=0.5, other=0.4)
MEMORY = GpuMemory(
    weights=17.5, gradients=9.1, optimizer=12.2, activations=30.0, logits=0.0, buffers=1.5, reserve=3.0, capacity=79.6
)


def layout(**keys: object) -> RankLayout:
    """Return a layout for all GPUs, by the keys a person would write."""
    return resolve_layout(Layout.model_validate(keys), CONFIG, world_size=GPUS)


def prediction(layout: RankLayout, times: StepTimes = TIMES, memory: GpuMemory = MEMORY) -> LayoutPrediction:
    """Return a prediction: later stages keep fewer activations, the last has the logits."""
    stages = tuple(
        StagePrediction(
            stage=rank,
            layers=CONFIG.layers // layout.pp,
            forward_seconds=0.06,
            backward_seconds=0.12,
            memory=replace(
                memory,
                activations=memory.activations * (1 - 0.2 * rank / layout.pp),
                logits=4.2 if rank == layout.pp - 1 > 0 else 0.0,
            ),
        )
        for rank in range(layout.pp)
    )
    seconds = times.total
    tokens = JOB.tokens_per_step / seconds / GPUS
    tflops = 3 * JOB.model.token_flops(JOB.sequence_length) * tokens / 1e12
    return LayoutPrediction(layout, seconds, times, stages, tokens, tflops, tflops / 1978.9, 1978.9)


def answer() -> Plan:
    """Return an answer with everything a picture can show."""
    chosen = prediction(layout(tp=4, pp=4, vp=5, cp=2))
    return Plan(
        request=PlanRequest("llama3-70b", JOB, CONFIG, "megatron"),
        chosen=chosen,
        runners_up=(
            prediction(layout(tp=8, pp=4, vp=5), replace(TIMES, tp=8.0, compute=31.0, cp=0.0)),
            prediction(layout(tp=4, pp=8, vp=2, micro_batch=2), replace(TIMES, pp_bubble=9.0)),
            prediction(layout(tp=2, pp=8, vp=5, cp=2, recompute="selective"), TIMES.scaled(1.2)),
        ),
        rejected=(RejectedLayout(layout(tp=2, pp=4), "stage 0 needs 96.1 GiB, 16.5 GiB more than a h100-sxm has", 12),),
        considered=1234,
        notes=("planned for the full batch of 1,024: steps of the ramp are shorter",),
        explanation=("tp 8 instead of 4 would cost 9% more (46.6 s): tensor-parallel communication +3.90 s.",),
    )

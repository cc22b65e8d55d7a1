"""What `fit_planner.py` fits: for every engine its constants with their bounds, and the rows they are fitted to.

Every constant is physical and starts from what it is known or believed to be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trainshed.plan.performance.engine_constants import EngineConstants
from trainshed.plan.performance.gpu_efficiency import GpuEfficiency, gpu_efficiency
from trainshed.plan.performance.memory import rank_memory
from trainshed.plan.performance.prediction import predict_seconds
from trainshed.plan.published.cases import PublishedCase, row_case
from trainshed.plan.published.rows import PublishedRow, SkippedRow, read_tables, shipped_tables
from trainshed.plan.training_shape import TrainingShape

OWN_ENGINE_TABLE = Path(__file__).with_name("own_engine.csv")
"""Runs of our own engine on one GPU, in the columns of the published tables."""
Bounds = Mapping[str, tuple[float, float, float]]
"""Constant → where it starts, its lowest and its highest value; `b200.fp8` is a constant of a GPU."""
STARTS_FROM = {"megatron-fsdp": "megatron"}
"""Engines that start from the constants of another."""


@dataclass(frozen=True)
class FitRow:
    """A published row that can be predicted."""

    row: PublishedRow
    case: PublishedCase
    seconds: float | None
    gib: float | None

    @property
    def engine(self) -> str:
        """The engine that it was measured with."""
        return self.case.training.constants.name

    def training_with(
        self, constants: EngineConstants, efficiencies: Mapping[str, GpuEfficiency] | None = None
    ) -> TrainingShape:
        """Return its training with other constants, and with other efficiencies of GPUs than the stored ones."""
        training = self.case.training
        if efficiencies is None:
            return replace(training, constants=constants)
        efficiency = gpu_efficiency(training.hardware.gpu_name, efficiencies)
        return replace(training, constants=constants, gpu_efficiency=efficiency)


def fit_rows() -> dict[str, list[FitRow]]:
    """Read all tables but that of fine-tuning, which is held out; return the rows that can be predicted, by engine."""
    by_engine: dict[str, list[FitRow]] = defaultdict(list)
    tables = [path for path in shipped_tables() if path.name != "finetuning.csv"]
    for row in read_tables([*tables, OWN_ENGINE_TABLE]):
        try:
            case = row_case(row)
        except SkippedRow:
            continue
        one = FitRow(row, case, None if row.out_of_memory else row.step_seconds, row.memory_gib)
        by_engine[one.engine].append(one)
    return by_engine


def seconds_error(one: FitRow, training: TrainingShape) -> float:
    """Logarithm of predicted over measured seconds."""
    assert one.seconds is not None
    return float(np.log(predict_seconds(training, one.case.layout) / one.seconds))


def memory_error(one: FitRow, training: TrainingShape) -> float:
    """Relative error of the peak that the row states."""
    assert one.gib is not None
    layout = one.case.layout
    ranks = {"first": [0], "last": [layout.pp - 1]}.get(one.row.memory_stage, range(layout.pp))
    with_reserve = one.row.memory_metric in ("reserved", "nvidia-smi")
    peaks = (rank_memory(training, layout, rank) for rank in ranks)
    return max(memory.total if with_reserve else memory.allocated for memory in peaks) / one.gib - 1


def capacity_error(one: FitRow, training: TrainingShape) -> float:
    """By how much a row that ran is predicted not to fit, or one that ran out of memory to fit; 0 if that is right."""
    layout = one.case.layout
    peaks = [rank_memory(training, layout, rank) for rank in range(layout.pp)]
    over = max(memory.total / memory.capacity for memory in peaks) - 1
    return min(0.0, over) if one.row.out_of_memory else max(0.0, over)


@dataclass(frozen=True)
class Fit:
    """One engine: the constants that are fitted, their bounds, and the rows they are fitted to."""

    engine: str
    source: str
    time: Bounds
    memory: Bounds = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    newer: Bounds = field(default_factory=dict)
    """Constants that are different in a later release of the engine; they are fitted together with the rest."""
    newer_engine: str | None = None
    """The name of that release."""
    rows: Callable[[PublishedRow], bool] = lambda row: True
    weight: Callable[[FitRow], float] = lambda one: 1.0
    judged: Callable[[FitRow], bool] = lambda one: True
    """Which rows a fit that left out their model is judged on."""

    def all_rows(self, by_engine: Mapping[str, list[FitRow]]) -> list[FitRow]:
        """Return the rows of the engine and of its later release."""
        return [*by_engine[self.engine], *by_engine.get(self.newer_engine or "", [])]


_COMPUTE: Bounds = {
    "gemm": (0.92, 0.5, 1.2),
    "attention": (0.6, 0.2, 1.1),
    "elementwise": (1.6, 1.0, 6.0),
    "loss_passes": (6.0, 2.0, 20.0),
    "launch_layer_us": (800.0, 50.0, 8000.0),
    "step_ms": (30.0, 0.0, 300.0),
    "network": (0.7, 0.15, 1.0),
    "link": (0.7, 0.15, 1.0),
    "hop_us": (20.0, 2.0, 100.0),
    "optimizer": (1.5, 0.5, 6.0),
}
_PIPELINE: Bounds = {"pp_send_us": (300.0, 0.0, 20000.0), "pp_hidden": (0.3, 0.0, 1.0)}
_DP: Bounds = {"dp_hidden": (0.5, 0.0, 1.0), "gather_hidden": (0.4, 0.0, 1.0), "rails": (0.7, 0.0, 1.0)}
_CROSS_NODE_TP: Bounds = {"cross_node_tp_rails": (0.7, 0.05, 1.0), "cross_node_tp_us": (100.0, 10.0, 1500.0)}
_ACTIVATIONS: Bounds = {
    "hidden_bytes": (8.0, 2.0, 60.0),
    "head_bytes": (4.0, 2.0, 12.0),
    "inner_bytes": (6.0, 2.0, 20.0),
    "logit_bytes": (10.0, 4.0, 24.0),
    "backward_work_bytes": (4.0, 0.0, 30.0),
    "buffer_gib": (0.3, 0.0, 2.0),
}
_FP8: Bounds = {"fp8_kept": (0.8, 0.4, 1.0)}
_RESERVE: Bounds = {"reserve": (0.04, 0.0, 0.2), "context_gib": (1.5, 0.5, 4.0)}


STALLED_FROM = 1.6
"""Runs of the sweep that took this many times as long as predicted stalled (`plan/performance/stalls.py`)."""


def _above_10_percent_mfu(one: FitRow) -> bool:
    return (one.row.mfu or 1.0) > 0.1


def _stalled_counts_nothing(one: FitRow) -> float:
    """Runs that stalled say nothing about arithmetic, and the sweep's slow layouts little: they count a third."""
    if seconds_error(one, one.case.training) < -np.log(STALLED_FROM):
        return 0.0
    return 1.0 if _above_10_percent_mfu(one) else 0.3


FITS: tuple[Fit, ...] = (
    Fit(
        "torch",
        "25 runs of our own engine on one H200 (benchmarks/planner_gpu.py); between GPUs as torchtitan, with which it "
        "shares FSDP2 and the functional collectives",
        {
            "gemm": (0.95, 0.7, 1.1),
            "gemm_fp8": (1.0, 0.5, 1.3),
            "attention": (0.9, 0.5, 1.1),
            "elementwise": (1.2, 0.5, 3.0),
            "expert_elementwise": (1.0, 0.3, 4.0),
            "loss_passes": (4.0, 1.0, 12.0),
            "cast_bytes": (3.0, 0.0, 8.0),
            "launch_layer_us": (1000.0, 200.0, 5000.0),
            "launch_micro_batch_us": (1000.0, 0.0, 20000.0),
            "step_ms": (10.0, 0.0, 40.0),
        },
        {
            "hidden_bytes": (7.0, 2.0, 16.0),
            "head_bytes": (4.0, 2.0, 8.0),
            "inner_bytes": (6.0, 3.0, 9.0),
            "logit_bytes": (4.0, 2.0, 16.0),
            "backward_work_bytes": (2.0, 0.0, 12.0),
            "gradient_bytes": (4.0, 2.0, 4.0),
            "fp8_kept": (0.7, 0.4, 1.0),
            "selective_kept": (0.4, 0.2, 1.0),
            "buffer_gib": (0.3, 0.0, 2.0),
        },
        # Gradients are accumulated in fp32: two reads and a write. The loss takes 2^28 logits at a time. Attention with
        # a window of 4,096 in 16,384 tokens took 11.6 ms; full attention, with 2.3 times the FLOPs, took 13.2 ms. LoRA
        # of 8B takes the same memory in fp8 and bf16 (measurements/finetuning.csv).
        fixed={
            "gradients_freed": True,
            "accumulate_bytes": 12.0,
            "logit_slice": float(1 << 28),
            "windowed": 0.5,
            "full_memory_slowdown": 1.0,
            "fp8_kept_beside_adapters": 1.0,
        },
    ),
    Fit(
        "llm-foundry",
        "93 rows of MosaicML's table (Composer, FSDP; A100 40 and 80 GB, H100; 125M to 70B)",
        {
            **_COMPUTE,
            "launch_micro_batch_us": (1000.0, 0.0, 40000.0),
            "rails": (0.5, 0.0, 1.0),
            "fsdp_slowdown": (0.2, 0.0, 1.0),
            "a100.scale": (1.0, 0.8, 1.2),
            "a100.attention": (0.6, 0.3, 1.2),
            "a100.attention_width": (0.3, 0.0, 0.8),
        },
        {**_ACTIVATIONS},
        fixed={
            "gradients_freed": True,
            "reduce_bytes": 2.0,
            "gradient_bytes": 2.0,
            "reserve": 0.03,
            "context_gib": 1.0,
        },
    ),
    Fit(
        "nanotron",
        "1,093 rows of the ultra-scale playbook's sweep (1.3B, 8.9B and 80B on 8 to 512 H100, EFA)",
        {
            **_COMPUTE,
            **_CROSS_NODE_TP,
            "launch_layer_us": (4000.0, 1000.0, 8000.0),
            "launch_collective_us": (500.0, 0.0, 5000.0),
            "launch_micro_batch_us": (1000.0, 0.0, 20000.0),
            "pipeline_hop_us": (2000.0, 0.0, 6000.0),
            "pipeline_layer_us": (3000.0, 0.0, 20000.0),
            "stall_ms": (280.0, 0.0, 600.0),
            "tp_hidden": (0.3, 0.0, 1.0),
            "node_ms": (0.3, 0.0, 50.0),
            "dp_hidden": (0.5, 0.0, 1.0),
            "pp_hidden": (0.2, 0.0, 1.0),
            "cross_node_tp_us": (400.0, 10.0, 1500.0),
            "rails": (0.7, 0.0, 1.0),
            "shard_messages": (3.0, 0.0, 15.0),
        },
        {
            "gradient_bytes": (6.0, 4.0, 9.0),
            "optimizer_bytes": (12.0, 11.0, 13.0),
            "hidden_bytes": (30.0, 4.0, 60.0),
            "inner_bytes": (5.0, 2.0, 20.0),
            "pending_bytes": (100.0, 0.0, 200.0),
            "scattered_bytes": (4.0, 0.0, 16.0),
            "logit_bytes": (12.0, 4.0, 24.0),
            "step_bytes": (6.0, 0.0, 20.0),
            "buffer_gib": (0.3, 0.0, 1.0),
        },
        fixed={
            "backward_work_bytes": 0.0,
            "reserve": 0.07,
            "context_gib": 2.5,
            "full_memory_slowdown": 2.0,
            "reduces_whole": True,
        },
        weight=_stalled_counts_nothing,
        judged=_above_10_percent_mfu,
    ),
    Fit(
        "megatron-deepspeed",
        "54 rows of BLOOM's chronicles (176B to 205B, ZeRO-1, A100 80 GB, Omni-Path), memory by nvidia-smi",
        {
            **_COMPUTE,
            **_PIPELINE,
            **_DP,
            "score_passes": (8.0, 2.0, 20.0),
            "imbalance": (1.02, 1.0, 1.3),
            "pp_send_us": (20000.0, 0.0, 200000.0),
        },
        {**_ACTIVATIONS, "context_gib": (3.0, 0.5, 8.0), "gradient_bytes": (2.0, 2.0, 6.0)},
        fixed={"reduce_bytes": 2.0, "score_passes": 8.0},
    ),
    Fit(
        "megatron-2021",
        "60 rows of vTrain's ground truth (3.6B to 175B, no ZeRO, up to 512 A100) and 8 of Korthikanti et al. 2022: "
        "Megatron-LM before FlashAttention",
        {
            **_COMPUTE,
            **_PIPELINE,
            **_DP,
            **_CROSS_NODE_TP,
            "score_passes": (8.0, 2.0, 20.0),
            "pp_blocking": (0.2, 0.0, 1.0),
        },
        fixed={"reduce_bytes": 2.0, "score_passes": 8.0},
    ),
    Fit(
        "internevo",
        "54 rows of InternEvo's table (7B on 8 to 1,024 A100, 400 Gbit RoCE)",
        {**_COMPUTE, **_DP, "shard_messages": (2.0, 0.0, 15.0)},
        {**_ACTIVATIONS, "gradient_bytes": (2.0, 2.0, 4.0), "optimizer_bytes": (14.0, 12.0, 28.0)},
        fixed={"reduce_bytes": 2.0, "reserve": 0.03, "context_gib": 1.0},
    ),
    Fit(
        "torchtitan",
        "28 rows of torchtitan's and fms-fsdp's reports (FSDP2, compiled; A100, H100 of 500 W, H200)",
        {
            **_COMPUTE,
            "gemm_fp8": (1.0, 0.5, 1.3),
            "tp_hidden": (0.3, 0.0, 1.0),
            "fsdp_slowdown": (0.2, 0.0, 1.0),
            "dp_hidden": (0.8, 0.0, 1.0),
            "rails": (0.7, 0.0, 1.0),
        },
        {**_ACTIVATIONS, **_RESERVE},
        fixed={"gradients_freed": True, "reduce_bytes": 4.0},
    ),
    Fit(
        "torchtune",
        "10 rows of torchtune's README (Llama-3.2-3B on one A100)",
        {"gemm": (0.9, 0.4, 1.2), "elementwise": (2.0, 1.0, 8.0), "launch_layer_us": (800.0, 50.0, 8000.0)},
        {**_ACTIVATIONS},
        fixed={"gradients_freed": True, "gradient_bytes": 2.0, "optimizer_bytes": 4.0},
    ),
    Fit(
        "jax",
        "17 rows of MaxText and PaxML (70B and 175B on H100)",
        {**_COMPUTE, "gemm_fp8": (1.0, 0.5, 1.3), "fsdp_slowdown": (0.3, 0.0, 1.0), "tp_hidden": (0.3, 0.0, 1.0)},
    ),
    Fit(
        "megatron",
        "about 390 rows of NVIDIA's own tables (NeMo 24.07 to Megatron-Bridge 26.08, dgxc-benchmarking), SimuMax's "
        "runs on B200 and the Megatron-MoE model zoo",
        {
            **_COMPUTE,
            "gemm_fp8": (1.1, 0.5, 1.4),
            "attention": (0.85, 0.3, 1.1),
            "expert_elementwise": (1.5, 0.5, 8.0),
            "fused_dispatch_share": (0.6, 0.2, 1.0),
            # Two bytes read and one or two written, and one more read where the scale is that of the tensor itself.
            "cast_bytes": (3.0, 1.0, 5.0),
            # nccl-tests between GPUs of a node: 280 to 370 of NVLink 4's 450 GB/s. Rows nearly all hide it.
            "link": (0.7, 0.6, 0.85),
            "launch_layer_us": (1500.0, 50.0, 6000.0),
            "launch_expert_us": (6000.0, 0.0, 12000.0),
            "tp_hidden": (0.6, 0.0, 1.0),
            "cp_hidden": (0.5, 0.0, 1.0),
            "ep_hidden": (0.2, 0.0, 1.0),
            "ep_overlapped": (0.15, 0.0, 1.0),
            "ep_link": (0.5, 0.1, 1.0),
            "ep_network": (0.8, 0.3, 1.2),
            "dp_hidden": (0.7, 0.0, 1.0),
            "gather_hidden": (0.5, 0.0, 1.0),
            "imbalance": (1.02, 1.0, 1.2),
            "optimizer": (1.0, 0.5, 4.0),
            "pp_send_us": (300.0, 0.0, 4000.0),
            "b200.scale": (0.8, 0.6, 1.4),
            "b300.scale": (0.8, 0.6, 1.4),
            "b200.link": (0.85, 0.5, 1.1),
            "b300.link": (0.85, 0.5, 1.1),
            "b200.fp8": (0.85, 0.4, 1.4),
            "b300.fp8": (0.9, 0.4, 1.4),
            "h100.fp8": (0.75, 0.5, 1.2),
            "b200.fp4": (0.8, 0.4, 1.2),
            "b300.fp4": (0.6, 0.3, 1.2),
            "b200.attention": (0.5, 0.2, 0.9),
            "b300.attention": (0.6, 0.2, 0.9),
            "h100.grouped_half_tokens": (100.0, 0.0, 600.0),
            "b200.grouped_half_tokens": (100.0, 0.0, 800.0),
            "b300.grouped_half_tokens": (100.0, 0.0, 800.0),
        },
        {**_ACTIVATIONS, **_FP8},
        # By the 13 rows of LoRA in the tables of NeMo 24.07 and Megatron-Bridge 26.06; finetuning.csv is held out.
        fixed={"adapter_step": 0.25},
        newer={
            "expert_elementwise": (1.0, 0.2, 6.0),
            "ep_hidden": (0.7, 0.0, 1.0),
            "cast_bytes": (2.0, 1.0, 5.0),
        },
        newer_engine="megatron-26.06",
        rows=lambda row: "functional recipe" not in row.notes,
    ),
    Fit(
        "megatron-fsdp",
        "12 rows of Megatron-Bridge's tables (FSDP); all else as megatron",
        {"fsdp_slowdown": (0.2, 0.0, 1.0), "gemm": (0.94, 0.7, 1.2), "gemm_fp8": (1.2, 0.7, 1.4)},
    ),
)

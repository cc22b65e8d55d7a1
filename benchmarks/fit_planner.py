"""Fit the planner's constants to published measurements: `python benchmarks/fit_planner.py [STACK ...]`.

Rewrites `gpu_efficiency.yaml` (what GPUs reach of their datasheets) and `engine_constants.yaml` (what engines cost)
in `plan/performance`. Every constant is physical and starts from what it is known or believed to be; the fit pulls it
towards the measurements and a prior pulls it back, so that what a table cannot tell stays where it was. Errors are
logarithms, with outliers damped.
`--held-out` fits without one model at a time (or a share of them, or models on a number of GPUs) and prints how well
that one is then predicted. `--evidence` fits nothing that is kept: it writes `evidence.yaml`, which says how far off
predictions of left-out models are by engine, and which GPUs were measured and how well they were used; plans quote it.
Needs scipy.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import trainshed.plan.performance.gpu_efficiency as reach_module
from trainshed.plan.performance.engine_constants import EngineConstants, engine_constant_names, engine_constants
from trainshed.plan.performance.gpu_efficiency import GpuEfficiency
from trainshed.plan.performance.memory import rank_memory
from trainshed.plan.performance.prediction import LayoutPrediction, predict, predict_seconds
from trainshed.plan.published.cases import PublishedCase, row_case
from trainshed.plan.published.rows import PublishedRow, SkippedRow, read_tables, shipped_tables
from trainshed.plan.published.validation import JudgedRow, ranked_measurements, regret_scores, validate_rows

PLAN = Path(reach_module.__file__).parent
OWN_ENGINE_TABLE = Path(__file__).with_name("own_engine.csv")
"""What our own engine did on one GPU, in the columns of the published tables."""
DAMPED_FROM = 0.1
"""Errors beyond this count in proportion, not squared."""
Bounds = Mapping[str, tuple[float, float, float]]
"""Constant → what it starts from, its lowest and its highest; `b200.low` is a constant of a GPU."""
SAME_CHIP = {"h100": ("h100", "h200"), "b200": ("b200", "gb200"), "b300": ("b300", "gb300")}


@dataclass(frozen=True)
class Measured:
    """A row that can be predicted."""

    row: PublishedRow
    case: PublishedCase
    seconds: float | None
    gib: float | None


@dataclass(frozen=True)
class Fit:
    """One engine's constants: the rows they are fitted to, and where each may lie."""

    stack: str
    source: str
    time: Bounds
    memory: Bounds = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    newer: Bounds = field(default_factory=dict)
    """Constants that a later release of the engine has otherwise, fitted together with the rest."""
    newer_stack: str | None = None
    rows: Callable[[PublishedRow], bool] = lambda row: True
    weight: Callable[[Measured], float] = lambda one: 1.0
    judged: Callable[[Measured], bool] = lambda one: True
    """Which rows the fit is judged on where a model is held out."""


_COMPUTE: Bounds = {
    "gemm": (0.92, 0.5, 1.2),
    "attention": (0.6, 0.2, 1.1),
    "elementwise": (1.6, 1.0, 6.0),
    "loss_passes": (6.0, 2.0, 20.0),
    "host_layer_us": (800.0, 50.0, 8000.0),
    "step_ms": (30.0, 0.0, 300.0),
    "network": (0.7, 0.15, 1.0),
    "link": (0.7, 0.15, 1.0),
    "hop_us": (20.0, 2.0, 100.0),
    "optimizer": (1.5, 0.5, 6.0),
}
_PIPELINE: Bounds = {"handover_us": (300.0, 0.0, 20000.0), "pp_hidden": (0.3, 0.0, 1.0)}
_DP: Bounds = {"dp_hidden": (0.5, 0.0, 1.0), "gather_hidden": (0.4, 0.0, 1.0), "rails": (0.7, 0.0, 1.0)}
_FAR_TP: Bounds = {"far_rails": (0.7, 0.05, 1.0), "far_tp_us": (100.0, 10.0, 1500.0)}
_ACTIVATIONS: Bounds = {
    "hidden_bytes": (8.0, 2.0, 60.0),
    "head_bytes": (4.0, 2.0, 12.0),
    "inner_bytes": (6.0, 2.0, 20.0),
    "logit_bytes": (10.0, 4.0, 24.0),
    "work_bytes": (4.0, 0.0, 30.0),
    "buffer_gib": (0.3, 0.0, 2.0),
}
_LOW: Bounds = {"low_kept": (0.8, 0.4, 1.0)}
_RESERVE: Bounds = {"reserve": (0.04, 0.0, 0.2), "context_gib": (1.5, 0.5, 4.0)}


STALLED_FROM = 1.6
"""Runs of the sweep that took so many times what they should were held up (`plan/performance/stalls.py`)."""


def _above_10_percent_mfu(one: Measured) -> bool:
    return (one.row.mfu or 1.0) > 0.1


def _nothing_if_stalled(one: Measured) -> float:
    """Runs that were held up say nothing of arithmetic, and the sweep's slow layouts little: they count for a third."""
    if seconds_error(one, engine_constants("nanotron")) < -np.log(STALLED_FROM):
        return 0.0
    return 1.0 if _above_10_percent_mfu(one) else 0.3


FITS: tuple[Fit, ...] = (
    Fit(
        "torch",
        "27 runs of our own engine on one H200 (benchmarks/planner_gpu.py); between GPUs as torchtitan, with which it "
        "shares FSDP2 and the functional collectives",
        {
            "gemm": (0.95, 0.7, 1.1),
            "gemm_fp8": (1.0, 0.5, 1.3),
            "attention": (0.9, 0.5, 1.1),
            "elementwise": (1.2, 0.5, 3.0),
            "expert_elementwise": (1.0, 0.3, 4.0),
            "loss_passes": (4.0, 1.0, 12.0),
            "cast_bytes": (3.0, 0.0, 8.0),
            "host_layer_us": (1000.0, 200.0, 5000.0),
            "host_micro_batch_us": (1000.0, 0.0, 20000.0),
            "step_ms": (10.0, 0.0, 40.0),
        },
        {
            "hidden_bytes": (7.0, 2.0, 16.0),
            "head_bytes": (4.0, 2.0, 8.0),
            "inner_bytes": (6.0, 3.0, 9.0),
            "logit_bytes": (4.0, 2.0, 16.0),
            "work_bytes": (2.0, 0.0, 12.0),
            "gradient_bytes": (4.0, 2.0, 4.0),
            "low_kept": (0.7, 0.4, 1.0),
            "selective_kept": (0.4, 0.2, 1.0),
            "buffer_gib": (0.3, 0.0, 2.0),
        },
        # Gradients are added in fp32: two reads and a write. The loss goes through 2^28 logits at a time. A window of
        # 4,096 in 16,384 tokens took 11.6 ms where attention over all of them, 2.3 times the products, took 13.2.
        fixed={
            "gradients_freed": True,
            "added_bytes": 12.0,
            "logit_slice": float(1 << 28),
            "windowed": 0.5,
            "squeeze": 1.0,
        },
    ),
    Fit(
        "llm-foundry",
        "93 rows of MosaicML's table (Composer, FSDP; A100 40 and 80 GB, H100; 125M to 70B)",
        {
            **_COMPUTE,
            "host_micro_batch_us": (1000.0, 0.0, 40000.0),
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
            **_FAR_TP,
            "host_layer_us": (4000.0, 1000.0, 8000.0),
            "host_collective_us": (500.0, 0.0, 5000.0),
            "host_micro_batch_us": (1000.0, 0.0, 20000.0),
            "pipeline_hop_us": (2000.0, 0.0, 6000.0),
            "pipeline_layer_us": (3000.0, 0.0, 20000.0),
            "stall_ms": (280.0, 0.0, 600.0),
            "tp_hidden": (0.3, 0.0, 1.0),
            "node_ms": (0.3, 0.0, 50.0),
            "dp_hidden": (0.5, 0.0, 1.0),
            "pp_hidden": (0.2, 0.0, 1.0),
            "far_tp_us": (400.0, 10.0, 1500.0),
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
        fixed={"work_bytes": 0.0, "reserve": 0.07, "context_gib": 2.5, "squeeze": 2.0, "reduces_whole": True},
        weight=_nothing_if_stalled,
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
            "handover_us": (20000.0, 0.0, 200000.0),
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
            **_FAR_TP,
            "score_passes": (8.0, 2.0, 20.0),
            "pp_busy": (0.2, 0.0, 1.0),
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
        {"gemm": (0.9, 0.4, 1.2), "elementwise": (2.0, 1.0, 8.0), "host_layer_us": (800.0, 50.0, 8000.0)},
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
            "fused_exchange": (0.6, 0.2, 1.0),
            # Two bytes read and one or two written, and one more read where the scale is that of the tensor itself.
            "cast_bytes": (3.0, 1.0, 5.0),
            # nccl-tests between GPUs of a node: 280 to 370 of NVLink 4's 450 GB/s. Rows nearly all hide it.
            "link": (0.7, 0.6, 0.85),
            "host_layer_us": (1500.0, 50.0, 6000.0),
            "host_expert_us": (6000.0, 0.0, 12000.0),
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
            "handover_us": (300.0, 0.0, 4000.0),
            "b200.scale": (0.8, 0.6, 1.4),
            "b300.scale": (0.8, 0.6, 1.4),
            "b200.link": (0.85, 0.5, 1.1),
            "b300.link": (0.85, 0.5, 1.1),
            "b200.low": (0.85, 0.4, 1.4),
            "b300.low": (0.9, 0.4, 1.4),
            "h100.low": (0.75, 0.5, 1.2),
            "b200.fp4": (0.8, 0.4, 1.2),
            "b300.fp4": (0.6, 0.3, 1.2),
            "b200.attention": (0.5, 0.2, 0.9),
            "b300.attention": (0.6, 0.2, 0.9),
            "h100.narrow": (100.0, 0.0, 600.0),
            "b200.narrow": (100.0, 0.0, 800.0),
            "b300.narrow": (100.0, 0.0, 800.0),
        },
        {**_ACTIVATIONS, **_LOW},
        newer={
            "expert_elementwise": (1.0, 0.2, 6.0),
            "ep_hidden": (0.7, 0.0, 1.0),
            "cast_bytes": (2.0, 1.0, 5.0),
        },
        newer_stack="megatron-26.06",
        rows=lambda row: "functional recipe" not in row.notes,
    ),
    Fit(
        "megatron-fsdp",
        "12 rows of Megatron-Bridge's tables (FSDP); all else as megatron",
        {"fsdp_slowdown": (0.2, 0.0, 1.0), "gemm": (0.94, 0.7, 1.2), "gemm_fp8": (1.2, 0.7, 1.4)},
    ),
)
LIKE = {"megatron-fsdp": "megatron"}
"""Stacks that start from the constants of another."""


class Constants:
    """All constants as they stand while fitting."""

    def __init__(self) -> None:
        self.reach = dict(reach_module.all_gpu_efficiencies())
        self.stacks: dict[str, EngineConstants] = {}
        self.measured = dict(self.reach)

    def with_values(self, base: EngineConstants, values: Mapping[str, float]) -> EngineConstants:
        """Apply values to a stack, and those of GPUs to what the predictor looks up."""
        changed = dict(self.reach)
        for key, value in values.items():
            if "." in key:
                chip, name = key.split(".")
                for gpu in SAME_CHIP.get(chip, tuple(known for known in changed if known.startswith(chip))):
                    changed[gpu] = _changed(changed[gpu], self.measured[gpu], name, value)
        reach_module.use_gpu_efficiencies(changed)
        return with_constants(base, {key: value for key, value in values.items() if "." not in key})

    def keep(self, stack: EngineConstants, values: Mapping[str, float]) -> None:
        """Keep what a fit found."""
        self.stacks[stack.name] = self.with_values(stack, values)
        self.reach = dict(reach_module.all_gpu_efficiencies())


def with_constants(stack: EngineConstants, values: Mapping[str, Any]) -> EngineConstants:
    """Return a stack with other constants."""
    return replace(stack, **values)


def _changed(reach: GpuEfficiency, measured: GpuEfficiency, name: str, value: float) -> GpuEfficiency:
    if name != "scale":
        return replace(reach, **dict[str, Any]({name: value}))
    return replace(
        reach,
        forward=measured.forward * value,
        input_gradient=measured.input_gradient * value,
        weight_gradient=measured.weight_gradient * value,
    )


def measured_rows() -> dict[str, list[Measured]]:
    """Read the shipped tables, by stack."""
    found: dict[str, list[Measured]] = defaultdict(list)
    for row in read_tables([*shipped_tables(), OWN_ENGINE_TABLE]):
        try:
            case = row_case(row)
        except SkippedRow:
            continue
        seconds = None if row.out_of_memory else row.step_seconds
        found[case.job.stack.name].append(Measured(row, case, seconds, row.memory_gib))
    return found


def seconds_error(one: Measured, stack: EngineConstants) -> float:
    """Logarithm of predicted over measured seconds."""
    assert one.seconds is not None
    return float(np.log(predict_seconds(replace(one.case.job, stack=stack), one.case.layout) / one.seconds))


def memory_error(one: Measured, stack: EngineConstants) -> float:
    """Relative error of the peak that the row means."""
    assert one.gib is not None
    job, layout = replace(one.case.job, stack=stack), one.case.layout
    ranks = {"first": [0], "last": [layout.pp - 1]}.get(one.row.memory_stage, range(layout.pp))
    whole = one.row.memory_metric in ("reserved", "nvidia-smi")
    peaks = (rank_memory(job, layout, rank) for rank in ranks)
    return max(memory.total if whole else memory.allocated for memory in peaks) / one.gib - 1


def capacity_error(one: Measured, stack: EngineConstants) -> float:
    """By how much a row that ran is predicted not to fit, or one that ran out to fit; 0 where that is right."""
    job, layout = replace(one.case.job, stack=stack), one.case.layout
    peaks = [rank_memory(job, layout, rank) for rank in range(layout.pp)]
    over = max(memory.total / memory.capacity for memory in peaks) - 1
    return min(0.0, over) if one.row.out_of_memory else max(0.0, over)


def _memory_errors(stack: EngineConstants, weighed: Sequence[Measured], ran: Sequence[Measured]) -> np.ndarray:
    """Errors of measured peaks, and of the question whether a row fits."""
    errors = [memory_error(one, stack) for one in weighed]
    return np.array(errors + [0.5 * max(-0.3, min(0.3, capacity_error(one, stack))) for one in ran])


def damped(errors: np.ndarray, scale: float) -> np.ndarray:
    """Return residuals whose squares grow in proportion beyond the scale (soft L1)."""
    return np.sign(errors) * np.sqrt(2 * scale**2 * (np.sqrt(1 + (errors / scale) ** 2) - 1))


def solve(
    bounds: Bounds, errors: Callable[[dict[str, float]], np.ndarray], scale: float, prior: float, rounds: int
) -> dict[str, float]:
    """Find the values that make the errors small without leaving their starts for nothing."""
    from scipy.optimize import least_squares

    names = list(bounds)
    start, low, high = (np.array([bounds[name][index] for name in names]) for index in range(3))

    def values(place: np.ndarray) -> dict[str, float]:
        return dict(zip(names, (low + place * (high - low)).tolist(), strict=True))

    origin = np.clip((start - low) / (high - low), 1e-4, 1 - 1e-4)

    def residuals(place: np.ndarray) -> np.ndarray:
        return np.concatenate([damped(errors(values(place)), scale), prior * (place - origin)])

    found = least_squares(residuals, origin, bounds=(0, 1), diff_step=1e-3, max_nfev=rounds)
    return values(found.x)


def fit_memory(fit: Fit, rows: Sequence[Measured], base: EngineConstants, rounds: int) -> EngineConstants:
    """Fit the constants of memory to measured peaks, and to what ran and what ran out."""
    if not fit.memory:
        return base
    weighed = [one for one in rows if one.gib is not None]
    ran = [one for one in rows if one.case.cannot_run is None]

    def errors(values: dict[str, float]) -> np.ndarray:
        return _memory_errors(with_constants(base, values), weighed, ran)

    return with_constants(base, solve(fit.memory, errors, 0.02, 0.02, 2 * rounds))


def fit_time(
    fit: Fit, rows: Sequence[Measured], base: EngineConstants, constants: Constants, rounds: int
) -> dict[str, float]:
    """Fit the constants of time; those of a newer release are named `x@newer`."""
    newer = {f"{name}@newer": bounds for name, bounds in fit.newer.items()}
    weights = np.array([fit.weight(one) for one in rows])

    def errors(values: dict[str, float]) -> np.ndarray:
        stack, later = both(fit, base, values, constants)
        return weights * np.array(
            [seconds_error(one, later if one.case.job.stack.name == fit.newer_stack else stack) for one in rows]
        )

    return solve({**fit.time, **newer}, errors, DAMPED_FROM, 0.3, rounds)


def both(
    fit: Fit, base: EngineConstants, values: Mapping[str, float], constants: Constants
) -> tuple[EngineConstants, EngineConstants]:
    """Return the stack and its newer release."""
    plain = {name: value for name, value in values.items() if "@" not in name}
    stack = constants.with_values(base, plain)
    later = {name.removesuffix("@newer"): value for name, value in values.items() if "@" in name}
    return stack, with_constants(replace(stack, name=fit.newer_stack or stack.name), later)


def run_fit(fit: Fit, measured: Mapping[str, list[Measured]], constants: Constants, rounds: int) -> None:
    """Fit one stack and keep it."""
    everything = [*measured[fit.stack], *measured.get(fit.newer_stack or "", [])]
    timed = [one for one in everything if one.seconds is not None and fit.rows(one.row)]
    base = constants.stacks.get(LIKE.get(fit.stack, ""), EngineConstants(fit.stack))
    base = with_constants(replace(base, name=fit.stack, source=fit.source), fit.fixed)
    weighed = [one for one in everything if one.gib is not None]
    # Before time: a card that is nearly full is slow.
    base = fit_memory(fit, everything, base, rounds)
    found = fit_time(fit, timed, base, constants, rounds)
    stack, later = both(fit, base, found, constants)
    constants.keep(stack, {name: value for name, value in found.items() if "." in name and "@" not in name})
    if fit.newer_stack:
        constants.stacks[fit.newer_stack] = later
    print(f"{fit.stack:24} {_summary([seconds_error(one, _of(one, stack, later, fit)) for one in timed])}", end="")
    errors = [memory_error(one, stack) for one in weighed]
    print(f"  memory {len(errors)} rows {np.mean(np.abs(errors)):.1%}" if errors else "")


def _of(one: Measured, stack: EngineConstants, later: EngineConstants, fit: Fit) -> EngineConstants:
    return later if one.case.job.stack.name == fit.newer_stack else stack


def _summary(errors: Sequence[float]) -> str:
    ratios = np.exp(np.array(errors)) - 1
    sizes = np.abs(ratios)
    return f"{len(ratios):5} rows  mean {sizes.mean():.1%}  median {np.median(sizes):.1%}  bias {ratios.mean():+.1%}"


@dataclass(frozen=True)
class Split:
    """What is left out of a fit together, to be predicted by it."""

    groups: bool = False
    """Models on a number of GPUs, not models."""
    folds: int | None = None
    """Into how many parts they are dealt; None: each is a part."""

    def key(self, one: Measured) -> str:
        """Return what a row is left out with."""
        return f"{one.row.model} on {one.case.job.gpus:4}" if self.groups else one.row.model

    def parts(self, rows: Iterable[Measured]) -> list[set[str]]:
        """Deal what there is into parts."""
        keys = sorted({self.key(one) for one in rows})
        folds = min(self.folds or len(keys), len(keys))
        return [set(keys[number::folds]) for number in range(folds)]


def held_out(
    fit: Fit, measured: Mapping[str, list[Measured]], constants: Constants, rounds: int, split: Split
) -> list[tuple[Measured, float]]:
    """Fit without one part at a time, and predict that one; return its rows with the logarithms of their errors."""
    everything = [*measured[fit.stack], *measured.get(fit.newer_stack or "", [])]
    timed = [one for one in everything if one.seconds is not None and fit.rows(one.row)]
    base = constants.stacks.get(LIKE.get(fit.stack, ""), EngineConstants(fit.stack))
    base = with_constants(replace(base, name=fit.stack), fit.fixed)
    judged: list[tuple[Measured, float]] = []
    memory_errors: list[float] = []
    choices: list[list[float]] = []
    for part in split.parts(timed):
        rest = [one for one in everything if split.key(one) not in part]
        timed_rest = [one for one in timed if split.key(one) not in part]
        if not timed_rest:
            continue
        start = fit_memory(fit, rest, base, rounds)
        stack, later = both(fit, start, fit_time(fit, timed_rest, start, constants, rounds), constants)
        left_out = [one for one in timed if split.key(one) in part]
        here = [(one, seconds_error(one, _of(one, stack, later, fit))) for one in left_out if fit.judged(one)]
        if here:
            print(f"    without {', '.join(sorted(part))[:60]:60} {_summary([error for _, error in here])}", flush=True)
        judged += here
        weighed = (one for one in everything if split.key(one) in part and one.gib is not None)
        memory_errors += [memory_error(one, stack) for one in weighed]
        choices += ranked_measurements(
            (one.row.group, one.case, _prediction(one, _of(one, stack, later, fit)), one.seconds or np.inf)
            for one in left_out
        )
    if judged:
        summary = _summary([error for _, error in judged])
        print(f"{fit.stack:24} {summary}  (each predicted by a fit that never saw it)")
    if memory_errors:
        print(f"{'memory':24} {len(memory_errors):5} rows  mean {np.mean(np.abs(memory_errors)):.1%}")
    if choices:
        print(f"{'regret':24} {_regret(choices)}")
    return judged


def _prediction(one: Measured, stack: EngineConstants) -> LayoutPrediction:
    return predict(replace(one.case.job, stack=stack), one.case.layout)


def _regret(choices: Sequence[Sequence[float]]) -> str:
    found = regret_scores(choices)
    return (
        f"{found.groups:5} groups  first {found.top1_mean:.1%} (worst {found.top1_worst:.0%})  "
        f"best of three {found.top3_mean:.1%} (worst {found.top3_worst:.0%})"
    )


def write(constants: Constants) -> None:
    """Write both files of constants."""
    reach = {name: _plain(found) for name, found in constants.reach.items()}
    _write_yaml(PLAN / "gpu_efficiency.yaml", _REACH_HEAD, reach)
    default = _plain(EngineConstants(""))
    stacks = {}
    for name, found in constants.stacks.items():
        plain = _plain(found)
        stacks[name] = {key: value for key, value in plain.items() if key != "name" and value != default.get(key)}
    _write_yaml(PLAN / "engine_constants.yaml", _STACKS_HEAD, stacks)


def _plain(found: EngineConstants | GpuEfficiency) -> dict[str, object]:
    plain = {each.name: getattr(found, each.name) for each in fields(found)}
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in plain.items()}


_REACH_HEAD = """\
# What GPUs reach of their datasheets (gpu_efficiency.py says what each figure is). h100 and h200 are measured; the
# rest is fitted to published measurements. Written by benchmarks/fit_planner.py.
"""
_STACKS_HEAD = """\
# Constants of engines (engine_constants.py says what each figure is, and what it is where it is left out). Fitted to
# published measurements, named under `source`. Written by benchmarks/fit_planner.py.
"""


_EVIDENCE_HEAD = """\
# What plans are held against (evidence.py). `held_out`: measured seconds divided by predicted ones, for models that
# were left out of the fit, by engine and kind of model: between `low` and `high` lie eight of ten rows, all of them
# where they are fewer than twenty. `measured`: every GPU, precision, engine and kind of model that there are rows of,
# the most GPUs among them, and the best MFU, counted as a plan counts it.
# Written by benchmarks/fit_planner.py --evidence.
"""
_OF_ENGINES = ("torch", "torchtitan", "torchtune", "megatron", "megatron-fsdp")
"""Stacks that a plan can be made for, and torchtitan, which the torch engine's communication follows."""
_ALL_BELOW = 20


def evidence(measured: Mapping[str, list[Measured]], constants: Constants, rounds: int, folds: int) -> None:
    """Write what is known of errors on rows that no constant saw, and of what was measured at all."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for fit in FITS:
        if fit.stack in _OF_ENGINES:
            for one, error in held_out(fit, measured, constants, rounds, Split(folds=folds)):
                errors[fit.stack.removesuffix("-fsdp")][_kind(one.case)].append(float(np.exp(-error)))
    # Fits without some rows have left their constants behind.
    reach_module.use_gpu_efficiencies(constants.measured)
    held = {name: {kind: _interval(kinds[kind]) for kind in sorted(kinds)} for name, kinds in errors.items()}
    plain = {"held_out": held, "measured": _measured_kinds()}
    _write_yaml(PLAN / "evidence.yaml", _EVIDENCE_HEAD, plain)


def _kind(case: PublishedCase) -> str:
    return "dense" if case.job.model.experts is None else "experts"


def _interval(ratios: Sequence[float]) -> dict[str, float | int]:
    edges = (0.0, 1.0) if len(ratios) < _ALL_BELOW else (0.1, 0.9)
    low, high = (float(f"{np.quantile(ratios, edge):.3g}") for edge in edges)
    return {"rows": len(ratios), "low": low, "high": high}


def _measured_kinds() -> list[dict[str, object]]:
    groups: dict[tuple[str, str, str, str], list[JudgedRow]] = defaultdict(list)
    for one in validate_rows(read_tables([*shipped_tables(), OWN_ENGINE_TABLE])).judged:
        if one.step_seconds is not None:
            job = one.case.job
            groups[job.hardware.gpu_name, job.precision, job.stack.name, _kind(one.case)].append(one)
    found: list[dict[str, object]] = []
    for (gpu, precision, engine, kind), rows in sorted(groups.items()):
        best = max(rows, key=lambda one: one.measured_tflops / one.prediction.peak_tflops)
        found.append(
            {
                "gpu": gpu,
                "precision": precision,
                "engine": engine,
                "kind": kind,
                "rows": len(rows),
                "most_gpus": max(one.case.job.gpus for one in rows),
                "best_mfu": float(f"{best.measured_tflops / best.prediction.peak_tflops:.3g}"),
                "best": f"{best.row.model}, {best.row.source.partition(':')[0]}",
            }
        )
    return found


def _write_yaml(path: Path, head: str, found: Mapping[str, object]) -> None:
    text = yaml.safe_dump(dict(found), sort_keys=False, allow_unicode=True, width=116)
    path.write_text(head + "\n" + text, encoding="utf-8")


def share_constants(constants: Constants) -> None:
    """Give engines that share code what was measured of one of them."""
    slowdown = constants.stacks["megatron-fsdp"].fsdp_slowdown
    for name in ("megatron", "megatron-26.06"):
        constants.stacks[name] = replace(constants.stacks[name], fsdp_slowdown=slowdown)
    like = constants.stacks["torchtitan"]
    shared = {
        name: getattr(like, name) for name in ("network", "link", "rails", "hop_us", "dp_hidden", "fsdp_slowdown")
    }
    constants.stacks["torch"] = with_constants(constants.stacks["torch"], shared)
    constants.stacks["nemo"] = replace(constants.stacks["megatron"], name="nemo")


def chosen_fits(names: Sequence[str]) -> Iterator[Fit]:
    """Yield the fits that were asked for, or all."""
    for fit in FITS:
        if not names or fit.stack in names:
            yield fit


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="*", help="fit these only; the others keep what they have")
    parser.add_argument("--held-out", action="store_true", help="predict each model by a fit that never saw it")
    parser.add_argument("--folds", type=int, help="leave out this share of the models at a time: 6 is a sixth")
    parser.add_argument("--groups", action="store_true", help="leave out models on a number of GPUs, not whole models")
    parser.add_argument("--rounds", type=int, default=15, help="evaluations of the Jacobian at most")
    parser.add_argument("--evidence", action="store_true", help="write what plans are held against, and fit nothing")
    arguments = parser.parse_args()
    constants, measured = Constants(), measured_rows()
    constants.stacks = {name: engine_constants(name) for name in engine_constant_names()}
    if arguments.evidence:
        evidence(measured, constants, arguments.rounds, arguments.folds or 6)
        return
    for fit in chosen_fits(arguments.stacks):
        if arguments.held_out:
            held_out(fit, measured, constants, arguments.rounds, Split(arguments.groups, arguments.folds))
        else:
            run_fit(fit, measured, constants, arguments.rounds)
    if not arguments.held_out:
        share_constants(constants)
        write(constants)


if __name__ == "__main__":
    sys.exit(main())

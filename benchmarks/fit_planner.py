"""Fit the planner's constants to published measurements: `python benchmarks/fit_planner.py [ENGINE ...]`.

Rewrites `gpu_efficiency.yaml` (which share of its datasheet a GPU reaches) and `engine_constants.yaml` (what engines
cost) in `plan/performance`. `planner_fits.py` says what is fitted to which rows. The fit pulls each constant towards
the measurements and a prior pulls it back to its start, so what a table does not tell stays where it was. Errors are
logarithms, with outliers damped.
`--held-out` fits without one model at a time (or a share of them, or models on a number of GPUs) and prints how well
that model is then predicted. `--evidence` keeps no fit: it writes `evidence.yaml`, which plans quote
(`planner_evidence.py`). Needs scipy; `--measured` does not: it keeps the intervals of left-out models in that file and
writes the rest of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import trainshed.plan.performance
from planner_evidence import evidence, held_out_intervals
from planner_fits import FITS, STARTS_FROM, Bounds, Fit, FitRow, capacity_error, fit_rows, memory_error, seconds_error
from trainshed.plan.performance.engine_constants import EngineConstants, engine_constant_names, engine_constants
from trainshed.plan.performance.gpu_efficiency import GpuEfficiency, all_gpu_efficiencies
from trainshed.plan.performance.prediction import predict
from trainshed.plan.published.validation import JudgedRow, PlannerValidation
from trainshed.plan.training_shape import TrainingShape

CONSTANTS_FOLDER = Path(trainshed.plan.performance.__path__[0])
DAMPED_FROM = 0.1
"""Errors above this count in proportion, not squared."""
SAME_CHIP = {"h100": ("h100", "h200"), "b200": ("b200", "gb200"), "b300": ("b300", "gb300")}


@dataclass(frozen=True)
class Trial:
    """Constants that a fit tries: of an engine, of its later release, and of all GPUs."""

    fit: Fit
    constants: EngineConstants
    newer: EngineConstants
    efficiencies: Mapping[str, GpuEfficiency]

    def training(self, one: FitRow) -> TrainingShape:
        """Return the training of a row with these constants."""
        constants = self.newer if one.engine == self.fit.newer_engine else self.constants
        return one.training_with(constants, self.efficiencies)


class FittedConstants:
    """All constants while fitting: those that are stored, replaced by what was fitted so far."""

    def __init__(self) -> None:
        self.engines = {name: engine_constants(name) for name in engine_constant_names()}
        self.efficiencies = dict(all_gpu_efficiencies())
        self._stored = dict(self.efficiencies)

    def start(self, fit: Fit) -> EngineConstants:
        """Return the constants that a fit starts from."""
        base = self.engines.get(STARTS_FROM.get(fit.engine, ""), EngineConstants(fit.engine))
        return with_constants(replace(base, name=fit.engine, source=fit.source), fit.fixed)

    def trial(self, fit: Fit, base: EngineConstants, values: Mapping[str, float]) -> Trial:
        """Apply values: `gemm` to the engine, `gemm@newer` to its later release, `b200.fp8` to a GPU."""
        efficiencies = dict(self.efficiencies)
        for key, value in values.items():
            if "." in key:
                chip, name = key.split(".")
                for gpu in SAME_CHIP.get(chip, tuple(known for known in efficiencies if known.startswith(chip))):
                    efficiencies[gpu] = _with_efficiency(efficiencies[gpu], self._stored[gpu], name, value)
        plain = {name: value for name, value in values.items() if "@" not in name and "." not in name}
        later = {name.removesuffix("@newer"): value for name, value in values.items() if "@" in name}
        constants = with_constants(base, plain)
        newer = with_constants(replace(constants, name=fit.newer_engine or constants.name), later)
        return Trial(fit, constants, newer, efficiencies)

    def keep(self, trial: Trial) -> None:
        """Keep the result of a fit."""
        self.engines[trial.fit.engine] = trial.constants
        if trial.fit.newer_engine:
            self.engines[trial.fit.newer_engine] = trial.newer
        self.efficiencies = dict(trial.efficiencies)


def with_constants(constants: EngineConstants, values: Mapping[str, Any]) -> EngineConstants:
    """Return an engine with other constants."""
    return replace(constants, **values)


def _with_efficiency(efficiency: GpuEfficiency, stored: GpuEfficiency, name: str, value: float) -> GpuEfficiency:
    if name != "scale":
        return replace(efficiency, **dict[str, Any]({name: value}))
    return replace(
        efficiency,
        forward=stored.forward * value,
        input_gradient=stored.input_gradient * value,
        weight_gradient=stored.weight_gradient * value,
    )


def damped(errors: np.ndarray, scale: float) -> np.ndarray:
    """Return residuals whose squares grow in proportion above the scale (soft L1)."""
    return np.sign(errors) * np.sqrt(2 * scale**2 * (np.sqrt(1 + (errors / scale) ** 2) - 1))


def solve(
    bounds: Bounds, errors: Callable[[dict[str, float]], np.ndarray], scale: float, prior: float, rounds: int
) -> dict[str, float]:
    """Find the values that make the errors small; the prior keeps them near their start."""
    from scipy.optimize import least_squares

    names = list(bounds)
    start, low, high = (np.array([bounds[name][index] for name in names]) for index in range(3))

    def values(place: np.ndarray) -> dict[str, float]:
        return dict(zip(names, (low + place * (high - low)).tolist(), strict=True))

    origin = np.clip((start - low) / (high - low), 1e-4, 1 - 1e-4)

    def residuals(place: np.ndarray) -> np.ndarray:
        return np.concatenate([damped(errors(values(place)), scale), prior * (place - origin)])

    solution = least_squares(residuals, origin, bounds=(0, 1), diff_step=1e-3, max_nfev=rounds)
    return values(solution.x)


def fit_memory(fit: Fit, rows: Sequence[FitRow], base: EngineConstants, rounds: int) -> EngineConstants:
    """Fit the constants of memory to measured peaks, and to which rows ran out of memory."""
    if not fit.memory:
        return base
    with_peak = [one for one in rows if one.gib is not None]
    runnable = [one for one in rows if one.case.cannot_run is None]

    def errors(values: dict[str, float]) -> np.ndarray:
        constants = with_constants(base, values)
        peaks = [memory_error(one, one.training_with(constants)) for one in with_peak]
        fits = [capacity_error(one, one.training_with(constants)) for one in runnable]
        return np.array(peaks + [0.5 * max(-0.3, min(0.3, error)) for error in fits])

    return with_constants(base, solve(fit.memory, errors, 0.02, 0.02, 2 * rounds))


def fit_time(fit: Fit, rows: Sequence[FitRow], base: EngineConstants, constants: FittedConstants, rounds: int) -> Trial:
    """Fit the constants of time."""
    newer = {f"{name}@newer": bounds for name, bounds in fit.newer.items()}
    weights = np.array([fit.weight(one) for one in rows])

    def errors(values: dict[str, float]) -> np.ndarray:
        trial = constants.trial(fit, base, values)
        return weights * np.array([seconds_error(one, trial.training(one)) for one in rows])

    return constants.trial(fit, base, solve({**fit.time, **newer}, errors, DAMPED_FROM, 0.3, rounds))


def run_fit(fit: Fit, by_engine: Mapping[str, list[FitRow]], constants: FittedConstants, rounds: int) -> None:
    """Fit one engine and keep the result."""
    rows = fit.all_rows(by_engine)
    timed = [one for one in rows if one.seconds is not None and fit.rows(one.row)]
    # Memory before time, since a GPU that is nearly full is slow.
    base = fit_memory(fit, rows, constants.start(fit), rounds)
    trial = fit_time(fit, timed, base, constants, rounds)
    constants.keep(trial)
    print(f"{fit.engine:24} {_summary([seconds_error(one, trial.training(one)) for one in timed])}", end="")
    errors = [memory_error(one, trial.training(one)) for one in rows if one.gib is not None]
    print(f"  memory {len(errors)} rows {np.mean(np.abs(errors)):.1%}" if errors else "")


def _summary(errors: Sequence[float]) -> str:
    ratios = np.exp(np.array(errors)) - 1
    sizes = np.abs(ratios)
    return f"{len(ratios):5} rows  mean {sizes.mean():.1%}  median {np.median(sizes):.1%}  bias {ratios.mean():+.1%}"


@dataclass(frozen=True)
class Split:
    """Which rows are left out of a fit together, to be predicted by it."""

    groups: bool = False
    """Models on a number of GPUs, not models."""
    folds: int | None = None
    """Into how many parts they are divided; None: each is a part."""

    def key(self, one: FitRow) -> str:
        """Return the name under which a row is left out."""
        return f"{one.row.model} on {one.case.training.gpus:4}" if self.groups else one.row.model

    def parts(self, rows: Iterable[FitRow]) -> list[set[str]]:
        """Divide the names of all rows into parts."""
        keys = sorted({self.key(one) for one in rows})
        folds = min(self.folds or len(keys), len(keys))
        return [set(keys[number::folds]) for number in range(folds)]


def held_out(
    fit: Fit, by_engine: Mapping[str, list[FitRow]], constants: FittedConstants, rounds: int, split: Split
) -> list[tuple[FitRow, float]]:
    """Fit without one part at a time, and predict that part; return its rows with the logarithms of their errors."""
    rows = fit.all_rows(by_engine)
    timed = [one for one in rows if one.seconds is not None and fit.rows(one.row)]
    base = constants.start(fit)
    errors: list[tuple[FitRow, float]] = []
    memory_errors: list[float] = []
    predicted: list[JudgedRow] = []
    for part in split.parts(timed):
        timed_rest = [one for one in timed if split.key(one) not in part]
        if not timed_rest:
            continue
        start = fit_memory(fit, [one for one in rows if split.key(one) not in part], base, rounds)
        trial = fit_time(fit, timed_rest, start, constants, rounds)
        left_out = [one for one in timed if split.key(one) in part]
        part_errors = [(one, seconds_error(one, trial.training(one))) for one in left_out if fit.judged(one)]
        if part_errors:
            summary = _summary([error for _, error in part_errors])
            print(f"    without {', '.join(sorted(part))[:60]:60} {summary}", flush=True)
        errors += part_errors
        with_peak = (one for one in rows if split.key(one) in part and one.gib is not None)
        memory_errors += [memory_error(one, trial.training(one)) for one in with_peak]
        predicted += [
            JudgedRow(one.row, one.case, predict(trial.training(one), one.case.layout), one.seconds, one.gib)
            for one in left_out
        ]
    if errors:
        summary = _summary([error for _, error in errors])
        print(f"{fit.engine:24} {summary}  (each predicted by a fit that never saw it)")
    if memory_errors:
        print(f"{'memory':24} {len(memory_errors):5} rows  mean {np.mean(np.abs(memory_errors)):.1%}")
    regret = PlannerValidation(tuple(predicted), ()).scores().regret
    if regret.groups:
        print(
            f"{'regret':24} {regret.groups:5} groups  first {regret.top1_mean:.1%} (worst {regret.top1_worst:.0%})  "
            f"best of three {regret.top3_mean:.1%} (worst {regret.top3_worst:.0%})"
        )
    return errors


def share_constants(constants: FittedConstants) -> None:
    """Copy what was measured of one engine to engines that share its code."""
    engines = constants.engines
    slowdown = engines["megatron-fsdp"].fsdp_slowdown
    for name in ("megatron", "megatron-26.06"):
        engines[name] = replace(engines[name], fsdp_slowdown=slowdown)
    names = ("network", "link", "rails", "hop_us", "dp_hidden", "fsdp_slowdown")
    engines["torch"] = with_constants(engines["torch"], {name: getattr(engines["torchtitan"], name) for name in names})
    engines["nemo"] = replace(engines["megatron"], name="nemo")
    kernels = {name: getattr(engines["megatron"], name) for name in ("gemm", "gemm_fp8", "attention")}
    automodel = replace(engines["torchtitan"], name="automodel", source=engines["automodel"].source)
    engines["automodel"] = with_constants(automodel, kernels)


_GPU_EFFICIENCY_HEAD = """\
# Which share of its datasheet a GPU reaches (gpu_efficiency.py says what each figure is). h100 and h200 are measured;
# the rest is fitted to published measurements. Written by benchmarks/fit_planner.py.
"""
_ENGINE_CONSTANTS_HEAD = """\
# Constants of engines (engine_constants.py says what each figure is, and has the default of one that is left out).
# Fitted to published measurements, which `source` names. Written by benchmarks/fit_planner.py.
"""


def write_constants(constants: FittedConstants) -> None:
    """Write both files of constants."""
    efficiencies = {name: _rounded(efficiency) for name, efficiency in constants.efficiencies.items()}
    _write_yaml("gpu_efficiency.yaml", _GPU_EFFICIENCY_HEAD, efficiencies)
    default = _rounded(EngineConstants(""))
    engines = {}
    for name, engine in constants.engines.items():
        values = _rounded(engine)
        engines[name] = {key: value for key, value in values.items() if key != "name" and value != default.get(key)}
    _write_yaml("engine_constants.yaml", _ENGINE_CONSTANTS_HEAD, engines)


def _rounded(constants: EngineConstants | GpuEfficiency) -> dict[str, object]:
    values = {entry.name: getattr(constants, entry.name) for entry in fields(constants)}
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in values.items()}


def _write_yaml(name: str, head: str, content: Mapping[str, object]) -> None:
    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=116)
    (CONSTANTS_FOLDER / name).write_text(f"{head}\n{text}", encoding="utf-8")


_EVIDENCE_HEAD = """\
# How far predictions may be off (evidence.py). `held_out`: measured seconds divided by predicted ones, for models that
# were left out of the fit, by engine and kind of model: eight of ten rows are between `low` and `high`, all of them
# where there are fewer than twenty. `adapters`: the same for all rows of LoRA in measurements/finetuning.csv, which no
# constant was fitted to. `measured`: every GPU, precision, engine and kind of model that has rows, the most GPUs among
# them, and the best MFU, with FLOPs counted as in a plan.
# Written by benchmarks/fit_planner.py --evidence; all but `held_out` also by --measured.
"""
_EVIDENCE_ENGINES = ("torch", "torchtitan", "torchtune", "megatron", "megatron-fsdp")
"""Engines that can be planned for, and torchtitan, whose communication the torch engine is planned with."""


def write_evidence(
    by_engine: Mapping[str, list[FitRow]], constants: FittedConstants, rounds: int, split: Split
) -> None:
    """Fit without some models at a time, and write how far off their predictions are."""
    errors = {
        fit.engine: held_out(fit, by_engine, constants, rounds, split)
        for fit in FITS
        if fit.engine in _EVIDENCE_ENGINES
    }
    _write_yaml("evidence.yaml", _EVIDENCE_HEAD, evidence(held_out_intervals(errors)))


def write_measured() -> None:
    """Write what was measured, and keep how far off left-out models are."""
    stored = yaml.safe_load((CONSTANTS_FOLDER / "evidence.yaml").read_text(encoding="utf-8"))
    _write_yaml("evidence.yaml", _EVIDENCE_HEAD, evidence(stored["held_out"]))


def chosen_fits(names: Sequence[str]) -> Iterator[Fit]:
    """Yield the fits with these names, or all."""
    for fit in FITS:
        if not names or fit.engine in names:
            yield fit


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="fit these only; the others keep their constants")
    parser.add_argument("--held-out", action="store_true", help="predict each model by a fit that never saw it")
    parser.add_argument("--folds", type=int, help="leave out this share of the models at a time: 6 is a sixth")
    parser.add_argument("--groups", action="store_true", help="leave out models on a number of GPUs, not whole models")
    parser.add_argument("--rounds", type=int, default=15, help="evaluations of the Jacobian at most")
    parser.add_argument("--evidence", action="store_true", help="write how far off plans may be, and keep no fit")
    parser.add_argument(
        "--measured", action="store_true", help="write which GPUs were measured how well, without a fit"
    )
    arguments = parser.parse_args()
    if arguments.measured:
        write_measured()
        return
    constants, by_engine = FittedConstants(), fit_rows()
    if arguments.evidence:
        write_evidence(by_engine, constants, arguments.rounds, Split(folds=arguments.folds or 6))
        return
    for fit in chosen_fits(arguments.engines):
        if arguments.held_out:
            held_out(fit, by_engine, constants, arguments.rounds, Split(arguments.groups, arguments.folds))
        else:
            run_fit(fit, by_engine, constants, arguments.rounds)
    if not arguments.held_out:
        share_constants(constants)
        write_constants(constants)


if __name__ == "__main__":
    sys.exit(main())

"""The loss of a training by its size: L(N, D) = E + A / N^α + B / D^β, fitted to runs, with its error.

N is the number of parameters, D the number of tokens seen. Form and method are those of Hoffmann et al. 2022
(arXiv:2203.15556, section 3.3 and appendix D.2): the Huber loss (δ = 1e-3) of the difference of logarithms, minimised
from several starts. The minimiser is Levenberg-Marquardt with Huber's weights, in numpy.

Errors: a bootstrap of the residuals gives the interval of every constant and prediction. The run with the most compute
is also predicted from the others alone, which says how far the law reaches beyond what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from trainshed.errors import InputError

HUBER_DELTA = 1e-3
FEWEST_POINTS = 6
"""One more than there are constants."""
FEWEST_SIZES = 3
"""Of N and of D each: two of them fit any exponent."""
LEVEL = 0.9
"""Of all intervals."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
"""C = 6 N D, as Hoffmann et al. count compute (their section 3.2)."""
CONSTANTS = ("E", "A", "B", "alpha", "beta")
_MOST_ITERATIONS = 400
_LEAST_GAIN = 1e-7
"""Of the value that is minimised: a fit that gains less in each of some steps has arrived."""
_IDLE_STEPS = 6
_BOOTSTRAPS = 200
_LARGEST_CORRELATION = 0.999
_START_EXPONENTS = (0.15, 0.3, 0.5, 0.8)
_START_SHARES = (0.3, 0.6, 0.9)
"""Of the lowest loss, what E may be at the start."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class LossPoint:
    """One training: its size and the validation loss at its end."""

    name: str
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class LossPrediction:
    """The loss of a training that was not run, with its interval."""

    parameters: float
    tokens: float
    loss: float
    interval: Interval

    @property
    def compute(self) -> float:
        """In FLOPs, as 6 N D."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {
            "parameters": self.parameters,
            "tokens": self.tokens,
            "compute": self.compute,
            "loss": self.loss,
            "interval": list(self.interval),
        }


@dataclass(frozen=True)
class ScalingLaw:
    """The fitted law. `samples` are the constants of the bootstrap, a row each, in the order of `CONSTANTS`."""

    points: tuple[LossPoint, ...]
    constants: dict[str, float]
    samples: np.ndarray
    residual: float
    """Root mean square of the differences of log losses."""
    held_out: tuple[LossPoint, float] | None
    """The run with the most compute, and its loss as the others predict it; None where too few are left."""

    @property
    def intervals(self) -> dict[str, Interval]:
        """The interval of every constant."""
        return {name: _interval(self.samples[:, place]) for place, name in enumerate(CONSTANTS)}

    def predict(self, parameters: float, tokens: float) -> LossPrediction:
        """Predict the loss at a size."""
        values = _loss(self.samples, parameters, tokens)
        best = float(_loss(self._row, parameters, tokens)[0])
        return LossPrediction(parameters, tokens, best, _interval(values))

    def predict_compute(self, flops: float) -> tuple[LossPrediction, Interval]:
        """Predict the best loss of a compute budget, and the interval of the parameters that reach it."""
        parameters = float(_best_parameters(self._row, flops)[0])
        sizes = _best_parameters(self.samples, flops)
        tokens = flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters
        return self.predict(parameters, tokens), _interval(sizes)

    @property
    def _row(self) -> np.ndarray:
        return np.array([[self.constants[name] for name in CONSTANTS]])

    @property
    def held_out_error(self) -> float | None:
        """How far off the held-out run's prediction is, as a share of its loss."""
        return None if self.held_out is None else self.held_out[1] / self.held_out[0].loss - 1

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        held = self.held_out
        return {
            "constants": self.constants,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "level": LEVEL,
            "residual": self.residual,
            "held_out": None
            if held is None
            else {"run": held[0].name, "loss": held[0].loss, "predicted": held[1], "error": self.held_out_error},
            "points": [
                {"run": point.name, "parameters": point.parameters, "tokens": point.tokens, "loss": point.loss}
                | {"fitted": self.predict(point.parameters, point.tokens).loss}
                for point in self.points
            ],
        }


def fit_scaling_law(points: Sequence[LossPoint], *, seed: int = 0, bootstraps: int = _BOOTSTRAPS) -> ScalingLaw:
    """Fit the law; raises `InputError` where the points cannot say all five constants."""
    check_points(points)
    sizes, losses = _arrays(points)
    best = _fit(sizes, losses, _starts(sizes, losses))
    fitted = _log_loss(best[None], sizes)[0]
    residuals = np.log(losses) - fitted
    samples = _bootstrap(best, sizes, fitted, residuals, seed, bootstraps)
    return ScalingLaw(
        points=tuple(points),
        constants=dict(zip(CONSTANTS, map(float, _constants(best[None])[0]), strict=True)),
        samples=_constants(samples),
        residual=float(np.sqrt(np.mean(residuals**2))),
        held_out=_held_out(points),
    )


def check_points(points: Sequence[LossPoint]) -> None:
    """Refuse points that many laws fit alike: too few, too few sizes, or one line of them."""
    wrong = [point.name for point in points if min(point.parameters, point.tokens, point.loss) <= 0]
    if wrong or any(not np.isfinite(point.loss) for point in points):
        raise InputError(f"{wrong[0] if wrong else 'a run'} has no size or no loss that is a number above 0")
    if len(points) < FEWEST_POINTS:
        raise InputError(
            f"{len(points)} runs cannot say the five constants of a scaling law",
            hint=f"it takes {FEWEST_POINTS} or more, of {FEWEST_SIZES} model sizes and {FEWEST_SIZES} lengths at least",
        )
    for what, amounts in (
        ("model sizes", {point.parameters for point in points}),
        ("numbers of tokens", {point.tokens for point in points}),
    ):
        if len(amounts) < FEWEST_SIZES:
            raise InputError(
                f"the runs have {len(amounts)} {what}, and any exponent fits fewer than {FEWEST_SIZES}",
                hint="sweep both: model.config.… for sizes, train.tokens for lengths",
            )
    logs = np.log([[point.parameters, point.tokens] for point in points])
    if abs(np.corrcoef(logs.T)[0, 1]) > _LARGEST_CORRELATION:
        raise InputError(
            "the runs have one and the same relation of tokens to parameters, so that their exponents cannot be told "
            "apart",
            hint="train some sizes on more tokens, and some on fewer",
        )


def _arrays(points: Sequence[LossPoint]) -> tuple[np.ndarray, np.ndarray]:
    """Return log N and log D as [2, points], and the losses."""
    sizes = np.log(np.array([[point.parameters, point.tokens] for point in points], dtype=np.float64).T)
    return sizes, np.array([point.loss for point in points], dtype=np.float64)


# A row of parameters is (log E, log A, log B, log α, log β): whatever a step does, all constants stay above 0.


def _constants(rows: np.ndarray) -> np.ndarray:
    return np.exp(rows)


def _terms(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the logarithms of the three terms: [rows, 3, points]."""
    exponents = np.exp(rows[:, 3:5])
    floor = np.broadcast_to(rows[:, 0:1], (len(rows), sizes.shape[1]))
    by_size = rows[:, 1:3, None] - exponents[:, :, None] * sizes[None]
    return np.concatenate([floor[:, None], by_size], axis=1)


def _log_loss(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    terms = _terms(rows, sizes)
    largest = terms.max(axis=1, keepdims=True)
    return (largest + np.log(np.exp(terms - largest).sum(axis=1, keepdims=True)))[:, 0]


def _jacobian(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the derivatives of the log loss by the five parameters: [rows, points, 5]."""
    terms = _terms(rows, sizes)
    shares = np.exp(terms - terms.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    exponents = np.exp(rows[:, 3:5])
    by_exponent = -shares[:, 1:] * exponents[:, :, None] * sizes[None]
    return np.concatenate([shares, by_exponent], axis=1).transpose(0, 2, 1)


def _huber(residuals: np.ndarray) -> np.ndarray:
    size = np.abs(residuals)
    inside = size <= HUBER_DELTA
    return np.where(inside, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA)).sum(axis=-1)


def _starts(sizes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return starting points: for each α, β and E the A and B that fit best by least squares."""
    rows = []
    for alpha in _START_EXPONENTS:
        for beta in _START_EXPONENTS:
            for share in _START_SHARES:
                floor = share * float(losses.min())
                design = np.exp(-np.array([alpha, beta])[:, None] * sizes).T
                scale = design.max(axis=0)
                solved = np.linalg.lstsq(design / scale, losses - floor, rcond=None)[0] / scale
                least = 1e-3 * float(losses.min()) / scale
                factors = np.maximum(solved, least)
                rows.append([log(floor), *np.log(factors), log(alpha), log(beta)])
    return np.array(rows)


def _minimise(rows: np.ndarray, sizes: np.ndarray, log_losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimise the Huber loss of every row by Levenberg-Marquardt; `log_losses` may differ by row.

    Huber's loss is a weighted sum of squares with weights that follow the residuals; they are set anew at each step.
    """
    rows = rows.copy()
    log_losses = np.broadcast_to(log_losses, (len(rows), sizes.shape[1]))
    damping = np.full(len(rows), 1e-2)
    idle = np.zeros(len(rows), dtype=int)
    values = _huber(_log_loss(rows, sizes) - log_losses)
    for _ in range(_MOST_ITERATIONS):
        active = np.flatnonzero(idle < _IDLE_STEPS)
        if not len(active):
            break
        now, wanted = rows[active], log_losses[active]
        residuals = _log_loss(now, sizes) - wanted
        weights = np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        slopes = _jacobian(now, sizes)
        weighted = slopes * weights[:, :, None]
        curvature = np.einsum("rpi,rpj->rij", weighted, slopes)
        gradient = np.einsum("rpi,rp->ri", weighted, residuals)
        added = damping[active, None] * np.maximum(np.einsum("rii->ri", curvature), 1e-12)
        step = -np.linalg.solve(curvature + added[:, :, None] * np.eye(5), gradient[:, :, None])[:, :, 0]
        tried = now + np.clip(step, -2.0, 2.0)
        new = _huber(_log_loss(tried, sizes) - wanted)
        better = new < values[active]
        gain = np.where(better, (values[active] - new) / np.maximum(values[active], 1e-300), 0.0)
        idle[active] = np.where(gain > _LEAST_GAIN, 0, idle[active] + 1)
        rows[active] = np.where(better[:, None], tried, now)
        values[active] = np.where(better, new, values[active])
        damping[active] = np.clip(np.where(better, damping[active] / 4, damping[active] * 5), 1e-12, 1e12)
    return rows, values


def _fit(sizes: np.ndarray, losses: np.ndarray, starts: np.ndarray) -> np.ndarray:
    rows, values = _minimise(starts, sizes, np.log(losses)[None])
    return rows[int(np.argmin(values))]


def _bootstrap(
    best: np.ndarray, sizes: np.ndarray, fitted: np.ndarray, residuals: np.ndarray, seed: int, count: int
) -> np.ndarray:
    """Fit again to losses with resampled residuals, each from the best fit."""
    generator = np.random.default_rng(seed)
    points = len(residuals)
    # Five constants were fitted to them, which makes residuals smaller than the noise.
    spread = (residuals - residuals.mean()) * np.sqrt(points / (points - len(CONSTANTS)))
    drawn = spread[generator.integers(0, points, (count, points))]
    rows, _ = _minimise(np.repeat(best[None], count, axis=0), sizes, fitted[None] + drawn)
    return rows


def _held_out(points: Sequence[LossPoint]) -> tuple[LossPoint, float] | None:
    largest = max(points, key=lambda point: point.parameters * point.tokens)
    others = [point for point in points if point is not largest]
    try:
        check_points(others)
    except InputError:
        return None
    sizes, losses = _arrays(others)
    best = _fit(sizes, losses, _starts(sizes, losses))
    return largest, float(_loss(_constants(best[None]), largest.parameters, largest.tokens)[0])


def _loss(constants: np.ndarray, parameters: float, tokens: float) -> np.ndarray:
    floor, a, b, alpha, beta = constants.T
    return floor + a / parameters**alpha + b / tokens**beta


def _best_parameters(constants: np.ndarray, flops: float) -> np.ndarray:
    """Return the N that reaches the lowest loss of a budget (equation 4 of Hoffmann et al.)."""
    _, a, b, alpha, beta = constants.T
    factor = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    return factor * (flops / FLOPS_PER_PARAMETER_AND_TOKEN) ** (beta / (alpha + beta))


def _interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)

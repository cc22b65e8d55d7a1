"""The scaling law: known constants are recovered from noisy points, and points that cannot say them are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainshed.cli import run_cli
from trainshed.errors import InputError
from trainshed.plan.scaling_law import LossPoint, fit_scaling_law

PUBLISHED = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""Hoffmann et al. 2022, arXiv:2203.15556, equation 10."""
SIZES = (44e6, 90e6, 200e6, 400e6, 1e9, 2.8e9)


def loss(parameters: float, tokens: float) -> float:
    law = PUBLISHED
    return law["E"] + law["A"] / parameters ** law["alpha"] + law["B"] / tokens ** law["beta"]


def points(noise: float, seed: int = 0, ratios: tuple[float, ...] = (5, 10, 20, 40, 80)) -> list[LossPoint]:
    generator = np.random.default_rng(seed)
    return [
        LossPoint(
            f"{size:.0f}x{ratio}", size, size * ratio, loss(size, size * ratio) * np.exp(generator.normal(0, noise))
        )
        for size in SIZES
        for ratio in ratios
    ]


def test_exact_points_give_the_published_constants_back() -> None:
    law = fit_scaling_law(points(0.0), bootstraps=20)
    assert law.constants == pytest.approx(PUBLISHED, rel=1e-5)
    assert law.held_out is not None
    assert law.held_out_error == pytest.approx(0, abs=1e-7)
    # Chinchilla: 70B parameters, 1.4T tokens.
    assert law.predict(70e9, 1.4e12).loss == pytest.approx(loss(70e9, 1.4e12), rel=1e-6)


def test_intervals_of_noisy_points_hold_the_truth_about_as_often_as_they_say() -> None:
    held = dict.fromkeys((*PUBLISHED, "prediction"), 0)
    rounds = 20
    for seed in range(rounds):
        law = fit_scaling_law(points(2e-3, seed), bootstraps=100, seed=seed)
        intervals = law.intervals | {"prediction": law.predict(70e9, 1.4e12).interval}
        truth = PUBLISHED | {"prediction": loss(70e9, 1.4e12)}
        for name, (low, high) in intervals.items():
            held[name] += low <= truth[name] <= high
    # 90% intervals: of 20, fewer than 13 would happen once in ten thousand.
    assert min(held.values()) >= 13, held


def test_one_wrong_run_does_not_spoil_the_law() -> None:
    spoiled = points(1e-3)
    spoiled[7] = LossPoint("diverged", spoiled[7].parameters, spoiled[7].tokens, spoiled[7].loss * 1.3)
    law = fit_scaling_law(spoiled, bootstraps=20)
    assert law.predict(70e9, 1.4e12).loss == pytest.approx(loss(70e9, 1.4e12), rel=5e-3)


def test_the_best_size_of_a_budget_is_the_lowest_of_its_sizes() -> None:
    law = fit_scaling_law(points(0.0), bootstraps=20)
    best, (low, high) = law.predict_compute(1e22)
    assert best.compute == pytest.approx(1e22)
    assert low <= best.parameters <= high or low == pytest.approx(high)
    for factor in (0.8, 1.25):
        parameters = best.parameters * factor
        assert law.predict(parameters, 1e22 / 6 / parameters).loss > best.loss


@pytest.mark.parametrize(
    ("few", "words"),
    [
        (points(0.0)[:5], "5 runs cannot say the five constants"),
        (points(0.0)[:10], "the runs have 2 model sizes"),
        ([LossPoint("", size, tokens, 3.0) for size in SIZES for tokens in (1e9, 2e9)], "2 numbers of tokens"),
        (points(0.0, ratios=(20,)), "one and the same relation of tokens to parameters"),
        ([*points(0.0), LossPoint("broken", 1e9, 1e9, float("nan"))], "no loss that is a number"),
    ],
)
def test_points_that_cannot_say_the_constants_are_refused(few: list[LossPoint], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit_scaling_law(few)


def test_the_command_reads_a_table_predicts_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "runs.csv"
    rows = [f"{point.name},{point.parameters},{point.tokens},{point.loss}" for point in points(1e-3)]
    table.write_text("\n".join(["run,parameters,tokens,loss", *rows]))
    page = tmp_path / "law.html"
    asked = ["scaling", str(table), "--parameters", "70B", "--tokens", "1.4T", "--report", str(page)]
    assert run_cli([*asked, "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    low, high = data["predictions"][0]["interval"]
    assert low < data["predictions"][0]["loss"] < high
    assert "<svg" in page.read_text()
    assert run_cli([*asked[:2], "--compute", "1e22"]) == 0
    assert "the best size of 1e+22 FLOPs" in capsys.readouterr().out
    table.write_text("parameters,tokens,loss\n1e6,1e9\n")
    assert run_cli(["scaling", str(table)]) == 2
    assert "runs.csv:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--compute inf", "--compute: inf is not the FLOPs of a training"),
        ("--compute nan", "--compute: nan is not the FLOPs of a training"),
        ("--parameters 1e400 --tokens 1B", "--parameters: `1e400` is not a number"),
    ],
)
def test_sizes_that_nothing_has_are_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["scaling", "runs.csv", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_table_that_is_not_there_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["scaling", "nowhere.csv"]) == 2
    assert capsys.readouterr().err == "error: nowhere.csv: cannot be read: No such file or directory\n"

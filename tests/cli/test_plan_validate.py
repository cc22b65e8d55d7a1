"""`trainshed plan validate`: any number of tables of either kind, a table or JSON out, and a plot."""

from __future__ import annotations

import csv
from pathlib import Path

import orjson
import pytest

from trainshed.cli import run_cli
from trainshed.plan.published.rows import shipped_tables


def some_rows(table: Path, to: Path, count: int) -> Path:
    """The first rows of a shipped table, spread over its sources."""
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(to, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[:: len(rows) // count])
    return to


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    return [str(some_rows(table, tmp_path / table.name, 40)) for table in shipped_tables()]


def test_tables_of_both_kinds_together_have_every_score(
    tables: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plot = tmp_path / "accuracy.svg"
    assert run_cli(["plan", "validate", *tables, "-o", "json", "--plot", str(plot), "--worst", "3"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["schema"] == "trainshed.plan.validation/1"
    assert report["rows"] >= 80
    for scores in (report["step_time"], report["memory"], report["out_of_memory"]):
        assert None not in scores.values()
    assert len(report["worst"]) == 3
    assert plot.read_text().startswith("<svg")


def test_a_table_of_runs_that_ran_out_of_memory_leaves_times_open(
    tables: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run_cli(["plan", "validate", tables[-1], "-o", "json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["step_time"]["mape"] is None
    assert report["out_of_memory"]["recall"] is not None
    assert report["out_of_memory"]["balanced_accuracy"] is None


def test_people_get_a_line_per_source_with_the_null_model_beside(tables: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_cli(["plan", "validate", *tables, "--worst", "2"]) == 0
    shown = capsys.readouterr().out
    assert "HF ultra-scale playbook" in shown
    assert "null: a constant TFLOP/s per GPU" in shown
    assert "predicted worst" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv: cannot be read"),
        (["--plot", "x.png"], "plots are drawn as SVG"),
    ],
)
def test_what_cannot_be_read_or_drawn_is_refused(
    tables: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run_cli(["plan", "validate", *tables[:1], *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_columns_are_shown_to_who_wants_to_write_a_table(capsys: pytest.CaptureFixture[str]):
    assert run_cli(["plan", "validate", "--columns"]) == 0
    assert "step_time_s" in capsys.readouterr().out.split(",")


def test_code_that_travels_with_a_job_says_that_it_has_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainshed.plan.published.rows.shipped_folder", lambda kind: tmp_path / kind)
    assert run_cli(["plan", "validate"]) == 2
    assert "not in the code that travels with a job" in capsys.readouterr().err

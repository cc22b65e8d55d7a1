"""What measured runs taught: kept in a file, found again by GPU, engine and version, never used unasked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from trainshed.errors import InputError, RecipeError
from trainshed.plan.calibration import Calibration, Calibrations, read_calibrations, store_calibration, utc_day


def learnt(**changed: Any) -> Calibration:
    entry = {"gpu": "h100-sxm", "engine": "torch", "version": "1.0", "factor": 1.1, "from": "llama/ab12", "steps": 20}
    return Calibration.model_validate(entry | changed)


def test_what_was_kept_is_read_again_with_the_hash_of_the_file(tmp_path: Path):
    file = tmp_path / "calibration.yaml"
    kept = learnt(memory_factor=0.97, date="2026-03-01")
    stored = store_calibration(file, kept)
    assert stored == read_calibrations(file)
    assert stored.entries == (kept,)
    assert stored.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    used = stored.to_plain(kept)
    assert (used["sha256"], used["entry"]["from"]) == (stored.digest, "llama/ab12")


def test_the_same_run_replaces_what_it_taught_before_and_another_is_added(tmp_path: Path):
    file = tmp_path / "calibration.yaml"
    store_calibration(file, learnt())
    store_calibration(file, learnt(**{"from": "other/cd34"}, factor=1.3))
    stored = store_calibration(file, learnt(factor=1.2))
    assert [entry.factor for entry in stored.entries] == [1.3, 1.2]


def test_a_plan_gets_the_last_entry_of_its_gpu_and_engine_and_of_its_version_where_it_asks_for_one():
    older, newer = learnt(), learnt(version="1.1", factor=1.05)
    known = Calibrations((older, newer, learnt(gpu="h200", factor=2.0), learnt(engine="megatron")), "c.yaml")
    assert known.entry_for("h100-sxm", "torch") == newer
    assert known.entry_for("h100-sxm", "torch", "1.0") == older
    assert known.entry_for("h100-sxm", "torch", "0.9") is None
    assert known.entry_for("a100-80gb", "torch") is None
    assert known.missing_note("a100-80gb", "torch") == (
        "c.yaml has no calibration of torch on a100-80gb (only of megatron on h100-sxm, torch on h100-sxm, torch on "
        "h200): the plan is not calibrated"
    )


def test_an_entry_is_named_in_words():
    assert learnt(date="2026-03-01").description == (
        "steps times 1.100 for torch 1.0 on h100-sxm, from llama/ab12 of 2026-03-01"
    )


def test_a_missing_file_says_how_one_is_made(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read") as raised:
        read_calibrations(tmp_path / "none.yaml")
    assert "trainshed plan calibrate RUN --to" in (raised.value.hint or "")


def test_a_wrong_key_is_shown_with_its_line(tmp_path: Path):
    file = tmp_path / "calibration.yaml"
    file.write_text("calibrations:\n- gpu: h100-sxm\n  engine: torch\n  factor: -1.0\n  from: x\n  steps: 3\n")
    with pytest.raises(RecipeError) as raised:
        read_calibrations(file)
    assert "calibration.yaml:4" in str(raised.value)


def test_days_do_not_depend_on_where_they_are_read():
    assert utc_day(1_700_000_000) == "2023-11-14"

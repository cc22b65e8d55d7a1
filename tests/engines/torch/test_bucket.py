"""Checkpoints in a bucket: a real S3 server, real ranks, the real commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text

pytestmark = pytest.mark.s3


def trainshed(folder: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "trainshed", *arguments, "-o", "json"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_goes_on_from_its_checkpoints_in_a_bucket(s3_bucket: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    home = f"checkpoint.to=s3://{s3_bucket}/checkpoints"
    layout = ("--layout", "dp=2,micro_batch=2")
    first = trainshed(tmp_path, "run", "recipe.yaml", home, "train.steps=2", *layout)["training"]
    assert first["checkpoint"] == f"s3://{s3_bucket}/checkpoints/proof/{first['id']}/checkpoints/step-00000002"
    second = trainshed(tmp_path, "train", "recipe.yaml", home, "train.steps=4", "--layout", "micro_batch=2")
    assert (second["step"], second["layout"]) == (4, "one process")
    listed = trainshed(tmp_path, "checkpoints", "recipe.yaml", home, "--verify")
    assert [each["step"] for each in listed["checkpoints"]] == [4, 2]
    assert not list((tmp_path / "store").rglob("*.distcp")), "nothing is left on the disk"

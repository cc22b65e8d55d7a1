"""The tutorial is run as it is written: on this machine, and as far as what a cluster would be sent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from support.clusters.kubernetes_schemas import check
from support.docs_pages import FENCED, FILE_NAME, run_page

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""What is on the Hub is not asked for: the recipe pins its commit."""


def write_files(folder: Path) -> None:
    for _, block in FENCED.findall(PAGE.read_text(encoding="utf-8")):
        if name := FILE_NAME.match(block):
            (folder / name[1]).write_text(block, encoding="utf-8")


@pytest.mark.full
def test_the_laptop_part_runs_whole(tmp_path: Path) -> None:
    assert run_page(PAGE, tmp_path, "Your laptop") >= 9
    assert "quickstart" in (tmp_path / "runs.html").read_text()


def test_one_gpu_is_planned(tmp_path: Path) -> None:
    assert run_page(PAGE, tmp_path, "One GPU", OFFLINE) == 2


def test_the_scripts_for_slurm_are_rendered(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert run_page(PAGE, tmp_path, "Slurm", OFFLINE) == 2


def test_the_objects_for_kubernetes_fit_their_schemas(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert run_page(PAGE, tmp_path, "Kubernetes", OFFLINE) == 2
    objects = [body for body in yaml.safe_load_all((tmp_path / "objects.yaml").read_text()) if body]
    assert {"ConfigMap", "Job"} <= {body["kind"] for body in objects}
    for body in objects:
        check(body)
    assert re.search(r"^name: ", (tmp_path / "chart" / "Chart.yaml").read_text(), re.MULTILINE)

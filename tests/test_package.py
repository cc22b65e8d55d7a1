"""What is published: one version, a page on PyPI whose pictures are found, capped dependencies, a wheel that works."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainshed
from support.missing_parts import missing_part

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place_and_in_the_changelog() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/trainshed/__init__.py"
    assert f"\n## {trainshed.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_page_on_pypi_names_nothing_beside_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        assert target.startswith(("https://", "#")), target


def test_libraries_below_1_0_have_a_cap() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_canonical(name): version for line in lines if "==" in line for name, version in [line.split("==")]}
    extras = PROJECT["project"]["optional-dependencies"]
    published = [*PROJECT["project"]["dependencies"]]
    published += [text for name, texts in extras.items() if name not in ("bench", "release", "test") for text in texts]
    loose = []
    for text in published:
        wanted = Requirement(text)
        if pinned.get(_canonical(wanted.name), "1").startswith("0.") and "<" not in str(wanted.specifier):
            loose.append(text)
    assert loose == []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_declared_python_is_tried_by_the_workflow() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert declared == ["3.11", "3.12", "3.13", "3.14"]
    quoted = ", ".join(f'"{version}"' for version in declared)
    assert f"python: [{quoted}]" in workflow
    assert ".ci/run" in workflow


@pytest.mark.full
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_the_wheel_works_without_extras(tmp_path: Path, resolution: str) -> None:
    if find_spec("build") is None or find_spec("uv") is None:
        missing_part("the extra `release` is not installed: make package")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    check = [sys.executable, str(ROOT / "release" / "check_client.py"), str(tmp_path)]
    subprocess.run([*check, "--resolution", resolution, "--tests"], check=True)

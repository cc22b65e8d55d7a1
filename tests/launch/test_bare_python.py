"""What runs of ours in foreign images needs the standard library of an old Python, and is run by one here."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

import trainshed
from support.clusters.bare_python import bare_python
from trainshed.checkpoints.megatron import retention
from trainshed.engines import prove_image, stage_tokens
from trainshed.engines.megatron import run_program
from trainshed.launch import megatron_api
from trainshed.launch.kubernetes.driver_program import DRIVER_MODULES, driver_program
from trainshed.launch.ray import script_driver
from trainshed.observe.watch_node import shipped_files

OLDEST = (3, 8)
PACKAGE = Path(trainshed.__file__).parent
SHIPPED = [
    *(PACKAGE / name for name in DRIVER_MODULES),
    Path(script_driver.__file__),
    Path(stage_tokens.__file__),
    Path(prove_image.__file__),
    Path(run_program.__file__),
    Path(megatron_api.__file__),
    Path(retention.__file__),
    *shipped_files(),
]
"""Files of ours that foreign images run."""
NEWER_NAMES = {"removeprefix", "removesuffix", "is_relative_to", "pairwise", "batched"}
"""Attributes that Python 3.8 lacks."""


def imported_at_start(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports when it is loaded, but not for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield str(node.module)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_what_foreign_images_run_is_written_for_the_oldest_python(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=OLDEST)
    modules = {name.partition(".")[0] for name in imported_at_start(tree)}
    assert modules <= set(sys.stdlib_module_names) | {"trainshed"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & NEWER_NAMES


def test_the_driver_consists_of_modules_that_import_each_other_only() -> None:
    shipped = {f"trainshed.{name.removesuffix('.py').replace('/', '.')}" for name in DRIVER_MODULES}
    for name in DRIVER_MODULES:
        tree = ast.parse((PACKAGE / name).read_text())
        ours = {module for module in imported_at_start(tree) if module.startswith("trainshed")}
        assert ours <= shipped, name


def test_the_drivers_program_is_the_same_bytes_every_time() -> None:
    first = driver_program()
    driver_program.cache_clear()
    assert driver_program() == first
    assert len(first) < 64 * 1024
    with zipfile.ZipFile(BytesIO(first)) as archive:
        assert archive.testzip() is None


def isolated(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Python with nothing but its standard library."""
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        [python, "-I", "-S", *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("version", ["3.8", "3.10", "3.13"])
def test_every_program_starts_under_a_bare_python(version: str, tmp_path: Path) -> None:
    python = bare_python(version)
    (tmp_path / "driver.pyz").write_bytes(driver_program())
    driver = isolated(python, tmp_path / "driver.pyz", "--manifests", tmp_path, "--owner", "x")
    assert (driver.returncode, driver.stderr.splitlines()[0]) == (2, "error: this is not a pod of a cluster")
    job = {"run": str(tmp_path), "grace_seconds": 5, "stages": [{"name": "train", "script": "train.sh", "nodes": 2}]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    ray = isolated(python, script_driver.__file__, "train", "--job", tmp_path)
    assert (ray.returncode, ray.stderr.splitlines()[0][:29]) == (2, "error: this image has no Ray;")
    unknown = isolated(python, script_driver.__file__, "prepare", "--job", tmp_path)
    assert "has no stage `prepare` with a script" in unknown.stderr


def test_tokens_are_copied_to_the_node_once_and_named_there(tmp_path: Path) -> None:
    python, store, disk = bare_python("3.8"), tmp_path / "store", tmp_path / "ssd"
    store.mkdir()
    for name in ("a", "b"):
        (store / f"{name}.bin").write_bytes(name.encode() * 1000)
        (store / f"{name}.idx").write_bytes(b"index")
    (tmp_path / "prefixes.txt").write_text(f"['0.5','{store}/a','0.5','{store}/b']")
    command = (stage_tokens.__file__, tmp_path / "prefixes.txt", disk)
    first = isolated(python, *command)
    assert first.returncode == 0, first.stderr
    copies = [word for word in first.stdout.split("'") if word.startswith(str(disk))]
    assert len(copies) == 2
    assert (Path(f"{copies[1]}.bin").read_bytes(), Path(f"{copies[1]}.idx").read_bytes()) == (b"b" * 1000, b"index")
    times = {path: path.stat().st_ino for path in disk.rglob("*.bin")}
    assert isolated(python, *command).stdout == first.stdout
    assert {path: path.stat().st_ino for path in disk.rglob("*.bin")} == times, "nothing is copied again"
    (store / "a.bin").write_bytes(b"changed")
    assert isolated(python, *command).returncode == 0
    assert Path(f"{copies[0]}.bin").read_bytes() == b"changed"
    (store / "b.idx").unlink()
    assert isolated(python, *command).returncode != 0

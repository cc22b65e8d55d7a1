"""Our code as it travels: the same files give the same bytes, and a node can run it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path

import pytest

import trainshed
from trainshed.launch.kubernetes.code import MAX_CODE_BYTES
from trainshed.launch.packaging import pack_code, provenance
from trainshed.shipped import shipped_folder


def test_the_packed_code_is_named_by_its_content_and_packed_alike_each_time() -> None:
    first, second = pack_code(), pack_code()
    assert first == second
    assert first.sha256[:12] in first.name


def test_a_node_unpacks_and_runs_it_without_installing_anything(tmp_path: Path) -> None:
    code = pack_code()
    (tmp_path / code.name).write_bytes(code.data)
    unpack = [sys.executable, "-m", "tarfile", "-e", str(tmp_path / code.name), str(tmp_path / "code")]
    subprocess.run(unpack, check=True, capture_output=True)
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "trainshed", "recipes", "-o", "json"],
        env={"PYTHONPATH": str(tmp_path / "code"), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "quickstart" in shown.stdout
    whence = "import trainshed; print(trainshed.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", whence],
        env={"PYTHONPATH": str(tmp_path / "code")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(str(tmp_path / "code"))


def test_it_leaves_the_published_measurements_behind_in_a_checkout_and_in_an_installed_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        with tarfile.open(fileobj=BytesIO(pack_code().data)) as archive:
            return archive.getnames()

    assert not [name for name in names() if "measurements" in name]
    # A wheel has the shipped folders inside the package.
    installed = tmp_path / "trainshed"
    (installed / "shipped" / "measurements").mkdir(parents=True)
    (installed / "shipped" / "measurements" / "throughput_memory.csv").write_text("model\n")
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(trainshed, "__file__", str(installed / "__init__.py"))
    packed = names()
    assert "trainshed/__init__.py" in packed
    assert not [name for name in packed if "measurements" in name]


def test_every_shipped_folder_is_in_the_wheel() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    included = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for kind in ("recipes", "clusters", "measurements"):
        assert included[kind] == f"trainshed/shipped/{kind}"
        assert shipped_folder(kind) == project.parent / kind


def test_it_leaves_room_in_configmaps() -> None:
    assert 2 * len(pack_code().data) < MAX_CODE_BYTES


def test_where_it_comes_from_names_the_commit_and_what_was_never_committed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "recipe.yaml").write_text("name: a\n")
    git("add", "-A")
    git("commit", "-qm", "a")
    clean = provenance(tmp_path)
    assert len(clean["commit"]) == 40
    assert "diff" not in clean
    (tmp_path / "recipe.yaml").write_text("name: b\n")
    assert "+name: b" in provenance(tmp_path)["diff"]


def test_without_a_repository_there_is_nothing_to_name(tmp_path: Path) -> None:
    assert provenance(tmp_path)["commit"] is None

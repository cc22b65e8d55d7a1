"""The environment of jobs: what it installs, and that it appears only when it is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainshed.errors import InputError
from trainshed.launch.packaging import dockerfile, image_build_commands, image_requirements, venv_script


def test_an_image_has_what_nodes_need_and_keeps_the_pytorch_of_its_base() -> None:
    names = {line.split(">")[0].split("<")[0].split("=")[0].lower() for line in image_requirements()}
    assert {"torch", "tokenizers", "pydantic", "obstore", "safetensors"} <= names
    assert not {"pytest", "lightkube", "ray", "scipy"} & names
    text = dockerfile("registry.example/base@sha256:" + "0" * 64)
    assert text.splitlines()[1].startswith("FROM registry.example/base@sha256:")
    assert "-c /tmp/kept.txt" in text


@pytest.mark.parametrize("base", ["a b", "x\nRUN evil", "$(id)", ""])
def test_no_name_of_an_image_can_add_a_line_to_the_dockerfile(base: str) -> None:
    with pytest.raises(InputError, match="is no image"):
        dockerfile(base)
    with pytest.raises(InputError, match="is no name of an image"):
        image_build_commands(base, ".")


def test_an_environment_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    """With a stand-in for Python that makes an environment whose pip fails the first time."""
    fake = tmp_path / "python"
    venv = tmp_path / "shared" / "venv"
    fake.write_text(
        f"""#!{sys.executable}
import os, pathlib, stat, sys
target = pathlib.Path(sys.argv[-1]) / "bin"
target.mkdir(parents=True)
bodies = {{"python": "#!/bin/sh\\ntest -e {tmp_path}/ready || exit 3\\n", "tool": f"#!{{target}}/python\\n"}}
for name, body in bodies.items():
    (target / name).write_text(body)
    os.chmod(target / name, 0o755)
"""
    )
    fake.chmod(0o755)
    script = venv_script(str(venv), str(fake))
    first = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert first.returncode == 3
    assert not venv.exists()
    (tmp_path / "ready").touch()
    subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert (venv / "bin" / "tool").read_text() == f"#!{venv}/bin/python\n"
    again = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert again.returncode == 2
    assert b"is already there" in again.stderr

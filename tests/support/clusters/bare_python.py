"""Another version of Python, as foreign images have one: on the PATH, or one of pyenv's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def bare_python(version: str) -> Path:
    """A Python of a version (`3.8`); the test is skipped where there is none."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    named = shutil.which(f"python{version}")
    candidates += [Path(named)] if named else []
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", "import lzma, ssl"], capture_output=True, timeout=30, check=False)
        if done.returncode == 0:
            return candidate
    # No package of a distribution has it, so CI cannot install it where it is missing.
    pytest.skip(f"no Python {version}: put `python{version}` on the PATH (pyenv, uv)")

"""Installs a wheel without extras into a fresh environment and lets the client do what a laptop does.

    python release/check_client.py DIST [--python PYTHON] [--resolution lowest-direct|highest] [--tests]

DIST is the folder of the wheel. With `--resolution` uv installs the oldest versions of its dependencies that
`pyproject.toml` allows, or the newest ones; without it pip installs what it finds. `--tests` also runs the tests that
need nothing but the client. Works on Linux, macOS and Windows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "--version",
    "--help",
    "recipes",
    "clusters",
    "clusters check slurm-h100",
    "schema",
    "init --model llama3.2-1b --data data/*.jsonl --length 20B",
    "plan recipe.yaml --gpu h100 --gpus 8 --top 1",
    "plan gke-llama3-70b --on gke-a3-mega",
    "render soperator-llama3-3-70b-lora --on soperator-h100 --offline --out job",
    "render gke-llama3-70b --on gke-a3-mega --offline --out manifests",
    "ls",
    "man",
)
TESTS = ("tests/catalog", "tests/recipe", "tests/test_surface.py", "tests/storage/test_address.py")
TEST_PARTS = ("pytest>=9", "pytest-timeout", "hypothesis", "jsonschema", "packaging")
IMPORT = """
import sys, trainshed as ts
assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
ts.Recipe.load("quickstart")
"""


def main() -> None:
    """Install, run the commands, and say what was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--resolution", choices=["lowest-direct", "highest"])
    parser.add_argument("--tests", action="store_true")
    asked = parser.parse_args()
    (wheel,) = asked.dist.resolve().glob("trainshed-*.whl")
    with tempfile.TemporaryDirectory(prefix="trainshed-client-") as folder:
        place = Path(folder)
        python = install(place / "environment", wheel, asked)
        work = place / "work"
        work.mkdir()
        for command in COMMANDS:
            run([str(python), "-W", "error", "-m", "trainshed", *command.split()], work)
        run([str(python), "-W", "error", "-c", IMPORT], work)
        if os.name == "posix":
            assert (place / "environment" / "share" / "man" / "man1" / "trainshed.1").is_file()
        if asked.tests:
            run([str(python), "-m", "pytest", "-q", "-m", "not full", *TESTS], ROOT)
    how = asked.resolution or "as pip installs it"
    sys.stdout.write(f"the client of {wheel.name} works with {asked.python}, {how}\n")


def install(environment: Path, wheel: Path, asked: argparse.Namespace) -> Path:
    """Make the environment and return its Python."""
    run([asked.python, "-m", "venv", str(environment)], ROOT)
    folder = "Scripts" if os.name == "nt" else "bin"
    python = environment / folder / "python"
    # The parts for tests come afterwards: they may want newer versions of what both need.
    if asked.resolution is None:
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)], ROOT)
    else:
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        # Of a wheel uv takes only the wheel itself as direct: the file says what Trainshed asks for.
        run([*uv, "--resolution", asked.resolution, "--requirements", str(ROOT / "pyproject.toml")], ROOT)
        run([*uv, "--no-deps", str(wheel)], ROOT)
    if asked.tests:
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TEST_PARTS], ROOT)
    return python


def run(command: list[str], folder: Path) -> None:
    """Run a command; where it fails, show what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-6000:] + done.stderr[-6000:])
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    main()

"""The client on macOS and Windows: in a process that has only what those systems have."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed import file_locks, this_machine
from trainshed.cli import run_cli
from trainshed.storage import address

SYSTEMS = ("darwin", "win32")
CLIENT = (
    "--help",
    "plan --model llama3-8b --gpu h100 --gpus 64 --seq 8192 --global-batch 512 --top 1",
    "ls",
    "status small",
    "metrics small",
    "logs small",
    "checkpoints small",
    "dash small --save page.html",
    "recipes",
    "schema --cluster",
    "recipes check recipe.yaml",
    "clusters check slurm-h100",
    "init {system}.yaml --model tiny --data words.jsonl --length 100",
    "init cluster {system}-cluster.yaml --target slurm --machine dgx-h100 --store /shared --nodes 2",
    "data blend recipe.yaml",
    "watch small",
    "checkpoints small --verify",
    "cancel small",
    "clean",
    "image build team/trainshed:1 --out {system}-image",
    "--install-completion --shell powershell --to {system}.ps1",
    "2: submit recipe.yaml --on slurm-h100 --yes",
)
NEEDS_MORE = {
    "darwin": (),
    "win32": ("2: run recipe.yaml train.steps=4", "2: sweep recipe.yaml seed=1,2"),
}
"""What only Linux and macOS do: Windows says so, and what to do instead."""
WARN_ENCODING = ("-X", "warn_default_encoding")
RENDER = "render soperator-llama3-3-70b-lora --on soperator-h100 --offline"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which a run was trained here, on Linux."""
    folder = tmp_path_factory.mktemp("other")
    write_script(folder)
    write_small_recipe(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert run_cli(["run", "recipe.yaml"]) == 0
        yield folder


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_client_works_with_what_a_system_has(work: Path, system: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parent / "support" / "other_systems.py"
    refused = NEEDS_MORE[system]
    commands = [command.format(system=system) for command in (*CLIENT, *refused, RENDER + " --out {system}")]
    done = subprocess.run(
        [sys.executable, *WARN_ENCODING, str(script), system, *commands],
        capture_output=True,
        text=True,
        check=False,
        cwd=work,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "3 steps" in done.stdout or "step 3 of 3" in done.stdout
    assert ("WSL" in done.stderr) == (system == "win32")
    assert "<html" in (work / "page.html").read_text(encoding="utf-8")
    # What is sent is the same, byte for byte, wherever it is rendered.
    assert run_cli([*RENDER.split(), "--out", f"{system}-here"]) == 0
    here, there = (
        {path.name: path.read_bytes() for path in (work / name).glob("*.sbatch")} for name in (f"{system}-here", system)
    )
    assert here == there
    assert here


def test_windows_locks_a_byte_that_no_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()

    class Msvcrt:
        LK_NBLCK = 2

        @staticmethod
        def locking(descriptor: int, mode: int, count: int) -> None:
            import os

            place = os.lseek(descriptor, 0, os.SEEK_CUR)
            assert (mode, count) == (2, 1)
            assert place > 1 << 20
            if place in taken:
                raise PermissionError(errno.EACCES, "Permission denied")
            taken.add(place)

    monkeypatch.setattr(file_locks, "fcntl", None)
    monkeypatch.setattr(file_locks, "msvcrt", Msvcrt)
    with (tmp_path / "lock").open("w+b") as file:
        file.write(b"who")
        file.flush()
        file_locks.lock_file(file, wait=False)
        assert file.tell() == 3
        with pytest.raises(BlockingIOError):
            file_locks.lock_file(file, wait=False)
    monkeypatch.setattr(file_locks, "msvcrt", None)
    with (tmp_path / "lock").open("rb") as file, pytest.raises(OSError, match="no locks"):
        file_locks.lock_file(file)


def test_what_windows_lacks_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(this_machine, "ON_WINDOWS", True)
    monkeypatch.delattr("os.uname")
    monkeypatch.setattr("trainshed.cli.build_app", lambda: lambda *_, **__: os.uname())
    assert run_cli(["ls"]) == 2
    assert "error: Windows has no os.uname" in (shown := capsys.readouterr().err)
    assert "WSL" in shown


def test_windows_calls_a_closed_pipe_an_invalid_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("trainshed.cli.build_app", lambda: write)
    monkeypatch.setattr("trainshed.cli._reader_left", lambda: True)
    assert run_cli(["ls"]) == 1
    monkeypatch.setattr(this_machine, "ON_WINDOWS", True)
    assert run_cli(["ls"]) == 0


def test_a_machine_without_affinity_counts_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert this_machine.usable_cpus() == 12
    assert this_machine.memory_bytes() > 1 << 28


@pytest.mark.parametrize(
    ("written", "url", "path"),
    [
        (str(PureWindowsPath("C:/runs", "llama", "1")), "C:/", "runs/llama/1"),
        ("C:/runs/llama", "C:/", "runs/llama"),
        ("file:///D:/data", "D:/", "data"),
        (str(PureWindowsPath("store", "runs")), ".", "store/runs"),
        ("s3://bucket/path", "s3://bucket", "path"),
    ],
)
def test_paths_of_windows_are_addresses(written: str, url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "HAS_DRIVES", True)
    parsed = address.parse(written)
    assert (parsed.url, parsed.path) == (url, path)
    assert address.parse(str(parsed)) == parsed

"""Killed at any moment and run again, a preparation gives the bytes it would have given undisturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.runs.preparing import TokenizerFolder, contents, documents, jsonl
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.data.tokens.verify import verify_tokens

DRIVER = Path(__file__).parent / "kill_driver.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some megabytes in several files: seconds of work for the driver."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = documents(1500)
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_bytes(jsonl(texts[number:] + texts[:number]) * 5)
    return folder


class Attempt:
    """One run of the driver in a process group of its own."""

    def __init__(self, corpus: Path, tokenizer: Path, output: Path, shards: int, stall_after: int = 0) -> None:
        arguments = [str(each) for each in (corpus, tokenizer, output, shards, stall_after)]
        command = [sys.executable, str(DRIVER), *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        self.workers: list[int] = []
        while not self.workers and (line := self.process.stdout.readline()):
            self.lines.append(line)
            if line.startswith("workers "):
                self.workers = [int(pid) for pid in line.split()[1:]]

    def wait_until_it_waits(self) -> None:
        assert self.process.stdout is not None
        while "note waiting\n" not in self.lines:
            self.lines.append(self.process.stdout.readline())

    def finish(self) -> str:
        output, _ = self.process.communicate(timeout=60)
        return "".join(self.lines) + output

    def kill(self, *, group: bool) -> str:
        """Kill it, or see that it was done before: its exit code tells."""
        if group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            os.kill(self.process.pid, signal.SIGKILL)
        said = self.finish()
        assert self.process.returncode in (0, -signal.SIGKILL)
        return said


def gone(pids: list[int], seconds: float = 120) -> bool:
    """Whether processes end within some seconds (a zombie has ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not alive:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def undisturbed(
    corpus: Path, tokenizer_folder: TokenizerFolder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """The result to compare with, and how many seconds the work behind it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    attempt = Attempt(corpus, tokenizer_folder("gpt2"), folder / "tokens", 2)
    started = time.monotonic()
    assert "going on" not in attempt.finish()
    assert attempt.process.returncode == 0
    return folder, time.monotonic() - started


def results(folder: Path) -> dict[str, bytes]:
    """All files but the hidden ones: a manifest that was being written leaves one for an hour."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 8))]


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_at_random_points_and_rerun_gives_the_same_bytes(
    corpus: Path, tokenizer_folder: TokenizerFolder, undisturbed: tuple[Path, float], tmp_path: Path, seed: int
) -> None:
    expected, seconds = undisturbed
    chance = random.Random(seed)
    output, said = tmp_path / "tokens", ""
    for number in range(4):
        stall_after = chance.randint(1, 60) if number == 0 else 0
        attempt = Attempt(corpus, tokenizer_folder("gpt2"), output, 2, stall_after)
        if stall_after:
            attempt.wait_until_it_waits()
        else:
            time.sleep(chance.uniform(0.05, 0.5) * seconds)
        said += attempt.kill(group=chance.random() < 0.7)
        assert gone(attempt.workers), "workers must end with the process that started them"
    said += Attempt(corpus, tokenizer_folder("gpt2"), output, 2).finish()
    assert results(tmp_path) == results(expected)
    assert "going on after" in said
    assert all(verdict.passed for verdict in verify_tokens(str(output)))


def test_workers_and_fork_server_end_when_only_the_parent_is_killed(
    corpus: Path, tokenizer_folder: TokenizerFolder, tmp_path: Path
) -> None:
    attempt = Attempt(corpus, tokenizer_folder("gpt2"), tmp_path / "tokens", 1)
    helpers = [child.pid for child in psutil.Process(attempt.process.pid).children(recursive=True)]
    assert len(attempt.workers) == 2
    assert set(attempt.workers) < set(helpers)
    attempt.kill(group=False)
    assert gone(helpers)


def test_a_worker_that_is_killed_stops_the_work_with_its_exit_code_and_the_rerun_goes_on(
    corpus: Path, tokenizer_folder: TokenizerFolder, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    expected, _ = undisturbed
    attempt = Attempt(corpus, tokenizer_folder("gpt2"), tmp_path / "tokens", 2)
    os.kill(attempt.workers[0], signal.SIGKILL)
    assert "a tokenising worker died (exit code -9)" in attempt.finish()
    assert attempt.process.returncode == 1
    again = Attempt(corpus, tokenizer_folder("gpt2"), tmp_path / "tokens", 2)
    again.finish()
    assert results(tmp_path) == results(expected)
    manifest = read_token_manifest(str(tmp_path / "tokens-00000-of-00002"))
    assert manifest is not None
    assert contents(tmp_path / "tokens-00000-of-00002")[0]

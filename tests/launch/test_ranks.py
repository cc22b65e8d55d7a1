"""The ranks of a node: they find their place, end together, and leave nobody behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainshed.errors import InputError
from trainshed.launch import RanksResult, run_ranks


def python(code: str) -> list[str]:
    """A command for a rank; it has `rank`, and `say(name)`, which leaves a file of that name with its process id."""
    start = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def say(name):
    with open(f"{name}-{rank}.tmp", "w") as file: file.write(str(os.getpid()))
    os.rename(f"{name}-{rank}.tmp", f"{name}-{rank}")
"""
    return [sys.executable, "-S", "-c", start + code]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(code: str, ranks: int = 2, **options: object) -> RanksResult:
    return run_ranks(python(code), ranks=ranks, logs=Path("logs"), poll_seconds=0.02, **options)  # type: ignore[arg-type]


def once(names: list[str], do: Callable[[], None]) -> Callable[[], None]:
    """Do something at the first poll that finds all these files."""
    left = [do]

    def poll() -> None:
        if left and all(Path(name).exists() for name in names):
            left.pop()()

    return poll


def gone(pids: list[int], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
            return True
        time.sleep(0.02)
    return False


SHOW = "import json; print(json.dumps(dict(os.environ)), file=sys.stderr)"


def test_every_rank_finds_its_place_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = run(SHOW, world_size=4, first_rank=2, master=("node-0", 29500), environment={"SHARED": "yes"})
    assert done == RanksResult(0, [])
    for rank in (2, 3):
        found = json.loads(Path(f"logs/rank-{rank:05d}.log").read_text())
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SHARED")
        assert [found[name] for name in names] == [str(rank), str(rank - 2), "4", "2", "node-0", "29500", "yes"]
        assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_a_node_alone_needs_no_master_and_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(SHOW, ranks=1).exit_code == 0
    found = json.loads(Path("logs/rank-00000.log").read_text())
    assert (found["MASTER_ADDR"], found["OMP_NUM_THREADS"]) == ("127.0.0.1", "7")
    with pytest.raises(ValueError, match="told their master"):
        run(SHOW, ranks=1, world_size=2)


def test_the_first_rank_that_fails_gives_the_exit_code() -> None:
    """The others fail because of it, a little later, with codes of their own."""
    code = """
if rank == 2:
    print("the disk is gone"); sys.exit(3)
while os.path.exists("logs/rank-00002.log") and "gone" not in open("logs/rank-00002.log").read(): time.sleep(0.01)
time.sleep(0.2)
print("lost rank 2"); sys.exit(1)
"""
    done = run(code, ranks=3)
    assert done.exit_code == 3
    assert done.failed[0].rank == 2
    assert [(failure.exit_code, failure.killed) for failure in done.failed] == [(3, False), (1, False), (1, False)]
    assert done.failed[0].log_tail == "the disk is gone\n"
    assert done.failed[0].end_text == "exited with 3"


def test_ranks_that_do_not_notice_a_failure_are_killed_after_a_grace() -> None:
    done = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)", failure_grace_seconds=0.2)
    assert done.exit_code == 128 + signal.SIGKILL
    first, second = done.failed
    assert (first.rank, first.signal, first.exit_code, first.killed) == (1, "SIGKILL", None, False)
    assert first.end_text == "was killed by SIGKILL"
    assert (second.rank, second.killed) == (0, True)
    assert second.end_text == "did not end and was killed"
    assert done.ends == {1: "was killed by SIGKILL"}


OBEDIENT = """
def stop(number, _):
    say(f"asked-{number}")
    time.sleep(0.1 * rank)
    sys.exit(128 + number)
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(each, stop)
say("ready")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_becomes_the_exit_code(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    ask = once(["ready-0", "ready-1"], lambda: os.kill(os.getpid(), number))
    done = run(OBEDIENT, on_poll=ask, failure_grace_seconds=0)
    assert done == RanksResult(128 + number, [])
    assert {path.name for path in Path().glob("asked-*")} == {f"asked-{number}-0", f"asked-{number}-1"}
    assert signal.getsignal(number) is before


def test_a_signal_is_passed_on_once() -> None:
    """A second notice does not disturb ranks that are writing their checkpoint."""
    code = """
count = 0
def stop(number, _):
    global count
    count += 1
for each in (signal.SIGTERM, signal.SIGUSR1): signal.signal(each, stop)
say("ready")
while not count: time.sleep(0.01)
say("stopping")
time.sleep(0.3)
sys.exit(128 + number if (number := signal.SIGUSR1) and count == 1 else 9)
"""
    first = once(["ready-0", "ready-1"], lambda: os.kill(os.getpid(), signal.SIGUSR1))
    second = once(["stopping-0", "stopping-1"], lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(code, on_poll=lambda: (first(), second())).exit_code == 128 + signal.SIGUSR1


def test_ranks_that_do_not_stop_are_killed_after_their_grace() -> None:
    code = """
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number) if rank else None)
say("ready")
while True: time.sleep(1)
"""
    ask = once(["ready-0", "ready-1"], lambda: os.kill(os.getpid(), signal.SIGTERM))
    done = run(code, on_poll=ask, grace_seconds=0.3)
    assert done.exit_code == 128 + signal.SIGKILL
    assert [(failure.rank, failure.killed) for failure in done.failed] == [(0, True)]


def test_whoever_interrupts_twice_does_not_wait() -> None:
    code = "signal.signal(signal.SIGINT, lambda *_: say('asked')); say('ready')\nwhile True: time.sleep(1)"
    first = once(["ready-0"], lambda: os.kill(os.getpid(), signal.SIGINT))
    second = once(["asked-0"], lambda: os.kill(os.getpid(), signal.SIGINT))
    asked: list[tuple[int, bool]] = []
    done = run(
        code,
        ranks=1,
        on_poll=lambda: (first(), second()),
        on_stop_request=lambda *each: asked.append(each),
        grace_seconds=600,
    )
    assert done == RanksResult(128 + signal.SIGINT, [], killed_on_request=True)
    assert asked == [(signal.SIGINT, False), (signal.SIGINT, True)]


def test_a_rank_that_somebody_stops_is_named_once_and_left_alone() -> None:
    code = "say('ready')\nwhile not os.path.exists('named'): time.sleep(0.01)"
    stopped: list[tuple[int, int]] = []

    def named(rank: int, process: int) -> None:
        stopped.append((rank, process))
        Path("named").touch()
        os.kill(process, signal.SIGCONT)

    pid = lambda: int(Path("ready-1").read_text())  # noqa: E731
    stop = once(["ready-0", "ready-1"], lambda: os.kill(pid(), signal.SIGSTOP))
    assert run(code, on_poll=stop, on_stopped=named, stopped_seconds=0.2) == RanksResult(0, [])
    assert stopped == [(1, pid())]


def test_a_rank_that_stays_stopped_is_the_one_to_blame() -> None:
    code = "say('ready')\nwhile not (rank == 0 and os.path.exists('named')): time.sleep(0.01)\nsys.exit(3)"
    stop = once(["ready-0", "ready-1"], lambda: os.kill(int(Path("ready-1").read_text()), signal.SIGSTOP))
    named = lambda *_: Path("named").touch()  # noqa: E731
    done = run(code, on_poll=stop, on_stopped=named, stopped_seconds=0.2, failure_grace_seconds=0.1)
    assert done.exit_code == 3
    assert done.ends == {0: "exited with 3", 1: "was stopped (SIGSTOP) and never went on"}


def test_a_rank_leaves_no_children() -> None:
    code = "child = subprocess.Popen(['sleep', '600']); print(child.pid)"
    assert run(code, ranks=1).exit_code == 0
    assert gone([int(Path("logs/rank-00000.log").read_text())])


def test_an_error_of_ours_ends_the_ranks() -> None:
    def fail() -> None:
        raise RuntimeError("the page is gone")

    with pytest.raises(RuntimeError, match="the page is gone"):
        run("say('ready'); time.sleep(600)", on_poll=once(["ready-0", "ready-1"], fail))
    assert gone([int(Path(f"ready-{rank}").read_text()) for rank in (0, 1)])


def test_ranks_die_with_whoever_started_them(here: Path) -> None:
    code = f"""
from pathlib import Path
from trainshed.launch import run_ranks
run_ranks({python("say('ready'); time.sleep(600)")!r}, ranks=2, logs=Path("logs"))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as starter:
        names = [here / f"ready-{rank}" for rank in (0, 1)]
        while not all(name.exists() for name in names):
            assert starter.poll() is None
            time.sleep(0.02)
        starter.kill()
    assert gone([int(name.read_text()) for name in names])


def test_a_program_that_is_not_there_is_named_before_anything_starts() -> None:
    with pytest.raises(InputError, match="there is no program 'no-such-engine'"):
        run_ranks(["no-such-engine"], ranks=1, logs=Path("logs"))
    assert not Path("logs").exists()

"""Stacks of processes that run, read without disturbing them; groups of them, and what their ranks are doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from trainshed.observe import process_stacks
from trainshed.observe.health import (
    FailureDiagnosis,
    FlightRecord,
    RecordedError,
    failure_advice,
    flight_record_name,
    read_flight_records,
)
from trainshed.observe.process_stacks import RankStack, ask_faulthandler, find_ranks, read_stack, read_stacks
from trainshed.observe.stacks import format_groups, group_stacks, recorded_stacks
from trainshed.observe.stall_advice import activity_of, exit_advice, short_frame

# A rank that stands in a function; with `answer` it writes its stacks when asked, as ranks of our engine do.
RANK = """
import subprocess, sys, time
sys.path.insert(0, {source!r})
if sys.argv[1] == "answer":
    from trainshed.engines.torch.stack_dump import write_stacks_when_asked
    write_stacks_when_asked()
# A worker of its data loader has its environment too.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

def stands_here():
    print("up", flush=True)
    time.sleep(600)

stands_here()
"""

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a rank of the run in `tmp_path`."""
    processes = []
    source = str(Path(process_stacks.__file__).parents[2])
    (tmp_path / "rank.py").write_text(RANK.format(source=source))

    def make(rank: int, kind: str = "answer", run: Path = tmp_path) -> int:
        environment = {**os.environ, "RANK": str(rank), "TRAINSHED_RUN_FOLDER": str(run)}
        command = [sys.executable, str(tmp_path / "rank.py"), kind]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, process_group=0)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process.pid

    yield make
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ranks_are_found_by_their_run_and_their_workers_are_not_taken_for_them(start: Start, tmp_path: Path) -> None:
    first, second = start(0, "silent"), start(1, "silent")
    start(0, "silent", run=tmp_path / "another")
    assert find_ranks(str(tmp_path)) == {0: first, 1: second}
    (tmp_path / "link").symlink_to(tmp_path)
    assert find_ranks(str(tmp_path / "link")) == {0: first, 1: second}


def test_py_spy_shows_where_a_rank_stands_also_one_that_is_stopped(start: Start, tmp_path: Path) -> None:
    pid = start(3, "silent")
    stack = read_stack(3, pid)
    assert stack.source == "py-spy", stack.problem
    outer, inner = (frame.rpartition("/")[2] for frame in stack.stack)
    assert outer.endswith(" in <module>")
    assert re.fullmatch(r"rank\.py:\d+ in stands_here", inner)
    os.kill(pid, signal.SIGSTOP)
    while process_stacks.process_state(pid) != "T":
        time.sleep(0.01)
    (stopped,) = read_stacks(str(tmp_path), 3)
    assert stopped.stack[-1].endswith(" in stands_here")
    assert activity_of(stopped.stack, stopped.state).name == "stopped"
    assert process_stacks.process_state(pid) == "T"  # looking has not let it go on
    assert read_stacks(str(tmp_path), 4) == []


def test_a_rank_of_our_own_engine_answers_where_nobody_may_trace_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stacks, "find_py_spy", lambda _: None)
    stack = read_stack(0, start(0))
    assert stack.source == "faulthandler"
    assert stack.stack[-1].endswith(" in stands_here")
    again = read_stack(0, stack.pid or 0)
    assert again.stack[-1].endswith(" in stands_here")


def test_a_process_that_does_not_expect_the_signal_does_not_get_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stacks, "find_py_spy", lambda _: None)
    pid = start(0, "silent")
    assert ask_faulthandler(pid) is None
    assert "py-spy is not installed" in (read_stack(0, pid).problem or "")
    assert process_stacks.process_state(pid) in ("R", "S")


def test_a_process_that_may_not_be_traced_says_which_right_is_missing(tmp_path: Path) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text("#!/bin/sh\necho 'Permission denied (os error 13): try running again with sudo' >&2\nexit 1\n")
    py_spy.chmod(0o755)
    text, problem = process_stacks.run_py_spy(str(py_spy), os.getpid())
    assert text is None
    assert "CAP_SYS_PTRACE" in problem


def test_the_script_runs_from_standard_input_on_any_python(start: Start, tmp_path: Path) -> None:
    start(5, "silent")
    script = Path(process_stacks.__file__).read_bytes()
    done = subprocess.run([sys.executable, "-I", "-", str(tmp_path)], input=script, capture_output=True)
    (rank,) = orjson.loads(done.stdout)["ranks"]
    assert RankStack(**rank).rank == 5
    assert rank["stack"][-1].endswith("in stands_here")


C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
STEP = "/x/site-packages/megatron/training/training.py:1500 in train_step"


@pytest.mark.parametrize(
    ("stack", "name", "text"),
    [
        ([STEP, f"{C10D}:2810 in all_reduce"], "collective", "waits for other ranks in all_reduce"),
        (
            [STEP, f"{C10D}:4500 in barrier", "/x/site-packages/torch/distributed/c10d_logger.py:83 in wrapper"],
            "collective",
            "waits for other ranks in barrier",
        ),
        ([f"{C10D}:1700 in init_process_group", f"{C10D}:900 in _store_based_barrier"], "rendezvous", "meeting"),
        ([STEP, "/x/site-packages/torch/utils/data/dataloader.py:701 in _next_data"], "data", "waits for data"),
        (
            [STEP, "/x/src/trainshed/data/order.py:3 in read", "/usr/lib/python3.11/threading.py:1 in wait"],
            "data",
            "data",
        ),
        (
            ["/x/site-packages/megatron/core/dist_checkpointing/serialization.py:4 in save", "/x/os.py:1 in fsync"],
            "checkpoint",
            "checkpoint",
        ),
        ([STEP, "/x/site-packages/torch/_inductor/codecache.py:12 in load"], "compile", "is compiling"),
        ([STEP, "/x/site-packages/torch/cuda/__init__.py:1045 in synchronize"], "gpu", "waits for its GPU"),
        ([STEP, "/home/me/model.py:7 in forward"], "code", "is at"),
        ([], "unknown", "shows no stack"),
    ],
)
def test_a_stack_says_what_a_rank_is_doing(stack: list[str], name: str, text: str) -> None:
    activity = activity_of(stack)
    assert activity.name == name
    assert text in activity.text
    assert activity.waits_for_others == (name in ("collective", "rendezvous"))


def test_a_process_in_the_kernel_waits_for_a_disk_or_a_driver() -> None:
    assert activity_of(["/home/me/model.py:7 in forward"], "D").name == "kernel"


def test_how_a_rank_ended_has_its_own_advice() -> None:
    assert "out of memory" in (exit_advice("was killed by SIGKILL") or "")
    assert "/dev/shm" in (exit_advice("was killed by SIGBUS") or "")
    assert exit_advice("exited with 3") is None


def test_frames_are_shown_without_the_folders_of_packages() -> None:
    assert short_frame("/x/lib/python3.11/site-packages/torch/a.py:1 in f") == "torch/a.py:1 in f"
    assert short_frame("/very/long/way/to/model.py:1 in f") == "way/to/model.py:1 in f"


def test_equal_stacks_are_one_group_and_the_outlier_is_named() -> None:
    waiting = [STEP, f"{C10D}:2810 in all_reduce"]
    loading = [STEP, "/x/site-packages/torch/utils/data/dataloader.py:701 in _next_data"]
    stacks = [
        RankStack(rank, f"n{rank // 8}", 100 + rank, "S", loading if rank == 17 else waiting, "py-spy")
        for rank in range(63)
    ]
    most, one = group_stacks(reversed(stacks))
    assert len(most.ranks) == 62
    assert (one.ranks, one.to_plain()["hosts"], one.to_plain()["pids"]) == ([17], ["n2"], {"17": 117})
    text = format_groups([most, one])
    assert "62 ranks: ranks 0-16, 18-62 wait for other ranks in all_reduce" in text
    assert "rank 17 on n2 (process 117) waits for data" in text
    assert "  → look at the disk" in text
    assert "    megatron/training/training.py:1500 in train_step" in text


def test_long_stacks_are_shown_from_inside_and_in_full_when_asked() -> None:
    deep = [RankStack(0, "n", 1, "S", [f"/x/src/a.py:{line} in f" for line in range(30)], "py-spy")]
    assert "… 22 outer frames (--full)" in format_groups(group_stacks(deep))
    assert "/x/src/a.py:0 in f" in format_groups(group_stacks(deep), full=True)


def test_ranks_without_a_stack_say_why() -> None:
    text = format_groups(group_stacks([RankStack(0, "n", 1, "S", problem="py-spy is not installed")]))
    assert text.startswith("rank 0 on n (process 1) no stack: py-spy is not installed")


def test_the_stacks_of_a_dead_run_are_those_of_its_flight_records(tmp_path: Path) -> None:
    record = FlightRecord(1, 5.0, "stuck", stack=["/x/src/trainshed/data/order.py:3 in read: return next(self.rows)"])
    (tmp_path / flight_record_name(1)).write_bytes(record.to_json())
    foreign = {"number": 1, "ranks": [{"rank": 0, "host": "n0", "pid": 9, "stack": [f"{C10D}:1 in all_reduce"]}]}
    (tmp_path / "stacks-00000.json").write_bytes(orjson.dumps(foreign))
    (tmp_path / "stacks-00001.json").write_bytes(b"half")
    records = read_flight_records(tmp_path)
    assert records[0].waiting == "collective"
    first, second = recorded_stacks(records, {1: "n7"})
    assert first.stack == [f"{C10D}:1 in all_reduce"]
    assert (second.host, second.stack) == ("n7", ["/x/src/trainshed/data/order.py:3 in read"])


def test_a_failure_has_the_advice_that_matches_its_cause() -> None:
    data = FlightRecord(1, 5.0, "stuck", stack=["/x/src/trainshed/data/order.py:3 in read: next(self.rows)"])
    broken = FlightRecord(1, 5.0, "failed", error=RecordedError("KeyError", "x", False), stack=data.stack)
    blamed = FailureDiagnosis([1], None, "")
    assert "data.stage" in (failure_advice(blamed, {1: data}, {}) or "")
    assert failure_advice(blamed, {1: broken}, {}) is None
    assert "out of memory" in (failure_advice(blamed, {}, {1: "was killed by SIGKILL"}) or "")

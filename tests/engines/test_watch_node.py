"""The watch beside a foreign engine's torchrun: it names the rank that the others wait for, and why."""

from __future__ import annotations

import ast
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainshed.engines.launch import EngineLaunch, EngineSite, launcher_script
from trainshed.launch.ranks import free_port
from trainshed.observe import watch_node
from trainshed.observe.event_log import read_events
from trainshed.observe.events import EVENT_KINDS, encode_event
from trainshed.observe.health import diagnose, read_flight_records
from trainshed.observe.process_stacks import RankStack, find_ranks
from trainshed.observe.watch_node import NodeWatcher, compare_dumps, explain_stall, read_dumps, read_options
from trainshed.storage import LocalStore
from trainshed.workflow.stages import write_engine_watch

# A foreign engine as far as a watch sees one: it logs every step, and one rank can be made to stand still.
ENGINE = """
import os, sys, time
import torch
import torch.distributed as dist

def wait_for_a_tape_robot():
    while os.path.exists("stuck"):
        time.sleep(0.05)

dist.init_process_group("gloo")
while not os.path.exists("enough"):
    if dist.get_rank() == 1:
        wait_for_a_tape_robot()
    dist.all_reduce(torch.ones(4))
    print("step", flush=True)
    time.sleep(0.05)
"""


def wait_for(ask: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.05)
    return answer


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Path]:
    """Start the engine with two ranks as a job would, by the launcher; yields the run's folder."""
    run = tmp_path / "run"
    write_engine_watch(run)
    (tmp_path / "engine.py").write_text(ENGINE)
    site = EngineSite(str(run), str(tmp_path), nodes=1, gpus_per_node=2)
    script = launcher_script(
        EngineLaunch(str(tmp_path / "engine.py"), ()), site, python=sys.executable, quiet_seconds=6.0
    )
    node = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(["bash", "-c", script], env={**os.environ, **node}, cwd=tmp_path, start_new_session=True)
    try:
        yield run
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        for pid in find_ranks(str(run)).values():
            os.kill(pid, signal.SIGKILL)
        job.wait()


def stalls(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(LocalStore(run), "") if event["kind"] == "stall"]


def blamed(run: Path, since: float, text: str = "") -> list[dict[str, Any]]:
    """Return the stalls that somebody is blamed for: starting the ranks may take longer than the limit here."""
    return [event for event in stalls(run) if event["ranks"] and event["time"] >= since and text in event["what"]]


# It takes seconds: torch is imported by torchrun and by two ranks, and logs must be quiet for a while.
def test_a_stopped_rank_and_one_stuck_in_python_are_named_by_a_real_torchrun(engine: Path) -> None:
    log = engine / "logs/attempt-0001/node-00000.log"
    wait_for(lambda: log.is_file() and "step" in log.read_text(), "the first step")
    second, stopped_at = find_ranks(str(engine))[1], time.time()
    os.kill(second, signal.SIGSTOP)
    reported = "is stopped (SIGSTOP), and training waits for it"
    first = wait_for(lambda: blamed(engine, stopped_at, reported), "its state")[0]
    assert first["ranks"] == [1]
    assert f"{reported}: `kill -CONT {second}` lets it go on" in first["what"]
    waiting = "1 ranks wait in all_reduce"
    later = wait_for(lambda: blamed(engine, stopped_at, waiting), "who waits")[0]
    assert (later["ranks"], later["collective"]) == ([1], "all_reduce")
    assert later["what"].startswith("no log has grown for 6 s: rank 1 on ")
    health = engine / "health/attempt-0001"
    assert "rank 1" in diagnose(read_flight_records(health), 2).sentence

    # The log grows again: what explained that stall must not explain another failure.
    (engine.parent / "stuck").touch()
    continued_at = time.time()
    os.kill(second, signal.SIGCONT)
    stuck = wait_for(lambda: blamed(engine, continued_at), "who is stuck")[-1]
    assert (stuck["ranks"], stuck["collective"]) == ([1], "all_reduce")
    assert "engine.py:7 in wait_for_a_tape_robot" in stuck["what"] or "engine.py:8 in" in stuck["what"]
    for event in stalls(engine):
        values = {key: event[key] for key in ("ranks", "collective", "what")}
        encode_event("stall", None, values, attempt=1, rank=None)

    (engine.parent / "stuck").unlink()
    wait_for(lambda: not (health / "stacks-00000.json").exists(), "the stall to be forgotten")
    (engine.parent / "enough").touch()


def options(run: Path, node: int = 0, nodes: int = 2) -> Any:
    words = ["--run", str(run), "--attempt", "1", "--node", str(node), "--nodes", str(nodes)]
    return read_options([*words, "--ranks-per-node", "1", "--torchrun", "1", "--quiet-seconds", "600"])


def test_nodes_answer_the_first_one_and_a_silent_one_is_named(tmp_path: Path) -> None:
    now = 0.0
    watchers = [NodeWatcher(options(tmp_path, node, nodes=3), clock=lambda: now) for node in (0, 1)]
    (tmp_path / "logs/attempt-0001").mkdir(parents=True)
    (tmp_path / "logs/attempt-0001/node-00000.log").write_text("step 1\n")
    watchers[0].look()
    now = 599.0
    watchers[0].look()
    assert not (tmp_path / "health/attempt-0001/stall.json").exists()
    now = 602.0
    for watcher in (*watchers, watchers[0]):
        watcher.look()
    assert (tmp_path / "health/attempt-0001/stacks-00001.json").is_file()
    assert stalls(tmp_path) == []  # the third node may still answer
    now = 800.0
    watchers[0].look()
    (report,) = stalls(tmp_path)
    assert "no rank has a process" in report["what"]
    assert "1 nodes have not answered (first of all node 2)" in report["what"]


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_node_writes_the_devices_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-5d, 34, 118.42, 0, 1024, 1980, 0, 0, 0x8'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRAINSHED_HOST", f"host-{node}")
    NodeWatcher(options(tmp_path, 1)).look()
    NodeWatcher(options(tmp_path, 0)).look()
    (event,) = [event for event in read_events(LocalStore(tmp_path), "") if event["kind"] == "devices"]
    assert event["memory_gib"] == [1.0, 1.0]
    assert event.keys() >= {"v", "time", "attempt", "rank", "step"}


def dump(*entries: tuple[int, str]) -> dict[str, Any]:
    """Return what NCCL's flight recorder writes, as far as it is read here."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
        "entries": [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": "nccl:all_reduce",
                "is_p2p": False,
                "state": state,
            }
            for number, state in entries
        ],
    }


def test_flight_records_name_the_rank_that_has_not_begun_a_collective(tmp_path: Path) -> None:
    waiting = dump((1, "completed"), (2, "started"))
    for rank, body in enumerate([waiting, dump((1, "completed")), waiting]):
        (tmp_path / f"nccl-rank-{rank}").write_bytes(pickle.dumps(body))
    (tmp_path / "nccl-rank-7").write_bytes(pickle.dumps(Path("x")))  # it would call something
    (tmp_path / "nccl-rank-8").write_bytes(b"half a")
    dumps = read_dumps(tmp_path)
    assert sorted(dumps) == [0, 1, 2]
    assert compare_dumps(dumps) == ([1], "all_reduce #2 of group default_pg")
    synchronize = ["/x/site-packages/torch/cuda/__init__.py:1045 in synchronize"]
    loader = ["/x/site-packages/torch/utils/data/dataloader.py:701 in _next_data"]
    stacks = {rank: RankStack(rank, "n1", stack=loader if rank == 1 else synchronize) for rank in range(3)}
    ranks, collective, text = explain_stall(stacks, dumps, 3, "no log has grown for 1800 s")
    assert (ranks, collective) == ([1], "all_reduce #2 of group default_pg")
    assert text.startswith(
        "no log has grown for 1800 s: rank 1 on n1 waits for data at torch/utils/data/dataloader.py:701 in _next_data; "
        "2 ranks wait in all_reduce #2 of group default_pg. look at the disk or bucket"
    )


# A rank as its flight recorder sees one: PyTorch reads the pipe, prints a line and writes the dump.
RECORDER = """
import os, pickle, sys
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(pipe)
reading = os.open(pipe, os.O_RDWR)
print("up", flush=True)
while os.read(reading, 10):
    with open(sys.argv[1], "a") as log:
        log.write("preparing to dump debug info\\n")
    dump = os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0"
    with open(dump + ".part", "wb") as file:
        pickle.dump({"pg_config": {}, "entries": []}, file)
    os.replace(dump + ".part", dump)
"""


def test_a_flight_recorder_is_asked_and_the_line_that_it_prints_is_no_progress(tmp_path: Path) -> None:
    health, log = tmp_path / "health/attempt-0001", tmp_path / "logs/attempt-0001/node-00000.log"
    for folder in (health, log.parent):
        folder.mkdir(parents=True)
    log.write_text("step 1\n")
    variables = {
        "RANK": "0",
        "TRAINSHED_RUN_FOLDER": str(tmp_path),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe-"),
        "TORCH_FR_DUMP_TEMP_FILE": str(health / "nccl-rank-"),
    }
    command = [sys.executable, "-c", RECORDER, str(log)]
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        now = 0.0
        watcher = NodeWatcher(options(tmp_path, nodes=1), clock=lambda: now)
        watcher.look()
        now = 601.0
        watcher.look()  # asks, and answers for its own ranks
        assert sorted(read_dumps(health)) == [0]
        assert "preparing" in log.read_text()
        watcher.look()
        assert len(stalls(tmp_path)) == 1
        assert (health / "stacks-00000.json").is_file()
        with log.open("a") as grown:
            grown.write("step 2\n")
        watcher.look()
        assert not (health / "stacks-00000.json").exists()
        assert read_dumps(health) == {}
        rank.kill()


def test_without_stacks_the_reason_is_said() -> None:
    unread = {rank: RankStack(rank, "n1", problem="py-spy is not installed where it runs") for rank in range(2)}
    ranks, collective, text = explain_stall(unread, {}, 2, "no log has grown for 9 s")
    assert (ranks, collective) == ([], None)
    assert text == "no log has grown for 9 s: no rank stands out: py-spy is not installed where it runs"


def test_a_rank_without_a_process_is_the_one_to_blame() -> None:
    stack = RankStack(0, "n1", stack=["/x/torch/distributed/distributed_c10d.py:1 in barrier"])
    ranks, collective, text = explain_stall({0: stack}, {}, 2, "quiet")
    assert (ranks, collective) == ([1], "barrier")
    assert text == "quiet: rank 1 has no process any more; 1 ranks wait in barrier"


def test_what_travels_needs_only_the_standard_library_of_python_3_8(tmp_path: Path) -> None:
    write_engine_watch(tmp_path)
    files = sorted((tmp_path / "engine/watch").iterdir())
    names = {file.stem for file in files}
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 8))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        foreign = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - names - {"pynvml"}
        assert foreign <= ({"trainshed"} if file.name == "watch_node.py" else set())
    # As a file among files it finds its helpers beside it, and not in our package.
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "engine/watch/watch_node.py"), "--help"], capture_output=True, text=True
    )
    assert "--quiet-seconds" in done.stdout + done.stderr


def test_the_events_it_writes_are_of_the_schema() -> None:
    source = Path(watch_node.__file__).read_text()
    tree = ast.parse(source)
    kinds = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "emit"
        and isinstance(node.args[0], ast.Constant)
    }
    assert kinds <= EVENT_KINDS.keys()
    assert json.loads(json.dumps(sorted(kinds))) == ["alarm", "stall"]

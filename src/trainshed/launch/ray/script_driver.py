"""The driver of a foreign engine on Ray: `python3 script_driver.py --job FOLDER`, in the engine's own image.

A RayJob on Kubernetes trains in the image of the engine, which has Ray and some Python, and neither our code nor what
it depends on. So this file is sent as it is, among the files of the job. It imports the standard library of Python 3.8
and `ray`, and nothing of Trainshed.

It reserves whole nodes, starts one actor per node, and each actor runs the engine's script. If one fails, the others
are ended and all start again, as often as the job allows. A request to stop is passed on to the scripts, which have the
job's grace to save.

    <run>/attempts/0001.json    taken by whoever creates it, as every attempt of a run
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035 - Python 3.8

READY_SECONDS = 300.0
"""How long to wait for the nodes."""
POLL_SECONDS = 0.5
LOG_SECONDS = 3.0
"""Ray hands on what scripts print a little later: the end of it would be lost."""
FAILURE_GRACE_SECONDS = float(os.environ.get("TRAINSHED_FAILURE_GRACE_SECONDS", "20"))
"""For the others after one has failed: the flight recorder of NCCL takes some seconds to write itself."""
KILL_MARGIN_SECONDS = 15.0
STOPPED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1, 128 + signal.SIGINT)
WRONG_INPUT = 2
_MARK = "TRAINSHED_RAY_SCRIPT"
# Kills whatever has a mark among its variables when the process that holds the other end of its input has ended. It is
# nobody's child: Ray kills those of an actor with it.
# One look at /proc can miss a process: while a program is being loaded its variables and its arguments read as empty,
# and the child of a process that ends is not in a list made before. So it looks again until nothing is being loaded
# and three looks have found nothing (a hundred, should a program stay like that).
_WATCHER = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
sys.stdin.read()
mark, looks, loading = os.fsencode(sys.argv[1]), 0, False
def read(process, file):
    with open("/proc/%s/%s" % (process, file), "rb") as opened:
        return opened.read()
def is_loading(process):
    words = read(process, "stat").rpartition(b")")[2].split()
    ended, of_kernel = words[0] in b"ZX", int(words[6]) & 0x200000
    return not ended and not of_kernel and not read(process, "cmdline")
while looks < (100 if loading else 3):
    looks, loading = looks + 1, False
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            variables = read(process, "environ")
            if mark in variables.split(bytes(1)):
                looks = 0
                os.kill(int(process), signal.SIGKILL)
            elif not variables:
                loading = is_loading(process) or loading
        except OSError:
            pass
    time.sleep(0.1)
"""


@contextmanager
def ending_with_this_process() -> Iterator[dict[str, str]]:
    """Yield variables; whatever is started with them ends when this block or this process does, however it does.

    torchrun gives its ranks sessions of their own, and a node of Ray outlives its actors: ranks that wait for a dead
    peer in a collective would hold their GPUs while the next start wants them.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, "-I", "-S", "-c", _WATCHER, f"{_MARK}={mark}"]
    # In a session of its own from its first moment: Ray may end the group of an actor too.
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    assert watcher.stdout is not None
    watcher.wait()
    try:
        yield {_MARK: mark}
    finally:
        watcher.stdin.close()
        watcher.stdout.read()  # until it has ended
        watcher.stdout.close()


class ScriptActor:
    """Runs the script on its node. Its methods run concurrently: a stop must reach a script that `run` waits for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: int | None = None

    def location(self) -> tuple[str, str]:
        """Return the address and the name of the node."""
        import ray

        return ray.util.get_node_ip_address(), socket.gethostname()

    def free_port(self) -> int:
        """Return a port that nobody uses now."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return listener.getsockname()[1]

    def run(self, script: str, environment: dict[str, str]) -> int:
        """Run the script to its end; returns its exit code, 128 + signal if it was killed."""
        with ending_with_this_process() as mark:
            self._process = subprocess.Popen(
                ["bash", script],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **mark},
                start_new_session=True,
            )
            if self._stopped is not None:
                self._process.send_signal(self._stopped)
            code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, number: int) -> None:
        """Pass a signal on to the script, or to the one that is started next."""
        self._stopped = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def take_attempt(run: Path) -> int:
    """Take the next number of the run: whoever creates its file has it."""
    folder = run / "attempts"
    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for match in map(re.compile(r"(\d+)\.json").fullmatch, os.listdir(str(folder))) if match]
    number = max(taken, default=0) + 1
    while True:
        record = {"attempt": number, "writer": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            with (folder / f"{number:04d}.json").open("x") as file:
                file.write(json.dumps(record, sort_keys=True) + "\n")
            return number
        except FileExistsError:
            number += 1


def note(text: str) -> None:
    """Write a line of the driver's log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Training:
    """The training of one job, from start to start."""

    def __init__(self, job: dict[str, Any], stage: dict[str, Any], folder: Path) -> None:
        self.job, self.stage, self.folder = job, stage, folder
        self.nodes = int(stage["nodes"])
        self.stop_signal: int | None = None

    def run_with_restarts(self) -> int:
        """Run until it succeeds, is stopped, or has failed too often; returns the exit code."""
        restarts, code = int(self.stage.get("restarts") or 0), 1
        for start in range(restarts + 1):
            code = self.run_once()
            if code == 0 or code in STOPPED_CODES or code == WRONG_INPUT or self.stop_signal is not None:
                return code
            if start < restarts:
                note(f"{self.stage['name']} failed with {code}; starting again, {restarts - start} restarts left")
        return code

    def run_once(self) -> int:
        """Reserve the nodes and run the script on each; returns 0, or the exit code of the first that failed."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = int(self.stage.get("gpus_per_node") or 0)
        cpus = float(gpus or self.stage.get("ranks_per_node") or 1)
        bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        group = placement_group([bundle] * self.nodes, strategy="STRICT_SPREAD" if self.nodes > 1 else "STRICT_PACK")
        try:
            if not self._wait_for(group, bundle):
                return 128 + self.stop_signal if self.stop_signal else 1
            actors: list[Any] = [
                ray.remote(ScriptActor)
                .options(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                )
                .remote()
                for node in range(self.nodes)
            ]
            try:
                return self._run_scripts(actors)
            finally:
                for actor in actors:
                    ray.kill(actor)
        finally:
            remove_placement_group(group)

    def _wait_for(self, group: Any, bundle: dict[str, float]) -> bool:
        deadline, reported = time.monotonic() + READY_SECONDS, False
        while not group.wait(1):
            if self.stop_signal is not None:
                return False
            if time.monotonic() > deadline:
                note(f"error: no room for {self.nodes} nodes with {bundle} after {READY_SECONDS:.0f} s")
                return False
            if not reported:
                note(f"{self.stage['name']} waits: it takes {self.nodes} nodes with {bundle}")
                reported = True
        return True

    def _run_scripts(self, actors: list[Any]) -> int:
        import ray

        places = ray.get([actor.location.remote() for actor in actors])
        # By address as a number: the same order of nodes at every start.
        order = sorted(range(len(actors)), key=lambda node: [int(part) for part in re.findall(r"\d+", places[node][0])])
        actors, places = [actors[node] for node in order], [places[node] for node in order]
        attempt = take_attempt(Path(self.job["run"]))
        shared = {
            **self.stage.get("environment", {}),
            "TRAINSHED_ATTEMPT": str(attempt),
            "NNODES": str(self.nodes),
            "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(ray.get(actors[0].free_port.remote())),
        }
        script = str(self.folder / self.stage["script"])
        for number, (address, host) in enumerate(places):
            note(f"attempt {attempt}: node {number} on {address} ({host})")
        pending = {
            actor.run.remote(script, {**shared, "NODE_RANK": str(number)}): number
            for number, actor in enumerate(actors)
        }
        return self._wait_for_all(actors, pending)

    def _wait_for_all(self, actors: list[Any], pending: dict[Any, int]) -> int:
        import ray

        first_code, deadline, stop_sent = 0, float("inf"), False
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
            for reference in done:
                number = pending.pop(reference)
                try:
                    code = ray.get(reference)
                except ray.exceptions.RayError as error:
                    note(f"error: node {number} was lost: {str(error).strip().splitlines()[0]}")
                    code = 1
                if code:
                    note(f"node {number} ended with {code}")
                    first_code = first_code or code
                    deadline = min(deadline, time.monotonic() + self._seconds_after(code))
            if self.stop_signal is not None and not stop_sent:
                stop_sent = True
                deadline = min(deadline, time.monotonic() + float(self.job["grace_seconds"]) + KILL_MARGIN_SECONDS)
                for number in pending.values():
                    actors[number].stop.remote(self.stop_signal)
            if pending and time.monotonic() > deadline:
                note(f"nodes {sorted(pending.values())} do not end and are killed")
                return first_code or 128 + signal.SIGKILL
        return first_code

    def _seconds_after(self, code: int) -> float:
        """How long the others have after one has ended: as long as a save takes if it was asked to stop."""
        grace = float(self.job["grace_seconds"]) + KILL_MARGIN_SECONDS
        return grace if code in STOPPED_CODES else FAILURE_GRACE_SECONDS


def main(arguments: list[str] | None = None) -> int:
    """Run the training of a job; returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs the script of a foreign engine on every node of a Ray cluster.")
    parser.add_argument("stage", help="the stage of the job")
    parser.add_argument("--job", type=Path, required=True, help="folder with the files of the job")
    options = parser.parse_args(arguments)
    job = json.loads((options.job / "job.json").read_text(encoding="utf-8"))
    stage = next((stage for stage in job["stages"] if stage["name"] == options.stage), None)
    if stage is None or not stage.get("script"):
        note(f"error: the job in {options.job} has no stage `{options.stage}` with a script")
        return WRONG_INPUT
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines that are alike are still lines: every step has one
    try:
        import ray
    except ImportError:
        note("error: this image has no Ray; `engine.image` must name one that has")
        return WRONG_INPUT
    # What scripts print is in the log of the job: the first node's losses are among it.
    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    training = Training(job, stage, options.job)

    def ask_to_stop(number: int, _frame: Any) -> None:
        training.stop_signal = training.stop_signal or number

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    try:
        return training.run_with_restarts()
    finally:
        time.sleep(LOG_SECONDS)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())

"""Train on this machine: take an attempt, start its ranks, follow their events, say who failed and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import TrainshedError
from trainshed.launch.explaining import explain
from trainshed.launch.ranks import RanksResult, run_ranks, stopped_text
from trainshed.observe.events import EventWriter
from trainshed.observe.reading import EventFollower
from trainshed.observe.training_words import CTRL_C, stopping_text
from trainshed.plan import RankLayout
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

PLAN_SCHEMA = "trainshed.plan/1"
# CPUs that say they have matrix tiles (AMX) while the hypervisor forbids them kill bf16 products with SIGILL.
WITHOUT_TILES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@dataclass(frozen=True)
class Trained:
    """How an attempt ended; 0 is finished, 128 + signal a requested stop."""

    attempt: int
    exit_code: int


def train_here(
    run_folder: Path,
    layout: RankLayout,
    *,
    precision: str,
    reasons: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
    worker_arguments: Sequence[str] = (),
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    environment: dict[str, str] | None = None,
    grace_seconds: float = 600.0,
    failure_grace_seconds: float = 20.0,
) -> Trained:
    """Train a prepared run with all its ranks on this machine; raises what ended it, unless somebody asked it to stop.

    `reasons` say why the planner chose the layout, and `calibration` by what it was calibrated, for the plan that is
    kept. `worker_arguments` tell each rank which cluster it is on. `grace_seconds` is how long ranks may take for their
    last checkpoint after a request to stop, `failure_grace_seconds` how long to write down where they stood when one
    fails.
    """
    store = LocalStore(run_folder)
    attempt = take_attempt(store, "").number
    write_plan(store, attempt, layout, reasons, calibration)
    follower = EventFollower(run_folder)
    # What earlier attempts wrote is no news.
    follower.poll()
    watched = WatchedFolder(run_folder)
    done = saved = None

    def follow() -> None:
        nonlocal done, saved
        watched.check()
        for event in follower.poll():
            if event["attempt"] != attempt:  # a start on another machine writes beside it
                continue
            kind = event["kind"]
            if kind == "step":
                done = event["step"] + 1
            elif kind == "resume":
                done = saved = event["step"]
            elif kind == "checkpoint" and event["phase"] == "committed":
                saved = event["step"]
            on_event(event)

    def say_stopping(signum: int, again: bool) -> None:
        follow()
        asked = CTRL_C if signum == signal.SIGINT else signal.Signals(signum).name
        on_event({"kind": "note", "text": stopping_text(asked, attempt, done, saved, again=again)})

    result = run_ranks(
        rank_command(run_folder, attempt, worker_arguments),
        ranks=layout.world_size,
        logs=logs_folder(run_folder, attempt),
        environment=(environment or {}) | machine_environment(precision),
        grace_seconds=grace_seconds,
        failure_grace_seconds=failure_grace_seconds,
        on_poll=follow,
        on_asked=say_stopping,
        on_stopped=partial(keep_stall, store, attempt),
    )
    watched.check(at_once=True)
    follow()
    if result.given_up:
        # No rank was left the time to say it.
        with EventWriter(store, "", attempt=attempt, rank=None) as events:
            events.emit("end", reason="signal", exit_code=result.exit_code)
    if result.exit_code and not _asked_to_stop(result):
        failed = [failure.rank for failure in result.failed]
        raise explain(run_folder, attempt, layout.world_size, ends=result.ends, failed=failed)
    return Trained(attempt, result.exit_code)


class WatchedFolder:
    """Notices that a run's folder is gone: its ranks would train on for a while, and keep nothing."""

    def __init__(self, folder: Path, *, seconds: float = 3.0) -> None:
        self._folder, self._seconds = folder, seconds
        self._there = self._looked = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Raise if the folder has been gone for some time; a network disk may lose sight of it for a moment."""
        now = time.monotonic()
        if now - self._looked < self._seconds / 3 and not at_once:
            return
        self._looked = now
        if self._folder.is_dir():
            self._there = now
        elif at_once or now - self._there >= self._seconds:
            raise TrainshedError(
                "the folder of this run was removed or renamed while it trained",
                where=str(self._folder),
                hint="put it back, and the same command goes on from its last checkpoint; without it a new run begins",
            )


def keep_stall(store: LocalStore, attempt: int, rank: int, process: int) -> None:
    """Keep that a rank is stopped, for everybody who follows the run."""
    with EventWriter(store, "", attempt=attempt, rank=None) as events:
        events.emit("stall", ranks=[rank], collective=None, what=stopped_text(rank, process))


def worker_command(*arguments: str) -> list[str]:
    """Return how this Python starts `trainshed worker`."""
    # -P: a file of the user's named like one of Python's modules must not be taken for it.
    return [sys.executable, "-P", "-m", "trainshed", "worker", *arguments]


def rank_command(run_folder: Path, attempt: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return what every rank of an attempt runs."""
    return worker_command("train", "--run", str(run_folder), "--attempt", str(attempt), *arguments)


def logs_folder(run_folder: Path, attempt: int) -> Path:
    """Return where the ranks of an attempt write what they print."""
    return run_folder / "logs" / f"attempt-{attempt:04d}"


def machine_environment(precision: str) -> dict[str, str]:
    """What ranks on this machine need in their environment besides their place."""
    needed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if precision == "bf16" and "ONEDNN_MAX_CPU_ISA" not in os.environ and _tiles_are_forbidden():
        needed |= WITHOUT_TILES
    return {name: value for name, value in needed.items() if name not in os.environ}


def _tiles_are_forbidden() -> bool:
    """Whether a bf16 product dies on this CPU; only one that claims to have tiles is tried."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists() or "amx_bf16" not in facts.read_text():
        return False
    tried = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", tried], capture_output=True).returncode == -signal.SIGILL


def write_plan(
    store: LocalStore,
    attempt: int,
    layout: RankLayout,
    reasons: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Keep what an attempt's ranks are to run, and why the planner chose it; no reasons where a person did."""
    body: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "attempt": attempt,
        "layout": asdict(layout),
        "reasons": list(reasons),
    }
    if calibration is not None:
        body["calibration"] = calibration
    store.put(f"plans/attempt-{attempt:04d}.json", orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def read_plan(run_folder: Path, attempt: int) -> RankLayout:
    """Return the layout of an attempt."""
    body = orjson.loads(LocalStore(run_folder).read(f"plans/attempt-{attempt:04d}.json"))
    return RankLayout(**body["layout"] | {"stages": tuple(body["layout"]["stages"])})


def _asked_to_stop(result: RanksResult) -> bool:
    return result.exit_code > 128 and not result.failed

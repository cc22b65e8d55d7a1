"""Node agents of a small job as processes of this machine, with a few lines of Python in place of each rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

import trainshed
from support.recipes.small_recipes import recipe_text, small_recipe
from trainshed.launch.agent.records import AttemptRecords, NodeRecord
from trainshed.launch.attempt import PLAN_SCHEMA
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ranks import free_port
from trainshed.plan import resolve_layout
from trainshed.recipe import Layout

_AGENT = """
import sys
from trainshed.launch.agent import training
code = sys.argv.pop(1)
training.rank_command = lambda run, attempt, arguments: [sys.executable, "-S", "-c", code, str(run), str(attempt)]
from trainshed.cli import run_cli
sys.exit(run_cli(["agent", "train", "--job", sys.argv[1]]))
"""
_RANK = """
import os, signal, sys, time
rank, run, attempt = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
def say(name):
    with open(f"{run}/{name}-{rank}", "w") as file: file.write(str(os.getpid()))
def stop(number, _): sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, stop)
"""
FAST = {
    "TRAINSHED_LOOK_SECONDS": "0.05",
    "TRAINSHED_BEAT_SECONDS": "0.2",
    "TRAINSHED_LOST_SECONDS": "2",
    "TRAINSHED_ROLL_CALL_SECONDS": "2",
    "TRAINSHED_MEET_SECONDS": "60",
    "TRAINSHED_FAILURE_GRACE_SECONDS": "0.2",
}


class SmallAgents:
    """The agents of one start; `rank` is what each rank does, with `rank`, `attempt` and `say(name)` at hand."""

    def __init__(self, folder: Path, rank: str = "", *, nodes: int = 2, spares: int = 0, **job: Any) -> None:
        self.run, self.job = folder / "run", folder / "job"
        self.run.mkdir()
        self.job.mkdir()
        self._rank = _RANK + rank
        stage = Stage("train", nodes=nodes, spares=spares)
        body = {"version": trainshed.__version__} | job
        file = JobFile("small-1", str(self.run), (stage, Stage("fetch")), 60, "fp64", **body)
        recipe = small_recipe("dense")
        assert recipe.model.config is not None
        layout = resolve_layout(Layout(dp=nodes), recipe.model.config)
        plan = {"schema": PLAN_SCHEMA, "layout": asdict(layout), "reasons": ["because"], "predicted": {"mfu": 0.4}}
        texts = {
            "job.json": file.to_text(),
            "recipe.yaml": recipe_text("dense"),
            "plan.json": orjson.dumps(plan).decode(),
        }
        for name, text in texts.items():
            (self.job / name).write_text(text)
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._port = free_port()

    def start(self, *slots: int, **environment: str) -> None:
        for slot in slots:
            node_env = {
                "TRAINSHED_NODE_RANK": str(slot),
                "TRAINSHED_HOST": f"host-{slot}",
                "TRAINSHED_START": "start-1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
            }
            self.agents[slot] = subprocess.Popen(
                [sys.executable, "-c", _AGENT, self._rank, str(self.job)],
                env={**os.environ, **FAST, **node_env, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def until(self, *files: str, seconds: float = 240) -> None:
        """Wait for files of the run."""
        wait_for(lambda: all((self.run / file).exists() for file in files), ", ".join(files), seconds)

    def ends(self) -> tuple[list[int], str]:
        """Wait for all agents; their exit codes and what they printed."""
        printed = [agent.communicate(timeout=60)[0] for agent in self.agents.values()]
        return [agent.returncode for agent in self.agents.values()], "".join(printed)

    def record(self, node: int, attempt: int = 1) -> NodeRecord:
        record = AttemptRecords(self.run, attempt).read_node(node)
        assert record is not None
        return record

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.communicate()


def wait_for(ask: Callable[[], Any], what: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)

"""A real training that Prometheus reads and that is killed, restarted and ended: what people and tools are told of it.

It starts real processes three times, some seconds each: the whole job of `observe` and `notify` is looked at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from support.clusters.small_agents import wait_for
from support.recipes.small_recipes import recipe_text
from support.servers.prometheus_server import prometheus_server
from support.servers.webhook_server import Webhook, webhook_server
from trainshed.launch.ranks import free_port
from trainshed.observe.event_log import completed_steps, read_events
from trainshed.observe.exporters.prometheus import grafana_dashboard
from trainshed.storage import LocalStore

PLANTED = "planted0secret"
OBSERVED = (
    "notify=[{webhook: {secret: HOOK}, on: [start, first_step, failure, restart, end], every_minutes: 0.0001}]",
    "checkpoint.every=5",
    "layout={dp: 1}",
    "observe.mlflow.uri=mlruns",
)
NOT_HERE = ("mfu", "memory", "validation", "compute", "rate(")
"""A CPU has no peak and counts no memory, nothing is validated, one rank is not compared; a rate takes a while."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with webhook_server() as server:
        yield server


def start(folder: Path, webhook: Webhook, *overrides: str) -> subprocess.Popen[bytes]:
    own = {"HOOK": webhook.address, "MLFLOW_TRACKING_TOKEN": PLANTED, "WANDB_API_KEY": PLANTED}
    with (folder / "printed").open("a") as printed:  # a pipe that nobody reads would fill up
        return subprocess.Popen(
            [sys.executable, "-m", "trainshed", "run", "recipe.yaml", *OBSERVED, *overrides],
            cwd=folder,
            env={**os.environ, **own},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_run_is_scraped_killed_restarted_and_ends_and_everybody_is_told(tmp_path: Path, webhook: Webhook) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    port = free_port()
    first = start(tmp_path, webhook, "train.steps=100000", f"observe.prometheus.port={port}")
    try:
        with prometheus_server(tmp_path / "prometheus", port) as prometheus:
            wait_for(
                lambda: prometheus.query("trainshed_checkpoint_step >= 5") or first.poll() is not None, "a checkpoint"
            )
            assert first.poll() is None, (tmp_path / "printed").read_text()
            (series,) = prometheus.query("trainshed_step")
            assert series["metric"]["run"].startswith("proof/")
            assert series["metric"]["attempt"] == "1"
            for panel in orjson.loads(grafana_dashboard().read_bytes())["panels"]:
                for target in panel["targets"]:
                    shown = target["expr"].replace("$run", "proof/.*").replace("$__range", "1h")
                    series = prometheus.query(shown)
                    assert series or any(word in shown for word in NOT_HERE), shown
        (rank,) = children(first.pid)
        os.kill(rank, signal.SIGKILL)
        code = first.wait(timeout=240)
    finally:
        first.kill()
        first.wait()
    assert code == 1, (tmp_path / "printed").read_text()
    assert webhook.kinds == ["start", "first_step", "failure"]
    assert "was killed by SIGKILL" in webhook.messages[-1]["text"]
    (run,) = (tmp_path / "store/runs/proof").iterdir()
    done = completed_steps(list(read_events(LocalStore(run), "")))[-1]["step"] + 1
    second = start(tmp_path, webhook, f"train.steps={done + 3}")
    assert second.wait(timeout=240) == 0, (tmp_path / "printed").read_text()
    assert webhook.kinds[3:] == ["restart", "first_step", "end"]
    assert webhook.messages[3]["attempt"] == 2
    assert "attempt 2 goes on after step" in webhook.messages[3]["text"]
    last = webhook.messages[-1]
    assert last["text"].endswith(
        f"training has finished (step {done + 3} of {done + 3}, loss " + (f"{webhook.messages[-1]['loss']:.4f})")
    )
    assert_steps_once(tmp_path / "mlruns", done + 3)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()] == []


def assert_steps_once(folder: Path, steps: int) -> None:
    """MLflow has each step once, however often it was done."""
    (losses,) = folder.glob("*/*/metrics/train/loss")
    logged = [int(line.split()[2]) for line in losses.read_text().splitlines()]
    assert sorted(logged) == sorted(set(logged))
    assert logged[-1] == steps

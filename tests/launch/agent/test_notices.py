"""The first agent tells what happens to a job; a stage on CPUs that fails is told of, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.clusters.small_agents import SmallAgents
from support.servers.webhook_server import PATH, Webhook, webhook_server
from trainshed.errors import TrainshedError
from trainshed.launch.agent import run_agent

STEPS = """
import json, time
if rank == 0:
    folder = f"{run}/events/attempt-{attempt:04d}"
    os.makedirs(folder, exist_ok=True)
    base = {"v": 1, "time": time.time(), "attempt": attempt, "rank": 0, "step": None}
    start = {"kind": "start", "run": "proof/run", "layout": "dp2", "world_size": 2, "device": "cpu", "parameters": 9}
    end = {"kind": "end", "reason": "finished", "exit_code": 0}
    with open(f"{folder}/000009.jsonl", "w") as file:
        file.write("".join(json.dumps(base | event) + chr(10) for event in EVENTS))
"""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with webhook_server() as server:
        yield server


def job(folder: Path, rank: str) -> SmallAgents:
    """Agents of a job whose recipe and cluster file both tell somebody."""
    agents = SmallAgents(folder, rank)
    recipe = yaml.safe_load((agents.job / "recipe.yaml").read_text())
    recipe["notify"] = [{"webhook": {"secret": "HOOK"}, "on": ["start", "failure", "end"]}]
    (agents.job / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    cluster = {"name": "c", "target": "slurm", "machine": "cpu", "store": "/data", "secrets": {"HOOK": {"env": "HOOK"}}}
    cluster["notify"] = [{"command": ["tee", "-a", str(folder / "told")], "on": ["failure"]}]
    (agents.job / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return agents


def test_the_first_agent_tells_of_a_training_once(tmp_path: Path, webhook: Webhook) -> None:
    agents = job(tmp_path, STEPS.replace("EVENTS", "(start, end)"))
    agents.start(0, 1, HOOK=webhook.address)
    codes, printed = agents.ends()
    agents.close()
    assert codes == [0, 0], printed
    assert webhook.kinds == ["start", "end"]
    assert webhook.messages[0]["text"] == "proof/run training begins: dp2, 2 ranks on cpu"
    assert not (tmp_path / "told").exists()


def test_a_failure_is_told_to_those_of_the_recipe_and_of_the_cluster(tmp_path: Path, webhook: Webhook) -> None:
    agents = job(tmp_path, "if rank == 1: sys.exit(3)\ntime.sleep(600)")
    agents.start(0, 1, HOOK=webhook.address)
    codes, printed = agents.ends()
    agents.close()
    assert codes == [1, 1], printed
    assert [message["text"] for message in webhook.messages] == ["proof/run failed: rank 1 exited with 3"]
    assert "rank 1 exited with 3" in (tmp_path / "told").read_text()
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert PATH not in printed
    assert not any(PATH.encode() in data for data in left)


def test_a_stage_on_cpus_that_fails_is_told_of(
    tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = job(tmp_path, "")
    for name, value in {"HOOK": webhook.address, "TRAINSHED_START": "s", "PATH": os.environ["PATH"]}.items():
        monkeypatch.setenv(name, value)
    program = "import sys; sys.exit('error: no such tokenizer')"
    monkeypatch.setattr("trainshed.launch.agent.main.worker_command", lambda *words: [sys.executable, "-c", program])
    with pytest.raises(TrainshedError, match="no such tokenizer"):
        run_agent("fetch", agents.job)
    assert [message["kind"] for message in webhook.messages] == ["failure"]
    assert "no such tokenizer" in webhook.messages[0]["text"]

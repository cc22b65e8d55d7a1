"""A server at the end of a line, on a real Slurm: it answers, drains, is queued again, and ends when cancelled."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.clusters.slurm_runs import SlurmRuns, write_cluster
from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.launch.job import ServingSpec, Stage

pytestmark = pytest.mark.slurm

# Stands for any program that drains on TERM: what is proven here is the script around it.
DRAINS = """
trap 'echo drained >>"$HERE/told"; exit 0' TERM
echo "started on $TRAINSHED_PORT" >>"$HERE/told"
while :; do sleep 0.1; done
"""


def told(folder: Path) -> list[str]:
    file = folder / "told"
    return file.read_text().splitlines() if file.exists() else []


def test_a_server_drains_when_its_time_is_nearly_up_and_is_queued_again_until_it_is_cancelled(
    slurm_runs: SlurmRuns,
) -> None:
    stage = Stage("serve", serving=ServingSpec(drain_seconds=5))
    job = slurm_runs.script_job((stage, DRAINS), environment={"HERE": str(slurm_runs.folder)})
    run = slurm_runs.submit(job)
    port = 20000 + int(run.id("serve")) % 12000
    assert run.submitted.serve_port == port
    run.until(lambda: told(slurm_runs.folder), "the server")
    state = run.states()["serve"]
    assert (state.state, "does not answer" in state.reason) == ("running", True)
    # What Slurm does before the time limit.
    run.slurm.run("scancel", "--batch", "--signal=USR1", run.id("serve"))
    run.until(lambda: len(told(slurm_runs.folder)) == 3, "the second start")
    assert told(slurm_runs.folder) == [f"started on {port}", "drained", f"started on {port}"]
    assert "drained before the time limit; queued again" in run.all_logs()
    assert run.target.cancel(run.submitted) == ("serve",)
    assert run.wait("serve").state == "cancelled"
    assert told(slurm_runs.folder)[2:] == [f"started on {port}", "drained"]


def test_a_server_that_fails_is_queued_again_and_one_that_is_told_wrong_things_is_not(slurm_runs: SlurmRuns) -> None:
    fails = 'echo start >>"$HERE/told"; exit $(($(wc -l <"$HERE/told") == 1 ? 1 : 2))\n'
    stage = Stage("serve", restarts=2, serving=ServingSpec())
    run = slurm_runs.submit(slurm_runs.script_job((stage, fails), environment={"HERE": str(slurm_runs.folder)}))
    state = run.wait("serve")
    assert (state.state, state.exit_code, state.restarts) == ("failed", 2, 1), run.all_logs()
    assert told(slurm_runs.folder) == ["start", "start"]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_line_from_text_ends_in_a_server_that_answers(
    slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("trainshed.workflow.run_state.CLUSTER_POLL_SECONDS", 0.5)
    write_script(tmp_path)
    asked = [str(write_small_recipe(tmp_path)), "export={}", "serve={gpus: 0, max_length: 24}"]
    # It follows the run until it serves, not for ever.
    assert run_cli(["run", *asked, "--on", str(write_cluster(tmp_path, nodes={"default": 1})), "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["state"] == "serving"
    assert [each["state"] for each in data["stages"]] == ["done", "done", "done", "serving"]
    served = data["stages"][-1]
    (node,), port = served["nodes"], 20000 + int(served["id"]) % 12000
    assert served["reason"] == f"Serving at {node}:{port}, 1 of 1 ready."
    assert run_cli(["open", "small", "serve", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"ssh -N -L 8000:localhost:{port} -- {node}\n"
    assert run_cli(["exec", "small", "--stage", "serve", "--dry-run", "nvidia-smi"]) == 0
    assert f"--nodelist={node} --pty nvidia-smi" in capsys.readouterr().out
    (model,) = ask(port, "/v1/models")["data"]
    assert model["id"] == "small"
    question = {"model": "small", "prompt": "one two three", "max_tokens": 4, "ignore_eos": True}
    answer = ask(port, "/v1/completions", question)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (4, "length")
    assert run_cli(["cancel", "small"]) == 0
    assert "cancelled small/" in capsys.readouterr().out
    slurm_runs.slurm.wait(served["id"], "CANCELLED")
    assert run_cli(["logs", "small", "--stage", "serve"]) == 0
    assert "SIGTERM: finishing running answers" in capsys.readouterr().out

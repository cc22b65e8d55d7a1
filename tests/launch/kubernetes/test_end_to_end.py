"""What was submitted really runs: the driver, the stages and a gang of two, as processes in the pods' own folders."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.clusters.kubernetes_schemas import check
from support.clusters.pod_runner import PodRunner
from support.models.made_tokenizers import CONFIGS, KINDS, save
from support.models.tiny_models import save_tiny_hf
from support.recipes.small_recipes import recipe_text
from support.recipes.text_recipes import write_script, write_small_recipe
from support.runs.opened_pages import opened_page
from support.runs.written_runs import write_run, write_training
from support.servers.shared_daemons import free_ports
from trainshed.cli import run_cli
from trainshed.launch.job import Job, Stage
from trainshed.launch.kubernetes.objects import read_documents
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.launch.submissions import record_submission
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.observe.event_log import read_events, read_steps
from trainshed.recipe import Cluster, load_cluster, load_recipe, to_yaml
from trainshed.storage import LocalStore
from trainshed.workflow.submit import build_job


def written_cluster(folder: Path, **changed: Any) -> Cluster:
    body: dict[str, Any] = {
        "name": "pods",
        "target": "kubernetes",
        "machine": "cpu",
        "image": "registry/trainshed:1",
        "python": sys.executable,
        "store": "/mnt/data",
        "nodes": {"default": 2},
        "preflight": False,
        "volumes": [{"mount": "/mnt/data", "pvc": "shared"}],
        "limits": {"grace_seconds": 60, "restarts": 2},
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TRAINSHED_LOOK_SECONDS": "0.2",
            "TRAINSHED_ROLL_CALL_SECONDS": "5",
            "TRAINSHED_FAILURE_GRACE_SECONDS": "5",
        },
        "kubernetes": {"namespace": "ml"},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(body | changed))
    return load_cluster(folder / "cluster.yaml")


def make_job(folder: Path, *overrides: str, **changed: Any) -> Job:
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    recipe = load_recipe(str(folder / "recipe.yaml"), ["layout.dp=2", "checkpoint.every=5", *overrides])
    return build_job(recipe, written_cluster(folder, **changed))


def submit(job: Job) -> SubmittedJob:
    target = KubernetesTarget(job.cluster)
    assert target.check(job) == ["there is no claim shared in namespace ml"]  # the server has no claims
    return target.submit(target.render(job), job)


def states(job: Job, submitted: SubmittedJob) -> dict[str, StageState]:
    return {state.stage: state for state in KubernetesTarget(job.cluster).status(submitted)}


def test_the_whole_line_runs_and_a_gang_that_loses_a_pod_starts_again_and_ends(
    runner: PodRunner, tmp_path: Path
) -> None:
    job = make_job(tmp_path, "train.steps=60")
    submitted = submit(job)
    run = runner.shared / Path(job.run).relative_to("/mnt/data")
    runner.until(lambda: list(run.glob("checkpoints/*/manifest.json")), "a checkpoint")
    before = states(job, submitted)
    assert (before["prepare"].state, before["train"].state) == ("done", "running"), runner.logs()

    (gang,) = [gang for path, gang in runner.gangs.items() if "/jobsets/" in path]
    gang.pods[1].process.send_signal(signal.SIGKILL)
    runner.until(lambda: states(job, submitted)["train"].state in ("done", "failed"), "the training to end")
    after = states(job, submitted)
    assert (after["train"].state, after["train"].restarts) == ("done", 1), runner.logs()
    events = list(read_events(LocalStore(run), ""))
    assert [event["step"] for event in read_steps(LocalStore(run), "")] == list(range(60))
    assert {event["attempt"] for event in events if event["kind"] == "step"} == {1, 2}
    assert {"install", "meeting", "first_step"} <= {event["name"] for event in events if event["kind"] == "phase"}

    driver = next(path for path in runner.gangs if path.endswith("-driver"))
    runner.until(lambda: runner.server.objects[driver].get("status"), "the driver to end")
    assert runner.server.objects[driver]["status"]["conditions"][0]["type"] == "Complete", runner.logs()


@pytest.mark.full
def test_a_plain_job_that_loses_a_pod_is_made_anew_by_the_driver_and_ends(runner: PodRunner, tmp_path: Path) -> None:
    for group in ("jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta1"):
        del runner.server.kinds[f"/apis/{group}"]  # a cluster with nothing installed
    job = make_job(tmp_path, "train.steps=20", kubernetes={"namespace": "ml", "kind": "job"})
    submitted = submit(job)
    run = runner.shared / Path(job.run).relative_to("/mnt/data")
    runner.until(lambda: list(run.glob("checkpoints/*/manifest.json")), "a checkpoint")
    (path,) = [path for path in runner.gangs if path.endswith(f"/jobs/{job.name}")]
    first = runner.server.objects[path]["metadata"]["uid"]
    runner.gangs[path].pods[1].process.send_signal(signal.SIGKILL)
    seen: set[str] = set()

    def ended() -> bool:
        seen.add(states(job, submitted)["train"].state)
        return "done" in seen or "failed" in seen

    runner.until(ended, "the training to end")
    after = states(job, submitted)["train"]
    assert (after.state, after.restarts) == ("done", 1), runner.logs()
    assert "failed" not in seen, "whoever follows must not leave"
    assert runner.server.objects[path]["metadata"]["uid"] != first
    assert [event["step"] for event in read_steps(LocalStore(run), "")] == list(range(20))
    driver = next(path for path in runner.gangs if path.endswith("-driver"))
    runner.until(lambda: runner.server.objects[driver].get("status"), "the driver to end")
    KubernetesTarget(job.cluster).cancel(submitted)
    assert not [path for path in runner.server.objects if "/pods/" not in path]


def test_the_sites_lines_run_in_every_pod_before_its_command(runner: PodRunner, tmp_path: Path) -> None:
    lines = ['export SITE="of $(hostname)" # as it says', "export OMP_NUM_THREADS=9"]
    stages = (Stage("first", script="seen.sh"), Stage("second", script="seen.sh"))
    files = {"seen.sh": 'env >"/mnt/data/$(hostname)"\n'}
    job = Job(
        name="seen-1",
        run="/mnt/data/runs/seen/1",
        cluster=written_cluster(tmp_path, setup=lines),
        stages=stages,
        files=files,
        code=None,
    )
    submitted = submit(job)
    runner.until(lambda: states(job, submitted)["second"].state in ("done", "failed"), "both stages to end")
    assert states(job, submitted)["second"].state == "done", runner.logs()
    for stage in ("first", "second"):
        text = (runner.shared / f"seen-1-{stage}-0").read_text()
        seen = dict(line.partition("=")[::2] for line in text.splitlines())
        assert seen["SITE"] == f"of seen-1-{stage}-0"
        assert seen["OMP_NUM_THREADS"] == "1", "`environment` is set after `setup`"


def test_a_line_of_setup_that_fails_ends_the_pod_and_is_named(runner: PodRunner, tmp_path: Path) -> None:
    cluster = written_cluster(tmp_path, setup=["exit 0"])
    job = Job(
        name="seen-1",
        run="/mnt/data/runs/seen/1",
        cluster=cluster,
        stages=(Stage("first", script="seen.sh"),),
        files={"seen.sh": ""},
        code=None,
    )
    submitted = submit(job)
    runner.until(lambda: states(job, submitted)["first"].state == "failed", "the stage to fail")
    assert "trainshed: setup ended the shell at line 1: exit 0" in states(job, submitted)["first"].reason


def serving_job(folder: Path) -> tuple[Job, int]:
    write_script(folder)
    (port,) = free_ports(1, 10000, 20000)
    recipe = load_recipe(str(write_small_recipe(folder)), ["export={}", f"serve={{gpus: 0, port: {port}}}"])
    return build_job(recipe, written_cluster(folder, nodes={"default": 1})), port


def answered_tokens(port: int) -> int:
    """Ask a server for three tokens; how many it says it gave."""
    body = json.dumps({"model": "small", "prompt": "one two", "max_tokens": 3, "ignore_eos": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


@pytest.mark.full
def test_a_server_is_started_again_when_it_dies_or_hangs_and_drains_when_it_is_cancelled(
    runner: PodRunner, tmp_path: Path
) -> None:
    line, port = serving_job(tmp_path)
    job = replace(line, stages=line.stages[-1:])
    export = runner.shared / Path(job.run).relative_to("/mnt/data") / "export"
    save_tiny_hf("llama", export, layers=2, vocab_size=2000)
    save(KINDS["qwen"](), CONFIGS["qwen"], export)
    submitted = submit(job)

    def stands(state: str, restarts: int) -> bool:
        found = states(job, submitted)["serve"]
        return (found.state, found.restarts) == (state, restarts)

    runner.until(lambda: stands("serving", 0), "the server to be ready")
    assert states(job, submitted)["serve"].reason == "Serving, 1 of 1 ready."
    assert answered_tokens(port) == 3
    (served,) = runner.servers.values()
    served.pod.process.kill()
    runner.until(lambda: stands("waiting", 1), "the server to be missed")
    assert "was ended by signal 9" in states(job, submitted)["serve"].reason
    runner.until(lambda: stands("serving", 1), "the server to be ready again")
    served.pod.process.send_signal(signal.SIGSTOP)  # it lives, and answers no more
    runner.until(lambda: stands("serving", 2), "the server that hung to be replaced")

    KubernetesTarget(job.cluster).cancel(submitted)
    runner.until(lambda: not runner.servers, "the server to end")
    assert "SIGTERM: finishing running answers" in served.pod.log.read_text()
    assert not runner.server.paths("/deployments/") + runner.server.paths("/services/")


@pytest.mark.full
def test_a_line_from_text_ends_in_a_server_and_its_driver_is_done(runner: PodRunner, tmp_path: Path) -> None:
    job, port = serving_job(tmp_path)
    submitted = submit(job)
    runner.until(lambda: states(job, submitted)["serve"].state == "serving", "the server to be ready")
    driver = next(path for path in runner.gangs if path.endswith("-driver"))
    runner.until(lambda: runner.server.objects[driver].get("status"), "the driver to end")
    assert runner.server.objects[driver]["status"]["conditions"][0]["type"] == "Complete", runner.logs()
    assert answered_tokens(port) == 3


@pytest.mark.full
def test_wrong_input_ends_the_line_at_once_and_says_which_line_to_write(runner: PodRunner, tmp_path: Path) -> None:
    job = make_job(tmp_path, "train.steps=5", "checkpoint.resume=must")
    submitted = submit(job)
    runner.until(lambda: states(job, submitted)["train"].state == "failed", "the training to fail")
    state = states(job, submitted)["train"]
    assert (state.restarts, state.exit_code) == (0, 2), runner.logs()
    assert "checkpoint" in state.reason


KUBECTL = "#!/bin/sh\n# Pods share this machine's loopback: a port is forwarded by itself.\nexec sleep 1000\n"


@pytest.mark.parametrize("page_name", ["tensorboard", "dash"])
def test_a_page_is_opened_in_a_pod_beside_the_files_and_removed_with_the_last_look(
    page_name: str, runner: PodRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = write_run(runner.shared)
    write_training(folder)
    assert run_cli(["export-figures", str(folder), "--to", "tensorboard"]) == 0
    cluster = written_cluster(tmp_path, secrets={"HF_TOKEN": {"k8s": "hub/token"}})
    job = SubmittedJob("proof-x", "/mnt/data/runs/proof/x", "kubernetes", {"train": "JobSet/proof-x"})
    record_submission("proof", "x", 6, job, to_yaml(cluster))
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    (port,) = free_ports(1, 21000, 32000)
    path = f"{kubectl.parent}:{os.environ['PATH']}"
    with opened_page("proof", page_name, port=port, folder=tmp_path, meanwhile=runner._step, PATH=path) as page:
        (made,) = [body for path, body in runner.server.objects.items() if "/jobs/" in path]
        check(made)
        assert made["metadata"]["name"] == f"proof-x-{page_name}"
        assert "HF_TOKEN" not in json.dumps(made)
        if page_name == "tensorboard":
            tags = page.ask_json("/data/plugin/scalars/tags")
            assert "train/loss" in {tag for tags_of_run in tags.values() for tag in tags_of_run}
        else:
            (listed,) = page.ask_json("/api/runs")["runs"]
            assert (listed["run"], listed["step"]) == ("proof/x", 6)
        assert page.interrupt() == 0, page.log.read_text()
    left = [path for path in runner.server.objects if "/jobs/" in path or "/configmaps/" in path]
    assert not [path for path in left if "/trainshed-code-" not in path], "our code is shared by all jobs and stays"


def test_a_page_that_is_kept_is_the_service_that_the_seed_forwards_to(
    runner: PodRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cluster = written_cluster(tmp_path)
    job = SubmittedJob("proof-x", "/mnt/data/runs/proof/x", "kubernetes", {"train": "JobSet/proof-x"})
    record_submission("proof", "x", 6, job, to_yaml(cluster))
    assert run_cli(["open", "proof", "tensorboard", "--keep", "--dry-run"]) == 0
    text, _, command = capsys.readouterr().out.partition("# then: ")
    assert command == "kubectl --namespace ml port-forward service/tensorboard 6006:6006\n"
    objects = {body["kind"]: body for body in read_documents(text)}
    for body in objects.values():
        check(body)
    service, deployment = objects["Service"], objects["Deployment"]
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == ("tensorboard", 6006)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (script,) = [text for text in objects["ConfigMap"]["data"].values() if "tensorboard.main" in text]
    assert "--logdir /mnt/data/runs --host 127.0.0.1 --port 6006" in script

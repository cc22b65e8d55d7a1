"""What the seeds send, held against a real API server: charts, `kubectl apply`, our own submit, the driver's rights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import TESTS
from support.clusters.helm_program import helm
from support.clusters.kubernetes_schemas import CRDS
from support.clusters.real_api_server import ApiServer, real_api_server
from trainshed.cli import run_cli
from trainshed.errors import TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.objects import read_documents
from trainshed.launch.kubernetes.render import plan_stages, render, stage_objects
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
IMAGE = "image=registry.example/trainshed@sha256:" + "1" * 64
SEEDS = {
    "gke-a3-mega": "gke-llama3-70b",
    "gke-a3-ultra": "gke-llama3-70b",
    "aks-nd-h100-v5": "aks-gpt-175b",
    "eks-p4d": "eks-llama2-7b-cpt",
    "eks-p5": "eks-llama2-7b-cpt",
    "minio-mi300x-ray": "minio-llama3-1-70b-cpt",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not CRDS.is_dir():
        pytest.skip("the custom resources are described in ../shared/crds, which is not here")
    with real_api_server(tmp_path_factory.mktemp("server"), CRDS) as standing:
        yield standing


@pytest.fixture(autouse=True)
def kubeconfig(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def seed_job(cluster: str, *overrides: str) -> Job:
    return build_job(load_recipe(SEEDS[cluster], list(overrides)), load_cluster(cluster, [IMAGE]), offline=True)


def objects_of(server: ApiServer, job: Job) -> set[str]:
    """What the server holds of a job, as kind/name."""
    kinds = "configmaps,jobs,serviceaccounts,roles,rolebindings,jobsets,pytorchjobs,rayjobs"
    listed = server.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={job.name}", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    return {f"{item['kind']}/{item['metadata']['name']}" for item in json.loads(listed.stdout)["items"]}


def stage_manifests(server: ApiServer, job: Job) -> list[dict[str, Any]]:
    """What the driver is to create, from the ConfigMap that the server holds."""
    found = server.kubectl("get", "configmaps", "-l", f"app.kubernetes.io/instance={job.name}", "-o", "json")
    maps = [item for item in json.loads(found.stdout)["items"] if "-stages-" in item["metadata"]["name"]]
    texts = [text for item in maps for name, text in item["data"].items() if name.endswith(".yaml")]
    return [body for text in texts for body in read_documents(text)]


@pytest.mark.parametrize("cluster", ["aks-nd-h100-v5", "eks-p4d", "gke-a3-mega"])
def test_a_chart_is_installed_upgraded_rolled_back_and_uninstalled(
    cluster: str, server: ApiServer, tmp_path: Path
) -> None:
    words = ["render", SEEDS[cluster], "--on", cluster, f"cluster.{IMAGE}", "--offline"]
    assert run_cli([*words, "--as", "helm", "--out", str(tmp_path / "chart")]) == 0
    job, release = seed_job(cluster), f"seed-{cluster}"
    if (code := tmp_path / "chart" / "code.yaml").exists():
        applied = server.kubectl("apply", "-f", code)
        assert applied.returncode == 0, applied.stderr
    installed = helm("install", release, tmp_path / "chart")
    assert installed.returncode == 0, installed.stderr
    before = objects_of(server, job)
    assert f"Job/{job.name}-driver" in before
    changed = ["--set", "engine_image=registry.example/megatron:2", "--set-string", "arguments={--log-interval,1}"]
    upgraded = helm("upgrade", release, tmp_path / "chart", *changed)
    assert upgraded.returncode == 0, upgraded.stderr
    after = objects_of(server, job)
    # A Job cannot be changed: another one drives the stages of the new values.
    assert {name for name in after if name.startswith("Job/")} != {name for name in before if name.startswith("Job/")}
    training = next(body for body in stage_manifests(server, job) if body["kind"] in ("JobSet", "PyTorchJob"))
    text = yaml.safe_dump(training)
    assert "registry.example/megatron:2" in text
    assert "--log-interval" in text
    rolled = helm("rollback", release, "1")
    assert rolled.returncode == 0, rolled.stderr
    assert objects_of(server, job) == before
    removed = helm("uninstall", release)
    assert removed.returncode == 0, removed.stderr
    assert objects_of(server, job) == set()


@pytest.mark.parametrize("cluster", SEEDS)
def test_every_stage_is_taken_by_the_server_from_the_driver_and_nothing_more_is_allowed(
    cluster: str, server: ApiServer, tmp_path: Path
) -> None:
    job = seed_job(cluster, *(("checkpoint.to=s3://bucket/x",) if cluster == "eks-p4d" else ()))
    words = ["render", SEEDS[cluster], "--on", cluster, f"cluster.{IMAGE}", "--offline", "--out", str(tmp_path / "out")]
    assert run_cli(words) == 0
    applied = server.kubectl("apply", "-f", tmp_path / "out", "--validate=strict")
    assert applied.returncode == 0, applied.stderr
    account = f"--as=system:serviceaccount:{job.cluster.on_kubernetes.namespace}:{job.name}-driver"
    for plan in plan_stages(job)[0]:
        for body in stage_objects(plan):
            manifest = yaml.safe_dump(body)
            made = server.kubectl("create", "-f", "-", "--validate=strict", "--dry-run=server", account, stdin=manifest)
            unknown = "no matches for kind" in made.stderr  # of a fabric, whose resources no folder here describes
            assert made.returncode == 0 or unknown, f"{plan.stage.name}: {made.stderr}"
    for verb, kind in [("create", "pods"), ("get", "secrets"), ("delete", "configmaps"), ("update", "roles")]:
        assert server.kubectl("auth", "can-i", verb, kind, account).stdout.strip() == "no"
    assert server.kubectl("delete", "-f", tmp_path / "out").returncode == 0


def test_the_account_of_the_documentation_creates_every_stage_of_somebody_who_may_create_no_roles(
    server: ApiServer, tmp_path: Path
) -> None:
    page = (TESTS.parent / "docs" / "launch.md").read_text()
    (block,) = re.findall(r"```yaml\n# file: drivers.yaml\n(.*?)```", page, re.DOTALL)
    made = server.kubectl("apply", "-f", "-", "--validate=strict", stdin=block)
    assert made.returncode == 0, made.stderr
    for name, recipe in SEEDS.items():
        cluster = load_cluster(name, [IMAGE, "kubernetes.driver_account=trainshed-driver"])
        job = build_job(load_recipe(recipe), cluster, offline=True)
        account = f"--as=system:serviceaccount:{cluster.on_kubernetes.namespace}:trainshed-driver"
        for plan in plan_stages(job)[0]:
            for body in stage_objects(plan):
                manifest = yaml.safe_dump(body)
                sent = server.kubectl(
                    "create", "-f", "-", "--validate=strict", "--dry-run=server", account, stdin=manifest
                )
                unknown = "no matches for kind" in sent.stderr  # of a fabric, whose resources no folder here describes
                assert sent.returncode == 0 or unknown, f"{name} {plan.stage.name}: {sent.stderr}"
    account = "--as=system:serviceaccount:default:trainshed-driver"
    for verb, kind in [("create", "pods"), ("get", "secrets"), ("delete", "configmaps"), ("update", "roles")]:
        assert server.kubectl("auth", "can-i", verb, kind, account).stdout.strip() == "no"


@pytest.mark.parametrize("cluster", ["aks-nd-h100-v5", "eks-p4d", "eks-p5"])
def test_our_submit_is_taken_listed_not_sent_twice_and_cancelled(cluster: str, server: ApiServer) -> None:
    job = seed_job(cluster)
    target = KubernetesTarget(job.cluster)
    submitted = target.submit(target.render(job), job)
    expected = {
        f"{body['kind']}/{body['metadata']['name']}"
        for part in render(job).parts
        if part.name != "code.yaml"
        for body in read_documents(part.text)
    }
    assert objects_of(server, job) == expected
    assert {state.state for state in target.status(submitted)} == {"waiting"}
    with pytest.raises(TrainshedError, match="is under way already"):
        target.submit(target.render(job), job)
    target.cancel(submitted)
    assert objects_of(server, job) == set()

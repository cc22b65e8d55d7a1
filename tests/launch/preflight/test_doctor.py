"""A cluster file is looked over before anything is sent, and what is wrong with it is said at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.launch.preflight import preflight_job, preflight_stage
from trainshed.launch.preflight.doctor import cluster_file_checks, scheduler_checks
from trainshed.launch.preflight.verdict import CheckResult
from trainshed.recipe import Cluster, known_clusters, load_cluster
from trainshed.storage import LocalStore


def written(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "mine.yaml"
    file.write_text(f"trainshed: 1\nname: mine\n{text}")
    return load_cluster(file)


def found(tmp_path: Path, text: str, **environment: str) -> dict[str, CheckResult]:
    return {check.name: check for check in cluster_file_checks(written(tmp_path, text), environment)}


@pytest.mark.parametrize("name", sorted(known_clusters()))
def test_every_shipped_cluster_file_is_sane(name: str) -> None:
    checks = list(cluster_file_checks(load_cluster(name), {}))
    wrong = [check for check in checks if check.verdict == "fail" and not check.name.startswith("secret")]
    assert wrong == []


SANE = (
    "target: kubernetes\nmachine: p5\nimage: registry/x@sha256:0123\nstore: /data\n"
    "nodes: {default: 2, max: 4}\nvolumes: [{mount: /data, pvc: shared}]\n"
)


def test_a_sane_file_passes(tmp_path: Path) -> None:
    checks = found(tmp_path, SANE)
    assert {check.verdict for check in checks.values()} == {"pass", "skipped"}
    assert checks["fabric"].what == "efa-v2: efa any, NCCL_NET=AWS Libfabric"


@pytest.mark.parametrize(
    ("change", "name", "verdict", "what"),
    [
        (("registry/x@sha256:0123", "registry/x:1"), "image", "warn", "registry/x:1 is a tag, which may change"),
        (("image: registry/x@sha256:0123\n", ""), "image", "fail", "jobs need a container image, and none is named"),
        (("store: /data\n", ""), "store", "fail", "no store is named"),
        (("store: /data", "store: s3://bucket/x"), "store", "fail", "s3://bucket/x is not a path that every node"),
        (("store: /data", "store: /disk"), "store", "fail", "/disk lies in no volume: every pod would have its own"),
        (("pvc: shared", "pvc: shared, read_only: true"), "store", "fail", "/data lies in no volume: every pod"),
        (
            (", max: 4", ""),
            "nodes",
            "warn",
            "`nodes.max` is not set: a job that asks for more nodes than there are",
        ),
        (("machine: p5\n", "machine: p55\n"), "machine", "fail", "there is no machine `p55` in the catalog"),
        (("machine: p5\n", "machine: p5\nfabric: none\n"), "machine", "fail", "there is no fabric `none`"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: tuple[str, str], name: str, verdict: str, what: str) -> None:
    check = found(tmp_path, SANE.replace(*change))[name]
    assert check.verdict == verdict
    assert check.what.startswith(what)
    assert "mine.yaml" in (check.hint or "")


def test_variables_that_do_not_belong_are_found_with_their_line(tmp_path: Path) -> None:
    check = found(tmp_path, SANE + "environment: {NCCL_SOCKET_IFNAME: eth0}\n")["environment"]
    assert check.verdict == "fail"
    assert "mine.yaml:9 (environment.NCCL_SOCKET_IFNAME): NCCL_SOCKET_IFNAME does not belong here" in check.what
    check = found(tmp_path, SANE + "environment: {FI_EFA_USE_DEVICE_RDMA: '1'}\n")["environment"]
    assert check.verdict == "warn"


def test_secrets_are_looked_for_where_they_are_referred_to_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2")
    text = "target: slurm\nmachine: cpu\nstore: /s\n" + (
        f"secrets: {{A: {{env: A}}, B: {{env: B}}, C: {{file: {tmp_path}/token}}, D: {{file: /no}}}}\n"
    )
    checks = found(tmp_path, text, A="hunter2")
    verdicts = {name: checks[f"secret {name}"].verdict for name in "ABCD"}
    assert verdicts == {"A": "pass", "B": "fail", "C": "pass", "D": "skipped"}
    assert "hunter2" not in str(checks)


def test_a_scheduler_that_cannot_be_asked_from_here_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (slurm,) = scheduler_checks(written(tmp_path, "target: slurm\nmachine: cpu\nstore: /shared\n"))
    assert slurm.verdict == "skipped"
    assert "on this machine" in slurm.what
    kubernetes = next(scheduler_checks(written(tmp_path, SANE)))
    assert (kubernetes.name, kubernetes.verdict) == ("kubernetes", "skipped")


def test_a_scheduler_that_does_not_answer_fails(tmp_path: Path) -> None:
    (ray,) = scheduler_checks(
        written(tmp_path, "target: ray\nmachine: cpu\nstore: /shared\nray: {address: 'http://127.0.0.1:9'}\n")
    )
    assert (ray.name, ray.verdict) == ("ray", "fail")
    assert ray.what.startswith("does not answer: ")


def test_preflight_follows_from_the_cluster_file(tmp_path: Path) -> None:
    cluster = written(tmp_path, SANE + "storage: {tier: s3}\n")
    stage = preflight_stage(cluster)
    assert (stage.nodes, stage.gpus_per_node, stage.preflight) == (2, 8, True)
    job = preflight_job(cluster, store=LocalStore(tmp_path), run_folder="runs/x", attempt=2, nodes=2, gpus=8)
    assert job.folder == "runs/x/health/attempt-0002/preflight"
    assert (job.setup.name, job.machine and job.machine.name) == ("efa", "p5")
    assert (job.storage_gb_per_s or 0) > 0

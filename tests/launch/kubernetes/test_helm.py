"""A chart of the same objects, held against the real Helm."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.clusters.helm_program import charted_objects, helm, templated
from support.clusters.kubernetes_jobs import CLUSTERS, NAME, cluster_of, job_of, stages_of, train_alone
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.helm import write_chart
from trainshed.launch.kubernetes.objects import read_documents
from trainshed.launch.kubernetes.render import render
from trainshed.launch.packaging import pack_code
from trainshed.recipe import load_cluster

TEMPLATES = '{{ .Values.image }} {{- fail "x" }} }} {{ {{{ `{{` {{/* */}} ${{ secrets.X }}\n\t{{end}}\n'


def chart_of(job: Job, folder: Path) -> Path:
    write_chart(job, render(job), folder)
    return folder


@pytest.mark.parametrize(
    "name", ["gke-a3-mega", *(pytest.param(name, marks=pytest.mark.full) for name in CLUSTERS[1:])]
)
def test_helm_makes_the_objects_that_render_prints(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name, ["kubernetes.labels.team=ml", 'kubernetes.labels.cost="0123"'])
    job = job_of(cluster, stages=stages_of(cluster))
    folder = chart_of(job, tmp_path / "chart")
    linted = helm("lint", folder)
    assert linted.returncode == 0, linted.stdout
    assert templated(folder) == charted_objects(render(job))


def test_a_chart_of_a_plain_job_makes_its_service_and_the_driver_that_restarts_it(tmp_path: Path) -> None:
    cluster = load_cluster("eks-p5", ["kubernetes.kind=job", "setup=[source /fsx/site.sh]"])
    job = job_of(cluster, stages=train_alone())
    folder = chart_of(job, tmp_path / "chart")
    assert templated(folder) == charted_objects(render(job))


def test_what_looks_like_a_template_stays_text(tmp_path: Path) -> None:
    files = {"recipe.yaml": TEMPLATES, "a/b.txt": TEMPLATES * 2}
    cluster = cluster_of({"environment": {"X": TEMPLATES}, "volumes": [{"mount": "/a {{b}}", "pvc": "c"}]})
    job = job_of(cluster, stages=stages_of(cluster, nodes=2), files=files)
    folder = chart_of(job, tmp_path / "chart")
    assert templated(folder) == charted_objects(render(job))


def test_values_reach_everything_the_driver_will_create(tmp_path: Path) -> None:
    cluster = load_cluster("gke-a3-mega")
    folder = chart_of(job_of(cluster), tmp_path / "chart")
    values = {
        "image": "other/image@sha256:0123",
        "namespace": "team-a",
        "queue": "yes",
        "volumes": {"/gcs": "other-bucket"},
        "steps": 2000,
        "labels": {"team": "null", "cost-centre": "12"},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    objects = templated(folder, "--values", str(tmp_path / "values.yaml"))
    (stages,) = [each for each in objects if "-stages-" in each["metadata"]["name"]]
    created = [each for name, text in stages["data"].items() if name.endswith(".yaml") for each in read_documents(text)]
    training = created[-1]
    pod = training["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert training["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "yes"
    assert pod["containers"][0]["image"] == "other/image@sha256:0123"
    assert {each["csi"]["volumeAttributes"]["bucketName"] for each in pod["volumes"] if "csi" in each} == {
        "other-bucket"
    }
    for found in [*objects, *created]:
        assert found["metadata"]["namespace"] == "team-a"
        assert found["metadata"]["labels"]["team"] == "null"
        assert found["metadata"]["labels"]["cost-centre"] == "12"
    (binding,) = [each for each in objects if each["kind"] == "RoleBinding"]
    assert binding["subjects"][0]["namespace"] == "team-a"
    files = next(each for each in objects if "-files-" in each["metadata"]["name"])
    assert "  steps: 2000\n" in files["data"]["recipe.yaml"]
    # Immutable ConfigMaps with another content have another name, wherever they are mounted.
    mounted = pod["volumes"][0]["projected"]["sources"][0]["configMap"]["name"]
    assert mounted == files["metadata"]["name"]
    assert mounted not in render(job_of(cluster)).text()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("nodes=4", "is part of the plan: change the recipe or the cluster file"),
        ("volumes./other=x", "is part of the plan: change the recipe or the cluster file"),
        ("steps=0", "steps: Must be greater than or equal to 1"),
        ("steps=many", "steps: Invalid type"),
        ("queue=Not A Name", "queue: Does not match pattern"),
        ("labels.app\\.kubernetes\\.io/instance=x", "labels"),
    ],
)
def test_every_other_value_is_refused_with_the_reason(setting: str, said: str, tmp_path: Path) -> None:
    folder = chart_of(job_of("gke-a3-mega"), tmp_path / "chart")
    done = helm("template", "release", folder, "--set", setting)
    assert done.returncode != 0
    assert said in done.stderr


def values_of(job: Job, folder: Path) -> set[str]:
    return set(yaml.safe_load((chart_of(job, folder) / "values.yaml").read_text()))


def test_only_what_the_plan_leaves_open_is_a_value(tmp_path: Path) -> None:
    alone = job_of(cluster_of({}), stages=train_alone())
    assert values_of(alone, tmp_path / "a") == {"image", "namespace", "steps", "labels", "gpus"}
    foreign = job_of("gke-a3-mega", stages=stages_of(load_cluster("gke-a3-mega"), "megatron"))
    assert "steps" not in values_of(foreign, tmp_path / "b")
    assert {"arguments", "engine_image"} <= values_of(foreign, tmp_path / "b")
    assert not {"arguments", "engine_image"} & values_of(alone, tmp_path / "a")
    assert "steps" not in values_of(replace(alone, steps=7), tmp_path / "c")


def test_a_chart_that_helm_could_not_install_says_what_to_do(tmp_path: Path) -> None:
    job = job_of("gke-a3-mega", stages=train_alone())
    large = replace(job, files=dict(job.files) | {"large.txt": "x" * 600_000})
    (note,) = write_chart(large, render(large), tmp_path / "b")
    assert note.endswith(f"helm template {job.name} {tmp_path / 'b'} | kubectl apply -f -")


def release_bytes(chart: Path) -> int:
    """How large the Secret is in which Helm keeps a release: chart and manifests as JSON, gzipped, in base64 twice."""
    files = {
        path.relative_to(chart).as_posix(): base64.b64encode(path.read_bytes()).decode()
        for path in chart.rglob("*")
        if path.is_file() and path.name != "code.yaml" and "store" not in path.relative_to(chart).parts
    }
    manifest = helm("template", "release", chart).stdout
    packed = gzip.compress(json.dumps({"chart": files, "manifest": manifest}).encode())
    return len(base64.b64encode(base64.b64encode(packed)))


@pytest.mark.parametrize("store", ["/data", "/gcs"])
def test_the_chart_fits_into_the_secret_of_a_release_and_our_code_is_beside_it(tmp_path: Path, store: str) -> None:
    cluster = load_cluster("gke-a3-mega")
    job = replace(job_of(cluster, code=pack_code()), run=f"{store}/runs/llama/1a2b3c4d")
    chart = tmp_path / "chart"
    notes = write_chart(job, render(job), chart)
    assert notes[-1] == f"helm install {job.name} {chart}"
    assert helm("lint", chart).returncode == 0
    assert release_bytes(chart) < 1024 * 1024
    beside = [path for path in (chart / "code.yaml", chart / "store") if path.exists()]
    if store == "/data":  # no bucket of the cluster file
        assert notes[0].startswith(f"kubectl apply -f {chart}/code.yaml")
        assert beside == [chart / "code.yaml"]
    else:
        (archive,) = (chart / "store").rglob("*.tar.xz")
        assert notes[0].startswith(f"gcloud storage cp {archive} gs://my-bucket/code/{archive.parent.name}/")
        assert beside == [chart / "store"]


def test_an_upgrade_starts_another_driver_since_a_job_cannot_change(tmp_path: Path) -> None:
    folder = chart_of(job_of("gke-a3-mega"), tmp_path / "chart")

    def names(*arguments: str) -> dict[str, str]:
        wanted = {"Job": "-driver", "Role": "-driver"}
        objects = [obj for obj in templated(folder, *arguments) if obj["kind"] in wanted]
        return {obj["kind"]: obj["metadata"]["name"] for obj in objects}

    before, after = names(), names("--set", "steps=7")
    assert before == {"Job": f"{NAME}-driver", "Role": f"{NAME}-driver"}
    assert after["Role"] == before["Role"]
    assert after["Job"].startswith(f"{NAME}-driver-")


def test_image_and_arguments_of_the_engine_and_the_planned_gpus_are_values(tmp_path: Path) -> None:
    cluster = load_cluster("gke-a3-mega")
    folder = chart_of(job_of(cluster, stages=stages_of(cluster, "megatron")), tmp_path / "chart")
    given = ["trainer.max_steps=50", 'a "b" $(c)']
    values = {"arguments": given, "gpus": 128, "engine_image": "registry.example/nemo@sha256:0123"}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    objects = templated(folder, "--values", str(tmp_path / "values.yaml"))
    (stages,) = [obj for obj in objects if "-stages-" in obj["metadata"]["name"]]
    training = read_documents(stages["data"]["02-train.yaml"])[-1]
    pod = training["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == ["bash", "/etc/trainshed/job/train.sh", *given]
    assert pod["containers"][0]["image"] == values["engine_image"]
    refused = helm("template", "release", folder, "--set", "gpus=64")
    assert refused.returncode != 0
    assert (
        "another number needs another plan: `trainshed render RECIPE --on CLUSTER --gpus N --as helm`" in refused.stderr
    )

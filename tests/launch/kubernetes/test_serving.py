"""A line that ends with a server: a Deployment with probes, a Service, and how they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.clusters.helm_program import charted_objects, templated
from support.clusters.kubernetes_jobs import NAME, cluster_of, job_of, served, stages_of
from support.clusters.kubernetes_schemas import all_objects, check
from support.clusters.kubernetes_server import TOKEN, KubernetesServer, kubernetes_server, write_kubeconfig
from support.recipes.golden_files import check_golden
from trainshed.errors import TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.api import KubeApi
from trainshed.launch.kubernetes.driver import drive
from trainshed.launch.kubernetes.helm import write_chart
from trainshed.launch.kubernetes.kinds import KubeObject
from trainshed.launch.kubernetes.render import render, stage_ids
from trainshed.launch.kubernetes.status import JobObjects, stage_states
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.recipe import load_cluster
from trainshed.reporting import SILENT

DEPLOYMENT = f"/apis/apps/v1/namespaces/ml/deployments/{NAME}-serve"
READY = {"type": "Ready", "status": "True"}
UNREADY = {"type": "Ready", "status": "False"}


def deployment_of(job: Job) -> KubeObject:
    (found,) = [each for each in all_objects(render(job)) if each["kind"] == "Deployment"]
    return found


def container_of(job: Job) -> KubeObject:
    (found,) = deployment_of(job)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    ("name", "script", "serving"),
    [
        ("gke-a3-mega", False, {"replicas": 2, "startup_seconds": 301}),
        ("minio-mi300x-ray", True, {"startup_seconds": 689}),
        ("aks-nd-h100-v5", False, {"port": 9000}),
    ],
)
def test_a_server_renders_as_its_golden_file_says(name: str, script: bool, serving: dict[str, Any]) -> None:
    cluster = load_cluster(name)
    job = job_of(cluster, stages=served(cluster, script=script, **serving))
    objects = all_objects(render(job))
    for found in objects:
        check(found)
    assert [each["kind"] for each in objects[-2:]] == ["Service", "Deployment"]
    assert stage_ids(job)["serve"] == f"Deployment/{NAME}-serve"
    text = "".join(part.printed() for part in render(job).parts if part.name != "content.yaml")
    check_golden(f"kubernetes/serve-{name}.yaml", text)


def test_helm_makes_the_same_server(tmp_path: Path) -> None:
    cluster = load_cluster("gke-a3-mega")
    job = job_of(cluster, stages=(*stages_of(cluster), *served(cluster, replicas=2)))
    write_chart(job, render(job), tmp_path / "chart")
    assert templated(tmp_path / "chart") == charted_objects(render(job))
    assert (tmp_path / "chart" / "values.yaml").read_text().count("steps: 1000") == 1


def test_a_server_is_up_when_its_process_is_ready_when_it_has_loaded_and_has_time_to_drain() -> None:
    cluster = cluster_of({})
    ours = container_of(job_of(cluster, stages=served(cluster, startup_seconds=301)))
    assert ours["startupProbe"]["httpGet"] == ours["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert ours["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert ours["startupProbe"]["periodSeconds"] * ours["startupProbe"]["failureThreshold"] >= 301
    assert "lifecycle" not in ours
    assert ours["args"][-2:] == ["--port", "8000"]
    spec = deployment_of(job_of(cluster, stages=served(cluster, drain_seconds=200)))["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 200
    foreign = container_of(job_of(cluster, stages=served(cluster, script=True, port=9000)))
    assert foreign["readinessProbe"]["httpGet"]["path"] == "/health"
    assert {"name": "TRAINSHED_PORT", "value": "9000"} in foreign["env"]
    assert foreign["ports"][0]["containerPort"] == 9000


def test_replicas_are_replaced_one_by_one_and_a_single_server_before_its_successor() -> None:
    cluster = cluster_of({})
    several = deployment_of(job_of(cluster, stages=served(cluster, replicas=3)))["spec"]
    assert (several["replicas"], several["strategy"]["rollingUpdate"]["maxUnavailable"]) == (3, 0)
    assert deployment_of(job_of(cluster, stages=served(cluster)))["spec"]["strategy"] == {"type": "Recreate"}


def test_a_server_stands_where_its_gpus_are_and_needs_nothing_of_the_fabric_between_nodes() -> None:
    cluster = load_cluster("gke-a3-mega", ["kubernetes.priority=high"])
    found = deployment_of(job_of(cluster, stages=served(cluster)))
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "a3-mega"
    spec = found["spec"]["template"]["spec"]
    assert "hostNetwork" not in spec
    assert "initContainers" not in spec
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    named = {each["name"] for each in container["env"]}
    assert not {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING", "MASTER_ADDR", "NNODES"} & named
    on_processors = cluster_of({"machine": None, "kubernetes": {"queue": "gpus", "cpu_queue": "cpus"}})
    found = deployment_of(job_of(on_processors, stages=served(on_processors)))
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "cpus"


def test_the_driver_may_create_servers_and_look_at_their_probes() -> None:
    cluster = cluster_of({})
    (role,) = [each for each in all_objects(render(job_of(cluster, stages=served(cluster)))) if each["kind"] == "Role"]
    allowed = {(rule["resources"][0], tuple(rule["verbs"])) for rule in role["rules"]}
    assert {
        ("services", ("get", "create", "patch")),
        ("deployments", ("get", "create", "patch")),
        ("events", ("list",)),
    } < allowed


def pod(index: int, *conditions: KubeObject, node: bool = True, **status: Any) -> KubeObject:
    return {
        "metadata": {"name": f"p{index}", "uid": f"u{index}", "labels": {"app.kubernetes.io/component": "serve"}},
        "spec": {"nodeName": f"node-{index}"} if node else {},
        "status": {"phase": "Running", "conditions": list(conditions)} | status,
    }


def state_of(*pods: KubeObject, ready: int = 0, conditions: tuple[KubeObject, ...] = (), **listed: Any) -> StageState:
    """How a server of two replicas stands."""
    found = {
        "kind": "Deployment",
        "metadata": {"name": "x", "uid": "d", "generation": 1, "labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
        "spec": {"replicas": 2},
        "status": {
            "observedGeneration": 1,
            "readyReplicas": ready,
            "updatedReplicas": 2,
            "conditions": list(conditions),
        },
    }
    (state,) = stage_states({"serve": "Deployment/x"}, JobObjects({"serve": found}, pods, **listed))
    return state


def crashed(code: int, message: str) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error", "message": message, "finishedAt": "2026-11-15T10:00:00Z"}
    return {"containerStatuses": [{"restartCount": 2, "state": {"running": {}}, "lastState": {"terminated": ended}}]}


LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}
PULL = {"containerStatuses": [{"image": "a/b", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}]}
PROBE = {
    "involvedObject": {"name": "p1"},
    "message": "Readiness probe failed: HTTP probe failed with statuscode: 503",
    "lastTimestamp": "2026-11-15T10:00:00Z",
}
GATED = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
QUEUED = {
    "metadata": {"name": "w", "ownerReferences": [{"uid": "u1"}]},
    "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "8 more needed"}]},
}


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (lambda: state_of(pod(0, READY), pod(1, READY), ready=2), "serving", "Serving, 2 of 2 ready."),
        (
            lambda: state_of(pod(0, READY), pod(1, UNREADY), ready=1, probe_failures=(PROBE,)),
            "serving",
            "Serving, 1 of 2 ready: its server loads the weights (Readiness probe failed: HTTP probe failed with "
            "statuscode: 503).",
        ),
        (
            lambda: state_of(pod(0, node=False), pod(1, UNSCHEDULABLE, node=False)),
            "waiting",
            "2 of 2 pods have no node yet.",
        ),
        (
            lambda: state_of(pod(0, READY), pod(1, UNSCHEDULABLE, node=False), ready=1),
            "serving",
            "Serving, 1 of 2 ready: 1 of 2 pods have no node yet: 0/3 nodes are available: 3 Insufficient gpu.",
        ),
        (
            lambda: state_of(pod(0), pod(1) | GATED, workloads=(QUEUED,)),
            "waiting",
            "It waits for quota in gpus: 8 more needed.",
        ),
        (lambda: state_of(pod(0), pod(1, **PULL)), "waiting", "The image a/b cannot be pulled (no)."),
        (
            lambda: state_of(pod(0), pod(1, **PULL), conditions=(LATE,)),
            "failed",
            "The image a/b cannot be pulled (no).",
        ),
        (lambda: state_of(pod(0, node=False), pod(1), conditions=(LATE,)), "waiting", "1 of 2 pods have no node yet."),
        (
            lambda: state_of(pod(0), pod(1, **crashed(1, "Traceback\nOutOfMemoryError: CUDA"))),
            "waiting",
            "Pod p1 on node-1 exited with 1 and was started again. Last line: OutOfMemoryError: CUDA.",
        ),
        (
            lambda: state_of(pod(0), pod(1, **crashed(2, "error: there are no weights here"))),
            "failed",
            "Pod p1 on node-1 exited with 2 and was started again. Last line: error: there are no weights here.",
        ),
        (lambda: state_of(pod(0), pod(1)), "waiting", "2 servers load the weights."),
        (lambda: state_of(pod(0)), "waiting", "1 of 2 pods are made."),
    ],
)
def test_what_a_server_waits_for_is_one_sentence(found: Callable[[], StageState], state: str, reason: str) -> None:
    stands = found()
    assert (stands.state, stands.reason) == (state, reason)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    with kubernetes_server() as found:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(found, tmp_path / "config")))
        yield found


def line(server: KubernetesServer, folder: Path) -> tuple[Job, Path]:
    """A submitted line, and the manifests of its driver."""
    cluster = cluster_of({"kubernetes": {"namespace": "ml", "queue": "gpus"}})
    job = job_of(cluster, stages=served(cluster))
    target = KubernetesTarget(cluster)
    target.submit(target.render(job), job)
    (stages,) = [each for path, each in server.objects.items() if "-stages-" in path]
    manifests = folder / "manifests"
    manifests.mkdir()
    for name, text in stages["data"].items():
        (manifests / name).write_text(text)
    return job, manifests


class Controllers:
    """Write what controllers would, when the driver says that it has created something."""

    def __init__(self, server: KubernetesServer, then: Callable[[], None]) -> None:
        self._server, self._then, self.texts = server, then, list[str]()

    def note(self, text: str) -> None:
        self.texts.append(text)
        if text.endswith("export is created"):
            path = f"/apis/batch/v1/namespaces/ml/jobs/{NAME}-export"
            self._server.objects[path]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        if text.endswith("serve is created"):
            self._then()

    warn = note
    task = SILENT.task


def run_driver(server: KubernetesServer, manifests: Path, then: Callable[[], None]) -> list[str]:
    controllers = Controllers(server, then)
    client = httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
    with KubeApi(client, "ml") as api:
        drive(api, manifests, reporter=controllers, poll_seconds=0.02, api_retry_seconds=1)
    return controllers.texts


def put_pod(server: KubernetesServer, **status: Any) -> None:
    labels = {"app.kubernetes.io/instance": NAME, "app.kubernetes.io/component": "serve"}
    spec = {"nodeName": "node-1", "containers": [{"name": "serve"}]}
    body = {"metadata": {"labels": labels}, "spec": spec, "status": {"phase": "Running"} | status}
    server.put("/api/v1/namespaces/ml/pods/server-1", body)


def make_ready(server: KubernetesServer) -> None:
    put_pod(server, conditions=[READY])
    server.objects[DEPLOYMENT]["status"] = {"readyReplicas": 1, "updatedReplicas": 1}


def test_the_driver_is_done_when_the_server_answers_and_cancel_ends_it(
    server: KubernetesServer, tmp_path: Path
) -> None:
    job, manifests = line(server, tmp_path)
    told = run_driver(server, manifests, lambda: make_ready(server))
    assert told[-2:] == [f"serve: Deployment/{NAME}-serve is created", "serve: serves"]
    target = KubernetesTarget(job.cluster)
    request = target.render(job)
    with pytest.raises(TrainshedError, match="is under way already"):
        target.submit(request, job)  # a server that answers is not replaced in passing
    driver = f"/apis/batch/v1/namespaces/ml/jobs/{NAME}-driver"
    server.objects[driver]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    with pytest.raises(TrainshedError, match="serve has not ended"):
        target.submit(request, job)
    server.logs["server-1", "serve"] = ["listens"]
    (state,) = [each for each in target.status(_submitted(job)) if each.stage == "serve"]
    assert (state.state, state.reason, state.nodes) == ("serving", "Serving, 1 of 1 ready.", ("server-1",))
    assert list(target.logs(_submitted(job), "serve")) == ["listens\n"]
    ended = target.cancel(_submitted(job))
    assert {f"Deployment/{NAME}-serve", f"Service/{NAME}-serve"} <= set(ended)
    assert not [path for path in server.objects if NAME in path]


def _submitted(job: Job) -> SubmittedJob:
    return SubmittedJob(job.name, job.run, "kubernetes", stage_ids(job))


def test_the_driver_ends_with_the_last_words_of_a_server_that_would_only_fail_again(
    server: KubernetesServer, tmp_path: Path
) -> None:
    _, manifests = line(server, tmp_path)
    with pytest.raises(TrainshedError, match=r"exited with 2 .* Last line: error: there are no weights here") as caught:
        run_driver(server, manifests, lambda: put_pod(server, **crashed(2, "error: there are no weights here")))
    assert caught.value.exit_code == 1


def test_the_driver_does_not_wait_for_ever_for_a_server_that_has_its_node(
    server: KubernetesServer, tmp_path: Path
) -> None:
    _, manifests = line(server, tmp_path)

    def slow() -> None:
        put_pod(server, conditions=[UNREADY])
        server.put(
            "/api/v1/namespaces/ml/events/e", PROBE | {"involvedObject": {"name": "server-1"}, "reason": "Unhealthy"}
        )
        server.objects[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] = 0

    with pytest.raises(TrainshedError, match=r"serve was not ready within 0 s: .*Readiness probe failed") as caught:
        run_driver(server, manifests, slow)
    assert "trainshed cancel" in (caught.value.hint or "")


def test_what_kueue_says_about_a_server_that_it_holds_back_is_asked_for_by_its_pod(
    server: KubernetesServer, tmp_path: Path
) -> None:
    job, _ = line(server, tmp_path)
    server.put(
        DEPLOYMENT,
        {"kind": "Deployment", "spec": {"replicas": 1}, "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}},
    )
    put_pod(server, phase="Pending")
    held = server.objects["/api/v1/namespaces/ml/pods/server-1"]
    held["spec"] = GATED["spec"]
    uid = held["metadata"]["uid"]
    metadata = {"labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [{"uid": uid}]}
    server.put("/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/workloads/w", QUEUED | {"metadata": metadata})
    states = {state.stage: state for state in KubernetesTarget(job.cluster).status(_submitted(job))}
    assert states["serve"].reason == "It waits for quota in gpus: 8 more needed."

"""The target against a server over real HTTP: what is sent is what was rendered, and only what is ours is removed."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from support.clusters.kubernetes_jobs import NAME, RUN, cluster_of, job_of, stages_of, train_alone
from support.clusters.kubernetes_server import TOKEN, KubernetesServer, kubernetes_server, write_kubeconfig
from trainshed.errors import InputError, MissingExtra, NotFound, TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes import api
from trainshed.launch.kubernetes.api import connect, connect_in_cluster
from trainshed.launch.kubernetes.kinds import POD
from trainshed.launch.kubernetes.storage import apply_storage
from trainshed.launch.kubernetes.target import KubernetesTarget, delete_unused_code
from trainshed.launch.target import SubmittedJob

MINE = "app.kubernetes.io/instance"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    with kubernetes_server() as found:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(found, tmp_path / "config")))
        yield found


def make_job(**keys: object) -> Job:
    cluster = cluster_of({"kubernetes": {"namespace": "ml"}} | keys)
    return job_of(cluster, stages=train_alone())


def put_pod(server: KubernetesServer, name: str, index: int, component: str = "train") -> None:
    labels = {
        MINE: NAME,
        "app.kubernetes.io/component": component,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    spec = {"containers": [{"name": component}], "nodeName": f"node-{index}"}
    body = {"metadata": {"labels": labels}, "spec": spec, "status": {"phase": "Running"}}
    server.put(f"/api/v1/namespaces/ml/pods/{name}", body)


def submitted_to(server: KubernetesServer, job: Job) -> SubmittedJob:
    target = KubernetesTarget(job.cluster)
    return target.submit(target.render(job), job)


def test_what_is_sent_is_what_was_rendered_byte_for_byte(server: KubernetesServer) -> None:
    job = make_job()
    request = KubernetesTarget(job.cluster).render(job)
    submitted = KubernetesTarget(job.cluster).submit(request, job)
    assert b"".join(server.bodies).decode() == "".join(part.text for part in request.parts)
    printed = [part for part in request.parts if part.summary is None]
    assert request.text() == "".join(part.printed() for part in request.parts)
    assert [part.name for part in printed] == ["content.yaml", "train.yaml"]
    assert submitted == SubmittedJob(NAME, RUN, "kubernetes", {"train": f"JobSet/{NAME}"})
    assert server.paths(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/{NAME}")


def test_a_line_is_sent_as_a_driver_that_makes_the_rest(server: KubernetesServer) -> None:
    cluster = cluster_of({"kubernetes": {"namespace": "ml"}})
    submitted = submitted_to(server, job_of(cluster, stages=stages_of(cluster, nodes=2)))
    assert submitted.ids == {
        "fetch": f"Job/{NAME}-fetch",
        "tokenise": f"Job/{NAME}-tokenise",
        "train": f"JobSet/{NAME}",
    }
    assert server.paths("/jobs/") == [f"/apis/batch/v1/namespaces/ml/jobs/{NAME}-driver"]
    assert not server.paths("/jobsets/")


def test_a_run_that_is_under_way_is_not_submitted_twice(server: KubernetesServer) -> None:
    submitted_to(server, make_job())
    with pytest.raises(TrainshedError, match=f"{NAME} is under way already: train has not ended") as caught:
        submitted_to(server, make_job())
    assert "trainshed cancel" in (caught.value.hint or "")


def test_a_run_that_has_ended_is_submitted_anew(server: KubernetesServer) -> None:
    submitted_to(server, make_job())
    (path,) = server.paths("/jobsets/")
    server.objects[path]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    first = server.objects[path]["metadata"]["uid"]
    submitted_to(server, make_job())
    assert server.objects[path]["metadata"]["uid"] != first
    assert server.objects[path].get("status") is None


def test_cancel_removes_the_job_and_leaves_storage_and_other_jobs_alone(server: KubernetesServer) -> None:
    cluster = cluster_of({"kubernetes": {"namespace": "ml"}})
    submitted = submitted_to(server, job_of(cluster, stages=stages_of(cluster, nodes=2)))
    server.put("/api/v1/namespaces/ml/persistentvolumeclaims/data", {"metadata": {"labels": {MINE: NAME}}})
    server.put("/api/v1/namespaces/ml/configmaps/other", {"metadata": {"labels": {MINE: "other-job"}}})
    removed = KubernetesTarget(cluster).cancel(submitted)
    assert removed[0] == f"Job/{NAME}-driver"
    assert sorted(path.rsplit("/", 1)[1] for path in server.objects) == [
        "data",
        "other",
        "trainshed-code-0123456789ab-0",
    ]


def test_code_that_no_job_uses_goes_after_a_day(server: KubernetesServer) -> None:
    job = make_job()
    submitted_to(server, job)
    folder = "/api/v1/namespaces/ml/configmaps"
    for name, label, days in (("old", "aaa", 3), ("new", "bbb", 0), ("used", "0123456789ab", 3)):
        created = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")
        labels = {"trainshed.io/code": label, "app.kubernetes.io/component": "code"}
        server.put(f"{folder}/{name}", {"metadata": {"labels": labels, "creationTimestamp": created}})
    with connect(job.cluster) as api:
        assert delete_unused_code(api) == ["old"]


def test_cancel_twice_is_no_error(server: KubernetesServer) -> None:
    submitted = submitted_to(server, make_job())
    target = KubernetesTarget(make_job().cluster)
    assert target.cancel(submitted)
    assert target.cancel(submitted) == ()


def test_status_asks_for_the_job_its_pods_and_kueues_workload(server: KubernetesServer) -> None:
    job = make_job(kubernetes={"namespace": "ml", "queue": "gpus"})
    submitted = submitted_to(server, job)
    (path,) = server.paths("/jobsets/")
    uid = server.objects[path]["metadata"]["uid"]
    message = "couldn't assign flavors to pod set train: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    server.put(
        "/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/workloads/w",
        {
            "metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [{"uid": uid}]},
            "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]},
        },
    )
    (state,) = KubernetesTarget(job.cluster).status(submitted)
    assert state.state == "waiting"
    assert state.reason == f"It waits for quota in gpus: {message}."


def test_devices_that_no_node_offers_are_said_before_anything_is_sent(server: KubernetesServer) -> None:
    job = make_job(machine="nd-h100-v5")
    target = KubernetesTarget(job.cluster)
    assert target.check(job) == [], "no node yet: an autoscaler may make one"
    server.put("/api/v1/nodes/cpu", {"status": {"allocatable": {"cpu": "8"}}})
    assert target.check(job) == []
    offered = {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "63", "cpu": "95500m", "memory": "1840000000Ki"}
    server.put("/api/v1/nodes/gpu", {"status": {"allocatable": offered}})
    assert target.check(job) == [
        "no node with nvidia.com/gpu offers rdma/ib; they offer rdma/hca_shared_devices_a "
        "(kubernetes.resources says what pods ask for)"
    ]
    named = make_job(
        machine="nd-h100-v5", kubernetes={"namespace": "ml", "resources": {"rdma/hca_shared_devices_a": 1}}
    )
    assert KubernetesTarget(named.cluster).check(named) == []


def test_nodes_that_are_smaller_than_a_pod_are_said_before_anything_is_sent(server: KubernetesServer) -> None:
    """The catalog has no machine of every hoster: a pod of this one asks for 288 CPUs."""
    offered = {"amd.com/gpu": "8", "cpu": "254", "memory": "3000Gi"}
    server.put("/api/v1/nodes/gpu", {"metadata": {"labels": {"pool": "gpu"}}, "status": {"allocatable": offered}})
    job = make_job(machine="mi300x-8", kubernetes={"namespace": "ml"})
    assert KubernetesTarget(job.cluster).check(job) == [
        "no node with amd.com/gpu has 288 cpu, but 254 at most (limits.stages says what pods ask for)"
    ]
    elsewhere = make_job(machine="mi300x-8", kubernetes={"namespace": "ml", "node_selector": {"pool": "other"}})
    assert KubernetesTarget(elsewhere.cluster).check(elsewhere) == [], "its nodes may not be there yet"
    server.objects["/api/v1/nodes/gpu"]["status"]["allocatable"]["cpu"] = "382"
    assert KubernetesTarget(job.cluster).check(job) == []


def test_nodes_of_a_running_stage_are_its_pods_in_the_order_of_ranks(server: KubernetesServer) -> None:
    submitted = submitted_to(server, make_job())
    for index in (1, 0):  # names do not sort by rank
        put_pod(server, f"pod-{'ba'[index]}", index)
    (state,) = KubernetesTarget(make_job().cluster).status(submitted)
    assert (state.state, state.nodes) == ("running", ("pod-b", "pod-a"))


def test_logs_are_those_of_the_pod_that_has_the_rank(server: KubernetesServer) -> None:
    submitted = replace(submitted_to(server, make_job()), ranks_per_node=8)
    target = KubernetesTarget(make_job().cluster)
    for index in range(3):
        put_pod(server, f"pod-{index}", index)
        server.logs[f"pod-{index}", "train"] = [f"line of node {index}", "last"]
    assert list(target.logs(submitted, "train")) == ["line of node 0\n", "last\n"]
    assert next(iter(target.logs(submitted, "train", rank=17, follow=True))) == "line of node 2\n"
    with pytest.raises(NotFound, match="train has 3 pods now, none for rank 24"):
        list(target.logs(submitted, "train", rank=24))
    with pytest.raises(NotFound, match="Kubernetes keeps no logs of attempt 1"):
        list(target.logs(submitted, "train", attempt=1))


def test_a_container_that_has_not_started_has_no_log(server: KubernetesServer) -> None:
    submitted = submitted_to(server, make_job())
    put_pod(server, "pod-0", 0)
    with pytest.raises(InputError, match="container train is waiting to start"):
        list(KubernetesTarget(make_job().cluster).logs(submitted, "train"))


def test_a_cluster_without_jobset_says_so_before_and_at_submission(server: KubernetesServer) -> None:
    del server.kinds["/apis/jobset.x-k8s.io/v1alpha2"]
    job = make_job()
    target = KubernetesTarget(job.cluster)
    assert target.check(job) == [
        "the cluster does not know JobSet (jobset.x-k8s.io/v1alpha2): its controller is not installed"
    ]
    with pytest.raises(InputError, match="the cluster has no JobSet"):
        submitted_to(server, job)


def test_what_the_cluster_lacks_is_listed_before_anything_is_sent(server: KubernetesServer) -> None:
    job = make_job(
        kubernetes={"namespace": "ml", "queue": "gpus", "priority": "high"},
        volumes=[{"mount": "/data", "pvc": "shared", "create": {"kind": "blob", "size": "1Ti"}}],
        service_account="trainer",
        secrets={"HF_TOKEN": {"k8s": "hugging/token"}},
    )
    server.put("/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/localqueues/cpus", {"spec": {"clusterQueue": "c"}})
    assert KubernetesTarget(job.cluster).check(job) == [
        "there is no queue gpus in namespace ml (there: cpus)",
        "there is no WorkloadPriorityClass high",
        "there is no claim shared in namespace ml: `trainshed storage up --on mine` makes it",
        "there is no service account trainer in namespace ml",
        "there is no secret hugging in namespace ml",
    ]
    assert not server.bodies


def test_more_than_the_queue_can_ever_have_is_refused(server: KubernetesServer) -> None:
    """Two nodes ask for three quarters of 224 CPUs and 2048 GiB each."""
    job = make_job(kubernetes={"namespace": "ml", "queue": "gpus"})
    server.put("/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/localqueues/gpus", {"spec": {"clusterQueue": "all"}})
    quotas = {"nvidia.com/gpu": "16", "rdma/ib": "16", "cpu": "336", "memory": "3Ti"}

    def refusals(**spec: str) -> list[str]:
        rows = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
        groups = [{"coveredResources": list(quotas), "flavors": [{"name": "h100", "resources": rows}]}]
        body = {"spec": {"resourceGroups": groups} | spec}
        server.put("/apis/kueue.x-k8s.io/v1beta1/clusterqueues/all", body)
        return list(KubernetesTarget(job.cluster).check(job))

    assert refusals() == []
    quotas |= {"nvidia.com/gpu": "8", "memory": "1500Gi"}
    assert refusals() == [
        "the queue gpus may have 1,500Gi memory at most, and the job needs 3,072Gi "
        "(limits.stages says what pods ask for)",
        "the queue gpus may have 8 nvidia.com/gpu at most, and the job needs 16",
    ]
    quotas |= {"nvidia.com/gpu": "0"}
    assert refusals(cohort="everyone") == [], "others lend"


def test_a_queue_that_does_not_cover_what_pods_ask_for_is_named_with_what_to_write(server: KubernetesServer) -> None:
    """Google's Cluster Toolkit makes such queues; a job of theirs would stay suspended for ever."""
    server.put("/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/localqueues/a3-mega", {"spec": {"clusterQueue": "a3-mega"}})
    quota = {"name": "nvidia.com/gpu", "nominalQuota": "128"}
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "a3-mega", "resources": [quota]}]}]
    queue = server.put("/apis/kueue.x-k8s.io/v1beta1/clusterqueues/a3-mega", {"spec": {"resourceGroups": groups}})
    kubernetes = {"namespace": "ml", "queue": "a3-mega"}
    job = make_job(machine="a3-mega", kubernetes=kubernetes)
    (refusal,) = KubernetesTarget(job.cluster).check(job)
    assert refusal == (
        "the queue a3-mega (a3-mega) covers nvidia.com/gpu only, and pods ask for cpu and memory too: "
        "Kueue would never admit them; write `kubernetes: {requests: devices}`, or let an administrator add them to it"
    )
    queue["spec"]["cohort"] = "everyone"  # which lends quota, not resources
    assert KubernetesTarget(job.cluster).check(job) == [refusal]
    job = make_job(machine="a3-mega", kubernetes=kubernetes | {"requests": "devices"})
    assert KubernetesTarget(job.cluster).check(job) == []


def test_kueue_is_asked_in_the_version_that_the_cluster_serves(server: KubernetesServer) -> None:
    server.kinds["/apis/kueue.x-k8s.io/v1beta2"] = server.kinds.pop("/apis/kueue.x-k8s.io/v1beta1")
    job = make_job(kubernetes={"namespace": "ml", "queue": "gpus"})
    server.put("/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/localqueues/gpus", {"spec": {"clusterQueue": "all"}})
    assert KubernetesTarget(job.cluster).check(job) == []


def test_without_the_client_library_the_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightkube.config.client_adapter", None)
    with pytest.raises(MissingExtra) as caught:
        KubernetesTarget(make_job().cluster).check(make_job())
    assert caught.value.hint == "pip install 'trainshed[k8s]'"


def test_a_secret_without_the_key_is_found(server: KubernetesServer) -> None:
    job = make_job(secrets={"HF_TOKEN": {"k8s": "hugging/token"}})
    server.put("/api/v1/namespaces/ml/secrets/hugging", {"data": {"other": "eA=="}})
    assert KubernetesTarget(job.cluster).check(job) == ["the secret hugging has no key token"]


def test_what_may_not_be_looked_at_is_not_held_against_the_cluster(server: KubernetesServer) -> None:
    server.forbidden |= {"secrets", "clusterqueues", "localqueues"}
    job = make_job(kubernetes={"namespace": "ml", "queue": "gpus"}, secrets={"X": {"k8s": "a/b"}})
    assert KubernetesTarget(job.cluster).check(job) == []


def test_a_missing_namespace_is_named(server: KubernetesServer) -> None:
    job = make_job(kubernetes={"namespace": "nowhere"})
    assert "there is no namespace nowhere" in KubernetesTarget(job.cluster).check(job)


def test_an_object_that_the_server_refuses_is_quoted(server: KubernetesServer) -> None:
    job = make_job()
    target = KubernetesTarget(job.cluster)
    request = target.render(job)
    part = request.parts[-1]
    broken = replace(part, text=part.text.replace("\nspec:\n", "\nspec:\n  nonsense: 1\n", 1))
    with pytest.raises(InputError, match=r'refuses JobSet/llama-1a2b3c4d: unknown field "spec\.nonsense"'):
        target.submit(replace(request, parts=(*request.parts[:-1], broken)), job)


def test_rights_that_are_missing_are_named(server: KubernetesServer) -> None:
    server.forbidden.add("configmaps")
    with pytest.raises(TrainshedError, match="is forbidden"):
        submitted_to(server, make_job())


def test_a_server_that_is_busy_is_asked_again(server: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "BUSY_SECONDS", 0.0)
    job = make_job()
    target = KubernetesTarget(job.cluster)
    server.failures += [429, 429]
    submitted = target.submit(target.render(job), job)
    assert not server.failures
    server.failures += [429] * 10
    with pytest.raises(TrainshedError, match="HTTP 429"):
        target.status(submitted)


def test_a_server_that_does_not_answer_is_named(server: KubernetesServer) -> None:
    job = make_job(kubernetes={"context": "gone"})
    with pytest.raises(TrainshedError, match="the API server does not answer") as caught:
        KubernetesTarget(job.cluster).check(job)
    assert "127.0.0.1:9" in (caught.value.where or "")


def test_an_unknown_context_says_where_it_was_looked_for(server: KubernetesServer) -> None:
    job = make_job(kubernetes={"context": "prod"})
    with pytest.raises(InputError, match="Context 'prod' not found") as caught:
        KubernetesTarget(job.cluster).check(job)
    assert "kubernetes.context" in (caught.value.where or "")


def test_storage_is_made_and_never_labelled_as_a_jobs(server: KubernetesServer) -> None:
    create = {"kind": "amlfs", "size": "16Ti"}
    cluster = cluster_of(
        {"kubernetes": {"namespace": "ml"}, "volumes": [{"mount": "/data", "pvc": "shared", "create": create}]}
    )
    assert apply_storage(cluster) == ["StorageClass/shared-amlfs", "PersistentVolumeClaim/shared"]
    for found in server.objects.values():
        assert MINE not in found["metadata"]["labels"]


def test_inside_a_pod_the_service_account_speaks_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "namespace").write_text("ml")
    (tmp_path / "token").write_text("an old token")
    with kubernetes_server(context) as server:
        port = server.url.rsplit(":", 1)[1]
        with connect_in_cluster("127.0.0.1", port, tmp_path) as api:
            with pytest.raises(TrainshedError, match="Unauthorized"):
                api.list(POD)
            (tmp_path / "token").write_text(f"{TOKEN}\n")  # the kubelet replaces it now and then
            assert api.list(POD) == []
            assert api.namespace == "ml"

"""What a job becomes: golden files of every shipped cluster and kind, valid by every schema we have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from support import TESTS
from support.clusters.kubernetes_jobs import CLUSTERS, cluster_of, job_of, served, stages_of, train_alone
from support.clusters.kubernetes_schemas import all_objects, check
from support.recipes.golden_files import check_golden
from trainshed.errors import InputError
from trainshed.launch.job import CodeArchive, Job, Stage
from trainshed.launch.kubernetes.kinds import KubeObject
from trainshed.launch.kubernetes.render import render, stage_ids
from trainshed.recipe import load_cluster

KINDS = {"jobset": "JobSet", "pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "rayjob": "RayJob", "job": "Job"}


def training(job: Job) -> KubeObject:
    (found,) = [each for each in all_objects(render(job)) if is_training(each)]
    return found


def is_training(found: KubeObject) -> bool:
    return found["kind"] in KINDS.values() and found["metadata"]["labels"]["app.kubernetes.io/component"] == "train"


def gang_pod(found: KubeObject) -> KubeObject:
    """The template of the first pod of a training."""
    spec = found["spec"]
    if found["kind"] == "Job":
        return spec["template"]
    if found["kind"] == "JobSet":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]
    if found["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Master"]["template"]
    return spec["rayClusterSpec"]["headGroupSpec"]["template"]


def environment_of(found: KubeObject) -> dict[str, Any]:
    (container,) = gang_pod(found)["spec"]["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def golden_text(job: Job) -> str:
    """All parts but the files and the code, which are the same everywhere."""
    return "".join(f"# {part.name}\n{part.printed()}" for part in render(job).parts if part.name != "content.yaml")


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "torch") for name in CLUSTERS),
        ("gke-a3-mega", "megatron"),
        *(pytest.param(name, "megatron", marks=pytest.mark.full) for name in CLUSTERS[1:]),
    ],
)
def test_every_shipped_cluster_renders_as_its_golden_file_says(name: str, engine: str) -> None:
    cluster = load_cluster(name)
    job = job_of(cluster, stages=stages_of(cluster, engine))
    for found in all_objects(render(job)):
        check(found)
    check_golden(f"kubernetes/{name}-{engine}.yaml", golden_text(job))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_renders_the_same_job(kind: str) -> None:
    cluster = load_cluster("eks-p5", [f"kubernetes.kind={kind}"])
    job = job_of(cluster, stages=train_alone())
    assert training(job)["kind"] == KINDS[kind]
    for found in all_objects(render(job)):
        check(found)
    check_golden(f"kubernetes/kind-{kind}.yaml", golden_text(job))


def test_the_files_and_the_code_travel_in_config_maps() -> None:
    text = next(part.text for part in render(job_of("eks-p5")).parts if part.name == "content.yaml")
    check_golden("kubernetes/content.yaml", text)


def test_the_same_job_gives_the_same_bytes() -> None:
    assert render(job_of("gke-a3-mega")) == render(job_of("gke-a3-mega"))


def test_a_restart_is_of_the_whole_gang_and_wrong_input_is_not_tried_again() -> None:
    found = training(job_of("gke-a3-mega"))
    policy = found["spec"]["failurePolicy"]
    gang = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert policy["maxRestarts"] == 3
    assert gang["backoffLimit"] == 0
    (rule,) = gang["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [2]
    assert [(each["action"], each["onJobFailureReasons"]) for each in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]


def test_an_attempt_that_ran_out_of_time_is_started_again_without_being_counted() -> None:
    found = training(job_of(load_cluster("gke-a3-mega", ["limits.hours=8"])))
    assert found["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 8 * 3600
    rule = found["spec"]["failurePolicy"]["rules"][-1]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["DeadlineExceeded"])


def test_kueue_gets_queue_priority_and_topology_and_starts_the_job_itself() -> None:
    found = training(job_of(load_cluster("gke-a3-mega", ["kubernetes.priority=high"])))
    assert found["spec"]["suspend"] is True
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "a3-mega"
    assert found["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    annotations = gang_pod(found)["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-preferred-topology"] == "kubernetes.io/hostname"
    required = training(job_of(load_cluster("gke-a3-mega", ["kubernetes.topology.required=true"])))
    assert "kueue.x-k8s.io/podset-required-topology" in gang_pod(required)["metadata"]["annotations"]


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "job", "rayjob"])
def test_pods_of_a_training_say_where_prometheus_reads_it(kind: str) -> None:
    cluster = cluster_of({"kubernetes": {"kind": kind, "annotations": {"prometheus.io/path": "/mine"}}})
    *before, train = stages_of(cluster)
    job = job_of(cluster, stages=(*before, replace(train, metrics_port=9400)))
    annotations = gang_pod(training(job))["metadata"]["annotations"]
    assert {name: value for name, value in annotations.items() if name.startswith("prometheus.io")} == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9400",
        "prometheus.io/path": "/mine",
    }
    assert "prometheus" not in str(gang_pod(training(job_of(cluster_of({"kubernetes": {"kind": kind}})))))


def test_without_a_queue_nothing_is_suspended() -> None:
    for found in all_objects(render(job_of(cluster_of({})))):
        assert "suspend" not in found.get("spec", {})


def test_cpu_stages_ask_for_no_gpu_and_never_stand_in_the_queue_of_gpus() -> None:
    found = {each["metadata"]["name"]: each for each in all_objects(render(job_of("gke-a3-mega")))}
    job = found["llama-1a2b3c4d-tokenise"]
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi"},
        "limits": {"cpu": "16", "memory": "32Gi"},
    }
    queued = render(job_of(load_cluster("gke-a3-mega", ["kubernetes.cpu_queue=cpus"])))
    queues = [each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for each in all_objects(queued)]
    assert set(filter(None, queues)) == {"cpus", "a3-mega"}


def test_the_driver_may_create_its_stages_and_nothing_else() -> None:
    found = all_objects(render(job_of("gke-a3-mega")))
    (role,) = [each for each in found if each["kind"] == "Role"]
    allowed = {(rule["resources"][0], tuple(rule["verbs"])) for rule in role["rules"]}
    assert allowed == {
        ("jobs", ("get", "create", "patch")),
        ("jobsets", ("get", "create", "patch")),
        ("jobs", ("delete",)),
        ("jobsets", ("delete",)),
        ("configmaps", ("get",)),
        ("pods", ("list",)),
        ("workloads", ("list",)),
    }
    assert all("resourceNames" in rule for rule in role["rules"] if rule["verbs"] in (["delete"], ["get"]))
    driver = next(each for each in found if each["metadata"]["name"].endswith("-driver") and each["kind"] == "Job")
    pod = driver["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == role["metadata"]["name"]
    assert "nvidia.com/gpu" not in str(pod["containers"])


def test_a_driver_with_an_account_that_is_there_creates_no_role() -> None:
    found = all_objects(render(job_of(load_cluster("gke-a3-mega", ["kubernetes.driver_account=drivers"]))))
    assert not {each["kind"] for each in found} & {"ServiceAccount", "Role", "RoleBinding"}
    driver = next(each for each in found if each["metadata"]["name"].endswith("-driver"))
    assert driver["spec"]["template"]["spec"]["serviceAccountName"] == "drivers"


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob", "rayjob", "job"])
def test_the_role_in_the_documentation_allows_what_any_job_asks_for(kind: str) -> None:
    page = (TESTS.parent / "docs" / "launch.md").read_text()
    (block,) = re.findall(r"```yaml\n# file: drivers.yaml\n(.*?)```", page, re.DOTALL)
    (role,) = [each for each in yaml.safe_load_all(block) if each["kind"] == "Role"]
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    cluster = load_cluster("eks-p5", [f"kubernetes.kind={kind}"])
    job = job_of(cluster, stages=(*stages_of(cluster), *served(cluster)))
    (asked,) = [each for each in all_objects(render(job)) if each["kind"] == "Role"]
    for rule in asked["rules"]:
        for verb in rule["verbs"]:
            assert (rule["apiGroups"][0], rule["resources"][0], verb) in allowed


def test_what_is_applied_at_once_holds_no_gpus() -> None:
    applied = render(job_of("gke-a3-mega")).text()
    assert not [line for line in applied.splitlines() if line.startswith("kind: JobSet")]


def test_a_single_stage_needs_no_driver() -> None:
    request = render(job_of("gke-a3-mega", stages=train_alone()))
    assert [part.name for part in request.parts] == ["content.yaml", "code.yaml", "train.yaml"]
    assert request.parts[-1].stage == "train"
    assert stage_ids(job_of("gke-a3-mega", stages=train_alone())) == {"train": "JobSet/llama-1a2b3c4d"}


def test_node_zero_is_found_by_the_name_that_the_headless_service_gives_it() -> None:
    found = environment_of(training(job_of("gke-a3-mega")))
    assert found["MASTER_ADDR"] == "llama-1a2b3c4d-train-0-0.llama-1a2b3c4d"
    assert found["NNODES"] == "16"
    assert found["TRAINSHED_START"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"


def test_spares_are_further_pods_of_the_gang() -> None:
    found = training(job_of("gke-a3-mega", stages=train_alone(nodes=4, spares=1)))
    gang = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert gang["completions"] == gang["parallelism"] == 5
    assert environment_of(found)["NNODES"] == "4"


def test_pytorchjob_counts_restarts_of_pods_and_keeps_ttl_where_the_operator_reads_it() -> None:
    found = training(job_of("aks-nd-h100-v5"))
    policy = found["spec"]["runPolicy"]
    assert policy["backoffLimit"] == 3 * 2 + 1
    assert policy["cleanPodPolicy"] == "Running"
    assert policy["ttlSecondsAfterFinished"] > 0
    assert policy["suspend"] is True
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    # The operator sets these itself; twice would be an undefined order.
    assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & set(environment_of(found))


def test_pytorchjob_of_one_node_has_no_workers() -> None:
    found = training(job_of("aks-nd-h100-v5", stages=train_alone(nodes=1, restarts=0)))
    assert list(found["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert found["spec"]["runPolicy"]["backoffLimit"] == 0
    assert found["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"


def plain(*stages: Stage, **limits: Any) -> Job:
    cluster = cluster_of({"limits": limits, "kubernetes": {"kind": "job", "namespace": "ml"}})
    return job_of(cluster, stages=stages or train_alone())


def test_a_plain_job_is_a_gang_by_its_indexes_and_a_headless_service() -> None:
    job = plain()
    found = training(job)
    spec = found["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 0, "one pod that fails ends them all"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert spec["ttlSecondsAfterFinished"] > 0
    assert found["metadata"]["annotations"]["trainshed.io/most-restarts"] == "3"
    pod = gang_pod(found)
    assert pod["spec"]["subdomain"] == "llama-1a2b3c4d"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300
    (service,) = [each for each in all_objects(render(job)) if each["kind"] == "Service"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("llama-1a2b3c4d", "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert environment_of(found)["MASTER_ADDR"] == "llama-1a2b3c4d-0.llama-1a2b3c4d"
    assert stage_ids(job) == {"train": "Job/llama-1a2b3c4d"}
    timed = training(plain(hours=8.0))
    assert timed["spec"]["activeDeadlineSeconds"] == 8 * 3600
    assert any("started again by the driver" in note for note in render(job).notes)


def test_the_driver_of_a_plain_job_may_delete_that_job_and_no_other() -> None:
    request = render(plain())
    parts = ["content.yaml", "code.yaml", "driver-program.yaml", "driver.yaml"]
    assert [part.name for part in request.parts] == parts, "it needs a driver for a single stage"
    (role,) = [each for each in all_objects(request) if each["kind"] == "Role"]
    (config_map,) = [each for each in all_objects(request) if "-stages-" in each["metadata"]["name"]]
    allowed = {(rule["resources"][0], tuple(rule["verbs"]), *rule.get("resourceNames", ())) for rule in role["rules"]}
    assert allowed == {
        ("services", ("get", "create", "patch")),
        ("jobs", ("get", "create", "patch")),
        ("jobs", ("delete",), "llama-1a2b3c4d"),
        ("services", ("delete",), "llama-1a2b3c4d"),
        ("configmaps", ("get",), config_map["metadata"]["name"]),
        ("pods", ("list",)),
    }


def pod_specs(value: Any) -> Iterator[KubeObject]:
    """Every pod that an object makes."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_container_of_any_stage_is_refused_under_a_quota(name: str) -> None:
    cluster = load_cluster(name, ["kubernetes.requests=null"])
    for engine in ("torch", "megatron"):
        stages = (*stages_of(cluster, engine, nodes=2), *served(cluster))
        pods = [pod for obj in all_objects(render(job_of(cluster, stages=stages))) for pod in pod_specs(obj)]
        assert len(pods) >= 4
        for pod in pods:
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                for kind in ("requests", "limits"):
                    assert {"cpu", "memory"} <= set(container["resources"][kind]), container["name"]


def test_a_training_asks_for_three_quarters_of_its_node_or_for_what_the_cluster_file_says() -> None:
    (container,) = gang_pod(training(job_of("aks-nd-h100-v5")))["spec"]["containers"]
    assert container["resources"]["requests"] | {"cpu": "72", "memory": "1425Gi"} == container["resources"]["requests"]
    assert container["resources"]["limits"] | {"cpu": "96", "memory": "1900Gi"} == container["resources"]["limits"]
    own = job_of("aks-nd-h100-v5", stages=train_alone(cpus=64, memory="800Gi"))
    (container,) = gang_pod(training(own))["spec"]["containers"]
    assert container["resources"]["requests"] | {"cpu": "64", "memory": "800Gi"} == container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"] == "800Gi"


def test_only_pods_of_a_training_use_the_nodes_network_and_they_keep_their_identity() -> None:
    found = {each["metadata"]["name"]: each for each in all_objects(render(job_of("gke-a3-mega")))}

    def bucket(pod: KubeObject) -> KubeObject:
        (volume,) = [volume["csi"] for volume in pod["volumes"] if "csi" in volume]
        return volume["volumeAttributes"]

    cpu_stage = found["llama-1a2b3c4d-tokenise"]["spec"]["template"]["spec"]
    assert "hostNetwork" not in cpu_stage
    assert "hostNetworkPodKSA" not in bucket(cpu_stage)
    training_pod = gang_pod(found["llama-1a2b3c4d"])["spec"]
    assert training_pod["hostNetwork"] is True
    assert bucket(training_pod)["hostNetworkPodKSA"] == "true"
    # Agents read each other's heartbeats, every 30 s, from this mount.
    assert "metadata-cache:ttl-secs:5," in bucket(training_pod)["mountOptions"]


def test_trainjob_keeps_the_devices_of_the_fabric() -> None:
    found = training(job_of(load_cluster("eks-p5", ["kubernetes.kind=trainjob"])))
    limits = found["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert limits == {"cpu": "192", "memory": "2048Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}


def devices_of(found: KubeObject) -> dict[str, str]:
    (container,) = gang_pod(found)["spec"]["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    others = ("cpu", "memory")
    assert {name: requests[name] for name in requests if name not in others} == {
        name: limits[name] for name in limits if name not in others
    }
    return {name: count for name, count in limits.items() if name not in ("nvidia.com/gpu", *others)}


def test_a_site_names_the_devices_that_its_nodes_offer() -> None:
    own = load_cluster("aks-nd-h100-v5")
    assert devices_of(training(job_of(own))) == {"rdma/ib": "8"}
    assert any("rdma/ib" in note for note in render(job_of(own)).notes)
    named = {"rdma/hca_shared_devices_a": 1, "hugepages-2Mi": "5120Mi"}
    body = {"machine": "nd-h100-v5", "kubernetes": {"resources": named}}
    job = job_of(cluster_of(body), stages=train_alone())
    assert devices_of(training(job)) == {"rdma/hca_shared_devices_a": "1", "hugepages-2Mi": "5120Mi"}
    (note,) = [note for note in render(job).notes if "devices" in note]
    assert note.startswith("of the network's devices each pod asks for 5120Mi hugepages-2Mi and 1 rdma/hca")
    assert not any("rdma/ib" in note for note in render(job).notes)
    none = job_of(cluster_of(body | {"kubernetes": {"resources": {}}}), stages=train_alone())
    assert devices_of(training(none)) == {}
    alone = job_of(cluster_of(body), stages=train_alone(nodes=1))
    assert devices_of(training(alone)) == {}, "one node has no network between nodes"
    check(training(job))


def test_trainjob_refuses_a_fabric_that_needs_more_than_a_patch_can_say() -> None:
    with pytest.raises(InputError) as caught:
        render(job_of(load_cluster("gke-a3-mega", ["kubernetes.kind=trainjob"])))
    assert caught.value.what == "tcpxo needs init containers and the node's network, which a TrainJob cannot ask for"
    assert caught.value.hint == "write `kind: jobset`"


def test_in_a_rayjob_the_head_is_a_node_and_the_gpus_go_with_the_end() -> None:
    spec = training(job_of("minio-mi300x-ray"))["spec"]
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["numOfHosts"]) == (1, 1)
    assert (spec["shutdownAfterJobFinishes"], spec["ttlSecondsAfterFinished"]) == (True, 0)
    assert spec["submissionMode"] == "K8sJobMode"
    assert spec["entrypoint"] == "python3 -P -m trainshed ray-driver train --job /etc/trainshed/job"
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["resources"]["limits"]["amd.com/gpu"] == "8"


def test_ray_refuses_a_fabric_that_is_set_up_by_a_script() -> None:
    with pytest.raises(InputError, match="set up by a script") as caught:
        render(job_of(load_cluster("gke-a3-mega", ["kubernetes.kind=rayjob"])))
    assert caught.value.hint == "write `kind: jobset`"


def test_a_foreign_engine_runs_its_script_in_its_own_image_without_our_code() -> None:
    cluster = load_cluster("gke-a3-mega")
    found = training(job_of(cluster, stages=stages_of(cluster, "nemo")))
    (container,) = gang_pod(found)["spec"]["containers"]
    assert container["image"] == "nvcr.io/nvidia/nemo:25.09"
    assert container["args"] == ["bash", "/etc/trainshed/job/train.sh"]
    assert "TRAINSHED_CODE" not in environment_of(found)
    assert "code" not in [volume["name"] for volume in gang_pod(found)["spec"]["volumes"]]


@pytest.mark.parametrize(
    ("machine", "terms", "selector"),
    [
        ("a3-mega", {"spot": True}, {"cloud.google.com/gke-spot": "true"}),
        ("p5", {"spot": True}, {"eks.amazonaws.com/capacityType": "SPOT"}),
        ("nd-h100-v5", {"spot": True}, {"kubernetes.azure.com/scalesetpriority": "spot"}),
        ("a3-mega", {"reservation": "mine"}, {"cloud.google.com/reservation-name": "mine"}),
        ("p5", {"reservation": "cr-0123"}, {"karpenter.k8s.aws/capacity-reservation-id": "cr-0123"}),
    ],
)
def test_terms_of_capacity_become_labels_of_nodes(
    machine: str, terms: dict[str, Any], selector: dict[str, str]
) -> None:
    found = training(job_of(cluster_of({"machine": machine, "capacity": terms}), stages=train_alone()))
    assert gang_pod(found)["spec"]["nodeSelector"] == selector
    check(found)


def test_flex_start_tells_kueue_for_how_long() -> None:
    cluster = load_cluster("gke-a3-mega", ["capacity.flex_start_hours=2.5"])
    assert training(job_of(cluster))["metadata"]["annotations"] == {
        "provreq.kueue.x-k8s.io/maxRunDurationSeconds": "9000"
    }


@pytest.mark.parametrize(
    ("body", "what", "where"),
    [
        ({"capacity": {"spot": True}}, "it is not known how spot nodes of dgx-h100 are labelled", "capacity.spot"),
        (
            {"machine": "nd-h100-v5", "capacity": {"reservation": "x"}},
            "it is not known how reserved nodes of nd-h100-v5 are labelled",
            "capacity.reservation",
        ),
        (
            {"machine": "a3-mega", "capacity": {"flex_start_hours": 1.0}},
            "Kueue asks for such nodes, and there is no queue",
            "capacity.flex_start_hours",
        ),
        ({"capacity": {"flex_start_hours": 1.0}}, "flex start is Google's", "capacity.flex_start_hours"),
        ({"image": None}, "pods need an image, and the cluster file names none", "image"),
        (
            {"secrets": {"HF_TOKEN": {"env": "HF_TOKEN"}}},
            "an environment variable of this machine is not there in a pod",
            "secrets.HF_TOKEN",
        ),
        ({"secrets": {"X": {"file": "/x"}}}, "a file of this machine is not there in a pod", "secrets.X"),
    ],
)
def test_what_a_pod_cannot_have_is_said_with_its_place(body: dict[str, Any], what: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        render(job_of(cluster_of(body), stages=train_alone()))
    assert caught.value.what == what
    assert f"({where})" in (caught.value.where or "")
    assert caught.value.hint


def test_gpus_of_an_unnamed_machine_are_not_guessed() -> None:
    with pytest.raises(InputError, match="nobody knows what its GPUs are called"):
        render(job_of(cluster_of({"machine": None}), stages=train_alone(nodes=1)))


def test_volumes_secrets_and_placement_reach_the_pod() -> None:
    body = {
        "volumes": [
            {"mount": "/data", "pvc": "shared"},
            {"mount": "/gcs", "bucket": "corpus", "read_only": True},
            {"mount": "/mine", "bucket": "runs", "options": ["implicit-dirs"]},
            {"mount": "/ssd", "host": "/mnt/ssd"},
        ],
        "secrets": {"HF_TOKEN": {"k8s": "hugging/token"}},
        "service_account": "trainer",
        "limits": {"shared_memory": "250Gi"},
        "kubernetes": {
            "avoid_nodes": ["bad-node"],
            "image_pull_secrets": ["registry"],
            "tolerations": [{"key": "team", "operator": "Equal", "value": "ml"}],
            "labels": {"team": "ml"},
            "annotations": {"note": "1"},
        },
    }
    found = training(job_of(cluster_of(body), stages=train_alone(nodes=1)))
    pod = gang_pod(found)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["volume-0"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert volumes["volume-1"]["csi"]["readOnly"] is True
    assert "streaming-writes" not in volumes["volume-1"]["csi"]["volumeAttributes"]["mountOptions"]
    assert volumes["volume-2"]["csi"]["volumeAttributes"] == {"bucketName": "runs", "mountOptions": "implicit-dirs"}
    assert volumes["volume-3"]["hostPath"]["path"] == "/mnt/ssd"
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "250Gi"}
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    assert pod["metadata"]["annotations"]["note"] == "1"
    assert pod["metadata"]["labels"]["team"] == found["metadata"]["labels"]["team"] == "ml"
    assert environment_of(found)["HF_TOKEN"] == {"secretKeyRef": {"name": "hugging", "key": "token"}}
    assert pod["spec"]["serviceAccountName"] == "trainer"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert {"key": "team", "operator": "Equal", "value": "ml"} in pod["spec"]["tolerations"]
    assert "bad-node" in str(pod["spec"]["affinity"])
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300
    check(found)


def asked_for(found: Any) -> set[str]:
    """The names of all that an object's containers ask for."""
    if isinstance(found, list):
        return {name for each in found for name in asked_for(each)}
    if not isinstance(found, dict):
        return set()
    amounts = [value for key, value in found.items() if key in ("requests", "limits")]
    return {name for amount in amounts for name in amount} | asked_for(list(found.values()))


@pytest.mark.parametrize(("name", "kind"), [*(("eks-p5", kind) for kind in KINDS), ("gke-a3-mega", "jobset")])
def test_pods_in_a_queue_that_covers_devices_alone_ask_for_nothing_else(name: str, kind: str) -> None:
    """For Kueue every container counts, the fabric's and the one of Ray's submitter too."""
    objects = all_objects(
        render(job_of(load_cluster(name, [f"kubernetes.kind={kind}", "kubernetes.requests=devices"])))
    )
    for found in objects:
        check(found)
    (gang,) = filter(is_training, objects)
    assert asked_for(gang) == {"nvidia.com/gpu"} | ({"vpc.amazonaws.com/efa"} if name == "eks-p5" else set())
    # Stages on CPUs are not in that queue.
    (fetch,) = [each for each in objects if each["metadata"]["name"].endswith("-fetch")]
    assert {"cpu", "memory"} == asked_for(fetch)


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_every_pod_puts_up_with_the_taints_that_the_cluster_file_names(kind: str) -> None:
    """Where all nodes have GPUs, the driver too must run on them, and what submits to Ray."""
    taint = {"key": "nvidia.com/gpu", "operator": "Exists"}
    options = [
        f"kubernetes.kind={kind}",
        "kubernetes.tolerations=[{key: nvidia.com/gpu}]",
        "kubernetes.avoid_nodes=[bad]",
    ]
    pods = [pod for found in all_objects(render(job_of(load_cluster("eks-p5", options)))) for pod in pod_specs(found)]
    assert len(pods) == (6 if kind == "rayjob" else 4)
    for pod in pods:
        assert pod["tolerations"].count(taint) == 1, pod["containers"][0]["name"]
        assert "bad" in str(pod["affinity"]), pod["containers"][0]["name"]


def test_the_image_is_pulled_beforehand_where_that_is_asked() -> None:
    cluster = load_cluster("gke-a3-mega", ["kubernetes.pre_pull=true"])
    request = render(job_of(cluster))
    (found,) = [each for each in all_objects(request) if each["kind"] == "DaemonSet"]
    check(found)
    assert found["spec"]["template"]["spec"]["initContainers"][0]["image"] == cluster.image
    assert "nvidia.com/gpu" not in str(found["spec"]["template"]["spec"]["containers"])


def test_everything_of_a_job_is_found_by_its_label() -> None:
    for found in all_objects(render(job_of("gke-a3-mega"))):
        labels = found["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == "code":
            continue  # all jobs of the namespace share it
        assert labels["app.kubernetes.io/instance"] == "llama-1a2b3c4d"
        assert {f"app.kubernetes.io/{key}" for key in ("name", "component", "managed-by", "version")} <= set(labels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_name_still_fits_with_all_suffixes(kind: str) -> None:
    name = "a" * 40 + "-1a2b3c4d"
    cluster = load_cluster("eks-p5", [f"kubernetes.kind={kind}"])
    job = job_of(cluster, stages=stages_of(cluster, nodes=1024), name=name)
    for found in all_objects(render(job)):
        check(found)
        if is_training(found):
            # JobSet's own check: <jobset>-<job>-0-<index>-<five letters> is a label of 63.
            assert len(found["metadata"]["name"] + "-train-0-1023-abcde") <= 63
    other = job_of(cluster, name="a" * 40 + "-1a2b3c4e")
    assert not set(stage_ids(job).values()) & set(stage_ids(other).values())


def test_large_files_are_dealt_among_config_maps_that_kubectl_can_apply() -> None:
    files = {f"part-{number}.yaml": "x: 1\n" * 20_000 for number in range(6)}
    maps = [each for each in all_objects(render(job_of("eks-p5", files=files))) if each["kind"] == "ConfigMap"]
    assert len([each for each in maps if "-files-" in each["metadata"]["name"]]) > 3
    found = training(job_of("eks-p5", files=files))
    sources = gang_pod(found)["spec"]["volumes"][0]["projected"]["sources"]
    assert {source["configMap"]["name"] for source in sources} <= {each["metadata"]["name"] for each in maps}


def test_files_in_folders_keep_their_place() -> None:
    found = training(job_of("eks-p5", files={"scripts/my data.py": "print()\n", "job.json": "{}"}))
    (source,) = gang_pod(found)["spec"]["volumes"][0]["projected"]["sources"]
    assert "scripts/my data.py" in [item["path"] for item in source["configMap"]["items"]]
    for each in all_objects(render(job_of("eks-p5", files={"scripts/my data.py": "print()\n"}))):
        check(each)


def test_code_is_cut_into_pieces_and_more_than_config_maps_carry_is_refused() -> None:
    code = CodeArchive("code.tar.xz", "ab" * 32, bytes(range(256)) * 2000, "0.1.0")
    request = render(job_of("eks-p5", code=code))
    maps = [each for each in all_objects(request) if "-code-" in each["metadata"]["name"]]
    assert len(maps) == 4
    # None of it is in what people read, and no job's name is in theirs: all jobs of a namespace share them.
    assert "binaryData" not in request.text()
    assert "# code.yaml: ConfigMap/trainshed-code-abababababab-0 to trainshed-code-abababababab-3" in request.text()
    assert not any("app.kubernetes.io/instance" in each["metadata"]["labels"] for each in maps)
    assert all(len(next(iter(each["binaryData"].values()))) < 256 * 1024 for each in maps)
    with pytest.raises(InputError, match="the code has 5120 KiB, and ConfigMaps carry 4096 at most") as caught:
        render(job_of("eks-p5", code=CodeArchive("code.tar.xz", "ab" * 32, bytes(5 * 1024 * 1024), "0.1.0")))
    assert "trainshed image build" in (caught.value.hint or "")


def test_a_file_that_no_config_map_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"the job's file big\.txt has 2929 KiB"):
        render(job_of("eks-p5", files={"big.txt": "x" * 3_000_000}))


def test_nvlink_across_a_rack_gets_its_compute_domain_beside_the_job() -> None:
    cluster = cluster_of({"machine": "a4x", "kubernetes": {"namespace": "ml"}})
    objects = all_objects(render(job_of(cluster, stages=train_alone(gpus_per_node=4))))
    (domain,) = [each for each in objects if each["kind"] == "ComputeDomain"]
    assert domain["metadata"]["namespace"] == "ml"
    assert domain["metadata"]["labels"]["app.kubernetes.io/instance"] == "llama-1a2b3c4d"
    claim = gang_pod(objects[-1])["spec"]["resourceClaims"][0]["resourceClaimTemplateName"]
    assert domain["spec"]["channel"]["resourceClaimTemplate"]["name"] == claim


def test_a_training_on_processors_is_a_gang_without_gpus() -> None:
    found = training(job_of(cluster_of({"machine": None}), stages=(Stage("train", nodes=2),)))
    assert "resources" in gang_pod(found)["spec"]["containers"][0]
    assert "gpu" not in str(gang_pod(found)["spec"]["containers"][0]["resources"])
    check(found)

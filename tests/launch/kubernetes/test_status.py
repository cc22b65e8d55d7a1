"""From objects as an API server lists them to one sentence per stage."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.launch.kubernetes.kinds import KubeObject
from trainshed.launch.kubernetes.status import JobObjects, stage_states
from trainshed.launch.target import StageState

IDS = {"train": "JobSet/run"}
LINE = {"fetch": "Job/run-fetch", "prepare": "Job/run-prepare", "train": "JobSet/run"}
UNSCHEDULABLE = (
    "0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/12 nodes are available"
)
TRACE = "Traceback (most recent call last):\n  File x\nRuntimeError: CUDA error: an illegal memory access\n"


def jobset(
    *conditions: tuple[str, str], restarts: int = 0, suspend: bool = False, queue: str | None = None
) -> KubeObject:
    gang = {"replicas": 1, "template": {"spec": {"parallelism": 4}}}
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    listed = [{"type": kind, "status": "True", "message": message} for kind, message in conditions]
    return {
        "kind": "JobSet",
        "metadata": {"name": "run", "uid": "u", "labels": labels},
        "spec": {"replicatedJobs": [gang], "suspend": suspend},
        "status": {"conditions": listed, "restarts": restarts},
    }


def cpu_job(condition: str | None = None) -> KubeObject:
    conditions = [{"type": condition, "status": "True", "message": "Job has reached the specified backoff limit"}]
    status = {"conditions": conditions if condition else []}
    return {"kind": "Job", "metadata": {"name": "run-x", "uid": "j"}, "spec": {"parallelism": 1}, "status": status}


def pod(index: int, *, node: str | None = "set", stage: str = "train", **status: Any) -> KubeObject:
    labels = {"app.kubernetes.io/component": stage, "batch.kubernetes.io/job-completion-index": str(index)}
    spec = {"nodeName": f"node-{index}"} if node else {}
    return {
        "metadata": {"name": f"run-{stage}-0-{index}", "labels": labels},
        "spec": spec,
        "status": {"phase": "Running"} | status,
    }


def container(**state: Any) -> list[KubeObject]:
    return [{"name": "train", "image": "registry/trainshed:1", "state": state}]


def ended(code: int, *, reason: str = "Error", message: str = "", at: str = "2026-11-15T10:00:00Z") -> list[KubeObject]:
    return container(terminated={"exitCode": code, "reason": reason, "message": message, "finishedAt": at})


def workload(*conditions: tuple[str, str, str], checks: list[KubeObject] | None = None) -> KubeObject:
    listed = [{"type": kind, "status": status, "message": message} for kind, status, message in conditions]
    metadata = {"name": "w", "ownerReferences": [{"uid": "u"}]}
    return {"metadata": metadata, "status": {"conditions": listed, "admissionChecks": checks or []}}


def state_of(found: KubeObject | None, *pods: KubeObject, workloads: tuple[KubeObject, ...] = ()) -> StageState:
    (state,) = stage_states(IDS, JobObjects({"train": found}, pods, workloads))
    return state


def waiting(index: int) -> KubeObject:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
    return pod(index, node=None, phase="Pending", conditions=[condition])


def test_a_training_that_runs_has_nothing_to_explain() -> None:
    state = state_of(jobset(), *(pod(index) for index in range(4)))
    assert (state.state, state.reason, state.restarts) == ("running", "", 0)
    assert state.nodes == tuple(f"run-train-0-{index}" for index in range(4))


def test_a_training_that_was_started_again_says_how_often_and_why() -> None:
    pods = [pod(index) for index in range(4)]
    pods[2]["status"]["containerStatuses"] = [
        {"name": "train", "state": {"running": {}}, "lastState": ended(1, message=TRACE)[0]["state"]}
    ]
    state = state_of(jobset(restarts=2), *pods)
    assert state.state == "running"
    assert state.restarts == 2
    assert state.reason == (
        "Started again 2 times. Last line before: RuntimeError: CUDA error: an illegal memory access"
    )


def test_no_quota_is_said_in_kueues_words_with_the_queue() -> None:
    message = "couldn't assign flavors to pod set train: insufficient quota for nvidia.com/gpu in flavor h100, 16 > 8"
    waits = workload(("QuotaReserved", "False", message))
    state = state_of(jobset(suspend=True, queue="gpus"), workloads=(waits,))
    assert (state.state, state.reason) == ("waiting", f"It waits for quota in gpus: {message}.")


def test_quota_without_nodes_names_the_check_that_is_pending() -> None:
    checks = [{"name": "dws-prov", "state": "Pending", "message": "Waiting for resources. Stockout"}]
    waits = workload(("QuotaReserved", "True", ""), checks=checks)
    state = state_of(jobset(suspend=True, queue="gpus"), workloads=(waits,))
    assert state.reason == (
        "It has quota in gpus and waits for nodes: dws-prov is Pending (Waiting for resources. Stockout)."
    )


def test_what_kueue_took_back_is_said() -> None:
    taken = workload(("QuotaReserved", "False", "x"), ("Evicted", "True", "Preempted to accommodate a workload"))
    taken["status"]["conditions"][1]["reason"] = "Preempted"
    state = state_of(jobset(suspend=True, queue="gpus"), workloads=(taken,))
    assert state.reason == "Kueue has taken its nodes (Preempted): Preempted to accommodate a workload."


def test_a_queue_that_nobody_serves_is_asked_about() -> None:
    state = state_of(jobset(suspend=True, queue="gpsu"))
    assert state.reason == "Kueue has not looked at it yet: is there a queue gpsu?"
    by_hand = state_of(jobset(suspend=True))
    assert by_hand.reason == "It is suspended, and no queue will start it: somebody has done that by hand."


def test_half_a_gang_says_how_much_of_it_is_placed_and_why_not_the_rest() -> None:
    state = state_of(jobset(), pod(0), waiting(1), pod(2), waiting(3))
    assert state.state == "waiting"
    assert state.reason == (f"Only 2 of 4 pods have a node, which wait for the others: {UNSCHEDULABLE}.")


def test_a_gang_without_nodes_says_why() -> None:
    state = state_of(jobset(), *(waiting(index) for index in range(4)))
    assert state.reason == f"None of 4 pods has a node yet: {UNSCHEDULABLE}."
    assert state_of(jobset()).reason == "None of 4 pods has a node yet."


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_cannot_be_pulled_is_named(reason: str) -> None:
    message = 'Back-off pulling image "registry/trainshed:1": not found'
    broken = pod(0, phase="Pending", containerStatuses=container(waiting={"reason": reason, "message": message}))
    state = state_of(jobset(), broken, pod(1), pod(2), pod(3))
    assert state.state == "waiting"
    assert state.reason == f"The image registry/trainshed:1 cannot be pulled ({message})."


def test_a_secret_that_is_missing_is_named() -> None:
    waits = {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}
    state = state_of(jobset(), pod(0, phase="Pending", containerStatuses=container(waiting=waits)))
    assert state.reason == 'Pod run-train-0-0 on node-0 cannot start its container: secret "hf-token" not found.'


def test_pods_that_are_still_starting_are_counted() -> None:
    state = state_of(jobset(), pod(0), pod(1, phase="Pending"), pod(2), pod(3, phase="Pending"))
    assert state.state == "waiting"
    assert state.reason == "2 of 4 pods run; the others pull their image or install the fabric's plugin."


def test_a_container_that_used_too_much_memory_is_named_with_its_node() -> None:
    killed = pod(2, phase="Failed", containerStatuses=ended(137, reason="OOMKilled"))
    state = state_of(jobset(("Failed", "jobset failed"), restarts=3), pod(0), killed)
    assert (state.state, state.exit_code) == ("failed", 137)
    assert state.reason == (
        "Pod run-train-0-2 on node-2 was killed for using more memory than it may (OOMKilled) after 3 restarts."
    )


def test_the_pod_that_ended_first_explains_the_failure() -> None:
    first = pod(3, phase="Failed", containerStatuses=ended(1, message=TRACE, at="2026-11-15T10:00:00Z"))
    later = pod(0, phase="Failed", containerStatuses=ended(143, message="peer failed", at="2026-11-15T10:00:21Z"))
    state = state_of(jobset(("Failed", "x")), later, first)
    assert state.reason == (
        "Pod run-train-0-3 on node-3 exited with 1. Last line: RuntimeError: CUDA error: an illegal memory access"
    )
    assert state.exit_code == 1


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("DeletionByTaintManager", "lost its node: the node went down or was tainted"),
        ("PreemptionByScheduler", "was driven out by a job of higher priority"),
        ("EvictionByEvictionAPI", "was evicted: somebody drains its node"),
        ("TerminationByKubelet", "was ended by its node, which shuts down or is short of resources"),
    ],
)
def test_a_lost_node_is_told_from_a_failure_of_the_program(reason: str, words: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": "2026-11-15T09"}
    lost = pod(1, phase="Failed", conditions=[condition], containerStatuses=ended(137))
    others = pod(0, phase="Failed", containerStatuses=ended(1, message="NCCL error"))
    state = state_of(jobset(("Failed", "x")), others, lost)
    assert state.reason.startswith(f"Pod run-train-0-1 on node-1 {words}.")


@pytest.mark.parametrize(("reason", "words"), [("NodeLost", "lost its node"), ("Evicted", "was evicted")])
def test_what_the_node_itself_says_of_its_end_is_repeated(reason: str, words: str) -> None:
    gone = pod(1, phase="Failed", reason=reason, message="The node was low on resource: ephemeral-storage.")
    state = state_of(jobset(("Failed", "x")), gone)
    assert state.reason == f"Pod run-train-0-1 on node-1 {words}: The node was low on resource: ephemeral-storage."


def test_a_failure_without_pods_repeats_the_controller() -> None:
    state = state_of(jobset(("Failed", "jobset failed due to reaching max number of restarts.")))
    assert state.reason == "Jobset failed due to reaching max number of restarts."


def test_done_is_done() -> None:
    state = state_of(jobset(("Completed", "jobset completed successfully")), pod(0, phase="Succeeded"))
    assert (state.state, state.exit_code, state.reason) == ("done", 0, "")


def test_an_object_that_is_gone_is_not_called_failed() -> None:
    state = state_of(None)
    assert (state.state, state.reason) == (
        "unknown",
        "It is not in the cluster (any more): cancelled, or ended long ago.",
    )


def line_states(fetch: KubeObject | None, driver: KubeObject | None, *pods: KubeObject) -> tuple[StageState, ...]:
    stages = {"fetch": fetch, "prepare": None, "train": None}
    return stage_states(LINE, JobObjects(stages, pods, driver_job=driver, has_driver=True))


def test_later_stages_wait_for_earlier_ones() -> None:
    states = line_states(cpu_job(), cpu_job(), pod(0, stage="fetch"))
    assert [(state.state, state.reason) for state in states] == [
        ("running", ""),
        ("waiting", "It starts when fetch is done."),
        ("waiting", "It starts when prepare is done."),
    ]


def test_stages_behind_a_failed_one_never_start() -> None:
    failed = pod(0, stage="fetch", phase="Failed", containerStatuses=ended(2, message="hf://x: nothing there\n"))
    states = line_states(cpu_job("Failed"), cpu_job(), failed)
    assert [state.state for state in states] == ["failed", "cancelled", "cancelled"]
    assert states[0].reason.endswith("exited with 2. Last line: hf://x: nothing there")
    assert states[1].reason == states[2].reason == "It never starts: fetch failed."


def test_a_driver_that_failed_says_why_nothing_starts() -> None:
    ended_driver = pod(0, stage="driver", phase="Failed", containerStatuses=ended(1, message="jobs is forbidden\n"))
    states = line_states(None, cpu_job("Failed"), ended_driver)
    assert states[0].state == "failed"
    assert states[0].reason == (
        "The driver failed: Pod run-driver-0-0 on node-0 exited with 1. Last line: jobs is forbidden"
    )


def test_a_driver_that_has_no_image_yet_says_so() -> None:
    waits = {"reason": "ErrImagePull", "message": "denied"}
    driver_pod = pod(0, stage="driver", phase="Pending", containerStatuses=container(waiting=waits))
    states = line_states(None, cpu_job(), driver_pod)
    assert states[0].reason == (
        "The driver is about to create it: the image registry/trainshed:1 cannot be pulled (denied)."
    )


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ({"kind": "PyTorchJob", "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}, "done"),
        ({"kind": "PyTorchJob", "status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "failed"),
        ({"kind": "TrainJob", "status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "done"),
        ({"kind": "TrainJob", "status": {"conditions": [{"type": "Suspended", "status": "True"}]}}, "waiting"),
        ({"kind": "RayJob", "status": {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}}, "done"),
        ({"kind": "RayJob", "status": {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed"}}, "failed"),
        ({"kind": "RayJob", "status": {"jobDeploymentStatus": "Suspended"}}, "waiting"),
        ({"kind": "RayJob", "status": {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}}, "waiting"),
    ],
)
def test_every_kind_is_understood(found: KubeObject, state: str) -> None:
    specs = {
        "PyTorchJob": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 3}}},
        "TrainJob": {"trainer": {"numNodes": 4}},
        "RayJob": {"rayClusterSpec": {"workerGroupSpecs": [{"replicas": 3}]}},
    }
    whole = {"metadata": {"name": "run", "uid": "u"}, "spec": specs[found["kind"]]} | found
    assert state_of(whole).state == state
    if state == "waiting" and "Suspended" not in str(found):
        assert state_of(whole).reason == "None of 4 pods has a node yet."


def test_ray_says_itself_why_it_failed() -> None:
    status = {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "message": "Job entrypoint command\nfailed"}
    found = {"kind": "RayJob", "metadata": {"name": "run", "uid": "u"}, "spec": {}, "status": status}
    assert state_of(found).reason == "Job entrypoint command failed."


def test_pods_of_a_pytorchjob_are_in_the_order_of_their_ranks() -> None:
    def replica(kind: str, index: int) -> KubeObject:
        found = pod(index)
        found["metadata"] = {
            "name": f"run-{kind}-{index}",
            "labels": {
                "app.kubernetes.io/component": "train",
                "training.kubeflow.org/replica-type": kind,
                "training.kubeflow.org/replica-index": str(index),
            },
        }
        return found

    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}}
    found = {"kind": "PyTorchJob", "metadata": {"name": "run", "uid": "u"}, "spec": spec, "status": {}}
    state = state_of(found, replica("worker", 1), replica("worker", 0), replica("master", 0))
    assert state.nodes == ("run-master-0", "run-worker-0", "run-worker-1")

"""How a server stands: how many of its replicas are ready, and why the others are not. Pure, as `status` is."""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import Object
from trainshed.launch.kubernetes.live.listing import Listing
from trainshed.launch.kubernetes.live.queueing import QUEUE, is_gated, why_queued
from trainshed.launch.kubernetes.live.reasons import Reason, condition, failure_of, last_line, sentence, trouble_of
from trainshed.launch.kubernetes.live.standing import ready_replicas, standing, wanted_pods
from trainshed.launch.target import StageState

_WRONG_INPUT = 2
"""The exit code of what would only fail again, of ours (`errors.py`) as of any program that refuses its flags."""


def serving_state(stage: str, written: str, found: Object, listing: Listing) -> StageState:
    """Return how a stage that serves stands; it is never done, and failed only where waiting does not help."""
    pods = current_pods(stage, listing)
    names = tuple(pod["metadata"]["name"] for pod in pods if is_ready(pod)) or tuple(
        pod["metadata"]["name"] for pod in pods
    )
    ready, wanted = ready_replicas(found), wanted_pods(found)
    restarts = sum(each.get("restartCount", 0) for pod in pods for each in _statuses(pod))
    if ready >= wanted:
        return StageState(stage, "serving", f"Serving, {ready} of {wanted} ready.", written, names, restarts)
    why = _why_not(found, pods, wanted, listing)
    if ready:
        said = sentence(f"serving, {ready} of {wanted} ready: {why.sentence}")
        return StageState(stage, "serving", said, written, names, restarts)
    state = "failed" if why.failed else "waiting"
    return StageState(stage, state, sentence(why.sentence), written, names, restarts, why.exit_code)


def current_pods(stage: str, listing: Listing) -> list[Object]:
    """Return a server's pods without those that are being ended."""
    return [pod for pod in listing.pods_of(stage) if "deletionTimestamp" not in pod["metadata"]]


def is_placed(stage: str, found: Object, listing: Listing) -> bool:
    """Whether all replicas have a node, so that nothing but they themselves keeps them from being ready."""
    pods = current_pods(stage, listing)
    return len(pods) >= wanted_pods(found) and all(pod.get("spec", {}).get("nodeName") for pod in pods)


def is_ready(pod: Object) -> bool:
    """Whether a pod answers."""
    return condition(pod, "Ready").get("status") == "True"


def _why_not(found: Object, pods: list[Object], wanted: int, listing: Listing) -> Reason:
    """The first reason that applies; `failed` where time is up or another start would fail alike."""
    gated = next((pod for pod in pods if is_gated(pod)), None)
    if gated is not None:
        queue = found["metadata"].get("labels", {}).get(QUEUE, "its queue")
        return Reason(why_queued(queue, listing.workload_of(gated)), False)
    refused = condition(found, "ReplicaFailure")
    if len(pods) < wanted:
        message = refused.get("message", "").strip() if refused.get("status") == "True" else ""
        said = f"a pod cannot be made: {message}" if message else f"{len(pods)} of {wanted} pods are made"
        return Reason(said, False)
    unplaced = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if unplaced:
        message = condition(unplaced[0], "PodScheduled").get("message", "").strip()
        said = f": {message}" if message else ""
        return Reason(f"{len(unplaced)} of {wanted} pods have no node yet{said}", False)
    late = standing(found).phase == "failed"
    unready = [pod for pod in pods if not is_ready(pod)]
    trouble = trouble_of(unready)
    crashed = failure_of(unready)
    if trouble is None and crashed is not None:
        trouble = Reason(f"{crashed.sentence} and was started again", False, crashed.exit_code)
    if trouble is None:
        trouble = Reason(_loading(unready, listing), False)
    line = last_line(unready)
    said = f"{trouble.sentence}. Last line: {line}" if line else trouble.sentence
    hopeless = crashed is not None and crashed.exit_code == _WRONG_INPUT
    return Reason(said, late or hopeless, trouble.exit_code)


def _loading(pods: list[Object], listing: Listing) -> str:
    """What the probes say about pods that run and are not ready."""
    names = {pod["metadata"]["name"] for pod in pods}
    told = [each for each in listing.probe_failures if each.get("involvedObject", {}).get("name") in names]
    up = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if not up:
        return f"{len(pods)} pods pull their image"
    said = "its server loads the weights" if up == 1 else f"{up} servers load the weights"
    if not told:
        return said
    newest = max(told, key=lambda each: each.get("lastTimestamp") or "")
    return f"{said} ({newest['message'].strip().splitlines()[0]})"


def _statuses(pod: Object) -> list[Object]:
    return pod.get("status", {}).get("containerStatuses") or []

"""Why pods wait or fail, in a sentence: the first that applies, the worst before the harmless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainshed.launch.kubernetes.kinds import Object

_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Reasons of the condition DisruptionTarget, in people's words.
_DISRUPTIONS = {
    "PreemptionByScheduler": "was driven out by a job of higher priority",
    "DeletionByTaintManager": "lost its node: the node went down or was tainted",
    "EvictionByEvictionAPI": "was evicted: somebody drains its node",
    "DeletionByPodGC": "lost its node: the node is gone",
    "TerminationByKubelet": "was ended by its node, which shuts down or is short of resources",
}
OUT_OF_MEMORY = 137


@dataclass(frozen=True)
class Reason:
    """Why a pod is not what it should be; `failed`: it will not become that by itself."""

    sentence: str
    failed: bool
    exit_code: int | None = None


def failure_of(pods: Sequence[Object]) -> Reason | None:
    """Return why a gang failed: what ended first says it, the others followed."""
    ended = sorted(_failures(pods), key=lambda found: found[0])
    return ended[0][1] if ended else None


def trouble_of(pods: Sequence[Object]) -> Reason | None:
    """Return what keeps pods that have a node from running: an image, a secret, a mount."""
    for pod in pods:
        for status in _statuses(pod):
            waiting = status.get("state", {}).get("waiting") or {}
            reason, message = waiting.get("reason", ""), _first_line(waiting.get("message", ""))
            if reason in _PULL_FAILURES:
                said = f" ({message})" if message else ""
                return Reason(f"the image {status.get('image') or 'of a container'} cannot be pulled{said}", True)
            if reason in _CONFIG_FAILURES:
                return Reason(f"{_name(pod)} cannot start its container: {message or reason}", True)
            if reason == "CrashLoopBackOff":
                ended = (status.get("lastState") or {}).get("terminated")
                said = _ended(pod, ended) if ended else Reason(f"{_name(pod)} ends again and again", True)
                return Reason(f"{said.sentence}; it is started again soon", False, said.exit_code)
    return None


def unplaced(pods: Sequence[Object], wanted: int) -> Reason | None:
    """Return why pods have no node; half a gang that has one holds it for nothing."""
    waiting = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if not waiting and len(pods) >= wanted:
        return None
    placed = len(pods) - len(waiting)
    why = next((condition(pod, "PodScheduled").get("message") for pod in waiting), None)
    said = f": {_first_line(why)}" if why else ""
    if placed:
        return Reason(f"only {placed} of {wanted} pods have a node, which wait for the others{said}", False)
    return Reason(f"none of {wanted} pods has a node yet{said}", False)


def last_line(pods: Sequence[Object]) -> str:
    """Return the last line that the container which failed first has left."""
    for _, terminated in sorted(_terminations(pods), key=lambda found: found[0]):
        lines = [line for line in (terminated.get("message") or "").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return ""


def _failures(pods: Sequence[Object]) -> Iterator[tuple[str, Reason]]:
    for pod in pods:
        status = pod.get("status", {})
        disruption = condition(pod, "DisruptionTarget")
        if disruption.get("status") == "True":
            what = _DISRUPTIONS.get(disruption.get("reason", ""), _first_line(disruption.get("message", "was ended")))
            yield disruption.get("lastTransitionTime", ""), Reason(f"{_name(pod)} {what}", True)
            continue
        if status.get("reason") in ("NodeLost", "Evicted", "Shutdown", "NodeShutdown", "Terminated"):
            message = _first_line(status.get("message", "")) or status["reason"]
            lost = "lost its node" if status["reason"] == "NodeLost" else "was evicted"
            yield _when(pod), Reason(f"{_name(pod)} {lost}: {message}", True)
            continue
        for when, terminated in _terminations([pod]):
            yield when, _ended(pod, terminated)


def _terminations(pods: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Containers that ended badly, with the time; earlier ends count while a container is being started again."""
    for pod in pods:
        for status in _statuses(pod):
            for state in (status.get("state"), status.get("lastState")):
                terminated = (state or {}).get("terminated")
                if terminated and terminated.get("exitCode"):
                    yield terminated.get("finishedAt", ""), terminated


def _ended(pod: Object, terminated: Object) -> Reason:
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        return Reason(f"{_name(pod)} was killed for using more memory than it may (OOMKilled)", True, code)
    if code is not None and code > 128:
        return Reason(f"{_name(pod)} was ended by signal {code - 128}", True, code)
    return Reason(f"{_name(pod)} exited with {code}", True, code)


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def condition(found: Object, kind: str) -> Object:
    """Return a condition of an object; nothing where it has none such."""
    return next((each for each in (found.get("status") or {}).get("conditions", ()) if each["type"] == kind), {})


def sentence(text: str) -> str:
    """Write a text as a sentence."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _when(pod: Object) -> str:
    return max(
        (each.get("lastTransitionTime") or "" for each in pod.get("status", {}).get("conditions", ())), default=""
    )


def _name(pod: Object) -> str:
    node = pod.get("spec", {}).get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")


def _first_line(text: str) -> str:
    return next(iter((text or "").strip().splitlines()), "").rstrip(".")

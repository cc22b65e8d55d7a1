"""From what a cluster lists to one sentence per stage; pure, so that every sentence has a test."""

from __future__ import annotations

from collections.abc import Mapping

from trainshed.launch.kubernetes.kinds import DEPLOYMENT, Object
from trainshed.launch.kubernetes.live.listing import Listing
from trainshed.launch.kubernetes.live.queueing import QUEUE, why_queued
from trainshed.launch.kubernetes.live.reasons import failure_of, last_line, sentence, trouble_of, unplaced
from trainshed.launch.kubernetes.live.serving import serving_state
from trainshed.launch.kubernetes.live.standing import Standing, is_made_anew, standing, wanted_pods
from trainshed.launch.target import StageState


def stage_states(ids: Mapping[str, str], listing: Listing) -> tuple[StageState, ...]:
    """Return how each stage stands, in order."""
    states: list[StageState] = []
    for stage, written in ids.items():
        found = listing.stages.get(stage)
        before = states[-1] if states else None
        states.append(
            _absent(stage, written, before, listing) if found is None else _state(stage, written, found, listing)
        )
    return tuple(states)


def _state(stage: str, written: str, found: Object, listing: Listing) -> StageState:
    if found["kind"] == DEPLOYMENT.name:
        return serving_state(stage, written, found, listing)
    stands = standing(found)
    pods = listing.pods_of(stage)
    names = tuple(pod["metadata"]["name"] for pod in pods)
    if stands.phase == "done":
        return StageState(stage, "done", "", written, names, stands.restarts, 0)
    if stands.phase == "failed":
        reason, code = _why_failed(stands, pods)
        if listing.driver is not None and standing(listing.driver).phase == "active" and is_made_anew(found):
            again = f"{reason} The driver makes it anew."
            return StageState(stage, "waiting", again, written, names, stands.restarts, code)
        return StageState(stage, "failed", reason, written, names, stands.restarts, code)
    if stands.phase == "suspended":
        return StageState(stage, "waiting", _why_suspended(found, listing), written, (), stands.restarts)
    trouble = trouble_of(pods)
    if trouble is not None:
        state = "waiting" if trouble.failed else "running"
        return StageState(stage, state, sentence(trouble.sentence), written, names, stands.restarts, trouble.exit_code)
    missing = unplaced(pods, wanted_pods(found))
    if missing is not None and not _has_ended(pods):
        return StageState(stage, "waiting", sentence(missing.sentence), written, names, stands.restarts)
    if not all(_is_up(pod) for pod in pods):
        up = sum(map(_is_up, pods))
        reason = f"{up} of {len(pods)} pods run; the others pull their image or install the fabric's plugin"
        return StageState(stage, "waiting", sentence(reason), written, names, stands.restarts)
    return StageState(stage, "running", _restarted(stands, pods), written, names, stands.restarts)


def _absent(stage: str, written: str, before: StageState | None, listing: Listing) -> StageState:
    """A stage whose object is not there: not yet, never, or no more."""
    if not listing.has_driver:
        return StageState(
            stage, "unknown", "It is not in the cluster (any more): cancelled, or ended long ago.", written
        )
    if before is not None and before.state in ("failed", "cancelled"):
        reason = f"It never starts: {before.stage} failed." if before.state == "failed" else before.reason
        return StageState(stage, "cancelled", reason, written)
    if listing.driver is None:
        return StageState(stage, "unknown", "Neither it nor its driver is in the cluster.", written)
    if standing(listing.driver).phase == "failed":
        pods = listing.pods_of("driver")
        reason, code = _why_failed(standing(listing.driver), pods)
        return StageState(stage, "failed", f"The driver failed: {reason}", written, exit_code=code)
    if before is not None and before.state not in ("done",):
        return StageState(stage, "waiting", f"It starts when {before.stage} is done.", written)
    pods = listing.pods_of("driver")
    trouble = trouble_of(pods) or unplaced(pods, 1)
    why = f": {trouble.sentence}" if trouble is not None else ""
    return StageState(stage, "waiting", sentence(f"the driver is about to create it{why}"), written)


def _why_failed(stands: Standing, pods: list[Object]) -> tuple[str, int | None]:
    reason = failure_of(pods)
    line = last_line(pods)
    said = [reason.sentence if reason is not None else stands.message or "it failed"]
    if reason is not None and stands.restarts:
        said.append(f"after {stands.restarts} restarts")
    whole = sentence(" ".join(said))
    return (f"{whole} Last line: {line}" if line else whole), (reason.exit_code if reason is not None else None)


def _why_suspended(found: Object, listing: Listing) -> str:
    """What Kueue says; it suspends what it has not admitted."""
    queue = found["metadata"].get("labels", {}).get(QUEUE)
    if queue is None:
        return "It is suspended, and no queue will start it: somebody has done that by hand."
    return why_queued(queue, listing.workload_of(found))


def _restarted(stands: Standing, pods: list[Object]) -> str:
    if not stands.restarts:
        return ""
    line = last_line(pods)
    return f"Started again {stands.restarts} times." + (f" Last line before: {line}" if line else "")


def _is_up(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _has_ended(pods: list[Object]) -> bool:
    """Whether some pods have ended already: those that are missing then are not waited for."""
    return any(pod.get("status", {}).get("phase") in ("Succeeded", "Failed") for pod in pods)

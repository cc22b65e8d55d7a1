"""Why Kueue has not started something yet, in a sentence."""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import Object
from trainshed.launch.kubernetes.live.reasons import sentence

ADMISSION_GATE = "kueue.x-k8s.io/admission"
"""The gate that keeps a pod from being scheduled before its workload is admitted."""
QUEUE = "kueue.x-k8s.io/queue-name"


def is_gated(pod: Object) -> bool:
    """Whether Kueue still holds a pod back."""
    return any(gate["name"] == ADMISSION_GATE for gate in pod.get("spec", {}).get("schedulingGates", ()))


def why_queued(queue: str, workload: Object | None) -> str:
    """Return what Kueue says about a workload that it has not admitted."""
    if workload is None:
        return f"Kueue has not looked at it yet: is there a queue {queue}?"
    status = workload.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    evicted = conditions.get("Evicted", {})
    reserved = conditions.get("QuotaReserved", {})
    if conditions.get("Admitted", {}).get("status") == "True":
        return "Kueue has admitted it; its pods are about to be made."
    if reserved.get("status") == "True":
        checks = [
            f"{check['name']} is {check['state']}" + (f" ({check['message']})" if check.get("message") else "")
            for check in status.get("admissionChecks", ())
            if check.get("state") != "Ready"
        ]
        return sentence(f"it has quota in {queue} and waits for nodes: {', '.join(checks) or 'being admitted'}")
    if evicted.get("status") == "True":
        return sentence(f"Kueue has taken its nodes ({evicted.get('reason')}): {evicted.get('message', '')}")
    message = (reserved.get("message") or "it is its turn later").strip()
    return sentence(f"it waits for quota in {queue}: {message}")

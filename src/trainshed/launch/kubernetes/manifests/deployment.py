"""Serving as a Deployment with a Service before it: probes say when a server is up, ready and alive.

There is no preStop hook for our own server: TERM makes it unready, and it goes on taking questions for some seconds,
until the Service has forgotten its pod, and then finishes its answers. vLLM takes none from that moment on, so that its
pods wait before they are told.
"""

from __future__ import annotations

from math import ceil

from trainshed.launch.job import SERVICE_PORT, Serving
from trainshed.launch.kubernetes.kinds import DEPLOYMENT, SERVICE, Object, new_object
from trainshed.launch.kubernetes.manifests.naming import COMPONENT, INSTANCE, metadata
from trainshed.launch.kubernetes.manifests.pod import Container, Planned, pod_template, serving_port

_PORT = "http"
_EVERY_SECONDS = 5
_ANSWER_SECONDS = 5
# Missed answers in a row: one long pause of a busy process is no reason to load all weights again.
_LIVE_FAILURES = 6
_FORGET_SECONDS = 10
"""How long the proxies of a cluster take to send no more requests to a pod that is ending."""
_PLACED_SECONDS = 900
"""For images of some ten gigabytes, before the server itself starts."""


def service(plan: Planned) -> Object:
    """Return the address of all replicas."""
    ports = [{"name": _PORT, "port": SERVICE_PORT, "targetPort": _PORT, "protocol": "TCP"}]
    spec = {"type": "ClusterIP", "selector": _selected(plan), "ports": ports}
    return new_object(SERVICE, metadata(plan.job, plan.name, plan.stage.name), spec=spec)


def deployment(plan: Planned) -> Object:
    """Return the object of a stage that serves."""
    serving = _serving(plan)
    template = pod_template(plan, Container(plan.stage.name), restart_policy="Always")
    container = template["spec"]["containers"][0]
    container["ports"] = [{"name": _PORT, "containerPort": serving_port(serving), "protocol": "TCP"}]
    container |= _probes(serving)
    if plan.stage.script is not None:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_FORGET_SECONDS)]}}}
    # One more than asked for, and none less, while a new version takes over; a single server has no GPU beside its own.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    spec: Object = {
        "replicas": serving.replicas,
        "selector": {"matchLabels": _selected(plan)},
        "strategy": rolling if serving.replicas > 1 else {"type": "Recreate"},
        "progressDeadlineSeconds": serving.startup_seconds + _PLACED_SECONDS,
        "revisionHistoryLimit": 2,
        "template": template,
    }
    return new_object(DEPLOYMENT, plan.metadata, spec=spec)


def _probes(serving: Serving) -> Object:
    often = {"periodSeconds": _EVERY_SECONDS, "timeoutSeconds": _ANSWER_SECONDS}
    starts = ceil(serving.startup_seconds / _EVERY_SECONDS)
    return {
        "startupProbe": {"httpGet": _get(serving.live)} | often | {"failureThreshold": starts},
        "readinessProbe": {"httpGet": _get(serving.ready)} | often | {"failureThreshold": 2},
        "livenessProbe": {"httpGet": _get(serving.live)} | often | {"failureThreshold": _LIVE_FAILURES},
    }


def _get(path: str) -> Object:
    return {"path": path, "port": _PORT}


def _selected(plan: Planned) -> dict[str, str]:
    return {INSTANCE: plan.job.name, COMPONENT: plan.stage.name}


def _serving(plan: Planned) -> Serving:
    assert plan.stage.serving is not None
    return plan.stage.serving

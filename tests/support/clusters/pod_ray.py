"""Runs the pods of a RayJob as processes, with a real Ray: the parts of KubeRay's operator that our manifests count on.

The head and its workers start with the `ray start` that the operator generates from `rayStartParams` and the
container's limits, workers after its own init container has seen the head. Its submitter hands the entrypoint to the
head's dashboard, and what the dashboard says about it is the RayJob's status. A worker that ends is made anew; the
end of the head is the end of the job. Commands are those of kuberay's common/pod.go and common/job.go; the ports are
free ones of this machine, which all pods share.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.servers.shared_daemons import free_ports

if TYPE_CHECKING:
    from support.clusters.pod_runner import Gang, Pod, PodRunner

_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_WAIT_FOR_HEAD = "until ray health-check --address {address} >/dev/null 2>&1; do sleep 1; done"
_SUBMIT = """
until python -c "import urllib.request; r=urllib.request.urlopen('{url}/api/gcs_healthz', timeout=10); \
exit(0 if b'success' in r.read() else 1)" >/dev/null 2>&1; do sleep 1; done
if ! ray job status --address {url} {id} >/dev/null 2>&1; then
ray job submit --address {url} --no-wait --submission-id {id} -- {entrypoint}; fi
ray job logs --address {url} --follow {id}
"""


class PodsOfRayJob:
    """The Ray cluster of one RayJob, and the pod that submits its entrypoint."""

    def __init__(self, runner: PodRunner, path: str) -> None:
        from support.clusters.pod_runner import Gang

        self._runner, self._path = runner, path
        self._object = runner.server.objects[path]
        self._name = self._object["metadata"]["name"]
        self._id = f"{self._name}-{uuid.uuid4().hex[:5]}"
        self._port, self._dashboard, *self._agents = free_ports(8, 20000, 30000)
        # Short: a unix socket's path may have 107 characters.
        self._temporary = tempfile.mkdtemp(prefix="tsrj-", dir="/tmp")
        self._asked = 0.0
        spec = self._object["spec"]["rayClusterSpec"]
        self._groups = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())]
        counts = [1, *(group["replicas"] for group in self._groups[1:])]
        self._nodes = [group for group, count in zip(self._groups, counts, strict=True) for _ in range(count)]
        pods = [self._start_node(number) for number in range(len(self._nodes))]
        self._submitter = self._start_submitter()
        self.gang: Gang = Gang(path, [*pods, self._submitter], 0, self._object["metadata"]["uid"])
        self._write("Running", "PENDING")

    @property
    def nodes(self) -> list[Pod]:
        """The head and the workers."""
        return self.gang.pods[:-1]

    def look(self) -> None:
        """What the operator does from time to time."""
        if time.monotonic() < self._asked + 0.5:
            return
        self._asked = time.monotonic()
        # What a person reads with `kubectl logs`.
        log = self._submitter.log.read_text(errors="replace").splitlines()
        self._runner.server.logs[self._submitter.name, "ray-job-submitter"] = log
        status = self._status()
        if self.nodes[0].process.poll() is not None and status not in _ENDED:
            return self._end("Failed", "FAILED", "the head of the Ray cluster has ended")
        if status in _ENDED:
            self._submitter.process.wait(timeout=120)  # it follows the log to its end
            self._runner.server.logs[self._submitter.name, "ray-job-submitter"] = self._submitter.log.read_text(
                errors="replace"
            ).splitlines()
            return self._end("Complete" if status == "SUCCEEDED" else "Failed", status, f"the job has {status.lower()}")
        self._write("Running", status)
        for number, pod in enumerate(self.nodes):
            if pod.process.poll() is not None:
                self._runner.end_pod(pod)
                self._runner.server.objects.pop(pod.path, None)
                self.gang.pods[number] = self._start_node(number)
            for sidecar in self.gang.pods[number].sidecars:
                if sidecar.process.poll() is not None:
                    sidecar.start_again()

    def _status(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._dashboard}/api/jobs/{self._id}", timeout=30) as found:
                return json.load(found)["status"]
        except (urllib.error.URLError, OSError, ValueError):
            return "PENDING"

    def _write(self, deployment: str, status: str, message: str = "") -> None:
        found = self._runner.server.objects.get(self._path)
        if found is not None:
            found["status"] = {"jobDeploymentStatus": deployment, "jobStatus": status, "message": message}

    def _end(self, deployment: str, status: str, message: str) -> None:
        self._write(deployment, status, message)
        # `shutdownAfterJobFinishes`: the cluster goes; the submitter, a Job's pod, stays.
        self._runner.kill(self.gang)
        for pod in self.nodes:
            self._runner.server.objects.pop(pod.path, None)
        self.gang.pods, self.gang.ended = [], [self._submitter]
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _start_node(self, number: int) -> Pod:
        group, is_head = self._nodes[number], number == 0
        template = copy.deepcopy(group["template"])
        (container,) = template["spec"]["containers"]
        address = f"127.0.0.1:{self._port}"
        parameters = dict(group["rayStartParams"]) | _resources(container)
        parameters |= {"metrics-export-port": "0", "dashboard-agent-listen-port": str(self._agents[number])}
        # Ranges of ports are for nodes that have an address of their own, memory for those that have it alone.
        parameters |= {"min-worker-port": "0", "max-worker-port": "0", "object-store-memory": "100000000"}
        if is_head:
            parameters |= {"port": str(self._port), "dashboard-port": str(self._dashboard)}
            parameters |= {"ray-client-server-port": str(self._agents[-1])}
        else:
            parameters["address"] = address
            waiting = {key: container[key] for key in ("image", "env", "volumeMounts") if key in container}
            waiting |= {"name": "wait-gcs-ready", "command": ["/bin/bash", "-c", "--"]}
            waiting["args"] = [_WAIT_FOR_HEAD.format(address=address)]
            waiting["env"] = [*waiting.get("env", ()), *self._variables(address)]
            template["spec"].setdefault("initContainers", []).append(waiting)
        words = " ".join(f"--{key}={value}" for key, value in sorted(parameters.items()))
        container["command"] = ["/bin/bash", "-c", "--"]
        container["args"] = [f"ulimit -n 65536; ray start {'--head ' if is_head else ''}{words} --block"]
        container["env"] = [*container.get("env", ()), *self._variables(address)]
        peers = [f"{self._name}-{'head' if not node else f'worker-{node}'}" for node in range(len(self._nodes))]
        return self._runner.start_pod(template, number, peers, "none", str(uuid.uuid4()), 0, {})

    def _variables(self, address: str) -> list[dict[str, str]]:
        values = {"RAY_ADDRESS": address, "RAY_PORT": str(self._port), "RAY_USAGE_STATS_ENABLED": "0"}
        # Others use this machine's memory, and Ray would kill actors for it.
        values |= {"RAY_TMPDIR": self._temporary, "RAY_memory_monitor_refresh_ms": "0"}
        values |= {"RAY_enable_metrics_collection": "0", "RAY_worker_niceness": "0"}
        return [{"name": name, "value": value} for name, value in values.items()]

    def _start_submitter(self) -> Pod:
        template = copy.deepcopy(self._object["spec"]["submitterPodTemplate"])
        (container,) = template["spec"]["containers"]
        text = _SUBMIT.format(
            url=f"http://127.0.0.1:{self._dashboard}", id=self._id, entrypoint=self._object["spec"]["entrypoint"]
        )
        container["command"], container["args"] = ["/bin/bash", "-c", "--"], [text]
        container["env"] = [*container.get("env", ()), {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
        container["env"].append({"name": "RAY_TMPDIR", "value": self._temporary})
        Path(self._temporary, "ray").mkdir(exist_ok=True)
        return self._runner.start_pod(template, 0, [f"{self._name}-submitter"], "none", str(uuid.uuid4()), 0, {})


def _resources(container: dict[str, Any]) -> dict[str, str]:
    """What the operator tells Ray of a node's size: the container's limits, or what it requests."""
    resources = container.get("resources", {})
    sizes: dict[str, str] = {}
    cpus = resources.get("limits", {}).get("cpu") or resources.get("requests", {}).get("cpu")
    if cpus is not None:
        sizes["num-cpus"] = str(math.ceil(_quantity(cpus)))
    if (memory := resources.get("limits", {}).get("memory")) is not None:
        sizes["memory"] = str(int(_quantity(memory)))
    return sizes


def _quantity(text: str) -> float:
    units = {"m": 1e-3, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "k": 1e3, "M": 1e6, "G": 1e9}
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * units.get(unit, 1.0)

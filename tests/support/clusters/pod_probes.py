"""A pod that serves, as a kubelet sees to it: its probes are asked over HTTP, and what they say is done."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.clusters.kubernetes_server import KubernetesServer

if TYPE_CHECKING:
    from support.clusters.pod_runner import Pod

_ANSWER_SECONDS = 2.0
# So that a test sees a dead server restarted in seconds; the time to start is that of the manifest.
_LONGEST_PERIOD_SECONDS = 0.3


@dataclass
class ProbedPod:
    """The container of a pod, and what its probes have said."""

    pod: Pod
    template: dict[str, Any]
    restarts: int = 0
    is_started: bool = False
    is_ready: bool = False
    last_end: int | None = None
    _failures: dict[str, int] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)

    @property
    def container(self) -> dict[str, Any]:
        return self.template["spec"]["containers"][0]

    @property
    def port(self) -> int:
        return self.container["ports"][0]["containerPort"]

    def look(self, server: KubernetesServer, path: str) -> None:
        """Do what is due, and write down how it stands."""
        code = self.pod.process.poll()
        if code is not None:
            self._start_again(code)
        elif not self.is_started:
            self.is_started = self._answers("startupProbe", 0.2) is True
            if self._is_over("startupProbe", self.container["startupProbe"]["periodSeconds"]):
                self._stop()
        else:
            self.is_ready = self._answers("readinessProbe", _LONGEST_PERIOD_SECONDS) is not False and (
                self._failures.get("readinessProbe", 0) == 0
            )
            self._answers("livenessProbe", _LONGEST_PERIOD_SECONDS)
            if self._is_over("livenessProbe", _LONGEST_PERIOD_SECONDS):
                self._stop()
        self._write(server, path)

    def end(self) -> None:
        """What happens to a pod that is deleted: TERM, time to end, KILL."""
        self.pod.process.send_signal(signal.SIGTERM)
        self._wait(self.template["spec"]["terminationGracePeriodSeconds"])

    def _stop(self) -> None:
        self.pod.process.send_signal(signal.SIGTERM)
        self._wait(1.0)  # a server that does not answer is in no state to drain

    def _wait(self, seconds: float) -> None:
        try:
            self.pod.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.pod.process.kill()
            self.pod.process.wait()

    def _start_again(self, code: int) -> None:
        self.last_end = 128 - code if code < 0 else code
        self.restarts += 1
        self.is_started = self.is_ready = False
        self._failures.clear()
        self._asked.clear()
        self.pod.start_again()

    def _answers(self, probe: str, period_seconds: float) -> bool | None:
        """Ask, unless that was done a moment ago (None)."""
        if time.monotonic() - self._asked.get(probe, 0.0) < period_seconds:
            return None
        self._asked[probe] = time.monotonic()
        url = f"http://127.0.0.1:{self.port}{self.container[probe]['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS):
                self._failures[probe] = 0
                return True
        except (OSError, urllib.error.URLError):
            self._failures[probe] = self._failures.get(probe, 0) + 1
            return False

    def _is_over(self, probe: str, period_seconds: float) -> bool:
        """Whether a probe has failed for as long as it may."""
        asked_every = 0.2 if probe == "startupProbe" else period_seconds
        may = self.container[probe]["failureThreshold"] * period_seconds / asked_every
        return self._failures.get(probe, 0) >= may

    def _write(self, server: KubernetesServer, path: str) -> None:
        ready = int(self.is_ready)
        status: dict[str, Any] = {"restartCount": self.restarts, "state": {"running": {}}}
        if self.last_end is not None:
            message = self.pod.log.read_text()[-2000:]
            ended = {"exitCode": self.last_end, "reason": "Error", "message": message}
            status["lastState"] = {"terminated": ended}
        conditions = [{"type": "Ready", "status": str(self.is_ready)}]
        server.objects[self.pod.path]["status"] = {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": [status],
        }
        server.objects[path]["status"] = {"readyReplicas": ready, "updatedReplicas": 1, "replicas": 1}

"""Runs the pods of Jobs, JobSets and Deployments that lie in a test's API server, as processes on this machine.

The parts of a kubelet and of two controllers that our manifests count on: volumes at their paths (in a mount namespace
of each pod), variables with their references, names of pods in DNS (/etc/hosts), completion indexes, the rules of
podFailurePolicy and failurePolicy, a new uid for a job that is made anew; of a server its probes (`pod_probes.py`).
Needs root, for `unshare --mount`.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.clusters.kubernetes_server import KubernetesServer
from support.clusters.pod_probes import ProbedPod

# Each pod sees its own /etc (with its files and the names of its peers), /run, /var/tmp and /mnt.
_INSIDE = """
set -e
mount --make-rprivate /
for place in etc run var/tmp mnt; do mount --bind "$POD_ROOT/$place" "/$place"; done
while read -r source target; do mkdir -p "$target"; mount --bind "$source" "$target"; done <"$POD_ROOT/mounts"
hostname "$POD_HOSTNAME"
unset POD_ROOT POD_HOSTNAME
exec "$@"
"""


@dataclass
class Pod:
    """A pod under way."""

    name: str
    path: str
    process: subprocess.Popen[bytes]
    log: Path
    command: list[str]
    values: dict[str, str]

    def start_again(self) -> None:
        """What a kubelet does with a container that ended: the same once more, in the same pod."""
        self.process = _started(self.command, self.values, self.log)


@dataclass
class Gang:
    """The pods of one job, and what its object says about failures."""

    path: str
    pods: list[Pod]
    restarts: int = 0
    uid: str = ""
    """Of its object."""
    ended: list[Pod] = field(default_factory=list)


@dataclass
class PodRunner:
    """Everything that runs for a server."""

    server: KubernetesServer
    folder: Path
    namespace: str
    shared: Path
    """What every claim is."""
    service_account: Path
    gangs: dict[str, Gang] = field(default_factory=dict)
    servers: dict[str, ProbedPod] = field(default_factory=dict)
    """By the path of their Deployment; each has one replica."""

    def until(self, ask: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
        """Run whatever is there until something is true."""
        end = time.monotonic() + seconds
        while not (found := ask()):
            assert time.monotonic() < end, f"waited for {what}\n{self.logs()}"
            self._step()
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """End what still runs."""
        for gang in self.gangs.values():
            self._kill(gang)
        for served in self.servers.values():
            served.pod.process.kill()
            served.pod.process.wait()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def _step(self) -> None:
        for path, gang in list(self.gangs.items()):
            there = self.server.objects.get(path)
            if there is None or there["metadata"]["uid"] != gang.uid:
                self._collect(gang)
        for path in [*self.server.paths("/jobs/"), *self.server.paths("/jobsets/")]:
            if path not in self.gangs:
                self.gangs[path] = self._start(path)
        for gang in self.gangs.values():
            if gang.path in self.server.objects and gang.pods:
                self._look(gang)
        for path in self.server.paths("/deployments/"):
            if path not in self.servers:
                self.servers[path] = self._serve(path)
        for path, served in list(self.servers.items()):
            if path in self.server.objects:
                served.look(self.server, path)
            else:
                served.end()
                del self.server.objects[served.pod.path], self.servers[path]

    def _collect(self, gang: Gang) -> None:
        """What is left of an object that was deleted goes with it."""
        self._kill(gang)
        for pod in [*gang.pods, *gang.ended]:
            self.server.objects.pop(pod.path, None)
        del self.gangs[gang.path]

    def _serve(self, path: str) -> ProbedPod:
        found = self.server.objects[path]
        assert found["spec"]["replicas"] == 1, "all pods share this machine's ports"
        template = found["spec"]["template"]
        return ProbedPod(self._pod(template, 0, [found["metadata"]["name"]], "none", str(uuid.uuid4()), 0), template)

    def _start(self, path: str, restarts: int = 0) -> Gang:
        found = self.server.objects[path]
        is_set = found["kind"] == "JobSet"
        job = found["spec"]["replicatedJobs"][0]["template"]["spec"] if is_set else found["spec"]
        name = found["metadata"]["name"]
        base = f"{name}-{found['spec']['replicatedJobs'][0]['name']}-0" if is_set else name
        peers = [f"{base}-{index}" for index in range(job["completions"])]
        uid = str(uuid.uuid4()) if is_set else found["metadata"]["uid"]
        pods = [self._pod(job["template"], index, peers, name, uid, restarts) for index in range(job["completions"])]
        return Gang(path, pods, restarts, found["metadata"]["uid"])

    def _pod(
        self, template: dict[str, Any], index: int, peers: list[str], service: str, uid: str, restarts: int
    ) -> Pod:
        name = f"{peers[index]}-{restarts}-{uid[:4]}"
        root = Path(tempfile.mkdtemp(prefix="pod-", dir=self.folder))
        labels = template["metadata"]["labels"] | {
            "batch.kubernetes.io/controller-uid": uid,
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        spec = template["spec"]
        (container,) = spec["containers"]
        shutil.copytree("/etc", root / "etc", symlinks=True, ignore_dangling_symlinks=True)
        hosts = "".join(f"127.0.0.1 {peer}.{service} {peer}\n" for peer in peers)
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        for place in ("run", "var/tmp", "mnt"):
            (root / place).mkdir(parents=True)
        account = root / "run/secrets/kubernetes.io/serviceaccount"
        if spec.get("automountServiceAccountToken", True):
            shutil.copytree(self.service_account, account)
        volumes = {volume["name"]: self._volume(volume, root) for volume in spec["volumes"]}
        mounts = [(volumes[each["name"]], each["mountPath"]) for each in container["volumeMounts"]]
        (root / "mounts").write_text("".join(f"{source} {target}\n" for source, target in mounts if source))
        values = {"PATH": os.environ["PATH"], "HOME": "/root", "POD_ROOT": str(root), "POD_HOSTNAME": peers[index]}
        values |= {"JOB_COMPLETION_INDEX": str(index)}
        host, port = self.server.url.removeprefix("https://").split(":")
        values |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        values |= {each["name"]: _value(each, labels) for each in container["env"]}
        log = self.folder / f"{name}.log"
        inside = ["unshare", "--mount", "--uts", "bash", "-c", _INSIDE, "pod"]
        command = [*inside, *container["command"], *container["args"]]
        process = _started(command, values, log)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        body = {"metadata": {"labels": labels}, "spec": {"nodeName": f"node-{index}", "containers": [container]}}
        self.server.put(path, body | {"status": {"phase": "Running"}})
        return Pod(name, path, process, log, command, values)

    def _volume(self, volume: dict[str, Any], root: Path) -> Path | None:
        """A folder with what a volume holds; shared memory is this machine's own."""
        if "persistentVolumeClaim" in volume:
            return self.shared
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            return None
        folder = root / "volumes" / volume["name"]
        folder.mkdir(parents=True)
        sources = volume.get("projected", {}).get("sources", [])
        sources = [each["configMap"] for each in sources] + ([volume["configMap"]] if "configMap" in volume else [])
        for source in sources:
            found = self.server.objects[f"/api/v1/namespaces/{self.namespace}/configmaps/{source['name']}"]
            content = {key: text.encode() for key, text in found.get("data", {}).items()}
            content |= {key: base64.b64decode(text) for key, text in found.get("binaryData", {}).items()}
            paths = {item["key"]: item["path"] for item in source.get("items", [])} or {key: key for key in content}
            for key, path in paths.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content[key])
        return folder

    def _look(self, gang: Gang) -> None:
        codes = [pod.process.poll() for pod in gang.pods]
        for pod, code in zip(gang.pods, codes, strict=True):
            if code is not None:
                self._write_end(pod, code)
            else:
                self._probe(pod)
        bad = [code for code in codes if code]
        if bad:
            self._fail(gang, [128 - code if code < 0 else code for code in bad])
        elif all(code == 0 for code in codes):
            is_set = self.server.objects[gang.path]["kind"] == "JobSet"
            self._conclude(gang, "Completed" if is_set else "Complete")

    def _probe(self, pod: Pod) -> None:
        """Ask the readiness probe of a pod, where it has one that is a command; pods share this machine's loopback."""
        probe = self.server.objects[pod.path]["spec"]["containers"][0].get("readinessProbe", {}).get("exec")
        if probe is not None:
            done = subprocess.run(probe["command"], capture_output=True, timeout=30, check=False)
            conditions = [{"type": "Ready", "status": str(done.returncode == 0)}]
            self.server.objects[pod.path]["status"] = {"phase": "Running", "conditions": conditions}

    def _fail(self, gang: Gang, codes: list[int]) -> None:
        """What the rules of the object say about a failure: of the whole at once, or another start."""
        found = self.server.objects[gang.path]
        if found["kind"] != "JobSet":
            rule = found["spec"]["podFailurePolicy"]["rules"][0]
            wrong = set(codes) & set(rule["onExitCodes"]["values"])
            return self._conclude(gang, "Failed", "PodFailurePolicy" if wrong else "BackoffLimitExceeded")
        policy = found["spec"]["failurePolicy"]
        (rule,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
        reason = "PodFailurePolicy" if set(codes) & set(rule["onExitCodes"]["values"]) else "BackoffLimitExceeded"
        action = next(
            (each["action"] for each in policy["rules"] if reason in each["onJobFailureReasons"]), "RestartJobSet"
        )
        if action == "FailJobSet" or gang.restarts >= policy["maxRestarts"]:
            return self._conclude(gang, "Failed")
        self._kill(gang)
        for pod in gang.pods:
            del self.server.objects[pod.path]
        again = self._start(gang.path, gang.restarts + 1)
        gang.pods, gang.restarts = again.pods, again.restarts
        found["status"] = {"restarts": gang.restarts}

    def _conclude(self, gang: Gang, condition: str, reason: str = "") -> None:
        self._kill(gang)
        status = self.server.objects[gang.path].setdefault("status", {})
        said = {"status": "True", "reason": reason, "message": f"the job has {condition.lower()}"}
        status["conditions"] = [{"type": condition} | said]
        gang.pods, gang.ended = [], gang.pods

    def _write_end(self, pod: Pod, code: int) -> None:
        code = 128 - code if code < 0 else code
        message = pod.log.read_text()[-2000:]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message if code else ""}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
        self.server.objects[pod.path]["status"] = status

    def _kill(self, gang: Gang) -> None:
        for pod in gang.pods:
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()


def _started(command: list[str], values: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as opened:
        return subprocess.Popen(
            command, env=values, stdout=opened, stderr=subprocess.STDOUT, cwd="/", start_new_session=True
        )


def _value(variable: dict[str, Any], labels: dict[str, str]) -> str:
    if "value" in variable:
        return variable["value"].replace("$$", "$")
    field_path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    label = re.fullmatch(r"metadata\.labels\['(.*)'\]", field_path)
    assert label is not None, field_path
    return labels[label[1]]

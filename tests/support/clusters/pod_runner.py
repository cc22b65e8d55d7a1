"""Runs the pods of Jobs, JobSets, PyTorchJobs, RayJobs and Deployments of a test's API server, as processes here.

The parts of a kubelet and of four controllers that our manifests count on: volumes at their paths and an image's
folders (in a mount namespace of each container), variables with their references, names of pods in DNS (/etc/hosts),
completion indexes, what the training operator sets, init containers and sidecars, the rules of podFailurePolicy and
failurePolicy, a new uid for a job that is made anew; of a server its probes (`pod_probes.py`), of a RayJob its cluster
(`pod_ray.py`). Needs root, for `unshare --mount`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.clusters.kubernetes_server import KubernetesServer
from support.clusters.pod_probes import ProbedPod
from support.clusters.pod_ray import PodsOfRayJob
from support.servers.shared_daemons import free_ports

# Each container sees this machine's folders, its pod's own /etc (with its files and the names of its peers), /run,
# /var/tmp and /mnt, and what is mounted, at any path: the root is its own.
_INSIDE = """
set -e
mount --make-rprivate /
root="$POD_ROOT/root"
mkdir -p "$root"
mount -t tmpfs pod "$root"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
    elif [ -d "$entry" ]; then mkdir "$root$entry" && mount --rbind "$entry" "$root$entry"; fi
done
for place in etc run var/tmp mnt; do mount --bind "$POD_ROOT/$place" "$root/$place"; done
while read -r source target; do mkdir -p "$root$target"; mount --bind "$source" "$root$target"; done <"$POD_MOUNTS"
hostname "$POD_HOSTNAME"
folder="$POD_WORKING_FOLDER"
unset POD_ROOT POD_HOSTNAME POD_MOUNTS POD_WORKING_FOLDER
exec chroot "$root" env --chdir="$folder" "$@"
"""


POD_MARK = "POD_OF_THE_TESTS"
"""A variable by which all processes of a container are found; its value is the name of the container's log."""


@dataclass(frozen=True)
class Image:
    """What an image has that this machine has not at that place."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    """By their path in the image."""
    environment: Mapping[str, str] = field(default_factory=dict)
    working_folder: str = "/"
    """Where its containers start."""


@dataclass
class Pod:
    """A pod under way."""

    name: str
    path: str
    process: subprocess.Popen[bytes]
    log: Path
    command: list[str]
    values: dict[str, str]
    sidecars: list[Pod] = field(default_factory=list)
    """Containers that run beside it, each as if it were a pod."""

    def start_again(self) -> None:
        """What a kubelet does with a container that ended: the same once more, in the same pod.

        A container ends with its first process. Ranks lead sessions of their own, and would train on without it.
        """
        _kill_left(self)
        self.process = _started(self.command, self.values, self.log)

    def end_sidecars(self) -> None:
        """Sidecars are asked to end when the pod's own containers have."""
        for sidecar in self.sidecars:
            if sidecar.process.poll() is None:
                sidecar.process.terminate()
        for sidecar in self.sidecars:
            sidecar.process.wait(timeout=120)
            _kill_left(sidecar)
        self.sidecars = []


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
    rays: dict[str, PodsOfRayJob] = field(default_factory=dict)
    """By the path of their RayJob."""
    images: dict[str, Image] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    """By name/key; one that is not there is empty."""

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
            self.kill(gang)
        for served in self.servers.values():
            served.pod.process.kill()
            served.pod.process.wait()

    def lose_everything(self) -> None:
        """Kill all pods and forget what the server holds: another cluster, with an empty volume."""
        self.close()
        self.gangs.clear()
        self.server.objects.clear()
        for path in self.shared.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def _step(self) -> None:
        for path, gang in list(self.gangs.items()):
            there = self.server.objects.get(path)
            if there is None or there["metadata"]["uid"] != gang.uid:
                self._collect(gang)
        kinds = {"/jobs/": self._start, "/jobsets/": self._start, "/pytorchjobs/": self._start_pytorchjob}
        for path, start in [(path, start) for kind, start in kinds.items() for path in self.server.paths(kind)]:
            if path not in self.gangs:
                self.gangs[path] = start(path)
        for path in self.server.paths("/rayjobs/"):
            if path not in self.gangs:
                self.rays[path] = PodsOfRayJob(self, path)
                self.gangs[path] = self.rays[path].gang
        for gang in self.gangs.values():
            if gang.path in self.server.objects and gang.pods:
                if gang.path in self.rays:
                    self.rays[gang.path].look()
                else:
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
        self.kill(gang)
        for pod in [*gang.pods, *gang.ended]:
            self.server.objects.pop(pod.path, None)
        del self.gangs[gang.path]

    def _serve(self, path: str) -> ProbedPod:
        found = self.server.objects[path]
        assert found["spec"]["replicas"] == 1, "all pods share this machine's ports"
        template = found["spec"]["template"]
        return ProbedPod(
            self.start_pod(template, 0, [found["metadata"]["name"]], "none", str(uuid.uuid4()), 0), template
        )

    def _start(self, path: str, restarts: int = 0) -> Gang:
        found = self.server.objects[path]
        is_set = found["kind"] == "JobSet"
        job = found["spec"]["replicatedJobs"][0]["template"]["spec"] if is_set else found["spec"]
        name = found["metadata"]["name"]
        base = f"{name}-{found['spec']['replicatedJobs'][0]['name']}-0" if is_set else name
        peers = [f"{base}-{index}" for index in range(job["completions"])]
        uid = str(uuid.uuid4()) if is_set else found["metadata"]["uid"]
        pods = [
            self.start_pod(job["template"], index, peers, name, uid, restarts) for index in range(job["completions"])
        ]
        return Gang(path, pods, restarts, found["metadata"]["uid"])

    def _start_pytorchjob(self, path: str) -> Gang:
        """The pods of a PyTorchJob, with the variables that the training operator 1.8 sets."""
        found = self.server.objects[path]
        name, replicas = found["metadata"]["name"], found["spec"]["pytorchReplicaSpecs"]
        (port,) = free_ports(1, 20000, 30000)
        peers = [
            f"{name}-master-0",
            *(f"{name}-worker-{n}" for n in range(replicas.get("Worker", {}).get("replicas", 0))),
        ]
        pods = []
        for rank in range(len(peers)):
            template = replicas["Worker" if rank else "Master"]["template"]
            address = {"MASTER_ADDR": peers[0], "MASTER_PORT": str(port)}
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(peers)), "PYTHONUNBUFFERED": "1"}
            # What torchrun takes for arguments that it is not given.
            elastic = {f"PET_{key}": value for key, value in address.items()} | {"PET_NODE_RANK": str(rank)}
            elastic |= {"PET_NNODES": str(len(peers)), "PET_NPROC_PER_NODE": "auto"}
            uid = str(uuid.uuid4())
            pods.append(self.start_pod(template, rank, peers, name, uid, 0, address | ranks | elastic))
        return Gang(path, pods, 0, found["metadata"]["uid"])

    def start_pod(
        self,
        template: dict[str, Any],
        index: int,
        peers: list[str],
        service: str,
        uid: str,
        restarts: int,
        operator: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start a pod; `operator` is what its controller sets, an index where nothing is given."""
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
        volumes = {volume["name"]: self._volume(volume, root) for volume in spec.get("volumes", ())}
        controller = {"JOB_COMPLETION_INDEX": str(index)} if operator is None else dict(operator)
        variables = {"POD_ROOT": str(root), "POD_HOSTNAME": peers[index]} | controller
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"

        def start(body: dict[str, Any], log: Path) -> Pod:
            return self._container(body, volumes, root, variables, labels | {"metadata.uid": uid}, (name, path, log))

        sidecars = []
        for body in spec.get("initContainers", ()):
            first = start(body, self.folder / f"{name}-{body['name']}.log")
            if body.get("restartPolicy") == "Always":
                sidecars.append(first)
            else:
                assert first.process.wait(timeout=300) == 0, first.log.read_text()
        pod = start(container, self.folder / f"{name}.log")
        pod.sidecars = sidecars
        body = {"metadata": {"labels": labels}, "spec": {"nodeName": f"node-{index}", "containers": [container]}}
        self.server.put(path, body | {"status": {"phase": "Running"}})
        return pod

    def _container(
        self,
        body: dict[str, Any],
        volumes: Mapping[str, Path | None],
        root: Path,
        variables: Mapping[str, str],
        fields: Mapping[str, str],
        named: tuple[str, str, Path],
    ) -> Pod:
        """Start a container of a pod; `named` is the pod, its path in the server and the container's log."""
        image = self.images.get(body["image"], Image())
        wanted = body.get("volumeMounts", ())
        mounts = [(source, mount["mountPath"]) for mount in wanted if (source := volumes[mount["name"]])]
        mounts = [(folder, path) for path, folder in image.folders.items()] + mounts
        (root / f"mounts-{body['name']}").write_text("".join(f"{source} {target}\n" for source, target in mounts))
        values = {"PATH": os.environ["PATH"], "HOME": "/root"} | dict(image.environment) | dict(variables)
        values[POD_MARK] = named[2].stem
        values["POD_MOUNTS"] = str(root / f"mounts-{body['name']}")
        values["POD_WORKING_FOLDER"] = image.working_folder
        host, port = self.server.url.removeprefix("https://").split(":")
        values |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        values |= {variable["name"]: self._value(variable, fields) for variable in body.get("env", ())}
        inside = ["unshare", "--mount", "--uts", "bash", "-c", _INSIDE, "pod"]
        command = [*inside, *body["command"], *body.get("args", ())]
        name, path, log = named
        return Pod(name, path, _started(command, values, log), log, command, values)

    def _value(self, variable: dict[str, Any], fields: Mapping[str, str]) -> str:
        """A variable's value; `fields` are the pod's labels and other fields."""
        if "value" in variable:
            return variable["value"].replace("$$", "$")
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return self.secrets.get(f"{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}", "")
        field_path = source["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", field_path)
        return fields[label[1] if label is not None else field_path]

    def _volume(self, volume: dict[str, Any], root: Path) -> Path | None:
        """A folder with what a volume holds; shared memory is this machine's own."""
        if "persistentVolumeClaim" in volume:
            return self.shared
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            return None
        if volume.get("hostPath", {}).get("path", "").startswith("/dev/"):
            return None  # devices of a fabric, which this machine has not
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
            for sidecar in pod.sidecars:
                if sidecar.process.poll() is not None and code is None:
                    sidecar.start_again()
        kind = self.server.objects[gang.path]["kind"]
        bad = [code for code in codes if code]
        if kind == "PyTorchJob":
            self._look_at_pytorchjob(gang, codes)
        elif bad:
            self._fail(gang, [128 - code if code < 0 else code for code in bad])
        elif all(code == 0 for code in codes):
            self._conclude(gang, "Completed" if kind == "JobSet" else "Complete")

    def _look_at_pytorchjob(self, gang: Gang, codes: list[int | None]) -> None:
        """The master's end is the job's; a container that fails is started again in its pod, `backoffLimit` times."""
        spec = self.server.objects[gang.path]["spec"]
        if codes[0] == 0:
            return self._conclude(gang, "Succeeded")
        for pod, code in zip(gang.pods, codes, strict=True):
            if not code:
                continue
            if gang.restarts >= spec["runPolicy"]["backoffLimit"]:
                return self._conclude(gang, "Failed", "PyTorchJobFailed")
            gang.restarts += 1
            pod.start_again()

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
        self.kill(gang)
        for pod in gang.pods:
            del self.server.objects[pod.path]
        again = self._start(gang.path, gang.restarts + 1)
        gang.pods, gang.restarts = again.pods, again.restarts
        found["status"] = {"restarts": gang.restarts}

    def _conclude(self, gang: Gang, condition: str, reason: str = "") -> None:
        self.kill(gang)
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

    def kill(self, gang: Gang) -> None:
        """End all pods of a job, with whatever they have started."""
        for pod in gang.pods:
            self.end_pod(pod)

    def end_pod(self, pod: Pod) -> None:
        """End a pod, with whatever it has started."""
        if pod.process.poll() is None:
            _kill_all(pod.process)
        pod.process.wait()
        pod.end_sidecars()
        _kill_left(pod)


def _kill_left(container: Pod) -> None:
    """End what a container has started besides: its processes end with it."""
    mark = f"{POD_MARK}={container.log.stem}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


def _started(command: list[str], values: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as opened:
        return subprocess.Popen(
            command, env=values, stdout=opened, stderr=subprocess.STDOUT, cwd="/", start_new_session=True
        )


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a container's processes: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

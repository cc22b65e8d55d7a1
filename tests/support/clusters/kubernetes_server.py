"""An HTTP server that speaks as much of Kubernetes' API as we use; no package ships a real one of today.

Objects are kept by their path. Applying creates or replaces, lists obey label selectors and come in pages, logs are
what a test has put there. Controllers there are none: tests write the status that one would have written.
"""

from __future__ import annotations

import json
import ssl
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

TOKEN = "token-of-the-tests"
PAGE = 2
"""Objects in one answer to a list, so that every list of three comes in pages."""
# fmt: off
KINDS = {
    "/api/v1": [
        "ConfigMap", "Event", "Pod", "PersistentVolume", "PersistentVolumeClaim", "Secret", "Service", "ServiceAccount",
    ],
    "/apis/batch/v1": ["Job"],
    "/apis/apps/v1": ["DaemonSet", "Deployment"],
    "/apis/rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
    "/apis/storage.k8s.io/v1": ["StorageClass"],
    "/apis/jobset.x-k8s.io/v1alpha2": ["JobSet"],
    "/apis/kueue.x-k8s.io/v1beta1": ["LocalQueue", "ClusterQueue", "WorkloadPriorityClass", "Workload"],
}
# fmt: on


@dataclass
class KubernetesServer:
    """What the server holds, by path (`/api/v1/namespaces/ml/pods/x`), and what it was asked."""

    url: str = ""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, list[str]] = field(default_factory=lambda: {path: list(names) for path, names in KINDS.items()})
    namespaces: set[str] = field(default_factory=lambda: {"default", "ml"})
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By pod and container."""
    forbidden: set[str] = field(default_factory=set)
    """Words in a path that may not be touched."""
    failures: list[int] = field(default_factory=list)
    """Codes with which the next requests fail."""
    bodies: list[bytes] = field(default_factory=list)
    """What was applied, byte for byte."""
    annotated: dict[str, dict[str, str]] = field(default_factory=dict)
    """By uid, what a merge patch wrote."""
    requests: list[str] = field(default_factory=list)

    def put(self, path: str, found: dict[str, Any]) -> dict[str, Any]:
        """Put an object there as a controller or a person would."""
        name, namespace = path.rsplit("/", 1)[1], path.split("/namespaces/")[-1].split("/")[0]
        found.setdefault("metadata", {}).setdefault("uid", str(uuid.uuid4()))
        found["metadata"] |= {"name": name} | ({"namespace": namespace} if "/namespaces/" in path else {})
        self.objects[path] = found
        return found

    def collect(self, uid: str) -> None:
        """Delete what belongs to an object that is gone, as the garbage collector does."""
        for path, found in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences", ())):
                del self.objects[path]

    def paths(self, word: str) -> list[str]:
        """The objects whose path has a word."""
        return [path for path in self.objects if word in path]


@contextmanager
def kubernetes_server(context: ssl.SSLContext | None = None) -> Iterator[KubernetesServer]:
    """A server on a free port of this machine."""
    state = KubernetesServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    state.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_kubeconfig(server: KubernetesServer, file: Path) -> Path:
    """A kubeconfig with two contexts: `here`, and one that nobody answers."""
    user = {"name": "me", "user": {"token": TOKEN}}
    clusters = [("here", server.url), ("gone", "http://127.0.0.1:9")]
    body = {
        "current-context": "here",
        "clusters": [{"name": name, "cluster": {"server": url}} for name, url in clusters],
        "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name, _ in clusters],
        "users": [user],
    }
    file.write_text(yaml.safe_dump(body))
    return file


def _handler(state: KubernetesServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: two would wait for each other's acknowledgement

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

        def _answer(self, code: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _status(self, code: int, message: str) -> None:
            self._answer(code, {"kind": "Status", "code": code, "message": message})

        def _start(self) -> tuple[str, dict[str, str], bytes] | None:
            """Path, parameters and body; None where the request is refused already."""
            parsed = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            state.requests.append(f"{self.command} {parsed.path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._status(401, "Unauthorized")
            if state.failures:
                return self._status(state.failures.pop(0), "the server is not itself today")
            if any(word in parsed.path for word in state.forbidden):
                return self._status(403, f"{parsed.path} is forbidden")
            return parsed.path, dict(urllib.parse.parse_qsl(parsed.query)), body

        def _served(self, path: str) -> bool:
            base = "/".join(path.split("/")[: 3 if path.startswith("/api/") else 4])
            return base in state.kinds

        def do_PATCH(self) -> None:
            asked = self._start()
            if asked is None:
                return
            path, params, body = asked
            namespace = path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else None
            if not self._served(path) or (namespace is not None and namespace not in state.namespaces):
                return self._status(404, "the server could not find the requested resource")
            if self.headers["Content-Type"] == "application/merge-patch+json":
                return self._annotate(path, params, json.loads(body))
            applied = self.headers["Content-Type"] == "application/apply-patch+yaml"
            if not applied or params.get("fieldManager") != "trainshed" or params.get("fieldValidation") != "Strict":
                return self._status(400, "this server takes server-side apply only")
            (found,) = [each for each in yaml.safe_load_all(body) if each]
            if found["metadata"]["name"] != path.rsplit("/", 1)[1]:
                return self._status(400, "the name in the object does not match the path")
            if "nonsense" in found.get("spec", {}):
                return self._status(422, 'unknown field "spec.nonsense"')
            state.bodies.append(body)
            before = state.objects.get(path)
            if before is not None:
                found["metadata"]["uid"], found["status"] = before["metadata"]["uid"], before.get("status", {})
                if "ownerReferences" in before["metadata"]:
                    found["metadata"]["ownerReferences"] = before["metadata"]["ownerReferences"]
                others = state.annotated.get(before["metadata"]["uid"], {})
                found["metadata"]["annotations"] = found["metadata"].get("annotations", {}) | others
            self._answer(201 if before is None else 200, state.put(path, found))

        def _annotate(self, path: str, params: dict[str, str], body: dict[str, Any]) -> None:
            """What another manager writes stays there when ours applies the object again."""
            if path not in state.objects:
                return self._status(404, "not found")
            merged = set(body["metadata"])
            if params.get("fieldManager") != "trainshed-driver" or merged not in ({"annotations"}, {"ownerReferences"}):
                return self._status(400, "this server merges annotations and owners only")
            found = state.objects[path]
            if merged == {"ownerReferences"}:
                found["metadata"] |= body["metadata"]
                return self._answer(200, found)
            written = state.annotated.setdefault(found["metadata"]["uid"], {})
            written |= body["metadata"]["annotations"]
            found["metadata"]["annotations"] = found["metadata"].get("annotations", {}) | written
            self._answer(200, found)

        def do_GET(self) -> None:
            asked = self._start()
            if asked is None:
                return
            path, params, _ = asked
            if path.endswith("/log"):
                return self._log(path, params)
            if path.startswith("/api/v1/namespaces/") and path.count("/") == 4:
                there = path.rsplit("/", 1)[1] in state.namespaces
                return self._answer(200, {}) if there else self._status(404, "not found")
            versions = [base.removeprefix("/apis/") for base in state.kinds if base.rsplit("/", 1)[0] == path]
            if versions:
                return self._answer(200, {"versions": [{"groupVersion": each} for each in versions]})
            if path in state.kinds:
                return self._answer(200, {"resources": [{"kind": kind} for kind in state.kinds[path]]})
            if path in state.objects:
                return self._answer(200, state.objects[path])
            if not self._served(path) or path.rsplit("/", 1)[0] in _folders(state):
                return self._status(404, "not found")
            self._list(path, params)

        def _list(self, path: str, params: dict[str, str]) -> None:
            terms = [each for each in params.get("labelSelector", "").split(",") if each]
            wanted = dict(each.split("=") for each in terms if "=" in each)
            named = {each for each in terms if "=" not in each}
            fields = dict(each.split("=") for each in params.get("fieldSelector", "").split(",") if each)
            found = [
                each
                for name, each in sorted(state.objects.items())
                if name.rsplit("/", 1)[0] == path
                and wanted.items() <= each["metadata"].get("labels", {}).items()
                and named <= set(each["metadata"].get("labels", {}))
                and all(_field(each, key) == value for key, value in fields.items())
            ]
            start = int(params.get("continue", 0))
            page = found[start : start + min(PAGE, int(params["limit"]))]
            more = {"continue": str(start + PAGE)} if start + PAGE < len(found) else {}
            items = [{key: value for key, value in each.items() if key not in ("kind", "apiVersion")} for each in page]
            self._answer(200, {"kind": "List", "metadata": more, "items": items})

        def _log(self, path: str, params: dict[str, str]) -> None:
            lines = state.logs.get((path.split("/")[-2], params["container"]))
            if lines is None:
                return self._status(400, f"container {params['container']} is waiting to start")
            self._answer(200, "".join(f"{line}\n" for line in lines).encode())

        def do_DELETE(self) -> None:
            asked = self._start()
            if asked is None:
                return
            path, _, _ = asked
            gone = state.objects.pop(path, None)
            if gone is None:
                return self._status(404, "not found")
            state.collect(gone["metadata"].get("uid", ""))
            self._answer(200, {"kind": "Status", "status": "Success"})

    return Handler


def _field(found: dict[str, Any], key: str) -> Any:
    for step in key.split("."):
        found = found.get(step, {})
    return found


def _folders(state: KubernetesServer) -> set[str]:
    """Paths of lists: what lies one below is an object that is not there."""
    return {
        f"{base}{inside}/{kind.lower()}s"
        for base, kinds in state.kinds.items()
        for kind in [*kinds, "WorkloadPriorityClasse"]
        for inside in ("", *(f"/namespaces/{name}" for name in state.namespaces))
    }

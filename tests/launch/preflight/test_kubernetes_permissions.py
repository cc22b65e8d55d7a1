"""Rights are asked of the API server, one by one; here a small server that grants some."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainshed.launch.preflight.kubernetes_permissions import check_permissions
from trainshed.recipe import Cluster

CLUSTER = Cluster.model_validate({"name": "c", "target": "kubernetes", "kubernetes": {"namespace": "team"}})


@pytest.fixture
def denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """What the server denies, as `verb resource`; kubeconfig points to it."""
    rights: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = body["spec"]["resourceAttributes"]
            assert (self.path, asked["namespace"]) == (
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                "team",
            )
            part = f"/{asked['subresource']}" if asked.get("subresource") else ""
            body["status"] = {"allowed": f"{asked['verb']} {asked['resource']}{part}" not in rights}
            answer = json.dumps(body).encode()
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    yield rights
    server.shutdown()
    thread.join()
    server.server_close()


def test_whoever_may_do_everything_passes(denied: set[str]) -> None:
    found = check_permissions(CLUSTER)
    assert (found.verdict, found.what) == ("pass", "you may submit, follow and cancel jobs in namespace team")


def test_what_is_denied_is_named(denied: set[str]) -> None:
    denied |= {"create jobsets", "get pods/log"}
    found = check_permissions(CLUSTER)
    assert (found.verdict, found.what) == ("fail", "you may not create jobsets, get pods/log in namespace team")


def test_whoever_may_create_no_roles_is_told_of_the_key_that_needs_none(denied: set[str]) -> None:
    """What GKE's Kubernetes Engine Developer may not do: the role that the source recipe asks for."""
    denied |= {f"{verb} {kind}" for verb in ("create", "patch", "delete") for kind in ("roles", "rolebindings")}
    found = check_permissions(CLUSTER)
    assert found.verdict == "fail"
    assert found.what.startswith("you may not create roles, patch roles, delete roles, create rolebindings, ")
    assert "`kubernetes: {driver_account: NAME}`" in str(found.hint)
    with_account = Cluster(name="c", target="kubernetes", kubernetes={"namespace": "team", "driver_account": "drivers"})
    assert check_permissions(with_account).verdict == "pass"


def test_a_plain_job_needs_services(denied: set[str]) -> None:
    denied |= {"create services", "create jobsets"}
    plain = Cluster(name="c", target="kubernetes", kubernetes={"namespace": "team", "kind": "job"})
    found = check_permissions(plain)
    assert (found.verdict, found.what) == ("fail", "you may not create services in namespace team")


def test_whoever_may_train_and_not_serve_is_warned(denied: set[str]) -> None:
    denied.add("patch deployments")
    found = check_permissions(CLUSTER)
    assert (found.verdict, found.what) == ("warn", "you may submit jobs in namespace team, and not patch deployments")


def test_without_a_cluster_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert check_permissions(CLUSTER).verdict == "skipped"

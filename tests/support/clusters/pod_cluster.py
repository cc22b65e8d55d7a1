"""An API server whose pods really run (`kubernetes_server.py`, `pod_runner.py`), over TLS as inside a cluster."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from support.clusters.kubernetes_server import TOKEN, KubernetesServer, kubernetes_server
from support.clusters.pod_runner import PodRunner
from support.missing_parts import missing_part


def make_service_account(folder: Path, namespace: str = "ml") -> Path:
    """Write what pods find of their service account: a certificate of the server, a token and a namespace."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem",
         "-out", folder / "ca.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "token").write_text(TOKEN)
    (folder / "namespace").write_text(namespace)
    return folder


@contextmanager
def running_pods(service_account: Path, folder: Path) -> Iterator[PodRunner]:
    """Serve and run until the end; `folder` gets the pods, the volume that all claims are, and the kubeconfig."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        missing_part("pods need root and `unshare` for a mount namespace of their own")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(service_account / "ca.crt", service_account / "key.pem")
    for place in ("pods", "shared"):
        (folder / place).mkdir()
    namespace = (service_account / "namespace").read_text()
    with kubernetes_server(context) as server:
        _write_kubeconfig(server, service_account, folder / "config")
        runner = PodRunner(server, folder / "pods", namespace, folder / "shared", service_account)
        try:
            yield runner
        finally:
            runner.close()


def _write_kubeconfig(server: KubernetesServer, service_account: Path, file: Path) -> None:
    cluster = {"server": server.url, "certificate-authority": str(service_account / "ca.crt")}
    body = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    file.write_text(yaml.safe_dump(body))

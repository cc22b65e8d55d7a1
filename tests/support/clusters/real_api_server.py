"""A real Kubernetes API server over a real etcd, where their programs are here; no controllers, no nodes.

No package has kube-apiserver: it is built by `go build ./cmd/kube-apiserver` in Kubernetes' sources, which have what
it needs in `vendor/`. etcd is in Debian's etcd-server. Both are looked for on the PATH, or named by KUBE_APISERVER and
ETCD.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support.servers.shared_daemons import free_ports

TOKEN = "token-of-the-tests"
START_SECONDS = 120.0


@dataclass(frozen=True)
class ApiServer:
    """A server that stands."""

    kubeconfig: Path

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl against it."""
        return subprocess.run(
            ["kubectl", "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def _program(name: str, variable: str) -> str:
    program = os.environ.get(variable) or shutil.which(name)
    if program is None:
        pytest.skip(f"no {name}: put it on the PATH or its path into {variable}")
    return program


@contextmanager
def real_api_server(folder: Path, crds: Path) -> Iterator[ApiServer]:
    """Start both, create the kinds that are described in a folder, and end both."""
    etcd, apiserver = _program("etcd", "ETCD"), _program("kube-apiserver", "KUBE_APISERVER")
    _program("kubectl", "KUBECTL")
    client, peer, port = free_ports(3, 20000, 32000)
    subprocess.run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    address = f"http://127.0.0.1:{client}"
    storage = [etcd, "--data-dir", folder / "etcd", "--listen-client-urls", address, "--advertise-client-urls", address]
    storage += ["--listen-peer-urls", f"http://127.0.0.1:{peer}", "--unsafe-no-fsync"]
    server = [
        apiserver,
        *(f"--etcd-servers={address}", f"--cert-dir={folder / 'certs'}", f"--token-auth-file={folder / 'tokens.csv'}"),
        *(f"--service-account-{kind}-file={folder / 'sa.key'}" for kind in ("key", "signing-key")),
        *("--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC"),
        *("--bind-address=127.0.0.1", f"--secure-port={port}", "--service-cluster-ip-range=10.96.0.0/16"),
        # It asks for an account's token, which a controller makes.
        "--disable-admission-plugins=ServiceAccount",
    ]
    with ExitStack() as stack:
        for name, command in {"etcd": storage, "apiserver": server}.items():
            stack.enter_context(_running(command, folder / f"{name}.log"))
        _wait_until_ready(f"https://127.0.0.1:{port}/readyz", folder)
        standing = ApiServer(_write_kubeconfig(folder, port))
        for file in sorted(crds.glob("*.yaml")):
            made = standing.kubectl("create", "-f", file)
            assert made.returncode == 0, made.stderr
        established = standing.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        assert established.returncode == 0, established.stderr
        yield standing


@contextmanager
def _running(command: list[str | Path], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait_until_ready(url: str, folder: Path) -> None:
    end = time.monotonic() + START_SECONDS
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5, context=trusting):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail((folder / "apiserver.log").read_text()[-3000:])


def _write_kubeconfig(folder: Path, port: int) -> Path:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / "certs/apiserver.crt")}
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(body))
    file.chmod(0o600)
    return file

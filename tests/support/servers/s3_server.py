"""A real S3 server for the tests: one small Ceph cluster with its RADOS gateway, on free loopback ports.

It starts once per test session (`shared_daemons.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.servers.shared_daemons import Daemons, free_ports, kill_all, pids_in, running, shared, watch_in_background

BINARIES = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
ACCESS_KEY = "TESTACCESSKEY"
SECRET_KEY = "test-secret-that-must-never-be-shown"

CONFIG = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_max_pg_per_osd = 1000
osd_crush_chooseleaf_type = 0
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
ms_bind_ipv6 = false
public_network = 127.0.0.0/8
mon_data_avail_warn = 1
mon_data_avail_crit = 1
[mon.a]
host = localhost
mon_data = {folder}/mon
mon_initial_members = a
[mgr.x]
mgr_data = {folder}/mgr
mgr_initial_modules =
[osd.0]
osd_data = {folder}/osd0
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_memory_target = 939524096
osd_op_num_shards = 2
[client.rgw.a]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {folder}/rgw
rgw_dns_name = localhost
"""


@dataclass(frozen=True)
class S3Server:
    """Where the server listens and who may talk to it."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    def request(self, method: str, path: str, query: str = "") -> tuple[int, bytes]:
        """Send one signed request that our own store has no call for (make a bucket, list multipart uploads)."""
        url = f"{self.endpoint}{path}" + (f"?{query}" if query else "")
        headers = _sign(self, method, path, query)
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def make_bucket(self, name: str) -> str:
        status, body = self.request("PUT", f"/{name}")
        assert status == 200, body
        return name

    def open_uploads(self, bucket: str) -> int:
        """How many multipart uploads are neither completed nor aborted."""
        status, body = self.request("GET", f"/{bucket}", "uploads=")
        assert status == 200, body
        return body.count(b"<Upload>")

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }


def missing_binaries() -> list[str]:
    return [name for name in BINARIES if shutil.which(name) is None]


@contextmanager
def shared_server(meeting_point: Path) -> Iterator[S3Server]:
    """Start the server, or join the one another worker started, and stop it with the last user."""
    with shared(DAEMONS, meeting_point) as place:
        yield S3Server(**place)


def _start(folder: Path) -> S3Server:
    for name in ("mon", "osd0", "mgr", "rgw"):
        (folder / name).mkdir(parents=True)
    mon_v2, mon_v1, port = free_ports(3, 20000, 32000)
    fsid, conf = str(uuid.uuid4()), folder / "ceph.conf"
    conf.write_text(CONFIG.format(fsid=fsid, folder=folder, mon_v2=mon_v2, mon_v1=mon_v1, port=port))
    everything = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
    _keyring(folder, "mon.", {"mon": "allow *"}, create=True)
    for name in ("client.admin", "mgr.x", "osd.0", "client.rgw.a"):
        _keyring(folder, name, everything)
    monmap, address = folder / "monmap", f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
    try:
        _run(folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(monmap))
        _run(folder, "ceph-mon", "-i", "a", "--mkfs", "--monmap", str(monmap), "--keyring", str(folder / "keyring"))
        _run(folder, "ceph-mon", "-i", "a", "--pid-file", str(folder / "mon.pid"))
        _run(folder, "ceph-mgr", "-i", "x", "--pid-file", str(folder / "mgr.pid"))
        osd_id = str(uuid.uuid4())
        _run(folder, "ceph", "osd", "new", osd_id)
        _run(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        _run(folder, "ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        _run(folder, "ceph-osd", "-i", "0", "--pid-file", str(folder / "osd.pid"))
        _run(folder, "radosgw", "-n", "client.rgw.a", "--pid-file", str(folder / "rgw.pid"))
        _wait_for(port)
        user = ("--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        _run(folder, "radosgw-admin", "user", "create", *user)
    except BaseException:
        _stop(folder)
        raise
    return S3Server(f"http://127.0.0.1:{port}")


def _stop(folder: Path) -> None:
    pids = pids_in(folder)
    kill_all(pids)  # nothing of it is kept
    while any(running(pid) for pid in pids):
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "CEPH_CONF": str(folder / "ceph.conf")}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"


def _keyring(folder: Path, name: str, caps: dict[str, str], *, create: bool = False) -> None:
    flags = ["--create-keyring"] if create else []
    grants = [part for kind, grant in caps.items() for part in ("--cap", kind, grant)]
    _run(folder, "ceph-authtool", *flags, str(folder / "keyring"), "-n", name, "--gen-key", *grants)


def _wait_for(port: int, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the RADOS gateway did not listen within {seconds} s")


def _sign(server: S3Server, method: str, path: str, query: str) -> dict[str, str]:
    """AWS Signature Version 4 for a request without a body."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    host, empty = urllib.parse.urlsplit(server.endpoint).netloc, hashlib.sha256(b"").hexdigest()
    signed = "host;x-amz-content-sha256;x-amz-date"
    canonical = (
        f"{method}\n{path}\n{query}\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{now}\n\n{signed}\n{empty}"
    )
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{server.secret_key}".encode()
    for part in (now[:8], "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={server.access_key}/{scope}, SignedHeaders={signed}, Signature={signature}"
    return {
        "x-amz-date": now,
        "x-amz-content-sha256": empty,
        "Authorization": f"AWS4-HMAC-SHA256 {credential}",
    }


DAEMONS = Daemons("ts3", _start, _stop, "support.servers.s3_server")

if __name__ == "__main__":
    watch_in_background(DAEMONS, Path(sys.argv[1]))

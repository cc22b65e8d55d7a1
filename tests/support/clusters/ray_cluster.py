"""A real Ray cluster of three nodes on this machine, with its dashboard, on free ports outside Ray's own range.

It starts once per test session in a process of its own and is shared by all pytest-xdist workers: they meet in a folder
guarded by a file lock, the first one starts it, and it stops itself when nobody uses it any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SECRET = "secret-of-the-nodes-that-must-never-be-shown"
NODES, CPUS_PER_NODE = 3, 2


@contextmanager
def shared_cluster(meeting_point: Path) -> Iterator[str]:
    """Start the cluster, or join the one another worker started; yields the address of its dashboard."""
    meeting_point.mkdir(parents=True, exist_ok=True)
    state, me = meeting_point / "address", meeting_point / f"user-{os.getpid()}"
    started = None
    with (meeting_point / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        me.touch()
        if not state.exists():
            started = _start(meeting_point)
    try:
        yield state.read_text()
    finally:
        me.unlink()
        while state.exists() and not _users(meeting_point):
            time.sleep(0.1)
        if started is not None and not _users(meeting_point):
            started.wait()
        elif started is not None:
            started.returncode = 0  # another worker goes on with it; it ends by itself


_STARTS = 4
"""Ray gives a node thirty seconds to come up, which no variable changes: on a busy machine it is started again."""


def _start(meeting_point: Path) -> subprocess.Popen[bytes]:
    text = ""
    for _ in range(_STARTS):
        with (meeting_point / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, str(meeting_point)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        while process.poll() is None:
            if (meeting_point / "address").exists():
                return process
            time.sleep(0.1)
        text = (meeting_point / "log").read_text()
        assert "timed out during startup" in text, text
    raise AssertionError(text)


def _environment() -> dict[str, str]:
    """What every node and worker of the cluster inherits: no variable of a test, and the right Python first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_", "COV_"))}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # others use this machine's memory, and Ray would kill our actors for it
        "RAY_worker_niceness": "0",  # on a busy machine, workers that are nicer than all others would never end
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "NODE_SECRET": SECRET,
    }


def _serve(meeting_point: Path) -> None:
    # Short: a unix socket's path may have 107 characters.
    folder = tempfile.mkdtemp(prefix="tsray-", dir="/tmp")
    # All of Ray's defaults lie below it, also the file that names the latest cluster: whoever else uses Ray on this
    # machine shares nothing with this one. The nodes and their jobs inherit it.
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    from ray.cluster_utils import Cluster

    ports = _free_ports(NODES + 1)
    head = {
        "num_cpus": CPUS_PER_NODE,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": ports[0],
        "dashboard_agent_listen_port": ports[1],
        "object_store_memory": 100 * 2**20,
    }
    with ExitStack() as stack:
        stack.callback((meeting_point / "address").unlink, missing_ok=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        for port in ports[2:]:
            cluster.add_node(
                wait=False,
                num_cpus=CPUS_PER_NODE,
                dashboard_agent_listen_port=port,
                object_store_memory=100 * 2**20,
            )
        cluster.wait_for_nodes(timeout=300)
        address = f"http://127.0.0.1:{ports[0]}"
        _wait_for_jobs(address)
        (meeting_point / "address.new").write_text(address)
        (meeting_point / "address.new").rename(meeting_point / "address")
        while _users(meeting_point):
            time.sleep(0.2)


def _wait_for_jobs(address: str) -> None:
    """Until the dashboard takes jobs, and all nodes are on its list."""
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{address}/api/v0/nodes", timeout=30) as answer:
            if json.load(answer)["data"]["result"]["total"] == NODES:
                return
        time.sleep(0.2)


def _users(meeting_point: Path) -> list[Path]:
    return [user for user in meeting_point.glob("user-*") if Path(f"/proc/{user.name.removeprefix('user-')}").exists()]


def _free_ports(count: int) -> list[int]:
    found = [socket.socket() for _ in range(count)]
    for each in found:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in found]
    for each in found:
        each.close()
    return ports


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

"""The stages of a job for a cluster, run on this machine by their own command lines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from support.runs.job_files import write_files
from trainshed.launch.job import MOUNTED_JOB, Job

MACHINE = """
small:
  source: a part of a node, as large as this machine can play
  gpu: h100-sxm
  gpus: 2
  fabric: infiniband-ndr
  network_gbps: 800.0
  nics: 2
  frontend_gbps: 20.0
  cpus: 24
  memory_gib: 475.0
  local_disk_tb: 7.0
  watts: 2550.0
"""


def write_machine(folder: Path) -> Path:
    """A machine with two GPUs, for `machine` of a cluster file."""
    file = folder / "machine.yaml"
    file.write_text(MACHINE)
    return file


def first_node(attempt: int = 1) -> dict[str, str]:
    """The variables that a launcher reads on a node that is alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {
        "NODE_RANK": "0",
        "TRAINSHED_ATTEMPT": str(attempt),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_stages(job: Job, folder: Path, stages: tuple[str, ...], variables: dict[str, str]) -> Path:
    """Run stages by their own command lines; the job's folder lies elsewhere than in a pod."""
    place = folder / "job"
    place.mkdir(exist_ok=True)
    write_files(place, {name: text.replace(MOUNTED_JOB, str(place)) for name, text in job.files.items()})
    for name in stages:
        stage = job.stage(name)
        ours = [sys.executable, "-m", "trainshed", "worker", name, "--job", str(place)]
        command = ours if stage.script is None else ["bash", str(place / stage.script)]
        done = subprocess.run(
            command,
            env=dict(os.environ) if stage.script is None else variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return Path(job.run)

"""A real Slurm for the tests: four virtual nodes on this machine, on free loopback ports, without accounting.

Each slurmd has a host name and a hosts file of its own (namespaces), so that nothing of the machine's is changed. It
starts once per test session (`shared_daemons.py`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.servers.shared_daemons import Daemons, free_ports, kill_all, pids_in, running, shared, watch_in_background

BINARIES = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol", "squeue", "sinfo", "unshare")
NODES = 4

# A job that is queued again waits until its old credentials have expired: 121 s unless said otherwise.
CONFIG = """
ClusterName=test
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName=n[1-{nodes}] NodeHostname=n[1-{nodes}] NodeAddr=127.0.1.[1-{nodes}] Port={node_ports} CPUs=8 RealMemory=4000 \
Gres=gpu:h100:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=small Nodes=n[1-2] Default=NO MaxNodes=1 MaxTime=1:00:00 State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster."""

    conf: str
    folder: str

    def run(self, *command: str) -> str:
        """Run one of Slurm's programs."""
        done = subprocess.run(
            command, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": self.conf}

    def state(self, id: str) -> str:
        """The state of a job, in Slurm's own word."""
        printed = self.run("scontrol", "--oneliner", "show", "job", id)
        return printed.partition("JobState=")[2].split()[0]

    def wait(self, id: str, *states: str, seconds: float = 240) -> str:
        """Wait until a job is in one of these states."""
        end = time.monotonic() + seconds
        while (state := self.state(id)) not in states:
            assert time.monotonic() < end, f"job {id} is {state}\n{self.run('scontrol', 'show', 'job', id)}"
            time.sleep(0.1)
        return state

    def processes(self, node: str, job: str, words: str) -> list[int]:
        """The processes of a job on one node whose command line holds these words."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            mine = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode()} <= set(variables)
            if mine and words in line:
                found.append(int(process.name))
        return found


def missing_parts() -> list[str]:
    missing = [name for name in BINARIES if shutil.which(name) is None]
    return missing + (["root"] if os.geteuid() != 0 else [])


@contextmanager
def shared_cluster(meeting_point: Path) -> Iterator[SlurmCluster]:
    """Start the cluster, or join the one another worker started, and stop it with the last user."""
    with shared(DAEMONS, meeting_point) as place:
        yield SlurmCluster(**place)


def _start(folder: Path) -> SlurmCluster:
    # World readable: munged refuses folders that others could write to, and slurmd leaves its own alone.
    folder.mkdir(mode=0o755)
    (folder / "state").mkdir()
    for number in range(1, NODES + 1):
        (folder / "spool" / f"n{number}").mkdir(parents=True)
    control, *nodes = free_ports(1 + NODES, 10000, 20000)  # below 20000, where jobs' own ports begin
    conf = folder / "slurm.conf"
    conf.write_text(
        CONFIG.format(
            hostname=socket.gethostname(),
            folder=folder,
            control_port=control,
            nodes=NODES,
            node_ports=f"[{','.join(map(str, nodes))}]",
        )
    )
    for number in range(8):
        os.mknod(folder / f"gpu{number}", 0o600 | 0o020000, os.makedev(240, number))
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName=n[1-{NODES}] Name=gpu Type=h100 File={folder}/gpu[0-7]\n"
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    names = "".join(f"127.0.1.{number} n{number}\n" for number in range(1, NODES + 1))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    cluster = SlurmCluster(str(conf), str(folder))
    try:
        cluster.run("mungekey", "--create", f"--keyfile={folder}/munge.key")
        munged = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE_FILES.items()]
        cluster.run("munged", "--force", "--num-threads=2", *munged)
        cluster.run("slurmctld")
        for number in range(1, NODES + 1):
            inside = 'mount --bind "$1/hosts" /etc/hosts && hostname "$2" && exec slurmd -N "$2"'
            cluster.run("unshare", "--uts", "--mount", "sh", "-c", inside, "sh", str(folder), f"n{number}")
        end = time.monotonic() + 60
        while len(cluster.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split()) < NODES:
            assert time.monotonic() < end, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)
    except BaseException:
        _stop(folder)
        raise
    return cluster


_MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _stop(folder: Path) -> None:
    pids = pids_in(folder)
    while left := [pid for pid in pids if running(pid)] + _members(folder):
        kill_all(left)  # nothing of it is kept
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: Path) -> list[int]:
    """What the daemons have started: whoever was born with this cluster's configuration."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0") and running(int(process.name)):
                    found.append(int(process.name))
    return found


DAEMONS = Daemons("tsl", _start, _stop, "support.clusters.slurm_cluster")

if __name__ == "__main__":
    watch_in_background(DAEMONS, Path(sys.argv[1]))

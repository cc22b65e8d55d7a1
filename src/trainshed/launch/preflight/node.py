"""What one node can be asked without any other: GPUs, memory, disk, limits, devices, variables, versions."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any

from trainshed import __version__
from trainshed.catalog import Machine, find_gpu
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.fabric_lint import misplaced
from trainshed.launch.preflight.checks import Check
from trainshed.launch.preflight.gpus import SeenGpus, check_gpus, check_kernel_log, find_gpus, read_kernel_log

GIB = 2**30
# NCCL keeps about 32 MiB of shared memory for each pair of a node's GPUs, loaders of data keep batches there; Docker's
# own default of 64 MiB kills both.
_SHARED_MEMORY_FAIL, _SHARED_MEMORY_WARN_PER_GPU = 0.5 * GIB, 1 * GIB
_DISK_FAIL, _DISK_WARN = 2 * GIB, 20 * GIB
_NOT_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# Images set these for MPI; they take no fabric away from NCCL.
_HARMLESS = ("UCX_", "SHARP_")
_GIVEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_NET")


def node_checks(setup: FabricSetup, machine: Machine | None, *, gpus: int, scratch: Path) -> list[Check]:
    """Look at this node; `gpus` is how many a job uses here, 0 where it trains on processors."""
    seen = find_gpus() if gpus else None
    names = find_gpu(machine.gpu).device_names if machine is not None else ()
    return [
        *check_gpus(seen, gpus, names),
        *([check_kernel_log(read_kernel_log())] if gpus else []),
        check_shared_memory(Path("/dev/shm"), gpus),
        check_disk(scratch),
        *check_limits(setup, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        *check_devices(setup),
        *check_environment(setup, os.environ),
    ]


def versions(seen: SeenGpus | None = None) -> dict[str, str]:
    """Return what should be the same on every node, as far as it can be known without loading PyTorch."""
    found = {"trainshed": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | ({"driver": seen.driver} if seen is not None and seen.driver else {})


def check_shared_memory(path: Path, gpus: int) -> Check:
    """Is there room in /dev/shm for NCCL and for loaders?"""
    if not path.is_dir():
        return Check("shared memory", "skipped", f"there is no {path}")
    usage = os.statvfs(path)
    size = usage.f_frsize * usage.f_blocks
    wanted = _SHARED_MEMORY_WARN_PER_GPU * max(gpus, 1)
    verdict = "fail" if size < _SHARED_MEMORY_FAIL and gpus > 1 else "warn" if size < wanted else "pass"
    hint = None if verdict == "pass" else "Kubernetes: limits.shared_memory; Docker: --shm-size; Slurm: the image's"
    what = f"{path} has {size / GIB:.1f} GiB" + ("" if verdict == "pass" else f", {wanted / GIB:.0f} GiB are usual")
    return Check("shared memory", verdict, what, hint, {"bytes": size})


def check_disk(path: Path) -> Check:
    """Is there room on the node's own disk for logs and caches?"""
    free = shutil.disk_usage(path).free
    verdict = "fail" if free < _DISK_FAIL else "warn" if free < _DISK_WARN else "pass"
    return Check("disk", verdict, f"{free / GIB:.0f} GiB are free at {path}", measured={"free_bytes": free})


def check_limits(setup: FabricSetup, memlock: int) -> Iterator[Check]:
    """May ranks lock the memory that cards write into?"""
    if not setup.rdma:
        return
    if memlock == resource.RLIM_INFINITY:
        yield Check("locked memory", "pass", "ranks may lock as much as they like")
    else:
        hint = "Slurm: `ulimit -l unlimited` and PropagateResourceLimitsExcept=MEMLOCK; pods: capability IPC_LOCK"
        # With IPC_LOCK the limit does not count, and whether we have it only the kernel knows.
        verdict = "pass" if _may_lock() else "fail"
        what = f"ranks may lock {memlock // 1024} KiB, and {setup.fabric} locks what it sends"
        yield Check("locked memory", verdict, "the capability IPC_LOCK is there" if verdict == "pass" else what, hint)


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK (bit 14 of linux/capability.h)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 14 & 1)


def check_devices(setup: FabricSetup) -> Iterator[Check]:
    """Are the fabric's cards, and the files its variables name, on this node?"""
    if setup.devices is not None:
        found = glob(setup.devices.path)
        verdict = "pass" if len(found) >= setup.devices.count else "fail"
        what = f"{len(found)} of {setup.devices.count} devices {setup.devices.path} are there"
        hint = None if verdict == "pass" else f"does the job ask for them, and is the driver of {setup.fabric} loaded?"
        yield Check("fabric devices", verdict, what, hint, {"count": len(found)})
    for name in ("NCCL_TOPO_FILE", "NCCL_TUNER_CONFIG_PATH"):
        file = setup.environment.get(name)
        if file is not None and not Path(file).is_file():
            yield Check("fabric files", "fail", f"{name} names {file}, which is not there", "put it into the image")
    if setup.profile_script is not None and not Path(setup.profile_script).is_file():
        yield Check("fabric files", "fail", f"there is no {setup.profile_script}", "did the plugin's installer run?")


def check_environment(setup: FabricSetup, environment: Mapping[str, str]) -> Iterator[Check]:
    """Which variables of this process (the image's, the scheduler's) do not belong to the fabric?"""
    ours = {name: value for name, value in environment.items() if not _expected(setup, name, value)}
    found = misplaced(setup, ours)
    if found:
        what = "; ".join(f"{name}: {rule.because}" for name, rule in found)
        yield Check("environment", "warn", what, "the image or the scheduler sets them; unset them there")
    else:
        yield Check("environment", "pass", "no variable that does not belong to the fabric")


def _expected(setup: FabricSetup, name: str, value: str) -> bool:
    """Whether a variable is what the setup, its script or the scheduler has put there."""
    if name in (*_NOT_OURS, *_GIVEN) or name.startswith(_HARMLESS) or setup.environment.get(name) == value:
        return True
    return setup.profile_script is not None and any(
        name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) for pattern in setup.profile_sets
    )


def compare_versions(by_node: Mapping[int, Mapping[str, Any]]) -> Check:
    """Are they the same on all nodes? A driver may differ, what talks over the network may not."""
    different: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for found in by_node.values() for name in found}):
        values: dict[str, list[int]] = {}
        for node, found in by_node.items():
            values.setdefault(str(found.get(name, "none")), []).append(node)
        if len(values) > 1:
            different[name] = values
    if not different:
        common = next(iter(by_node.values()), {})
        what = ", ".join(f"{name} {value}" for name, value in common.items())
        return Check("versions", "pass", what, measured=dict(common))
    told = "; ".join(f"{name}: {_minority(values)}" for name, values in different.items())
    verdict = "fail" if different.keys() - {"driver"} else "warn"
    return Check("versions", verdict, f"nodes differ in {told}", "give all nodes the same image and driver", different)


def _minority(values: Mapping[str, list[int]]) -> str:
    usual = max(values, key=lambda value: len(values[value]))
    others = [f"{value} on {nodes_in_words(nodes)}" for value, nodes in values.items() if value != usual]
    return f"{', '.join(others)}, {usual} elsewhere"


def nodes_in_words(nodes: list[int]) -> str:
    """Write a list of nodes, cut where it is long."""
    shown = ", ".join(str(node) for node in nodes[:8])
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"

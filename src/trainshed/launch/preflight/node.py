"""What one node can check without any other: GPUs, memory, disk, limits, devices, variables, versions, storage.

GPUs are read as their driver's own program shows them (`nvidia-smi -q -x`, `amd-smi static`); no CUDA is touched here.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson

from trainshed import __version__
from trainshed.catalog import Machine, find_gpu
from trainshed.errors import StorageError
from trainshed.launch.fabric import FabricSetup, misplaced_variables
from trainshed.launch.preflight.verdict import CheckResult
from trainshed.storage import Store

GIB = 2**30
# NCCL keeps about 32 MiB of shared memory for each pair of a node's GPUs, loaders of data keep batches there; Docker's
# own default of 64 MiB kills both.
_SHARED_MEMORY_FAIL, _SHARED_MEMORY_WARN_PER_GPU = 0.5 * GIB, 1 * GIB
_DISK_FAIL, _DISK_WARN = 2 * GIB, 20 * GIB
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# Images set these for MPI; they take no fabric away from NCCL.
_HARMLESS_PREFIXES = ("UCX_", "SHARP_")
_SCHEDULER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_NET")


def node_checks(setup: FabricSetup, machine: Machine | None, *, gpus: int, scratch: Path) -> list[CheckResult]:
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


def node_versions(seen: NodeGpus | None = None) -> dict[str, str]:
    """Return what should be the same on every node, as far as it can be known without loading PyTorch."""
    found = {"trainshed": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | ({"driver": seen.driver} if seen is not None and seen.driver else {})


def check_shared_memory(path: Path, gpus: int) -> CheckResult:
    """Is there room in /dev/shm for NCCL and for loaders?"""
    if not path.is_dir():
        return CheckResult("shared memory", "skipped", f"there is no {path}")
    usage = os.statvfs(path)
    size = usage.f_frsize * usage.f_blocks
    wanted = _SHARED_MEMORY_WARN_PER_GPU * max(gpus, 1)
    verdict = "fail" if size < _SHARED_MEMORY_FAIL and gpus > 1 else "warn" if size < wanted else "pass"
    hint = None if verdict == "pass" else "Kubernetes: limits.shared_memory; Docker: --shm-size; Slurm: the image's"
    what = f"{path} has {size / GIB:.1f} GiB" + ("" if verdict == "pass" else f", {wanted / GIB:.0f} GiB are usual")
    return CheckResult("shared memory", verdict, what, hint, {"bytes": size})


def check_disk(path: Path) -> CheckResult:
    """Is there room on the node's own disk for logs and caches?"""
    free = shutil.disk_usage(path).free
    verdict = "fail" if free < _DISK_FAIL else "warn" if free < _DISK_WARN else "pass"
    return CheckResult("disk", verdict, f"{free / GIB:.0f} GiB are free at {path}", measured={"free_bytes": free})


def check_limits(setup: FabricSetup, memlock: int) -> Iterator[CheckResult]:
    """May ranks lock the memory that cards write into?"""
    if not setup.rdma:
        return
    if memlock == resource.RLIM_INFINITY:
        yield CheckResult("locked memory", "pass", "ranks may lock as much as they like")
    else:
        hint = "Slurm: `ulimit -l unlimited` and PropagateResourceLimitsExcept=MEMLOCK; pods: capability IPC_LOCK"
        # With IPC_LOCK the limit does not count, and whether we have it only the kernel knows.
        verdict = "pass" if _has_ipc_lock() else "fail"
        what = f"ranks may lock {memlock // 1024} KiB, and {setup.fabric} locks what it sends"
        yield CheckResult(
            "locked memory", verdict, "the capability IPC_LOCK is there" if verdict == "pass" else what, hint
        )


def _has_ipc_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK (bit 14 of linux/capability.h)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 14 & 1)


def check_devices(setup: FabricSetup) -> Iterator[CheckResult]:
    """Are the fabric's cards, and the files its variables name, on this node?"""
    if setup.devices is not None:
        found = glob(setup.devices.path)
        verdict = "pass" if len(found) >= setup.devices.count else "fail"
        what = f"{len(found)} of {setup.devices.count} devices {setup.devices.path} are there"
        hint = None if verdict == "pass" else f"does the job ask for them, and is the driver of {setup.fabric} loaded?"
        yield CheckResult("fabric devices", verdict, what, hint, {"count": len(found)})
    for name in ("NCCL_TOPO_FILE", "NCCL_TUNER_CONFIG_PATH"):
        file = setup.environment.get(name)
        if file is not None and not Path(file).is_file():
            yield CheckResult(
                "fabric files", "fail", f"{name} names {file}, which is not there", "put it into the image"
            )
    if setup.profile_script is not None and not Path(setup.profile_script).is_file():
        yield CheckResult(
            "fabric files", "fail", f"there is no {setup.profile_script}", "did the plugin's installer run?"
        )


def check_environment(setup: FabricSetup, environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Which variables of this process (the image's, the scheduler's) do not belong to the fabric?"""
    ours = {name: value for name, value in environment.items() if not _is_expected(setup, name, value)}
    found = misplaced_variables(setup, ours)
    if found:
        what = "; ".join(f"{name}: {rule.because}" for name, rule in found)
        yield CheckResult("environment", "warn", what, "the image or the scheduler sets them; unset them there")
    else:
        yield CheckResult("environment", "pass", "no variable that does not belong to the fabric")


def _is_expected(setup: FabricSetup, name: str, value: str) -> bool:
    """Whether a variable is what the setup, its script or the scheduler has put there."""
    if (
        name in (*_RANK_VARIABLES, *_SCHEDULER_VARIABLES)
        or name.startswith(_HARMLESS_PREFIXES)
        or setup.environment.get(name) == value
    ):
        return True
    return setup.profile_script is not None and any(
        name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) for pattern in setup.profile_sets
    )


def compare_versions(by_node: Mapping[int, Mapping[str, Any]]) -> CheckResult:
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
        return CheckResult("versions", "pass", what, measured=dict(common))
    told = "; ".join(f"{name}: {_format_minority(values)}" for name, values in different.items())
    verdict = "fail" if different.keys() - {"driver"} else "warn"
    return CheckResult(
        "versions", verdict, f"nodes differ in {told}", "give all nodes the same image and driver", different
    )


def _format_minority(values: Mapping[str, list[int]]) -> str:
    usual = max(values, key=lambda value: len(values[value]))
    others = [f"{value} on {format_nodes(nodes)}" for value, nodes in values.items() if value != usual]
    return f"{', '.join(others)}, {usual} elsewhere"


def format_nodes(nodes: list[int]) -> str:
    """Write a list of nodes, cut where it is long."""
    shown = ", ".join(str(node) for node in nodes[:8])
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"


_TOOL_SECONDS = 60.0
# What AWS's health suite (awslabs/awsome-distributed-ai) does about an Xid of NVIDIA's driver. Not listed: those that a
# program causes (13, 31, 94, 126) and those that need nothing (43, 63, 92, 121).
_XID_BAD = {54: "isolate the node", 79: "reboot it", 151: "reboot it", 168: "reboot it"}
_XID_RESET = frozenset({48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")


@dataclass(frozen=True)
class GpuReading:
    """One GPU."""

    name: str
    trouble: tuple[str, ...] = ()
    """Why it should not be used."""
    doubts: tuple[str, ...] = ()
    """Why it may be slow."""


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node and their driver."""

    vendor: str
    driver: str | None
    gpus: tuple[GpuReading, ...]


def find_gpus() -> NodeGpus | None:
    """Ask the driver's program; None where there is none."""
    if shutil.which("nvidia-smi"):
        done = _run_tool("nvidia-smi", "-q", "-x")
        return None if done is None else parse_nvidia_smi(done)
    if shutil.which("amd-smi"):
        listed = _run_tool("amd-smi", "static", "--asic", "--driver", "--json")
        return None if listed is None else parse_amd_smi(listed)
    return None


def parse_nvidia_smi(text: str) -> NodeGpus:
    """Read what `nvidia-smi -q -x` prints."""
    root = ElementTree.fromstring(text[text.index("<nvidia_smi_log") :])
    gpus = tuple(
        GpuReading(_xml_text(gpu, "product_name") or "GPU", tuple(_nvidia_errors(gpu)), tuple(_nvidia_slowdowns(gpu)))
        for gpu in root.iter("gpu")
    )
    return NodeGpus("nvidia", _xml_text(root, "driver_version"), gpus)


def _nvidia_errors(gpu: ElementTree.Element) -> Iterator[str]:
    kinds = ("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
    paths = [*(f"ecc_errors/volatile/{kind}" for kind in kinds), "ecc_errors/volatile/double_bit/total"]
    if count := sum(_parse_count(_xml_text(gpu, path)) for path in paths):
        yield f"{count} uncorrectable memory errors since it was last reset"
    for path in ("remapped_rows/remapped_row_failure", "row_remapper_failure"):
        if _xml_text(gpu, path) == "Yes":
            yield "its memory has no spare rows left (row remapping failed)"
    for path in ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"):
        if _xml_text(gpu, path) == "Yes":
            yield "memory waits to be remapped: it needs a reset"


def _nvidia_slowdowns(gpu: ElementTree.Element) -> Iterator[str]:
    for reason, words in (("hw_thermal_slowdown", "too hot"), ("hw_power_brake_slowdown", "short of power")):
        for group, item in (("clocks_event_reasons", "event"), ("clocks_throttle_reasons", "throttle")):
            if _xml_text(gpu, f"{group}/clocks_{item}_reason_{reason}") == "Active":
                yield f"slowed down: {words}"
                break


def parse_amd_smi(text: str) -> NodeGpus:
    """Read what `amd-smi static --asic --driver --json` prints; a list, in newer versions below `gpu_data`."""
    body = orjson.loads(text)
    listed: list[dict[str, Any]] = body.get("gpu_data", []) if isinstance(body, dict) else body
    names = [str(gpu.get("asic", {}).get("market_name", "GPU")) for gpu in listed]
    drivers = [gpu.get("driver", {}).get("version") for gpu in listed]
    return NodeGpus("amd", drivers[0] if drivers else None, tuple(GpuReading(name) for name in names))


def check_gpus(seen: NodeGpus | None, wanted: int, device_names: tuple[str, ...] = ()) -> Iterator[CheckResult]:
    """Are all GPUs there, of the kind that was paid for, and well?"""
    if not wanted:
        yield CheckResult("gpus", "skipped", "the job asks for no GPUs")
        return
    if seen is None:
        hint = "does the job ask for GPUs, and has the image the driver's tools?"
        yield CheckResult("gpus", "fail", f"{wanted} GPUs are wanted, and neither nvidia-smi nor amd-smi answers", hint)
        return
    measured = {"count": len(seen.gpus), "names": sorted({gpu.name for gpu in seen.gpus}), "driver": seen.driver}
    if len(seen.gpus) < wanted:
        what = f"{len(seen.gpus)} of {wanted} GPUs are there"
        yield CheckResult("gpus", "fail", what, "a GPU may have fallen off the bus: `dmesg | grep Xid`", measured)
    else:
        yield CheckResult(
            "gpus", "pass", f"{len(seen.gpus)} x {seen.gpus[0].name}, driver {seen.driver}", measured=measured
        )
    others = sorted({gpu.name for gpu in seen.gpus if device_names and gpu.name not in device_names})
    if others:
        yield CheckResult(
            "gpu kind", "warn", f"the machine's GPUs should be {device_names[0]}, not {', '.join(others)}"
        )
    trouble = [f"GPU {index}: {what}" for index, gpu in enumerate(seen.gpus) for what in gpu.trouble]
    doubts = [f"GPU {index} is {what}" for index, gpu in enumerate(seen.gpus) for what in gpu.doubts]
    if trouble or doubts:
        yield CheckResult("gpu health", "fail" if trouble else "warn", "; ".join([*trouble, *doubts]))
    else:
        yield CheckResult("gpu health", "pass", "no GPU reports errors or slows down")


def check_kernel_log(log: str | None) -> CheckResult:
    """What the driver said of its GPUs since the node was started."""
    if log is None:
        return CheckResult("kernel log", "skipped", "it may not be read here")
    found = {(place, int(number)) for place, number in _XID.findall(log)}
    bad = sorted((place, number) for place, number in found if number in _XID_BAD)
    reset = sorted((place, number) for place, number in found if number in _XID_RESET)
    measured = {"xids": sorted({number for _, number in found})}
    if bad:
        place, number = bad[0]
        what = f"the driver reported Xid {number} of the GPU at {place}: {_XID_BAD[number]}"
        return CheckResult("kernel log", "fail", what, measured=measured)
    if reset:
        place, number = reset[0]
        what = f"the driver reported Xid {number} of the GPU at {place} since the node was started"
        return CheckResult("kernel log", "warn", what, "reset the GPU if it was not done since", measured)
    return CheckResult("kernel log", "pass", "no Xid that asks for a reset", measured=measured)


def read_kernel_log() -> str | None:
    """Return the kernel's messages, None where they may not be read."""
    return _run_tool("dmesg") if shutil.which("dmesg") else None


def _run_tool(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _xml_text(element: ElementTree.Element, path: str) -> str | None:
    found = element.findtext(path)
    return found.strip() if found else None


def _parse_count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


STORAGE_SAMPLE_BYTES = 64 * 2**20
_MAX_SAMPLED_NODES = 4
# One file says little about what many writers reach: only what is far off is worth a word.
_SLOW_STORAGE_FRACTION = 0.25


def sampled_nodes(nodes: int) -> tuple[int, ...]:
    """Return which nodes write: the first, the last, and some between them."""
    count = min(nodes, _MAX_SAMPLED_NODES)
    return tuple(sorted({round(index * (nodes - 1) / max(count - 1, 1)) for index in range(count)}))


def check_storage(
    store: Store, path: str, *, expected_gb_per_s: float | None = None, size_bytes: int = STORAGE_SAMPLE_BYTES
) -> CheckResult:
    """Write a file, read it back, remove it; `expected_gb_per_s` is what this node should get of the storage."""
    block = os.urandom(min(size_bytes, 2**20))
    blocks: Sequence[bytes] = [block] * max(1, size_bytes // len(block))
    total = len(block) * len(blocks)
    try:
        started = time.perf_counter()
        with store.writer(path, size=total) as writer:
            for each in blocks:
                writer.write(each)
        written = time.perf_counter() - started
        started = time.perf_counter()
        whole = sum(len(chunk) for chunk in store.stream(path)) == total and store.read(path, 0, len(block)) == block
        read = time.perf_counter() - started
        store.delete(path)
    except (StorageError, OSError) as error:
        return CheckResult(
            "storage", "fail", f"the run's folder cannot be written: {error}", f"is {store.url} reachable?"
        )
    if not whole:
        return CheckResult(
            "storage", "fail", "what was written does not come back", f"is {store.url} mounted everywhere?"
        )
    rates = {"write_gb_per_s": total / written / 1e9, "read_gb_per_s": total / read / 1e9, "bytes": total}
    told = f"{rates['write_gb_per_s']:.2f} GB/s written, {rates['read_gb_per_s']:.2f} read"
    if expected_gb_per_s is None:
        return CheckResult("storage", "pass", f"{told}; measured, nothing to compare with", measured=rates)
    slow = rates["write_gb_per_s"] < _SLOW_STORAGE_FRACTION * expected_gb_per_s
    what = f"{told}; the tier gives this node {expected_gb_per_s:.2f}"
    hint = "checkpoints will take longer than planned" if slow else None
    return CheckResult(
        "storage", "warn" if slow else "pass", what, hint, rates | {"expected_gb_per_s": expected_gb_per_s}
    )

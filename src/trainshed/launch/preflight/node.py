"""What one node can check without any other: GPUs, memory, disk, limits, devices, variables, versions, storage.

GPUs are read from the driver's own program (`nvidia-smi -q -x`, `amd-smi static`), without CUDA.
"""

from __future__ import annotations

import os
import platform
import re
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
# NCCL uses about 32 MiB of shared memory for each pair of a node's GPUs, and data loaders keep batches there. Docker's
# default of 64 MiB is too small for both.
_SHARED_MEMORY_FAIL, _SHARED_MEMORY_WARN_PER_GPU = 0.5 * GIB, 1 * GIB
_DISK_FAIL, _DISK_WARN = 2 * GIB, 20 * GIB
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# Images set these for MPI; they do not change the network that NCCL uses.
_HARMLESS_PREFIXES = ("UCX_", "SHARP_")
_SCHEDULER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_NET")


def node_checks(setup: FabricSetup, machine: Machine | None, *, gpus: int, scratch: Path) -> list[CheckResult]:
    """Check this node; `gpus` is how many the job uses here, 0 if it trains on CPUs."""
    node_gpus = find_gpus() if gpus else None
    names = find_gpu(machine.gpu).device_names if machine is not None else ()
    return [
        *check_gpus(node_gpus, gpus, names),
        *([check_kernel_log(read_kernel_log())] if gpus else []),
        check_shared_memory(Path("/dev/shm"), gpus),
        check_disk(scratch),
        *check_limits(setup, locked_memory_limit()),
        *check_devices(setup),
        *check_environment(setup, os.environ),
    ]


def node_versions(node_gpus: NodeGpus | None = None) -> dict[str, str]:
    """Return the versions that should be the same on every node, as far as they are known without loading PyTorch."""
    versions = {"trainshed": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions | ({"driver": node_gpus.driver} if node_gpus is not None and node_gpus.driver else {})


def check_shared_memory(path: Path, gpus: int) -> CheckResult:
    """Check whether /dev/shm has room for NCCL and for data loaders."""
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
    """Check whether the node's own disk has room for logs and caches."""
    free = shutil.disk_usage(path).free
    verdict = "fail" if free < _DISK_FAIL else "warn" if free < _DISK_WARN else "pass"
    return CheckResult("disk", verdict, f"{free / GIB:.0f} GiB are free at {path}", measured={"free_bytes": free})


def locked_memory_limit() -> int | None:
    """Return how many bytes this process may lock into memory; None: as many as it likes."""
    import resource  # of Linux and macOS: the machine that submits may be another

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_limits(setup: FabricSetup, memlock: int | None) -> Iterator[CheckResult]:
    """Check whether ranks may lock the memory that network cards write into; None is no limit."""
    if not setup.rdma:
        return
    if memlock is None:
        yield CheckResult("locked memory", "pass", "ranks may lock as much as they like")
    else:
        hint = "Slurm: `ulimit -l unlimited` and PropagateResourceLimitsExcept=MEMLOCK; pods: capability IPC_LOCK"
        # With the capability IPC_LOCK the limit does not count.
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
    """Check whether this node has the fabric's cards, and the files that its variables name."""
    if setup.devices is not None:
        devices = glob(setup.devices.path)
        verdict = "pass" if len(devices) >= setup.devices.count else "fail"
        what = f"{len(devices)} of {setup.devices.count} devices {setup.devices.path} are there"
        hint = None if verdict == "pass" else f"does the job ask for them, and is the driver of {setup.fabric} loaded?"
        yield CheckResult("fabric devices", verdict, what, hint, {"count": len(devices)})
    for name in ("NCCL_TOPO_FILE", "NCCL_TUNER_CONFIG_PATH"):
        # The cluster file may name another place than the fabric's setup does.
        file = os.environ.get(name) or setup.environment.get(name)
        if file is not None and not Path(file).is_file():
            yield CheckResult(
                "fabric files", "fail", f"{name} names {file}, which is not there", "put it into the image"
            )
    if setup.profile_script is not None and not Path(setup.profile_script).is_file():
        yield CheckResult(
            "fabric files", "fail", f"there is no {setup.profile_script}", "did the plugin's installer run?"
        )


def check_environment(setup: FabricSetup, environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check for variables of the image or the scheduler that do not belong to the fabric."""
    unexpected = {name: value for name, value in environment.items() if not _is_expected(setup, name, value)}
    misplaced = misplaced_variables(setup, unexpected)
    if misplaced:
        what = "; ".join(f"{name}: {rule.because}" for name, rule in misplaced)
        yield CheckResult("environment", "warn", what, "the image or the scheduler sets them; unset them there")
    else:
        yield CheckResult("environment", "pass", "no variable that does not belong to the fabric")


def _is_expected(setup: FabricSetup, name: str, value: str) -> bool:
    """Whether the setup, its script or the scheduler has set a variable."""
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
    """Check whether versions are the same on all nodes; only the driver may differ."""
    different: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for versions in by_node.values() for name in versions}):
        values: dict[str, list[int]] = {}
        for node, versions in by_node.items():
            values.setdefault(str(versions.get(name, "none")), []).append(node)
        if len(values) > 1:
            different[name] = values
    if not different:
        common = next(iter(by_node.values()), {})
        what = ", ".join(f"{name} {value}" for name, value in common.items())
        return CheckResult("versions", "pass", what, measured=dict(common))
    differences = "; ".join(f"{name}: {_format_minority(values)}" for name, values in different.items())
    verdict = "fail" if different.keys() - {"driver"} else "warn"
    return CheckResult(
        "versions", verdict, f"nodes differ in {differences}", "give all nodes the same image and driver", different
    )


def _format_minority(values: Mapping[str, list[int]]) -> str:
    most_common = max(values, key=lambda value: len(values[value]))
    others = [f"{value} on {format_nodes(nodes)}" for value, nodes in values.items() if value != most_common]
    return f"{', '.join(others)}, {most_common} elsewhere"


def format_nodes(nodes: list[int]) -> str:
    """Write a list of nodes; a long one is cut."""
    shown = ", ".join(str(node) for node in nodes[:8])
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"


_TOOL_SECONDS = 60.0
# What AWS's health suite (awslabs/awsome-distributed-ai) does about an Xid error of NVIDIA's driver. Not listed: those
# that a program causes (13, 31, 94, 126) and those that need no action (43, 63, 92, 121).
_XID_BAD = {54: "isolate the node", 79: "reboot it", 151: "reboot it", 168: "reboot it"}
_XID_RESET = frozenset({48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")


@dataclass(frozen=True)
class GpuReading:
    """One GPU."""

    name: str
    errors: tuple[str, ...] = ()
    """Why it should not be used."""
    slowdowns: tuple[str, ...] = ()
    """Why it may be slow."""


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node and their driver."""

    vendor: str
    driver: str | None
    gpus: tuple[GpuReading, ...]


def find_gpus() -> NodeGpus | None:
    """Read the GPUs from the driver's program; None if there is none."""
    if shutil.which("nvidia-smi"):
        printed = _run_tool("nvidia-smi", "-q", "-x")
        return None if printed is None else parse_nvidia_smi(printed)
    if shutil.which("amd-smi"):
        printed = _run_tool("amd-smi", "static", "--asic", "--driver", "--json")
        return None if printed is None else parse_amd_smi(printed)
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
    for reason, cause in (("hw_thermal_slowdown", "too hot"), ("hw_power_brake_slowdown", "short of power")):
        for group, item in (("clocks_event_reasons", "event"), ("clocks_throttle_reasons", "throttle")):
            if _xml_text(gpu, f"{group}/clocks_{item}_reason_{reason}") == "Active":
                yield f"slowed down: {cause}"
                break


def parse_amd_smi(text: str) -> NodeGpus:
    """Read what `amd-smi static --asic --driver --json` prints: a list, in newer versions below `gpu_data`."""
    body = orjson.loads(text)
    listed: list[dict[str, Any]] = body.get("gpu_data", []) if isinstance(body, dict) else body
    names = [str(gpu.get("asic", {}).get("market_name", "GPU")) for gpu in listed]
    drivers = [gpu.get("driver", {}).get("version") for gpu in listed]
    return NodeGpus("amd", drivers[0] if drivers else None, tuple(GpuReading(name) for name in names))


def check_gpus(node_gpus: NodeGpus | None, wanted: int, device_names: tuple[str, ...] = ()) -> Iterator[CheckResult]:
    """Check whether all GPUs are there, of the machine's kind, and without errors."""
    if not wanted:
        yield CheckResult("gpus", "skipped", "the job asks for no GPUs")
        return
    if node_gpus is None:
        hint = "does the job ask for GPUs, and has the image the driver's tools?"
        yield CheckResult("gpus", "fail", f"{wanted} GPUs are wanted, and neither nvidia-smi nor amd-smi answers", hint)
        return
    measured = {
        "count": len(node_gpus.gpus),
        "names": sorted({gpu.name for gpu in node_gpus.gpus}),
        "driver": node_gpus.driver,
    }
    if len(node_gpus.gpus) < wanted:
        what = f"{len(node_gpus.gpus)} of {wanted} GPUs are there"
        yield CheckResult("gpus", "fail", what, "a GPU may have fallen off the bus: `dmesg | grep Xid`", measured)
    else:
        yield CheckResult(
            "gpus",
            "pass",
            f"{len(node_gpus.gpus)} x {node_gpus.gpus[0].name}, driver {node_gpus.driver}",
            measured=measured,
        )
    others = sorted({gpu.name for gpu in node_gpus.gpus if device_names and gpu.name not in device_names})
    if others:
        yield CheckResult(
            "gpu kind", "warn", f"the machine's GPUs should be {device_names[0]}, not {', '.join(others)}"
        )
    errors = [f"GPU {index}: {what}" for index, gpu in enumerate(node_gpus.gpus) for what in gpu.errors]
    slowdowns = [f"GPU {index} is {what}" for index, gpu in enumerate(node_gpus.gpus) for what in gpu.slowdowns]
    if errors or slowdowns:
        yield CheckResult("gpu health", "fail" if errors else "warn", "; ".join([*errors, *slowdowns]))
    else:
        yield CheckResult("gpu health", "pass", "no GPU reports errors or slows down")


def check_kernel_log(log: str | None) -> CheckResult:
    """Check for errors that the driver reported since the node was started."""
    if log is None:
        return CheckResult("kernel log", "skipped", "it may not be read here")
    xids = {(gpu_address, int(number)) for gpu_address, number in _XID.findall(log)}
    bad = sorted((gpu_address, number) for gpu_address, number in xids if number in _XID_BAD)
    reset = sorted((gpu_address, number) for gpu_address, number in xids if number in _XID_RESET)
    measured = {"xids": sorted({number for _, number in xids})}
    if bad:
        gpu_address, number = bad[0]
        what = f"the driver reported Xid {number} of the GPU at {gpu_address}: {_XID_BAD[number]}"
        return CheckResult("kernel log", "fail", what, measured=measured)
    if reset:
        gpu_address, number = reset[0]
        what = f"the driver reported Xid {number} of the GPU at {gpu_address} since the node was started"
        return CheckResult("kernel log", "warn", what, "reset the GPU if it was not done since", measured)
    return CheckResult("kernel log", "pass", "no Xid that asks for a reset", measured=measured)


def read_kernel_log() -> str | None:
    """Return the kernel's messages, None if they may not be read."""
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
    text = element.findtext(path)
    return text.strip() if text else None


def _parse_count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


STORAGE_SAMPLE_BYTES = 64 * 2**20
_MAX_SAMPLED_NODES = 4
# One file says little about what many writers reach: only a rate far below the expected one is a warning.
_SLOW_STORAGE_FRACTION = 0.25


def sampled_nodes(nodes: int) -> tuple[int, ...]:
    """Return which nodes write: the first, the last, and some between them."""
    count = min(nodes, _MAX_SAMPLED_NODES)
    return tuple(sorted({round(index * (nodes - 1) / max(count - 1, 1)) for index in range(count)}))


def check_storage(
    store: Store, path: str, *, expected_gb_per_s: float | None = None, size_bytes: int = STORAGE_SAMPLE_BYTES
) -> CheckResult:
    """Write a file, read it back, delete it; `expected_gb_per_s` is this node's share of the storage's bandwidth."""
    block = os.urandom(min(size_bytes, 2**20))
    blocks: Sequence[bytes] = [block] * max(1, size_bytes // len(block))
    total = len(block) * len(blocks)
    try:
        started = time.perf_counter()
        with store.writer(path, size=total) as writer:
            for chunk in blocks:
                writer.write(chunk)
        write_seconds = time.perf_counter() - started
        started = time.perf_counter()
        is_intact = (
            sum(len(chunk) for chunk in store.stream(path)) == total and store.read(path, 0, len(block)) == block
        )
        read_seconds = time.perf_counter() - started
        store.delete(path)
    except (StorageError, OSError) as error:
        return CheckResult(
            "storage", "fail", f"the run's folder cannot be written: {error}", f"is {store.url} reachable?"
        )
    if not is_intact:
        return CheckResult(
            "storage", "fail", "what was written does not come back", f"is {store.url} mounted everywhere?"
        )
    rates = {"write_gb_per_s": total / write_seconds / 1e9, "read_gb_per_s": total / read_seconds / 1e9, "bytes": total}
    rates_text = f"{rates['write_gb_per_s']:.2f} GB/s written, {rates['read_gb_per_s']:.2f} read"
    if expected_gb_per_s is None:
        return CheckResult("storage", "pass", f"{rates_text}; measured, nothing to compare with", measured=rates)
    slow = rates["write_gb_per_s"] < _SLOW_STORAGE_FRACTION * expected_gb_per_s
    what = f"{rates_text}; the tier gives this node {expected_gb_per_s:.2f}"
    hint = "checkpoints will take longer than planned" if slow else None
    return CheckResult(
        "storage", "warn" if slow else "pass", what, hint, rates | {"expected_gb_per_s": expected_gb_per_s}
    )

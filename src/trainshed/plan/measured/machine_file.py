"""A measured machine as a file in the catalog's own form, for `plan --machine FILE`.

A GPU that the catalog knows keeps its published figures: predictions are of what engines reach of those. For one it
does not know (a CPU too) an entry is made from the measurements, in a second file beside the first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from trainshed.catalog.gpus import Gpu, gpu_by_device_name
from trainshed.catalog.machines import find_machine
from trainshed.plan.measured.machine_measurements import MachineMeasurements
from trainshed.storage import LocalStore

# What the best measurement reaches of the published figure on GPUs whose figures are published, by which figures are
# made up for others: 0.8 of the bf16 peak in the largest products, 0.9 of the memory bandwidth in copies, 0.8 of NVLink
# in all-reduces of 1 GiB (nccl-tests on DGX A100 and H100).
REACHED_TFLOPS, REACHED_MEMORY, REACHED_LINK = 0.8, 0.9, 0.8
_UNKNOWN_NETWORK = ("ethernet", 10.0)


def write_machine(measured: MachineMeasurements, path: Path) -> list[Path]:
    """Write the machine's file, and its GPU's where the catalog has none; return what was written."""
    known = gpu_by_device_name(measured.device)
    name = path.stem
    written = [path]
    gpu_name = known.name if known is not None else f"./{name}-gpu.yaml"
    _write(path, {name: machine_entry(measured, gpu_name, known)}, measured)
    if known is None:
        beside = path.with_name(f"{name}-gpu.yaml")
        _write(beside, {_name_of(measured.device): gpu_entry(measured, machine=f"./{path.name}")}, measured)
        written.append(beside)
    return written


def machine_entry(measured: MachineMeasurements, gpu_name: str, known: Gpu | None) -> dict[str, Any]:
    """Return the machine's entry; what cannot be measured on one machine is taken from its kind, and said."""
    fabric, gbps, whence = measured.fabric, measured.network_gbps, "network cards as Linux lists them"
    if fabric is None or gbps is None:
        if known is not None and known.machine is not None:
            usual = find_machine(known.machine)
            fabric, gbps, whence = usual.fabric, usual.network_gbps, f"no network card found: that of {usual.name}"
        else:
            fabric, gbps = _UNKNOWN_NETWORK
            whence = f"no network card found: {gbps:g} Gbit/s of {fabric} assumed"
    return {
        "source": f"trainshed plan probe, torch {measured.torch}; {whence}",
        "gpu": gpu_name,
        "gpus": measured.devices,
        "fabric": fabric,
        "network_gbps": float(gbps),
        "cpus": measured.cpus,
        "memory_gib": _figures(measured.host_memory_gib),
    }


def gpu_entry(measured: MachineMeasurements, *, machine: str) -> dict[str, Any]:
    """Return an entry for a GPU whose figures are not published, from what was measured on it."""
    peaks = {
        dtype: _figures(best / REACHED_TFLOPS)
        for dtype in ("fp8", "bf16", "fp32")
        if (best := measured.best_tflops(dtype)) is not None
    }
    bus = measured.bus_gb_per_s if measured.kind == "cuda" else None
    return {
        "source": f"trainshed plan probe, torch {measured.torch}: peaks are the best product measured / "
        f"{REACHED_TFLOPS}, bandwidth a copy / {REACHED_MEMORY}, links an all-reduce / {REACHED_LINK}",
        "device_names": [measured.device],
        "memory_gib": _figures(measured.memory_gib),
        "memory_gb_per_s": _figures(measured.copy_gb_per_s / REACHED_MEMORY),
        "link_gb_per_s": None if bus is None else _figures(2 * bus / REACHED_LINK),
        "dense_tflops": peaks,
        "machine": machine,
    }


def shares(measured: MachineMeasurements) -> dict[str, float]:
    """Return what the best measurements reach of the published figures; empty for a GPU that has none."""
    known = gpu_by_device_name(measured.device)
    if known is None:
        return {}
    found = {"memory": measured.copy_gb_per_s / known.memory_gb_per_s}
    for dtype in ("bf16", "fp8"):
        peak, best = known.dense_tflops.peak(dtype), measured.best_tflops(dtype)
        if peak is not None and best is not None:
            found[dtype] = best / peak
    if known.link_gb_per_s is not None and measured.bus_gb_per_s is not None:
        found["link"] = 2 * measured.bus_gb_per_s / known.link_gb_per_s
    return found


def _write(path: Path, entries: dict[str, Any], measured: MachineMeasurements) -> None:
    body = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=110)
    LocalStore(path.absolute().parent).put(path.name, (_measurements(measured) + body).encode())


def _measurements(measured: MachineMeasurements) -> str:
    """What was measured, as comments: a later reader may want to fit something else to it."""
    lines = [f"{measured.devices} x {measured.device}, measured with torch {measured.torch}"]
    lines += [f"{g.rows} x {g.inputs} x {g.outputs} {g.dtype}: {g.tflops:.4g} TFLOP/s" for g in measured.gemms]
    lines += [
        f"attention, {a.heads} heads of {a.head_dim} over {a.sequence_length} tokens, {a.dtype}: "
        f"{a.forward_tflops:.4g} TFLOP/s forward, {a.backward_tflops:.4g} backward"
        for a in measured.attention
    ]
    lines.append(f"copy {measured.copy_gb_per_s:.4g} GB/s, {measured.launch_us:.3g} us between kernels")
    lines += [
        f"all-reduce of {r.mebibytes:g} MiB among {r.ranks}: {r.bus_gb_per_s:.4g} GB/s bus bandwidth"
        for r in measured.all_reduces
    ]
    return "".join(f"# {line}\n" for line in lines)


def _name_of(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def _figures(value: float) -> float:
    return float(f"{value:.4g}")

"""What `plan probe` measures on a machine, and the file it writes for `plan --machine FILE`, in the catalog's form.

A GPU that the catalog knows keeps its published figures, because predictions are shares of those. For an unknown one
(or a CPU) an entry is made from the measurements, in a second file beside the first. There is no torch here: the
measuring itself is `engines/torch/machine_probe.py`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from trainshed.catalog.gpus import Gpu, gpu_by_device_name
from trainshed.catalog.machines import find_machine
from trainshed.storage import LocalStore


@dataclass(frozen=True)
class GemmRate:
    """One shape of matrix product: `rows` tokens, times a weight of `inputs` x `outputs`.

    Called from Python, one after the other, as an engine does without CUDA graphs: the host limits small shapes.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str
    tflops: float


@dataclass(frozen=True)
class AttentionRate:
    """Causal attention over one shape; FLOPs counted as causal, backward as 2.5 times the forward."""

    sequence_length: int
    heads: int
    head_dim: int
    dtype: str
    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True)
class AllReduceRate:
    """One message size: `bus_gb_per_s` is 2 (n - 1) / n of the message per second, as nccl-tests count."""

    ranks: int
    mebibytes: float
    seconds: float
    bus_gb_per_s: float


@dataclass(frozen=True)
class MachineMeasurements:
    """One machine as it was measured."""

    device: str
    """The driver's name of the GPU; the processor's name without a GPU."""
    kind: str
    """`cuda` or `cpu`."""
    devices: int
    """GPUs of the machine; 1 for a CPU."""
    memory_gib: float
    """Memory of one device."""
    host_memory_gib: float
    cpus: int
    torch: str
    gemms: tuple[GemmRate, ...]
    attention: tuple[AttentionRate, ...]
    copy_gb_per_s: float
    """Reading and writing together."""
    launch_us: float
    """Between two of the smallest kernels, one after the other."""
    all_reduces: tuple[AllReduceRate, ...]
    """Empty with one GPU."""
    fabric: str | None = None
    """The network cards that were found, by the fabric's name in the catalog; nothing was sent over them."""
    network_gbps: float | None = None
    """Line rate of those cards together, 10^9 bits a second."""

    def best_tflops(self, dtype: str) -> float | None:
        """Return the fastest product of a dtype, None where it was not measured."""
        return max((gemm.tflops for gemm in self.gemms if gemm.dtype == dtype), default=None)

    @property
    def bus_gb_per_s(self) -> float | None:
        """The best bus bandwidth among the machine's own devices."""
        return max((rate.bus_gb_per_s for rate in self.all_reduces), default=None)

    def to_plain(self) -> dict[str, Any]:
        """Return the measurements as JSON has them."""
        return asdict(self)


# What the best measurement reaches of the published figure, on GPUs that have one. Other GPUs get their measurement
# divided by it: 0.8 of the bf16 peak in the largest products, 0.9 of the memory bandwidth in copies, 0.8 of NVLink
# in all-reduces of 1 GiB (nccl-tests on DGX A100 and H100).
TFLOPS_EFFICIENCY, MEMORY_EFFICIENCY, LINK_EFFICIENCY = 0.8, 0.9, 0.8
_UNKNOWN_NETWORK = ("ethernet", 10.0)


def write_machine_file(measured: MachineMeasurements, path: Path) -> list[Path]:
    """Write the machine's file, and its GPU's where the catalog has none; return what was written."""
    known = gpu_by_device_name(measured.device)
    name = path.stem
    written = [path]
    gpu_name = known.name if known is not None else f"./{name}-gpu.yaml"
    _write_entries(path, {name: machine_entry(measured, gpu_name, known)}, measured)
    if known is None:
        beside = path.with_name(f"{name}-gpu.yaml")
        _write_entries(beside, {_entry_name(measured.device): gpu_entry(measured, machine=f"./{path.name}")}, measured)
        written.append(beside)
    return written


def machine_entry(measured: MachineMeasurements, gpu_name: str, known: Gpu | None) -> dict[str, Any]:
    """Return the machine's entry; a network that was not found is that of the usual machine, and `source` says so."""
    fabric, gbps, source = measured.fabric, measured.network_gbps, "network cards as Linux lists them"
    if fabric is None or gbps is None:
        if known is not None and known.machine is not None:
            usual = find_machine(known.machine)
            fabric, gbps, source = usual.fabric, usual.network_gbps, f"no network card found: that of {usual.name}"
        else:
            fabric, gbps = _UNKNOWN_NETWORK
            source = f"no network card found: {gbps:g} Gbit/s of {fabric} assumed"
    return {
        "source": f"trainshed plan probe, torch {measured.torch}; {source}",
        "gpu": gpu_name,
        "gpus": measured.devices,
        "fabric": fabric,
        "network_gbps": float(gbps),
        "cpus": measured.cpus,
        "memory_gib": _four_figures(measured.host_memory_gib),
    }


def gpu_entry(measured: MachineMeasurements, *, machine: str) -> dict[str, Any]:
    """Return an entry for a GPU whose figures are not published, from what was measured on it."""
    peaks = {
        dtype: _four_figures(best / TFLOPS_EFFICIENCY)
        for dtype in ("fp8", "bf16", "fp32")
        if (best := measured.best_tflops(dtype)) is not None
    }
    bus = measured.bus_gb_per_s if measured.kind == "cuda" else None
    return {
        "source": f"trainshed plan probe, torch {measured.torch}: peaks are the best product measured / "
        f"{TFLOPS_EFFICIENCY}, bandwidth a copy / {MEMORY_EFFICIENCY}, links an all-reduce / {LINK_EFFICIENCY}",
        "device_names": [measured.device],
        "memory_gib": _four_figures(measured.memory_gib),
        "memory_gb_per_s": _four_figures(measured.copy_gb_per_s / MEMORY_EFFICIENCY),
        "link_gb_per_s": None if bus is None else _four_figures(2 * bus / LINK_EFFICIENCY),
        "dense_tflops": peaks,
        "machine": machine,
    }


def reached_shares(measured: MachineMeasurements) -> dict[str, float]:
    """Return what the best measurements reach of the published figures; empty for a GPU that has none."""
    known = gpu_by_device_name(measured.device)
    if known is None:
        return {}
    shares = {"memory": measured.copy_gb_per_s / known.memory_gb_per_s}
    for dtype in ("bf16", "fp8"):
        peak, best = known.dense_tflops.peak(dtype), measured.best_tflops(dtype)
        if peak is not None and best is not None:
            shares[dtype] = best / peak
    if known.link_gb_per_s is not None and measured.bus_gb_per_s is not None:
        shares["link"] = 2 * measured.bus_gb_per_s / known.link_gb_per_s
    return shares


def _write_entries(path: Path, entries: dict[str, Any], measured: MachineMeasurements) -> None:
    body = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=110)
    LocalStore(path.absolute().parent).put(path.name, (_measurements(measured) + body).encode())


def _measurements(measured: MachineMeasurements) -> str:
    """The measurements as comments, for readers who need more than the entry."""
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


def _entry_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def _four_figures(value: float) -> float:
    return float(f"{value:.4g}")

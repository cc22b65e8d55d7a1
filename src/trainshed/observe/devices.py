"""What the GPUs and network cards of a node report, and which of it a person should look at.

`open_gpus` finds the reader for this node: NVML by nvidia-ml-py, `nvidia-smi` where that package is missing, `amd-smi`
on AMD. `read_node` takes one sample of a node. `DeviceWatch` turns the samples of all nodes into the events `devices`
and `alarm`; only one process of a run has one.

This is also a job file: `watch_node.py` imports it in the image of a foreign engine. It needs the standard library of
Python 3.8 and nothing of Trainshed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence  # noqa: UP035 - Python 3.8

SAMPLE_SECONDS = 60.0
"""Between two `devices` events."""

_GIB = 2**30
_COMMAND_SECONDS = 20.0  # nvidia-smi on a node with a broken GPU may never answer


@dataclass(frozen=True)
class GpuSample:
    """What one GPU reports; None for what it does not."""

    index: int
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization: float | None = None
    """Fraction of the time in which a kernel ran."""
    memory_gib: float | None = None
    clock_mhz: float | None = None
    throttled: str | None = None
    """Why the clock is held down: `power` (its own limit, usual under load), `temperature`, `hardware`."""
    nvlink_bytes: int | None = None
    """Sent and received over NVLink, counted."""
    ecc_uncorrectable: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrectable_ever: int | None = None
    remapping_pending: bool = False
    """A broken row of memory is replaced with the next reset."""
    remapping_failed: bool = False
    """There is no spare row left for a broken one."""
    lost: bool = False
    """It no longer answers."""
    xids: list[int] = field(default_factory=list)
    """Errors that NVIDIA's driver has reported since the last reading."""


@dataclass(frozen=True)
class NodeSample:
    """What a node reports at one time; `gpus` are in the order of local ranks."""

    host: str
    time: float
    gpus: list[GpuSample]
    network_bytes: int | None = None
    """Sent and received by its network cards, counted."""
    problem: str | None = None
    """Why GPUs that are there cannot be read."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, body: Mapping[str, Any]) -> NodeSample:
        """Read what `to_plain` gave."""
        values: dict[str, Any] = {**body, "gpus": [GpuSample(**gpu) for gpu in body["gpus"]]}
        return cls(**values)


class GpuReader(Protocol):
    """Reads the GPUs that the ranks of this node use."""

    def read(self) -> list[GpuSample]:
        """Return a reading of each; empty where they do not answer now."""
        ...


def read_node(gpus: GpuReader | None, host: str | None = None, problem: str | None = None) -> NodeSample:
    """Take a sample of this node."""
    readings = gpus.read() if gpus is not None else []
    return NodeSample(host or socket.gethostname(), time.time(), readings, read_network_bytes(), problem)


def open_gpus(environment: Mapping[str, str] = os.environ) -> GpuReader | None:
    """Return the reader of this node's GPUs; None where there are none or nothing reads them."""
    try:
        import pynvml

        reader = NvmlGpus(pynvml, environment)
    except Exception:  # not installed, or no driver of NVIDIA's: the library has an error class for each
        reader = None
    if reader is not None and reader.count:
        return reader
    for smi in (NvidiaSmiGpus(environment), AmdSmiGpus(environment)):
        if smi.read():
            return smi
    return None


def unread_gpus_problem(devices: Path = Path("/dev")) -> str | None:
    """Say why the GPUs of a node cannot be read, where `open_gpus` has found none; None: it has none."""
    if (devices / "nvidia0").exists():
        return "its GPUs cannot be read: there is neither nvidia-ml-py (pip install 'trainshed[health]') nor nvidia-smi"
    if (devices / "kfd").exists():
        return "its GPUs cannot be read: amd-smi is not in this image, or does not answer"
    return None


_SLOWED_BY_TEMPERATURE = 0x20 | 0x40  # nvmlClocksEventReasonSwThermalSlowdown, …HwThermalSlowdown
_SLOWED_BY_HARDWARE = 0x08 | 0x80  # …HwSlowdown, …HwPowerBrakeSlowdown: the node's supply asks for it
_SLOWED_BY_POWER = 0x04  # …SwPowerCap


def throttle_reason(mask: int | None) -> str | None:
    """Return why a clock is held down, by NVML's bits."""
    if mask is None:
        return None
    if mask & _SLOWED_BY_TEMPERATURE:
        return "temperature"
    if mask & _SLOWED_BY_HARDWARE:
        return "hardware"
    return "power" if mask & _SLOWED_BY_POWER else None


_ALL_LINKS = 0xFFFFFFFF  # the scope of a field: the sum over all NVLinks


class NvmlGpus:
    """NVIDIA's GPUs by NVML; `nvml` is the module pynvml."""

    def __init__(self, nvml: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [_as_text(self._ask(nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
        visible = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), uuids)
        self._handles = {index: handles[index] for index in visible}
        self._events = self._watch_xids()

    @property
    def count(self) -> int:
        """How many GPUs the ranks of this node see."""
        return len(self._handles)

    def read(self) -> list[GpuSample]:
        """Ask NVML about each GPU."""
        xids = self._new_xids()
        return [self._read_gpu(index, handle, xids.get(index, [])) for index, handle in self._handles.items()]

    def _read_gpu(self, index: int, handle: Any, xids: list[int]) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        try:
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return GpuSample(index, lost=True, xids=xids)
            temperature = None
        power, rates, memory = (
            ask(nvml.nvmlDeviceGetPowerUsage, handle),
            ask(nvml.nvmlDeviceGetUtilizationRates, handle),
            ask(nvml.nvmlDeviceGetMemoryInfo, handle),
        )
        rows = ask(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return GpuSample(
            index,
            temperature_celsius=temperature,
            power_watts=None if power is None else power / 1000,
            utilization=None if rates is None else rates.gpu / 100,
            memory_gib=None if memory is None else round(memory.used / _GIB, 3),
            clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            throttled=throttle_reason(ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)),
            nvlink_bytes=self._nvlink_bytes(handle),
            ecc_uncorrectable=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_VOLATILE_ECC),
            ecc_uncorrectable_ever=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_AGGREGATE_ECC),
            remapping_pending=bool(rows[2]),
            remapping_failed=bool(rows[3]),
            xids=xids,
        )

    def _ask(self, function: Any, *arguments: Any) -> Any:
        """Return what NVML says, None for what this GPU or driver does not have."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _nvlink_bytes(self, handle: Any) -> int | None:
        nvml = self._nvml
        kinds = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        fields = self._ask(nvml.nvmlDeviceGetFieldValues, handle, [(kind, _ALL_LINKS) for kind in kinds])
        if fields is None or any(field.nvmlReturn for field in fields):
            return None
        return sum(field.value.ullVal for field in fields) * 1024  # NVML counts KiB

    def _watch_xids(self) -> Any:
        nvml = self._nvml
        events = self._ask(nvml.nvmlEventSetCreate)
        if events is not None:
            for handle in self._handles.values():
                self._ask(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _new_xids(self) -> dict[int, list[int]]:
        """Return the Xid errors since the last call, by GPU."""
        xids: dict[int, list[int]] = {}
        while self._events is not None:
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # a timeout: there are no more
                break
            index = self._ask(self._nvml.nvmlDeviceGetIndex, event.device)
            if index is not None:
                xids.setdefault(index, []).append(int(event.eventData))
        return xids


def _as_text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name or "")


def visible_devices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the devices that CUDA_VISIBLE_DEVICES (or AMD's like it) names, in its order; without it, all."""
    if variable is None:
        return list(range(len(uuids)))
    indices = []
    for word in filter(None, (part.strip() for part in variable.split(","))):
        if word.isdecimal():
            matching = [int(word)] if int(word) < len(uuids) else []
        else:
            matching = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)][:1]
        if not matching:  # CUDA ends the list at the first that it does not know
            break
        indices += matching
    return indices


_SMI_KEYS = (
    "index",
    "uuid",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "memory.used",
    "clocks.sm",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
)
_SMI_REASON_KEYS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Drivers since 535 have the first name, older ones the second."""


class NvidiaSmiGpus:
    """NVIDIA's GPUs by nvidia-smi, which has no NVLink counters and no Xid errors."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._reason_keys: Sequence[str] = _SMI_REASON_KEYS

    def read(self) -> list[GpuSample]:
        """Ask nvidia-smi once."""
        for key in (*self._reason_keys, None):
            keys = (*_SMI_KEYS, key) if key is not None else _SMI_KEYS
            text = run_smi(["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"])
            if text is not None:
                self._reason_keys = () if key is None else (key,)
                return parse_nvidia_smi(text, self._environment.get("CUDA_VISIBLE_DEVICES"))
        return []


def parse_nvidia_smi(text: str, visible: str | None = None) -> list[GpuSample]:
    """Return the GPUs in the answer of nvidia-smi to `_SMI_KEYS` and the throttle reasons."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    readings = []
    for index in visible_devices(visible, [row[1] for row in rows]):
        row = rows[index]
        _, _, temperature, power, utilization, memory_mib, clock, ecc, ecc_ever = (_figure(cell) for cell in row[:9])
        mask = int(row[9], 16) if len(row) > 9 and row[9].startswith("0x") else None
        readings.append(
            GpuSample(
                int(row[0]),
                temperature_celsius=temperature,
                power_watts=power,
                utilization=None if utilization is None else utilization / 100,
                memory_gib=None if memory_mib is None else round(memory_mib / 1024, 3),
                clock_mhz=clock,
                throttled=throttle_reason(mask),
                ecc_uncorrectable=None if ecc is None else int(ecc),
                ecc_uncorrectable_ever=None if ecc_ever is None else int(ecc_ever),
            )
        )
    return readings


class AmdSmiGpus:
    """AMD's GPUs by amd-smi."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment

    def read(self) -> list[GpuSample]:
        """Ask amd-smi once."""
        text = run_smi(["amd-smi", "metric", "--json"])
        if text is None:
            return []
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return parse_amd_smi(text, next((value for name in names if (value := self._environment.get(name))), None))


_AMD_VIOLATIONS = {
    "socket_thermal_violation_status": "temperature",
    "hbm_thermal_violation_status": "temperature",
    "vr_thermal_violation_status": "temperature",
    "prochot_violation_status": "hardware",
    "ppt_violation_status": "power",
}
"""The keys of `throttle` in amd-smi's answer that say ACTIVE, the worst first."""


def parse_amd_smi(text: str, visible: str | None = None) -> list[GpuSample]:
    """Return the GPUs in the answer of `amd-smi metric --json`; a list in older versions, under `gpu_data` in newer."""
    try:
        body = json.loads(text)
    except ValueError:
        return []
    gpus = body.get("gpu_data", []) if isinstance(body, dict) else body
    readings = []
    for index in visible_devices(visible, [""] * len(gpus)):
        gpu = gpus[index]
        throttle = gpu.get("throttle")
        throttle = throttle if isinstance(throttle, dict) else {}
        active = (reason for key, reason in _AMD_VIOLATIONS.items() if throttle.get(key) == "ACTIVE")
        utilization = _amd_figure(gpu, "usage", "gfx_activity")
        memory_mib = _amd_figure(gpu, "mem_usage", "used_vram")
        hotspot = _amd_figure(gpu, "temperature", "hotspot")
        ecc = _amd_figure(gpu, "ecc", "total_uncorrectable_count")
        readings.append(
            GpuSample(
                int(gpu.get("gpu", index)),
                temperature_celsius=hotspot if hotspot is not None else _amd_figure(gpu, "temperature", "edge"),
                power_watts=_amd_figure(gpu, "power", "socket_power"),
                utilization=None if utilization is None else utilization / 100,
                memory_gib=None if memory_mib is None else round(memory_mib / 1024, 3),
                clock_mhz=_amd_figure(gpu, "clock", "gfx_0", "clk"),
                throttled=next(active, None),
                ecc_uncorrectable=None if ecc is None else int(ecc),
            )
        )
    return readings


def _amd_figure(gpu: Any, *path: str) -> float | None:
    """Return a figure of amd-smi, which is `{"value": 1, "unit": "W"}`, a plain number or "N/A"."""
    for key in path:
        gpu = gpu.get(key) if isinstance(gpu, dict) else None
    return _figure(gpu.get("value") if isinstance(gpu, dict) else gpu)


def _figure(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):  # [N/A]
        return None


def run_smi(command: list[str]) -> str | None:
    """Return what a vendor's program prints; None where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def read_network_bytes(system: Path = Path("/sys/class")) -> int | None:
    """Return what the node's network cards have sent and received; None where there is none.

    RDMA is counted apart from the interfaces of the kernel: InfiniBand and RoCE in words of four bytes, EFA in bytes.
    """
    counted = [
        *(4 * count for count in _read_counters(system, "infiniband/*/ports/*/counters/port_rcv_data")),
        *(4 * count for count in _read_counters(system, "infiniband/*/ports/*/counters/port_xmit_data")),
        *_read_counters(system, "infiniband/*/ports/*/hw_counters/rx_bytes"),
        *_read_counters(system, "infiniband/*/ports/*/hw_counters/tx_bytes"),
    ]
    for card in system.glob("net/*"):
        if (card / "device").exists():  # not lo, not a bridge, not a container's end of a pair
            counted += [*_read_counters(card, "statistics/rx_bytes"), *_read_counters(card, "statistics/tx_bytes")]
    return sum(counted) if counted else None


def _read_counters(folder: Path, pattern: str) -> list[int]:
    counts = []
    for file in folder.glob(pattern):
        try:
            counts.append(int(file.read_text()))
        except (OSError, ValueError):
            continue
    return counts


XID_MEANINGS = {
    13: "a kernel of the program failed",
    31: "the program used memory that it does not have",
    43: "the program's work was stopped after an error of its own",
    45: "the program was ended while it worked",
    48: "an ECC error that cannot be corrected",
    63: "a row of memory is broken and will be replaced at the next reset",
    64: "a row of memory is broken and could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many ECC errors that were corrected",
    94: "an ECC error that ended the program that met it",
    95: "an ECC error that ends every program on the GPU",
    119: "the GPU's own processor (GSP) does not answer",
    120: "the GPU's own processor (GSP) failed",
}
"""The Xid errors that trainings meet (NVIDIA's deployment guide, "Xid Errors")."""

_READ_COLUMNS = ("temperature_celsius", "power_watts", "utilization", "memory_gib", "clock_mhz", "throttled")
_RATE_COLUMNS = ("nvlink_gb_per_s", "network_gb_per_s")
_THROTTLED_SAMPLES = 2
_NAMED_GPUS = 4


class DeviceWatch:
    """Turns the samples of a run's nodes, each by its node rank, into events."""

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self._nodes, self._ranks_per_node = nodes, ranks_per_node
        self._before: dict[int, NodeSample] = {}
        self._slow_samples: dict[tuple[int, int], int] = {}
        self._reported: set[tuple[int, int, str]] = set()
        self._problems: set[str] = set()

    def update(self, samples: Mapping[int, NodeSample]) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of these samples, as kind and values; no event where no node has a GPU to read."""
        events: list[tuple[str, dict[str, Any]]] = []
        if any(sample.gpus for sample in samples.values()):
            events.append(("devices", self._devices(samples)))
        for _, sample in sorted(samples.items()):
            if sample.problem is not None and sample.problem not in self._problems:
                self._problems.add(sample.problem)
                events.append(("warning", {"text": f"{sample.host}: {sample.problem}"}))
        slow: list[tuple[int, GpuSample, str]] = []
        broken: list[tuple[int, GpuSample, str]] = []
        for node, sample in sorted(samples.items()):
            before = self._before.get(node)
            if before is not None and before.time == sample.time:  # no news from it
                continue
            for place, gpu in enumerate(sample.gpus):
                slow += [(node, gpu, text) for text in self._slowness(node, gpu)]
                earlier = before.gpus[place] if before is not None and place < len(before.gpus) else None
                broken += [(node, gpu, text) for text in self._faults(node, gpu, earlier)]
        for name, gpus in (("throttling", slow), ("gpu_error", broken)):
            if gpus:
                events.append(("alarm", self._alarm(name, gpus, samples)))
        self._before.update(samples)
        return events

    def _devices(self, samples: Mapping[int, NodeSample]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {key: [] for key in (*_READ_COLUMNS, *_RATE_COLUMNS)}
        for node in range(self._nodes):
            sample, before = samples.get(node), self._before.get(node)
            network = None
            if sample is not None and before is not None:
                network = _gb_per_s(sample.network_bytes, before.network_bytes, sample.time - before.time)
            for place in range(self._ranks_per_node):
                gpu = sample.gpus[place] if sample is not None and place < len(sample.gpus) else GpuSample(-1)
                for key in (
                    "temperature_celsius",
                    "power_watts",
                    "utilization",
                    "memory_gib",
                    "clock_mhz",
                    "throttled",
                ):
                    columns[key].append(getattr(gpu, key))
                nvlink = None
                if sample is not None and before is not None and place < len(before.gpus):
                    earlier = before.gpus[place].nvlink_bytes
                    nvlink = _gb_per_s(gpu.nvlink_bytes, earlier, sample.time - before.time)
                columns["nvlink_gb_per_s"].append(nvlink)
                columns["network_gb_per_s"].append(network)
        optional = ("clock_mhz", "throttled", *_RATE_COLUMNS)
        unknown = [key for key in optional if all(value is None for value in columns[key])]
        return {key: values for key, values in columns.items() if key not in unknown}

    def _slowness(self, node: int, gpu: GpuSample) -> list[str]:
        """Say that a GPU is slowed down, once, when two samples in a row show it; its own power limit is usual."""
        key = (node, gpu.index)
        if gpu.throttled not in ("temperature", "hardware"):
            self._slow_samples.pop(key, None)
            return []
        self._slow_samples[key] = self._slow_samples.get(key, 0) + 1
        if self._slow_samples[key] != _THROTTLED_SAMPLES:
            return []
        if gpu.throttled == "hardware":
            return ["is slowed down by its hardware: look at the node's power supply"]
        heat = "" if gpu.temperature_celsius is None else f" ({gpu.temperature_celsius:.0f} °C)"
        return [f"is slowed down because it is too hot{heat}: look at the node's cooling"]

    def _faults(self, node: int, gpu: GpuSample, before: GpuSample | None) -> list[str]:
        texts = [f"reports Xid {xid}: {XID_MEANINGS.get(xid, 'see NVIDIA’s list')}" for xid in gpu.xids]
        errors = gpu.ecc_uncorrectable or 0
        earlier = (before.ecc_uncorrectable or 0) if before is not None else 0
        if errors > earlier:
            since = "" if before is not None else " since its driver was loaded"
            texts.append(f"has {errors - earlier} new ECC errors that cannot be corrected{since}")
        states = {
            "no longer answers": gpu.lost,
            "has a broken row of memory and no spare one: replace it": gpu.remapping_failed,
            "has a broken row of memory: reset it before the next run": gpu.remapping_pending,
        }
        for text, is_so in states.items():
            if is_so and (node, gpu.index, text) not in self._reported:
                self._reported.add((node, gpu.index, text))
                texts.append(text)
        return texts

    def _alarm(
        self, name: str, gpus: list[tuple[int, GpuSample, str]], samples: Mapping[int, NodeSample]
    ) -> dict[str, Any]:
        ranks, hosts, texts = [], [], []
        for node, gpu, text in gpus:
            sample = samples[node]
            place = next(place for place, own in enumerate(sample.gpus) if own.index == gpu.index)
            rank = node * self._ranks_per_node + place
            is_used = place < self._ranks_per_node
            ranks += [rank] if is_used else []
            hosts.append(sample.host)
            texts.append(f"GPU {gpu.index} of {sample.host}{f' (rank {rank})' if is_used else ''} {text}")
        more = f"; and {len(texts) - _NAMED_GPUS} more" if len(texts) > _NAMED_GPUS else ""
        return {
            "name": name,
            "what": "; ".join(texts[:_NAMED_GPUS]) + more,
            "ranks": sorted(set(ranks)),
            "hosts": sorted(set(hosts)),
        }


def _gb_per_s(now: int | None, before: int | None, seconds: float) -> float | None:
    if now is None or before is None or seconds <= 0 or now < before:  # a counter that began again
        return None
    return round((now - before) / seconds / 1e9, 3)

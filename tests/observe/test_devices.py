"""What GPUs report: NVML, nvidia-smi and amd-smi as recorded, a faulty GPU among them, and the events made of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainshed.observe import devices
from trainshed.observe.devices import (
    AmdSmiGpus,
    DeviceWatch,
    GpuSample,
    NodeSample,
    NvidiaSmiGpus,
    NvmlGpus,
    parse_amd_smi,
    parse_nvidia_smi,
    read_network_bytes,
    throttle_reason,
    unread_gpus_problem,
    visible_devices,
)
from trainshed.observe.events import encode_event

pynvml = pytest.importorskip("pynvml")


@dataclass
class RecordedGpu:
    """What NVML answers for one GPU."""

    uuid: str = "GPU-0"
    temperature: int = 61
    milliwatts: int = 688_000
    busy: int = 98
    used: int = 64 * 2**30
    clock: int = 1755
    reasons: int = 0x4
    nvlink_kib: int = 1_000_000
    ecc: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    lost: bool = False
    without: tuple[str, ...] = ()
    """Functions that this GPU does not support."""


@dataclass
class RecordedNvml:
    """pynvml with the constants and error classes of the real one, and recorded answers."""

    gpus: list[RecordedGpu]
    xids: list[tuple[int, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.gpus[handle].uuid.encode()

    def _gpu(self, handle: int, function: str) -> RecordedGpu:
        gpu = self.gpus[handle]
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if function in gpu.without:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._gpu(handle, "temperature").temperature

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._gpu(handle, "power").milliwatts

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._gpu(handle, "utilization").busy)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._gpu(handle, "memory").used)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._gpu(handle, "clock").clock

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._gpu(handle, "reasons").reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._gpu(handle, "ecc").ecc

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._gpu(handle, "rows").rows

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        kib = self._gpu(handle, "nvlink").nvlink_kib
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=kib)) for _ in fields]

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None: ...

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        device, xid = self.xids.pop(0)
        return SimpleNamespace(device=device, eventData=xid)


def test_nvml_gives_all_figures_and_each_xid_once() -> None:
    nvml = RecordedNvml([RecordedGpu(), RecordedGpu(uuid="GPU-1", ecc=3, rows=(0, 2, 1, 1))], xids=[(1, 94), (1, 63)])
    gpus = NvmlGpus(nvml, {})
    well, faulty = gpus.read()
    assert well == GpuSample(
        0,
        temperature_celsius=61,
        power_watts=688.0,
        utilization=0.98,
        memory_gib=64.0,
        clock_mhz=1755,
        throttled="power",
        nvlink_bytes=2 * 1_000_000 * 1024,
        ecc_uncorrectable=0,
        ecc_uncorrectable_ever=0,
    )
    assert (faulty.ecc_uncorrectable, faulty.remapping_pending, faulty.remapping_failed) == (3, True, True)
    assert faulty.xids == [94, 63]
    assert gpus.read()[1].xids == []


def test_what_a_gpu_does_not_support_is_unknown_and_a_lost_one_is_named_so() -> None:
    laptop = RecordedGpu(without=("power", "ecc", "rows", "nvlink", "reasons"))
    readings = NvmlGpus(RecordedNvml([laptop, RecordedGpu(lost=True)]), {}).read()
    assert (readings[0].power_watts, readings[0].nvlink_bytes, readings[0].throttled) == (None, None, None)
    assert readings[0].temperature_celsius == 61
    assert readings[1] == GpuSample(1, lost=True)


@pytest.mark.parametrize(
    ("variable", "indices"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("", []), ("1, 2", [1, 2])],
)
def test_gpus_come_in_the_order_in_which_ranks_see_them(variable: str | None, indices: list[int]) -> None:
    assert visible_devices(variable, ["GPU-a1", "GPU-b2", "GPU-c3"]) == indices


def test_a_clock_is_held_down_for_the_worst_of_its_reasons() -> None:
    assert [throttle_reason(mask) for mask in (None, 0, 1, 0x4, 0x4 | 0x8, 0x80, 0x8 | 0x40, 0x24)] == [
        *(None, None, None, "power", "hardware", "hardware", "temperature", "temperature")
    ]


NVIDIA_SMI = """0, GPU-5d, 34, 118.42, 0, 1071, 1980, 0, 0, 0x0000000000000000
1, GPU-7f, 88, 699.90, 100, 74921, 1155, 1, 5, 0x0000000000000044
2, GPU-99, 40, [N/A], [N/A], 10, 345, [N/A], [N/A], [N/A]
"""


def test_nvidia_smi_is_read_where_there_is_no_nvml() -> None:
    idle, hot, old = parse_nvidia_smi(NVIDIA_SMI)
    assert idle == GpuSample(
        0,
        temperature_celsius=34,
        power_watts=118.42,
        utilization=0,
        memory_gib=1.046,
        clock_mhz=1980,
        ecc_uncorrectable=0,
        ecc_uncorrectable_ever=0,
    )
    assert (hot.throttled, hot.ecc_uncorrectable, hot.ecc_uncorrectable_ever) == ("temperature", 1, 5)
    assert (old.power_watts, old.throttled) == (None, None)
    assert [gpu.index for gpu in parse_nvidia_smi(NVIDIA_SMI, "GPU-7f")] == [1]


def test_an_older_driver_is_asked_by_the_older_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    asked = tmp_path / "asked"
    smi.write_text(
        f"#!/bin/sh\necho x >> {asked}\ncase $1 in *clocks_event*) exit 2;; esac\n"
        "echo '0, GPU-5d, 34, 118.42, 0, 1071, 1980, 0, 0, 0x8'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus = NvidiaSmiGpus({})
    assert gpus.read()[0].throttled == "hardware"
    gpus.read()
    assert len(asked.read_text().splitlines()) == 3  # the second reading does not try the newer name again


# The shape that `amd-smi metric --json` has since ROCm 6.4; earlier versions give the list alone.
AMD_SMI: list[dict[str, Any]] = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 97, "unit": "%"}, "umc_activity": {"value": 41, "unit": "%"}},
        "power": {"socket_power": {"value": 741, "unit": "W"}, "gfx_voltage": "N/A", "throttle_status": "UNTHROTTLED"},
        "clock": {"gfx_0": {"clk": {"value": 1721, "unit": "MHz"}, "clk_locked": "DISABLED"}},
        "temperature": {
            "edge": "N/A",
            "hotspot": {"value": 79, "unit": "C"},
            "mem": {"value": 64, "unit": "C"},
        },
        "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": 0, "total_deferred_count": 0},
        "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 163840, "unit": "MB"}},
        "throttle": {
            "accumulation_counter": 1234,
            "prochot_violation_status": "NOT ACTIVE",
            "ppt_violation_status": "ACTIVE",
            "socket_thermal_violation_status": "NOT ACTIVE",
        },
    },
    {
        "gpu": 1,
        "usage": "N/A",
        "power": {"socket_power": "N/A"},
        "temperature": {"edge": {"value": 44, "unit": "C"}, "hotspot": "N/A"},
        "ecc": {"total_uncorrectable_count": 2},
        "mem_usage": {"used_vram": {"value": 283, "unit": "MB"}},
        "throttle": {"ppt_violation_status": "ACTIVE", "hbm_thermal_violation_status": "ACTIVE"},
    },
]


@pytest.mark.parametrize("body", [AMD_SMI, {"gpu_data": AMD_SMI}], ids=["older", "newer"])
def test_amd_smi_is_read_in_both_of_its_shapes(body: Any) -> None:
    well, faulty = parse_amd_smi(json.dumps(body))
    assert well == GpuSample(
        0,
        temperature_celsius=79,
        power_watts=741,
        utilization=0.97,
        memory_gib=160.0,
        clock_mhz=1721,
        throttled="power",
        ecc_uncorrectable=0,
    )
    assert (faulty.temperature_celsius, faulty.throttled, faulty.ecc_uncorrectable) == (44, "temperature", 2)
    assert (faulty.utilization, faulty.clock_mhz) == (None, None)


def test_amd_smi_that_prints_no_json_gives_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "amd-smi"
    smi.write_text("#!/bin/sh\necho 'driver not loaded'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert AmdSmiGpus({}).read() == []


def test_gpus_that_nothing_can_read_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    assert unread_gpus_problem(tmp_path) is None
    (tmp_path / "kfd").touch()
    assert "amd-smi" in (unread_gpus_problem(tmp_path) or "")
    (tmp_path / "nvidia0").touch()
    assert "nvidia-smi" in (unread_gpus_problem(tmp_path) or "")


def test_bytes_of_infiniband_efa_and_real_network_cards_are_added(tmp_path: Path) -> None:
    counters = {
        "infiniband/mlx5_0/ports/1/counters/port_rcv_data": 100,
        "infiniband/mlx5_0/ports/1/counters/port_xmit_data": 25,
        "infiniband/rdmap16s27/ports/1/hw_counters/rx_bytes": 7,
        "infiniband/rdmap16s27/ports/1/hw_counters/tx_bytes": 3,
        "net/eth0/statistics/rx_bytes": 40,
        "net/eth0/statistics/tx_bytes": 2,
        "net/lo/statistics/rx_bytes": 9000,
    }
    for name, count in counters.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{count}\n")
    (tmp_path / "net/eth0/device").mkdir()
    assert read_network_bytes(tmp_path) == 4 * 125 + 10 + 42
    assert read_network_bytes(tmp_path / "nothing") is None


GPU = GpuSample(0, temperature_celsius=60, power_watts=700, utilization=1.0, memory_gib=70, nvlink_bytes=0)


def samples(number: int, *nodes: list[GpuSample], network: int = 0) -> dict[int, NodeSample]:
    """Return the samples of a minute."""
    return {
        node: NodeSample(f"host-{node}", 60.0 * number, gpus, network_bytes=network * number)
        for node, gpus in enumerate(nodes)
    }


def update(watch: DeviceWatch, taken: dict[int, NodeSample]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of samples that have travelled as JSON, each checked against the schema."""
    travelled = {node: NodeSample.from_plain(json.loads(json.dumps(one.to_plain()))) for node, one in taken.items()}
    for kind, values in watch.update(travelled):
        encode_event(kind, None, values, attempt=1, rank=None)
        yield kind, values


def test_one_event_has_an_item_for_each_rank_of_all_nodes() -> None:
    watch = DeviceWatch(nodes=3, ranks_per_node=2)
    pair = [GPU, replace(GPU, index=1)]
    ((_, first),) = update(watch, samples(1, pair, pair, network=600 * 10**9))
    assert first["temperature_celsius"] == [60, 60, 60, 60, None, None]  # the third node has sent nothing yet
    assert "nvlink_gb_per_s" not in first
    moved = [replace(gpu, nvlink_bytes=6_000 * 10**9) for gpu in pair]
    ((_, second),) = update(watch, samples(2, moved, moved, network=600 * 10**9))
    assert second["nvlink_gb_per_s"] == [100, 100, 100, 100, None, None]
    assert second["network_gb_per_s"] == [10, 10, 10, 10, None, None]


def test_without_gpus_nothing_is_written() -> None:
    assert list(update(DeviceWatch(2, 1), samples(1, [], []))) == []


def test_heat_is_an_alarm_when_it_lasts_and_a_power_limit_is_none() -> None:
    watch = DeviceWatch(nodes=1, ranks_per_node=1)
    hot = [replace(GPU, throttled="temperature", temperature_celsius=91)]
    alarms = [
        [values["what"] for kind, values in update(watch, samples(minute, gpus)) if kind == "alarm"]
        for minute, gpus in enumerate([hot, [GPU], hot, hot, hot, [replace(GPU, throttled="power")]])
    ]
    text = "GPU 0 of host-0 (rank 0) is slowed down because it is too hot (91 °C): look at the node's cooling"
    assert alarms == [[], [], [], [text], [], []]


def test_errors_of_gpus_are_named_once_with_host_gpu_and_rank() -> None:
    watch = DeviceWatch(nodes=2, ranks_per_node=2)
    well = [GPU, replace(GPU, index=1)]
    faulty = [GPU, replace(GPU, index=1, ecc_uncorrectable=2, remapping_failed=True, xids=[94, 999])]
    assert [kind for kind, _ in update(watch, samples(1, well, well))] == ["devices"]
    (_, (_, alarm)) = update(watch, samples(2, well, faulty))
    assert alarm["name"] == "gpu_error"
    assert (alarm["ranks"], alarm["hosts"]) == ([3], ["host-1"])
    assert "GPU 1 of host-1 (rank 3) reports Xid 94: an ECC error that ended the program that met it" in alarm["what"]
    assert "Xid 999" in alarm["what"]
    assert "has 2 new ECC errors" in alarm["what"]
    quiet = [GPU, replace(faulty[1], xids=[])]
    assert [kind for kind, _ in update(watch, samples(3, well, quiet))] == ["devices"]
    (_, (_, lost)) = update(watch, samples(4, well, [GPU, GpuSample(1, lost=True)]))
    assert lost["what"] == "GPU 1 of host-1 (rank 3) no longer answers"


def test_many_broken_gpus_are_one_alarm() -> None:
    gpus = [replace(GPU, index=index, lost=True) for index in range(8)]
    (_, (_, alarm)) = update(DeviceWatch(1, 8), samples(1, gpus))
    assert alarm["ranks"] == list(range(8))
    assert alarm["what"].endswith("; and 4 more")


def test_a_node_that_cannot_read_its_gpus_is_warned_of_once() -> None:
    watch = DeviceWatch(2, 1)
    taken = {
        node: NodeSample(f"host-{node}", 1.0, [], problem="its GPUs cannot be read: no amd-smi") for node in range(2)
    }
    assert list(update(watch, taken)) == [("warning", {"text": "host-0: its GPUs cannot be read: no amd-smi"})]
    assert list(update(watch, taken)) == []


def test_it_runs_on_the_python_of_foreign_images() -> None:
    source = Path(devices.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name and name.startswith("trainshed") for name in imported)

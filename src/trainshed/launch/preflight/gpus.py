"""GPUs as their driver's own program shows them: `nvidia-smi -q -x` or `amd-smi list`; no CUDA is touched here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import orjson

from trainshed.launch.preflight.checks import Check

_SECONDS = 60.0
# What AWS's health suite (awslabs/awsome-distributed-ai) does about an Xid of NVIDIA's driver. Not listed: those that a
# program causes (13, 31, 94, 126) and those that need nothing (43, 63, 92, 121).
_XID_BAD = {54: "isolate the node", 79: "reboot it", 151: "reboot it", 168: "reboot it"}
_XID_RESET = frozenset({48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")


@dataclass(frozen=True)
class SeenGpu:
    """One GPU."""

    name: str
    trouble: tuple[str, ...] = ()
    """Why it should not be used."""
    doubts: tuple[str, ...] = ()
    """Why it may be slow."""


@dataclass(frozen=True)
class SeenGpus:
    """The GPUs of a node and their driver."""

    vendor: str
    driver: str | None
    gpus: tuple[SeenGpu, ...]


def find_gpus() -> SeenGpus | None:
    """Ask the driver's program; None where there is none."""
    if shutil.which("nvidia-smi"):
        done = _run("nvidia-smi", "-q", "-x")
        return None if done is None else read_nvidia(done)
    if shutil.which("amd-smi"):
        listed = _run("amd-smi", "static", "--asic", "--driver", "--json")
        return None if listed is None else read_amd(listed)
    return None


def read_nvidia(text: str) -> SeenGpus:
    """Read what `nvidia-smi -q -x` prints."""
    root = ElementTree.fromstring(text[text.index("<nvidia_smi_log") :])
    gpus = tuple(
        SeenGpu(_text(gpu, "product_name") or "GPU", tuple(_nvidia_trouble(gpu)), tuple(_nvidia_doubts(gpu)))
        for gpu in root.iter("gpu")
    )
    return SeenGpus("nvidia", _text(root, "driver_version"), gpus)


def _nvidia_trouble(gpu: ElementTree.Element) -> Iterator[str]:
    kinds = ("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
    paths = [*(f"ecc_errors/volatile/{kind}" for kind in kinds), "ecc_errors/volatile/double_bit/total"]
    if count := sum(_number(_text(gpu, path)) for path in paths):
        yield f"{count} uncorrectable memory errors since it was last reset"
    for path in ("remapped_rows/remapped_row_failure", "row_remapper_failure"):
        if _text(gpu, path) == "Yes":
            yield "its memory has no spare rows left (row remapping failed)"
    for path in ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"):
        if _text(gpu, path) == "Yes":
            yield "memory waits to be remapped: it needs a reset"


def _nvidia_doubts(gpu: ElementTree.Element) -> Iterator[str]:
    for reason, words in (("hw_thermal_slowdown", "too hot"), ("hw_power_brake_slowdown", "short of power")):
        for group, item in (("clocks_event_reasons", "event"), ("clocks_throttle_reasons", "throttle")):
            if _text(gpu, f"{group}/clocks_{item}_reason_{reason}") == "Active":
                yield f"slowed down: {words}"
                break


def read_amd(text: str) -> SeenGpus:
    """Read what `amd-smi static --asic --driver --json` prints; a list, in newer versions below `gpu_data`."""
    body = orjson.loads(text)
    listed: list[dict[str, Any]] = body.get("gpu_data", []) if isinstance(body, dict) else body
    names = [str(gpu.get("asic", {}).get("market_name", "GPU")) for gpu in listed]
    drivers = [gpu.get("driver", {}).get("version") for gpu in listed]
    return SeenGpus("amd", drivers[0] if drivers else None, tuple(SeenGpu(name) for name in names))


def check_gpus(seen: SeenGpus | None, wanted: int, device_names: tuple[str, ...] = ()) -> Iterator[Check]:
    """Are all GPUs there, of the kind that was paid for, and well?"""
    if not wanted:
        yield Check("gpus", "skipped", "the job asks for no GPUs")
        return
    if seen is None:
        hint = "does the job ask for GPUs, and has the image the driver's tools?"
        yield Check("gpus", "fail", f"{wanted} GPUs are wanted, and neither nvidia-smi nor amd-smi answers", hint)
        return
    measured = {"count": len(seen.gpus), "names": sorted({gpu.name for gpu in seen.gpus}), "driver": seen.driver}
    if len(seen.gpus) < wanted:
        what = f"{len(seen.gpus)} of {wanted} GPUs are there"
        yield Check("gpus", "fail", what, "a GPU may have fallen off the bus: `dmesg | grep Xid`", measured)
    else:
        yield Check("gpus", "pass", f"{len(seen.gpus)} x {seen.gpus[0].name}, driver {seen.driver}", measured=measured)
    others = sorted({gpu.name for gpu in seen.gpus if device_names and gpu.name not in device_names})
    if others:
        yield Check("gpu kind", "warn", f"the machine's GPUs should be {device_names[0]}, not {', '.join(others)}")
    trouble = [f"GPU {index}: {what}" for index, gpu in enumerate(seen.gpus) for what in gpu.trouble]
    doubts = [f"GPU {index} is {what}" for index, gpu in enumerate(seen.gpus) for what in gpu.doubts]
    if trouble or doubts:
        yield Check("gpu health", "fail" if trouble else "warn", "; ".join([*trouble, *doubts]))
    else:
        yield Check("gpu health", "pass", "no GPU reports errors or slows down")


def check_kernel_log(log: str | None) -> Check:
    """What the driver said of its GPUs since the node was started."""
    if log is None:
        return Check("kernel log", "skipped", "it may not be read here")
    found = {(place, int(number)) for place, number in _XID.findall(log)}
    bad = sorted((place, number) for place, number in found if number in _XID_BAD)
    reset = sorted((place, number) for place, number in found if number in _XID_RESET)
    measured = {"xids": sorted({number for _, number in found})}
    if bad:
        place, number = bad[0]
        what = f"the driver reported Xid {number} of the GPU at {place}: {_XID_BAD[number]}"
        return Check("kernel log", "fail", what, measured=measured)
    if reset:
        place, number = reset[0]
        what = f"the driver reported Xid {number} of the GPU at {place} since the node was started"
        return Check("kernel log", "warn", what, "reset the GPU if it was not done since", measured)
    return Check("kernel log", "pass", "no Xid that asks for a reset", measured=measured)


def read_kernel_log() -> str | None:
    """Return the kernel's messages, None where they may not be read."""
    return _run("dmesg") if shutil.which("dmesg") else None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(element: ElementTree.Element, path: str) -> str | None:
    found = element.findtext(path)
    return found.strip() if found else None


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0

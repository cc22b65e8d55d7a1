"""GPUs as their driver shows them: a real listing, and what it looks like when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.launch.preflight.node import NodeGpus, check_gpus, check_kernel_log, parse_amd_smi, parse_nvidia_smi
from trainshed.launch.preflight.verdict import CheckResult

LISTING = (Path(__file__).with_name("data") / "nvidia-smi-h200.xml").read_text()


def by_name(seen: NodeGpus | None, wanted: int, names: tuple[str, ...] = ()) -> dict[str, CheckResult]:
    return {check.name: check for check in check_gpus(seen, wanted, names)}


def test_a_healthy_gpu_passes() -> None:
    found = by_name(parse_nvidia_smi(LISTING), 1, ("NVIDIA H200",))
    assert found["gpus"].what == "1 x NVIDIA H200, driver 580.159.04"
    assert {check.verdict for check in found.values()} == {"pass"}


def test_a_gpu_that_fell_off_the_bus_is_missed() -> None:
    found = by_name(parse_nvidia_smi(LISTING), 8)["gpus"]
    assert (found.verdict, found.what) == ("fail", "1 of 8 GPUs are there")


@pytest.mark.parametrize(
    ("was", "now", "verdict", "what"),
    [
        (
            "<dram_uncorrectable>0<",
            "<dram_uncorrectable>3<",
            "fail",
            "GPU 0: 3 uncorrectable memory errors since it was last reset",
        ),
        (
            "<remapped_row_failure>No<",
            "<remapped_row_failure>Yes<",
            "fail",
            "GPU 0: its memory has no spare rows left (row remapping failed)",
        ),
        (
            "<remapped_row_pending>No<",
            "<remapped_row_pending>Yes<",
            "fail",
            "GPU 0: memory waits to be remapped: it needs a reset",
        ),
        (
            "hw_thermal_slowdown>Not Active<",
            "hw_thermal_slowdown>Active<",
            "warn",
            "GPU 0 is slowed down: too hot",
        ),
    ],
)
def test_what_the_driver_complains_of_is_said(was: str, now: str, verdict: str, what: str) -> None:
    assert was in LISTING
    found = by_name(parse_nvidia_smi(LISTING.replace(was, now, 1)), 1)["gpu health"]
    assert (found.verdict, found.what) == (verdict, what)


def test_another_gpu_than_the_machines_is_said_and_none_at_all_fails() -> None:
    found = by_name(parse_nvidia_smi(LISTING), 1, ("NVIDIA H100 80GB HBM3",))["gpu kind"]
    assert found.what == "the machine's GPUs should be NVIDIA H100 80GB HBM3, not NVIDIA H200"
    assert by_name(None, 8)["gpus"].verdict == "fail"
    assert by_name(None, 0)["gpus"].verdict == "skipped"


@pytest.mark.parametrize("wrapped", [True, False])
def test_amds_program_is_read_in_both_its_forms(wrapped: bool) -> None:
    listed = '[{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}, "driver": {"version": "6.10.5"}}]'
    seen = parse_amd_smi(f'{{"gpu_data": {listed}}}' if wrapped else listed)
    assert (seen.vendor, seen.driver, [gpu.name for gpu in seen.gpus]) == ("amd", "6.10.5", ["AMD Instinct MI300X"])


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        (None, "skipped"),
        ("[1.0] NVRM: loading\n", "pass"),
        ("[9.1] NVRM: Xid (PCI:0000:1a:00): 31, pid=1, name=python\n", "pass"),
        ("[9.1] NVRM: Xid (PCI:0000:1a:00): 48, pid=1, name=python\n", "warn"),
        ("[9.1] NVRM: Xid (PCI:0000:1a:00): 48, x\n[9.2] NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off\n", "fail"),
    ],
)
def test_xids_of_the_kernel_log_are_weighed(log: str | None, verdict: str) -> None:
    assert check_kernel_log(log).verdict == verdict

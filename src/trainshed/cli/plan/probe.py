"""`trainshed plan probe`: measure this machine, for plans on machines like it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.plan.measured.machine_measurements import MachineMeasurements

_SLOW_SHARE = 0.6
"""Of its published peak, what the best product of a healthy GPU reaches and more."""


def probe(
    *,
    to: Path | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Measure products, attention, memory and all-reduces on this machine: its GPUs, or its CPU without any.

    Parameters
    ----------
    to
        Write a machine file in the catalog's form, for `plan --machine FILE`.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import InputError, MissingExtra

    if find_spec("torch") is None:
        raise MissingExtra.named("train", "measuring a machine")
    if to is not None and to.suffix not in (".yaml", ".yml"):
        raise InputError("a machine file is YAML", where=str(to), hint=f"write --to {to.with_suffix('.yaml')}")
    if to is not None and not to.absolute().parent.is_dir():
        raise InputError("there is no such folder", where=str(to.parent), hint="make it first")

    from trainshed.launch.here import machine_environment

    # What ranks here would run with; it must be there before PyTorch is loaded.
    os.environ.update(machine_environment("bf16"))
    from trainshed.engines.torch.machine_probe import measure_machine
    from trainshed.plan.measured.machine_file import shares, write_machine

    report = reporter()
    measured = measure_machine(report)
    reached = shares(measured)
    for dtype in ("bf16", "fp8"):
        if reached.get(dtype, 1.0) < _SLOW_SHARE:
            report.warn(
                f"the best {dtype} product reaches {reached[dtype]:.0%} of the GPU's published peak: is it in use, "
                "throttled or power-limited?"
            )
    written = write_machine(measured, to) if to is not None else []
    data = {"schema": "trainshed.plan.probe/1", **measured.to_plain(), "share_of_published": reached}
    data["written"] = [str(path) for path in written]
    print_report(data, output, _text(measured, reached, written))
    return 0


def _text(measured: MachineMeasurements, reached: dict[str, float], written: list[Path]) -> str:
    def share(name: str) -> str:
        return f"   {reached[name]:.0%} of the published {_FIGURES[name]}" if name in reached else ""

    lines = [f"{measured.devices} x {measured.device}, {measured.memory_gib:.1f} GiB, torch {measured.torch}", ""]
    lines.append("  products                      TFLOP/s")
    lines += [
        f"    {f'{gemm.rows} x {gemm.inputs} x {gemm.outputs}':<22} {gemm.dtype:<5} {gemm.tflops:>8.4g}"
        for gemm in measured.gemms
    ]
    for dtype in ("fp32", "bf16", "fp8"):
        if (best := measured.best_tflops(dtype)) is not None:
            lines.append(f"    {'best':<22} {dtype:<5} {best:>8.4g}{share(dtype)}")
    if measured.kind == "cuda":
        lines.append("    called one behind the other from Python: small shapes wait for the host")
    lines.append("  attention, causal             forward  backward")
    lines += [
        f"    {f'{one.sequence_length} tokens, {one.heads} x {one.head_dim}':<22} {one.dtype:<5} "
        f"{one.forward_tflops:>8.4g}  {one.backward_tflops:>8.4g}"
        for one in measured.attention
    ]
    lines.append(f"  memory, copy   {measured.copy_gb_per_s:>10.4g} GB/s{share('memory')}")
    lines.append(f"  kernel launch  {measured.launch_us:>10.3g} us")
    if measured.all_reduces:
        lines.append(f"  all-reduce among {measured.all_reduces[0].ranks}{share('link')}")
        lines += [f"    {one.mebibytes:>7g} MiB  {one.bus_gb_per_s:>8.4g} GB/s" for one in measured.all_reduces]
    else:
        lines.append("  all-reduce: one GPU has nobody to reduce with")
    lines += [f"wrote {path}" for path in written]
    if written:
        lines.append(f"plan with it: trainshed plan RECIPE --machine {written[0]}")
    return "\n".join(lines)


_FIGURES = {"bf16": "peak", "fp8": "peak", "memory": "bandwidth", "link": "link"}

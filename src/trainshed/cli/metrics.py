"""`trainshed metrics`: the figures of a run or a log, or of several side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, GpuName, ModelName
from trainshed.cli.console import Flag, Output

if TYPE_CHECKING:
    pass


def metrics(
    runs: Annotated[tuple[str, ...], Parameter(name="RUN_OR_LOG", allow_leading_hyphen=False)],
    /,
    *,
    start: int | None = None,
    end: int | None = None,
    batch_size: int | None = None,
    gpus: int | None = None,
    gpu: GpuName | None = None,
    precision: str | None = None,
    model: ModelName | None = None,
    sequence_length: int | None = None,
    profiles: Flag = False,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Measure a run: step time, tokens/s, TFLOP/s, MFU, goodput and where the rest of the time went.

    Steps that say little are left out, and counted: the first one of each attempt, skipped and profiled ones, those
    beside a validation or checkpoint. Of several runs the figures stand side by side, with what differs in the recipes.

    Parameters
    ----------
    runs
        A run (its name, name/id, folder or recipe file), or a log: of Trainshed, Megatron-LM, Megatron-Bridge, NeMo,
        DLLogger, torchtune or MaxText.
    start
        The first step that counts, by the number that the log or `status` gives it.
    end
        The last step that counts.
    batch_size
        For a log: sequences per step.
    gpus
        For a log: how many GPUs it ran on.
    gpu
        The GPU, where neither the run nor the log says it: h100, or a file that describes one.
    precision
        For a log: the dtype of the products: bf16, fp8, fp16, fp32, tf32.
    model
        For a log: a preset, for the FLOPs of a token.
    sequence_length
        For a log: tokens per sequence (default: the preset's longest).
    profiles
        Report what the traces of a run (`observe.profile`) or one trace file say instead: compute, exposed
        communication, idle time, and the kernels that take most of it.
    on
        The cluster whose store is searched for the run, and whose endpoints reach a bucket.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.cli.metrics_text import comparison_text, run_text
    from trainshed.errors import InputError
    from trainshed.workflow.run_metrics import MetricsFlags, measure, recipe_differences

    if not runs:
        raise InputError("which run, or which log?", hint="trainshed metrics RUN_OR_LOG; `trainshed ls` lists the runs")
    if profiles:
        from trainshed.cli.profile_report import report_profiles

        if len(runs) > 1:
            raise InputError("--profiles is for one run", hint="write one run, or one trace")
        return report_profiles(runs[0], on, output)
    if start is not None and end is not None and start > end:
        raise InputError(f"--start {start} comes after --end {end}", where="--start")
    flags = MetricsFlags(batch_size, gpus, gpu, precision, model, sequence_length)
    measured = [measure(text, flags, start=start, end=end, on=on) for text in runs]
    differences = recipe_differences(measured)
    data = {
        "schema": "trainshed.metrics/1",
        "runs": [{"name": run.name, "kind": run.kind, **run.metrics.to_plain()} for run in measured],
        "differences": differences,
    }
    if output == "json":
        print_report(data, output, "")
    elif len(measured) == 1:
        print_report(data, output, run_text(measured[0]))
    else:
        print_report(data, output, comparison_text(measured, differences))
    return 0

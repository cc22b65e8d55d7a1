"""`trainshed plan`, `plan validate` and `plan probe`: a layout, its memory, time and cost, before any GPU is held.

A word that is a verb of `plan` is never taken for a recipe's name.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from trainshed.cli.completion import ClusterName, GpuNames, MachineName, ModelName, RecipeName
from trainshed.cli.console import Output
from trainshed.cli.examples import examples_text

if TYPE_CHECKING:
    from trainshed.plan.machine_file import MachineMeasurements
    from trainshed.plan.planner import Plan
    from trainshed.plan.published.validation import PlannerValidation, ValidationScores


def plan(
    recipe: RecipeName | None = None,
    *overrides: str,
    on: ClusterName | None = None,
    model: ModelName | None = None,
    gpu: GpuNames = (),
    machine: MachineName | None = None,
    gpus: str | None = None,
    nodes: int | None = None,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    layout: str | None = None,
    engine: str | None = None,
    steps: int | None = None,
    tokens: str | None = None,
    price: float | None = None,
    calibration: str | None = None,
    explain: Annotated[bool, Parameter(negative="")] = False,
    report: Path | None = None,
    top: int = 5,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Choose the layout of a training, or judge a given one: does it fit, how fast is it, what does it cost.

    Ask about a recipe (RECIPE --on CLUSTER), or about a model in flags (--model, --gpu, --gpus, --seq, --global-batch).
    No GPU is needed: every figure is predicted.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.global_batch=512, cluster.nodes.default=4).
    on
        The cluster file that says which machines there are.
    model
        A model of the catalog (llama3-70b), or a folder with a config.json (hf://org/name, ./folder), without a recipe.
    gpu
        A GPU of the catalog (h100), or a file that describes one; several (h100,h200, or the flag again) are compared.
    machine
        A machine of the catalog (a3-mega, p5.48xlarge), or a file that describes one.
    gpus
        How many GPUs; 8..4096 draws the scaling curve.
    nodes
        How many machines, in place of --gpus.
    seq
        Tokens per sequence, where there is no recipe.
    global_batch
        Sequences per step, where there is no recipe.
    precision
        Of the matrix products, where there is no recipe: fp32, fp16, bf16, fp8, mxfp8 or nvfp4.
    layout
        The layout to judge (tp=4,pp=4,vp=5,cp=2,micro_batch=1); left out, the best is searched.
    engine
        What steps the model, where there is no recipe: torch, megatron, nemo or torchtune.
    steps
        Length of the run, for hours and cost, where there is no recipe.
    tokens
        Length of the run in tokens (15T), in place of --steps.
    price
        Dollars per GPU and hour, in place of the machine's list price.
    calibration
        A file that `trainshed plan calibrate` wrote.
    explain
        Say in words why this layout won.
    report
        Write the pictures to a file: .html (with all words) or .svg.
    top
        How many layouts to show beside each other.
    output
        Report as text or json.
    """
    from trainshed import api
    from trainshed.cli.console import print_report
    from trainshed.plan.report.page import check_report_path, write_report
    from trainshed.workflow.plan_request import PlanFlags, check_top, split_values

    check_top(top)
    gpu_names = split_values(gpu)
    if len(gpu_names) > 1:
        from trainshed.cli.plan_picture import compare_gpus

        flags = PlanFlags(
            recipe,
            overrides,
            on,
            model,
            gpu_names[0],
            machine,
            gpus,
            nodes,
            seq,
            global_batch,
            precision,
            layout,
            engine,
            steps,
            tokens,
            price,
            calibration,
        )
        return compare_gpus(flags, gpu_names, report, top=top, explained=explain, output=output)
    if report is not None:
        check_report_path(report)
    chosen = api.plan(
        recipe,
        *overrides,
        on=on,
        model=model,
        gpu=gpu_names[0] if gpu_names else None,
        machine=machine,
        gpus=gpus,
        nodes=nodes,
        seq=seq,
        global_batch=global_batch,
        precision=precision,
        layout=layout,
        engine=engine,
        steps=steps,
        tokens=tokens,
        price=price,
        calibration=calibration,
        explain=explain,
        top=top,
    )
    if report is not None:
        write_report(chosen, report, top=top)
    print_report(chosen.to_plain(), output, "" if output == "json" else _picture(chosen, top, report))
    return 0


def _picture(chosen: Plan, top: int, report: Path | None) -> str:
    from rich.console import Console

    from trainshed.cli.plan_picture import picture

    text = picture(chosen, Console(highlight=False), top=top)
    return f"{text}\nwrote {report}" if report is not None else text


_MOST_SOURCES = 14


def validate(
    *tables: str,
    plot: Path | None = None,
    worst: int = 0,
    columns: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Predict published measurements and say how far off the predictions are.

    Parameters
    ----------
    tables
        CSV files of measurements, or of runs that ran out of memory (default: those that come with Trainshed).
    plot
        Draw predicted against measured into this SVG file.
    worst
        Show this many of the rows that were predicted worst.
    columns
        Show the columns that a table has, and predict nothing.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.plan.published.rows import column_names, read_tables, shipped_tables
    from trainshed.plan.published.validation import validate_rows

    if columns:
        names = column_names()
        print_report({"schema": "trainshed.plan.columns/1", "columns": names}, output, ",".join(names))
        return 0
    files = list(tables) or [str(path) for path in shipped_tables()]
    validation = validate_rows(read_tables(files))
    if plot is not None:
        _draw_accuracy(validation, plot)
    data = {
        "schema": "trainshed.plan.validation/1",
        "tables": [Path(file).name for file in files],
        **validation.to_plain(),
    }
    if worst:
        data["worst"] = [one.to_plain() for one in validation.worst(worst)]
    print_report(data, output, _validation_text(validation, worst, shipped=not tables))
    return 0


def _draw_accuracy(validation: PlannerValidation, plot: Path) -> None:
    from trainshed.errors import InputError
    from trainshed.plan.published.plot import accuracy_svg

    if plot.suffix.lower() != ".svg":
        raise InputError("plots are drawn as SVG", where=str(plot), hint=f"write --plot {plot.with_suffix('.svg')}")
    if not plot.absolute().parent.is_dir():
        raise InputError("there is no such folder", where=str(plot.parent), hint="make it first")
    plot.write_text(accuracy_svg(validation), encoding="utf-8")


def _validation_text(validation: PlannerValidation, worst: int, *, shipped: bool) -> str:
    from trainshed.plan.published.plot import short_source

    everything = validation.scores()
    by_source = validation.scores_by(lambda row: short_source(row.source))
    by_source = {name: scores for name, scores in by_source.items() if scores.rows > scores.skipped}
    shown = list(by_source.items())[:_MOST_SOURCES]
    width = max(len(name) for name, _ in [("everything", None), *shown])
    lines = [
        f"{everything.rows:,} rows, {everything.rows - everything.skipped:,} predicted, {everything.skipped:,} skipped",
        "",
        f"{'':<{width}}  {'step time':^37}  {'memory':^20}  {'out of memory':^13}  {'regret':^13}",
        f"{'':<{width}}  {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7} {'null':>7}"
        f"  {'rows':>5} {'mean':>6} {'bias':>7}  {'balanced':>13}  {'top 1':>6} {'top 3':>6}",
        *(_scores_line(name, scores, width) for name, scores in shown),
    ]
    if len(by_source) > len(shown):
        lines.append(f"{f'({len(by_source) - len(shown)} more: -o json)':<{width}}")
    lines += [_scores_line("everything", everything, width), "", *_scores_text(everything)]
    if shipped:
        lines.append("these rows come with Trainshed: its constants were fitted to some of them")
    if everything.skipped:
        lines += ["", "skipped"]
        lines += [f"  {count:>5}  {reason}" for reason, count in validation.reasons().items()]
    if worst:
        lines += ["", "predicted worst (predicted / measured)"]
        for one in validation.worst(worst):
            place = f"{short_source(one.row.source)}, row {one.row.number}"
            lines.append(
                f"  {one.prediction.step_seconds:>9.3f} / {one.step_seconds:<9.3f} s  {place}: {one.description}"
            )
    return "\n".join(lines)


def _scores_line(name: str, scores: ValidationScores, width: int) -> str:
    time, memory, fit, regret = scores.step_time, scores.memory, scores.out_of_memory, scores.regret
    balanced = "" if fit.balanced_accuracy is None else f"{fit.balanced_accuracy:.3f}"
    return (
        f"{name:<{width}}  {time.count or '':>5} {_percent(time.mape)} {_percent(time.median)} "
        f"{_percent(time.bias, signed=True)} {_percent(time.null_mape)}  {memory.count or '':>5} "
        f"{_percent(memory.mape, 6)} {_percent(memory.bias, signed=True)}  {balanced:>13}  "
        f"{_percent(regret.top1_mean, 6)} {_percent(regret.top3_mean, 6)}"
    ).rstrip()


def _scores_text(scores: ValidationScores) -> list[str]:
    """What the table has no room for."""
    fast, fit, regret = scores.above_10_percent_mfu, scores.out_of_memory, scores.regret
    lines: list[str] = []
    if fast.count:
        lines.append(
            f"above 10% MFU: step time off by {fast.mape:.1%} on {fast.count:,} rows, the null model by "
            f"{fast.null_mape:.1%}"
        )
    if fit.recall is not None:
        caught = f"{fit.recall:.1%} of {fit.positives:,} runs that ran out of memory were predicted to"
        right = "none was predicted" if fit.precision is None else f"{fit.precision:.1%} of such predictions were right"
        lines.append(f"{caught}; {right}")
    if regret.top1_worst is not None and regret.top3_worst is not None:
        lines.append(
            f"regret over {regret.groups} groups of measured layouts: worst {regret.top1_worst:.1%} for our first "
            f"choice, {regret.top3_worst:.1%} for the best of our first three"
        )
    lines.append("null: a constant TFLOP/s per GPU, the median of the same source, GPU and precision")
    return lines


def _percent(value: float | None, width: int = 7, *, signed: bool = False) -> str:
    return f"{'':>{width}}" if value is None else f"{value:>{'+' if signed else ''}{width}.1%}"


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

    from trainshed.launch.attempt import machine_environment

    # What ranks here would run with; it must be there before PyTorch is loaded.
    os.environ.update(machine_environment("bf16"))
    from trainshed.engines.torch.machine_probe import measure_machine
    from trainshed.plan.machine_file import reached_shares, write_machine_file

    report = reporter()
    measured = measure_machine(report)
    reached = reached_shares(measured)
    for dtype in ("bf16", "fp8"):
        if reached.get(dtype, 1.0) < _SLOW_SHARE:
            report.warn(
                f"the best {dtype} product reaches {reached[dtype]:.0%} of the GPU's published peak: is it in use, "
                "throttled or power-limited?"
            )
    written = write_machine_file(measured, to) if to is not None else []
    data = {"schema": "trainshed.plan.probe/1", **measured.to_plain(), "share_of_published": reached}
    data["written"] = [str(path) for path in written]
    print_report(data, output, _probe_text(measured, reached, written))
    return 0


def _probe_text(measured: MachineMeasurements, reached: dict[str, float], written: list[Path]) -> str:
    def share(name: str) -> str:
        return f"   {reached[name]:.0%} of the published {_PUBLISHED_FIGURES[name]}" if name in reached else ""

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
        lines.append("    called one after the other from Python: small shapes wait for the host")
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


_PUBLISHED_FIGURES = {"bf16": "peak", "fp8": "peak", "memory": "bandwidth", "link": "link"}


PLAN_VERBS = {
    "validate": ("trainshed.cli.plan:validate", "Compare the planner with published measurements."),
    "calibrate": ("trainshed.cli.plan_calibrate:calibrate", "Learn from a measured run how far off the plan was."),
    "probe": ("trainshed.cli.plan:probe", "Measure this machine and write a file that describes it."),
}

app = App(
    name="plan",
    help="Choose the layout of a training; predict its memory, time and cost.",
    help_epilogue=examples_text("plan"),
)
app.default(plan)
for _name, (_target, _summary) in PLAN_VERBS.items():
    app.command(_target, name=_name, help=_summary, help_epilogue=examples_text(f"plan {_name}"))

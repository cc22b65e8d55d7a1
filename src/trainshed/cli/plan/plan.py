"""`trainshed plan`: the layout of a training, its memory, its time and its cost, before any GPU is held."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.plan.report.answer import Answer


def plan(
    recipe: str | None = None,
    *overrides: str,
    on: str | None = None,
    model: str | None = None,
    gpu: tuple[str, ...] = (),
    machine: str | None = None,
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
    from trainshed.cli.console import print_report
    from trainshed.cli.plan.asking import ask
    from trainshed.cli.plan.flags import Flags, separated
    from trainshed.errors import InputError
    from trainshed.plan.planner import answer
    from trainshed.plan.report.page import check_report_path, write_report

    gpu_names = separated(gpu)
    flags = Flags(
        recipe,
        overrides,
        on,
        model,
        gpu_names[0] if gpu_names else None,
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
    if top < 1:
        raise InputError(f"{top} layouts cannot be shown", where="--top", hint="write 1 or more")
    if len(gpu_names) > 1:
        from trainshed.cli.plan.side_by_side import compare

        return compare(flags, gpu_names, report, top=top, explained=explain, output=output)
    if report is not None:
        check_report_path(report)
    found = answer(ask(flags), top=top, explained=explain)
    if report is not None:
        write_report(found, report, top=top)
    print_report(found.to_plain(), output, "" if output == "json" else _picture(found, top, report))
    return 0


def _picture(found: Answer, top: int, report: Path | None) -> str:
    from rich.console import Console

    from trainshed.cli.plan.picture import picture

    text = picture(found, Console(highlight=False), top=top)
    return f"{text}\nwrote {report}" if report is not None else text

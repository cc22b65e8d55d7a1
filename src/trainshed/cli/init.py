"""`trainshed init`: a first recipe or cluster file, from four questions at a terminal or from flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from trainshed.cli.completion import MachineName, ModelName
from trainshed.cli.console import Output, print_report
from trainshed.cli.examples import examples_text

app = App(
    name="init",
    help="Write a first recipe or cluster file, from four questions or from flags.",
    help_epilogue=examples_text("init"),
)


@app.default
def recipe(
    file: Path = Path("recipe.yaml"),
    /,
    *,
    model: ModelName | None = None,
    data: str | None = None,
    length: str | None = None,
    name: str | None = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Write a recipe that trains a model on text; asks at a terminal for what no flag says.

    Parameters
    ----------
    file
        The recipe to write. Nothing is overwritten.
    model
        A preset (llama3.2-1b: fresh weights), or weights to continue from (hf://org/name, a folder).
    data
        The text: JSONL or parquet files (`data/*.jsonl`, `s3://bucket/corpus/*.parquet`).
    length
        How long to train: steps (1000), or tokens (20B).
    name
        What its runs are called (default: the file's name, or the model's).
    output
        `json` for programs.
    """
    from trainshed.cli.recipes import check_new_file, write_new_file
    from trainshed.workflow.starter_files import starter_recipe

    check_new_file(file)
    wanted = model or _ask(
        "Which model? A preset (`tiny`, `llama3.2-1b`), or weights (hf://org/name)",
        "tiny",
        "--model",
        lambda answer: starter_recipe("run", answer, "data/*.jsonl", "1000"),
    )
    text_files = data or _ask(
        "Which text? JSONL or parquet files",
        "data/*.jsonl",
        "--data",
        lambda answer: starter_recipe("run", wanted, answer, "1000"),
    )
    steps = length or _ask(
        "How long? Steps (1000) or tokens (20B)",
        "1000",
        "--length",
        lambda answer: starter_recipe("run", wanted, text_files, answer),
    )
    usual = file.stem if file.stem != "recipe" else wanted.rstrip("/").rpartition("/")[2]
    called = name or _ask(
        "What are its runs called?",
        usual,
        "--name",
        lambda answer: starter_recipe(answer, wanted, text_files, steps),
        required=False,
    )
    write_new_file(file, starter_recipe(called, wanted, text_files, steps))
    next_steps = [f"trainshed plan {file} --gpu h100 --gpus 8", f"trainshed run {file}"]
    _report(file, next_steps, output)


@app.command
def cluster(
    file: Path = Path("clusters/my-cluster.yaml"),
    /,
    *,
    target: str | None = None,
    machine: MachineName | None = None,
    store: str | None = None,
    nodes: int | None = None,
    address: str | None = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Write a cluster file; asks at a terminal for what no flag says.

    Parameters
    ----------
    file
        The cluster file to write; in ./clusters `--on NAME` finds it. Nothing is overwritten.
    target
        What schedules jobs there: slurm, kubernetes, ray or local.
    machine
        The machine of its nodes: a name of the catalog (dgx-h100), an instance type (p5.48xlarge), a file, or cpu.
    store
        Where artefacts and runs are kept: a folder that all nodes see.
    nodes
        How many nodes there are.
    address
        Of Ray: where its head takes jobs (http://head:8265).
    output
        `json` for programs.
    """
    from trainshed.cli.recipes import check_new_file, write_new_file
    from trainshed.recipe.cluster.schema import CPU_MACHINE
    from trainshed.workflow.starter_files import TARGETS, starter_cluster

    check_new_file(file)

    def check(target: str, machine: str = CPU_MACHINE, store: str = "/shared", address: str | None = None) -> None:
        if target == "ray":
            address = address or usual_address
        starter_cluster("new", target, machine, store, 1, address)

    usual_address = "http://head:8265"
    scheduler = target or _ask(
        f"What schedules jobs there? {', '.join(TARGETS)}",
        "slurm",
        "--target",
        lambda answer: check(answer),
    )
    kind = machine or _ask(
        "Which machines? (dgx-h100, p5.48xlarge, a3-mega, cpu)",
        "dgx-h100",
        "--machine",
        lambda answer: check(scheduler, answer),
    )
    place = store or _ask(
        "Where are runs kept? A folder that all nodes see",
        "/shared/trainshed",
        "--store",
        lambda answer: check(scheduler, kind, answer),
    )
    count = _node_count(
        str(nodes)
        if nodes is not None
        else _ask("How many nodes are there?", "1", "--nodes", _node_count, required=False)
    )
    if scheduler == "ray":
        address = address or _ask(
            "Where does Ray's head take jobs?",
            usual_address,
            "--address",
            lambda answer: check(scheduler, kind, place, answer),
        )
    text = starter_cluster(file.stem, scheduler, kind, place, count, address)
    write_new_file(file, text)
    named = file.stem if file.parent == Path("clusters") else str(file)
    _report(file, [f"trainshed clusters check {named}", f"trainshed plan RECIPE --on {named}"], output)


app.command(recipe, name="recipe")


def _node_count(text: str) -> int:
    from trainshed.errors import InputError

    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"`{text}` is not a number of nodes", where="--nodes", hint="write 1 or more")
    return int(text)


def _ask(question: str, usual: str, flag: str, check: Callable[[str], object], *, required: bool = True) -> str:
    """Ask a person at a terminal until `check` raises nothing.

    Where there is no terminal the flag must say it, or the usual answer is taken.
    """
    from trainshed.cli.console import ask, print_error
    from trainshed.errors import InputError

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if not required:
            return usual
        raise InputError("is missing, and there is no terminal to ask at", where=flag, hint=f"write {flag} {usual}")
    while True:
        answer = ask(f"{question} [{usual}]")
        if answer is None:
            raise InputError("no answer was given, and nothing was written", where=flag, hint=f"write {flag} {usual}")
        try:
            check(answer or usual)
        except InputError as error:
            print_error(error)
            continue
        return answer or usual


def _report(file: Path, next_steps: list[str], output: Output) -> None:
    text = "\n".join([f"wrote {file}", "next:", *(f"  {command}" for command in next_steps)])
    print_report({"schema": "trainshed.init/1", "file": str(file), "next": next_steps}, output, text)

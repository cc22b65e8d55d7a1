"""`trainshed submit` and `trainshed render`: a recipe's job on a cluster, printed or sent byte for byte alike.

`trainshed run --on CLUSTER` submits the same job and follows it to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Flag, Output

if TYPE_CHECKING:
    from trainshed.launch.job import Job
    from trainshed.launch.target import SubmitRequest
    from trainshed.workflow.submission import RenderedJob


def render(
    recipe: RecipeName,
    *overrides: str,
    on: ClusterName,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    as_: Annotated[Literal["scripts", "helm"], Parameter(name="--as")] = "scripts",
    out: Path | None = None,
    despite_memory: Flag = False,
    offline: Flag = False,
) -> int:
    """Print what `submit` would send: scripts or manifests that run with plain sbatch or kubectl.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.steps=100, cluster.store=/data).
    on
        The cluster file that says where to run.
    id
        The id of the run, where it is not the recipe's own.
    nodes
        How many nodes (default: the recipe's, or the cluster's).
    gpus
        How many GPUs, in place of --nodes.
    as_
        scripts: what is submitted; helm: a chart, written into --out.
    out
        A folder to write the parts into, with the packed code beside them, in place of printing them.
    despite_memory
        Render a layout that the planner says does not fit.
    offline
        Do not ask the Hub for commits: the first node that fetches pins them.
    """
    from trainshed import api

    return _print_request(
        api.render(
            recipe, *overrides, on=on, id=id, nodes=nodes, gpus=gpus, despite_memory=despite_memory, offline=offline
        ),
        as_,
        out,
    )


def _print_request(rendered: RenderedJob, as_: str = "scripts", out: Path | None = None) -> int:
    import io
    import sys

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError

    job, request = rendered.job, rendered.request
    for note in rendered.notes:
        reporter().note(note)
    if as_ == "helm":
        if out is None or job.cluster.target != "kubernetes":
            what = "a chart is a folder" if out is None else f"a chart is for Kubernetes, not {job.cluster.target}"
            raise InputError(what, where="--as helm", hint="write --out DIR, and a Kubernetes cluster after --on")
        from trainshed.launch.kubernetes.helm import write_chart

        reporter().note("\n".join((f"chart written to {out}", *write_chart(job, request, out))))
    elif out is not None:
        _write_request(request, out)
        reporter().note(f"{len(request.parts)} parts written to {out}")
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(newline="\n")  # Windows would end lines in a way that bash does not read
        sys.stdout.write(request.text())
    return 0


def submit(
    recipe: RecipeName,
    *overrides: str,
    on: ClusterName,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    dry_run: Flag = False,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    despite_memory: Flag = False,
    offline: Flag = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Send a recipe's job to a cluster: planned and checked first, then exactly what --dry-run prints.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.steps=100, cluster.store=/data).
    on
        The cluster file that says where to run.
    id
        Start another run of the same recipe under this id.
    nodes
        How many nodes (default: the recipe's, or the cluster's); the layout is planned for them.
    gpus
        How many GPUs, in place of --nodes.
    dry_run
        Print what would be sent, and send nothing.
    yes
        Do not ask before sending.
    despite_memory
        Send a layout that the planner says does not fit.
    offline
        Do not ask the Hub for commits: the first node that fetches pins them.
    output
        Report as text or json.
    """
    from trainshed import api
    from trainshed.cli.console import print_report, reporter

    rendered = api.render(
        recipe, *overrides, on=on, id=id, nodes=nodes, gpus=gpus, despite_memory=despite_memory, offline=offline
    )
    if dry_run:
        return _print_request(rendered)
    sent = api.send(rendered, confirm=(lambda job: True) if yes else _confirmed, reporter=reporter())
    if sent is None:
        return 1
    job, ids = rendered.job, dict(sent.known.submitted("submit").submitted.ids)
    data = {
        "schema": "trainshed.submit/1",
        "run": str(sent),
        "folder": job.run,
        "cluster": job.cluster.name,
        "target": job.cluster.target,
        "ids": ids,
        "notes": list(job.notes),
    }
    lines = [f"submitted {sent} to {job.cluster.name}", *(f"  {stage:<10} {number}" for stage, number in ids.items())]
    lines.append(f"  trainshed status {sent}   trainshed logs {sent} -f")
    print_report(data, output, "\n".join(lines))
    return 0


def _write_request(request: SubmitRequest, folder: Path) -> None:
    """Write every part into a folder; `uploads` keep their place in the store below it."""
    for part in request.parts:
        path = folder / part.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(part.text, encoding="utf-8", newline="\n")
    for name, content in request.uploads.items():
        path = folder / "store" / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _confirmed(job: Job) -> bool:
    """Ask a person at a terminal; nobody else."""
    import sys

    from trainshed.cli.console import ask

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    answer = ask(f"submit {job.name} to {job.cluster.name}? [Y/n]")
    if answer is not None and answer.lower() in ("", "y", "yes"):
        return True
    sys.stderr.write("nothing was sent\n")
    return False


def run_on_cluster(
    recipe: str, overrides: tuple[str, ...], on: str, id: str | None, nodes: int | None, output: Output
) -> int:
    """Submit a recipe's stages and say how they go until the last has ended or serves; leaving does not end them."""
    from trainshed import api
    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.runs import status_text

    shown = reporter()
    sent = api.send(api.render(recipe, *overrides, on=on, id=id, nodes=nodes), confirm=_confirmed, reporter=shown)
    if sent is None:
        return 1
    shown.note(f"submitted {sent}; it goes on without this terminal: `trainshed status {sent}`")
    data = sent.wait(check=False, reporter=shown)
    print_report(data, output, status_text(data))
    return 0 if data["state"] in ("done", "serving") else 1

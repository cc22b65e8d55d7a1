"""`trainshed submit` and `trainshed render`: a recipe's job on a cluster, printed or sent byte for byte alike.

`trainshed run --on CLUSTER` submits the same job and follows it to its end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.launch.job import Job
    from trainshed.launch.target import SubmitRequest, SubmittedJob, Target


@dataclass(frozen=True)
class SubmitOptions:
    """What a person asks to be sent where, as both verbs take it."""

    recipe: str
    overrides: tuple[str, ...]
    on: str
    id: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    despite_memory: bool = False
    offline: bool = False

    def rendered(self) -> tuple[Job, SubmitRequest]:
        """Decide the job, and render it; the scheduler is not asked yet."""
        from trainshed.launch.target import target_of
        from trainshed.recipe import load_cluster, load_recipe, split_overrides
        from trainshed.workflow.submit import build_job

        for_recipe, for_cluster = split_overrides(self.overrides)
        cluster = load_cluster(self.on, for_cluster)
        target = target_of(cluster)
        job = build_job(
            load_recipe(self.recipe, for_recipe),
            cluster,
            id=self.id,
            nodes=self.nodes,
            gpus=self.gpus,
            despite_memory=self.despite_memory,
            offline=self.offline,
        )
        return job, target.render(job)


def render(
    recipe: str,
    *overrides: str,
    on: str,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    as_: Annotated[Literal["scripts", "helm"], Parameter(name="--as")] = "scripts",
    out: Path | None = None,
    despite_memory: bool = False,
    offline: bool = False,
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
    return _print_request(SubmitOptions(recipe, overrides, on, id, nodes, gpus, despite_memory, offline), as_, out)


def _print_request(asked: SubmitOptions, as_: str = "scripts", out: Path | None = None) -> int:
    import sys

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError

    job, request = asked.rendered()
    for note in (*job.notes, *request.notes):
        reporter().note(note)
    if as_ == "helm":
        if out is None or job.cluster.target != "kubernetes":
            what = "a chart is a folder" if out is None else f"a chart is for Kubernetes, not {job.cluster.target}"
            raise InputError(what, where="--as helm", hint="write --out DIR, and a Kubernetes cluster after --on")
        from trainshed.launch.kubernetes.helm import write_chart

        warnings = write_chart(job, request, out)
        notes = warnings or (f"helm install {job.name} {out}",)
        reporter().note("\n".join((f"chart written to {out}", *notes)))
    elif out is not None:
        _write_request(request, out)
        reporter().note(f"{len(request.parts)} parts written to {out}")
    else:
        sys.stdout.write(request.text())
    return 0


def submit(
    recipe: str,
    *overrides: str,
    on: str,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    dry_run: bool = False,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    despite_memory: bool = False,
    offline: bool = False,
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
    from trainshed.cli.console import print_report

    asked = SubmitOptions(recipe, overrides, on, id, nodes, gpus, despite_memory, offline)
    if dry_run:
        return _print_request(asked)
    data = plan_and_submit(asked, ask=not yes)
    if data is None:
        return 1
    lines = [f"submitted {data['run']} to {data['cluster']}"]
    lines += [f"  {stage:<10} {number}" for stage, number in data["ids"].items()]
    lines.append(f"  trainshed status {data['run']}   trainshed logs {data['run']} -f")
    print_report(data, output, "\n".join(lines))
    return 0


def plan_and_submit(asked: SubmitOptions, *, ask: bool = False) -> dict[str, Any] | None:
    """Plan, check and submit; returns what a report says of it, None where the person asked said no."""
    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.target import target_of

    job, request = asked.rendered()
    target = target_of(job.cluster)
    for note in (*job.notes, *request.notes):
        reporter().note(note)
    refusals = target.check(job)
    if refusals:
        raise InputError("; ".join(refusals), where=job.cluster.where("name"), hint="nothing was submitted")
    if ask and not _confirmed(job):
        return None
    submitted = target.submit(request, job)
    run = record_submission(job, submitted)
    return {
        "schema": "trainshed.submit/1",
        "run": run,
        "folder": job.run,
        "cluster": job.cluster.name,
        "target": job.cluster.target,
        "ids": dict(submitted.ids),
        "notes": list(job.notes),
    }


def record_submission(job: Job, submitted: SubmittedJob) -> str:
    """Remember what a scheduler took, and return the run's name as people write it."""
    from dataclasses import replace

    from trainshed.launch.submissions import record_submission
    from trainshed.recipe import to_yaml

    name, id = job.run.rsplit("/", 2)[1:]
    train = job.stage("train")
    kept = replace(submitted, ranks_per_node=train.ranks_per_node, losses_rank=job.losses_rank)
    record_submission(name, id, job.steps, kept, to_yaml(job.cluster), job.cluster.plugin_sources)
    return f"{name}/{id}"


def _write_request(request: SubmitRequest, folder: Path) -> None:
    """Write every part into a folder; `uploads` keep their place in the store below it."""
    for part in request.parts:
        path = folder / part.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(part.text, encoding="utf-8")
    for name, content in request.uploads.items():
        path = folder / "store" / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _confirmed(job: Job) -> bool:
    """Ask a person at a terminal; nobody else."""
    import sys

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    sys.stderr.write(f"submit {job.name} to {job.cluster.name}? [Y/n] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


_POLL_SECONDS = 5.0


def run_on_cluster(
    recipe: str, overrides: tuple[str, ...], on: str, id: str | None, nodes: int | None, output: Output
) -> int:
    """Submit a recipe's stages and say how they go until the last has ended or serves; leaving does not end them."""
    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.runs import status_text

    sent = plan_and_submit(SubmitOptions(recipe, overrides, on, id, nodes), ask=True)
    if sent is None:
        return 1
    reporter().note(f"submitted {sent['run']}; it goes on without this terminal: `trainshed status {sent['run']}`")
    data = _follow_run(str(sent["run"]))
    print_report(data, output, status_text(data))
    return 0 if data["state"] in ("done", "serving") else 1


def submit_and_follow(job: Job, target: Target) -> dict[str, Any]:
    """Submit a job that is already built, and follow it to its end."""

    return _follow_run(record_submission(job, target.submit(target.render(job), job)))


def _follow_run(run: str) -> dict[str, Any]:
    from trainshed.cli.console import reporter
    from trainshed.cli.runs import submission_status
    from trainshed.launch.submissions import find_submission
    from trainshed.launch.target import target_of

    submission = find_submission(run)
    target, shown = target_of(submission.cluster), reporter()
    last_lines: dict[str, str] = {}
    while True:
        data = submission_status(submission, target.status(submission.submitted))
        for stage in data["stages"]:
            line = f"{stage['stage']}: {stage['state']}  {stage['reason']}".rstrip()
            if last_lines.get(stage["stage"]) != line:
                last_lines[stage["stage"]] = line
                shown.note(line)
        if data["state"] in ("done", "serving", "failed", "cancelled"):
            return data
        time.sleep(_POLL_SECONDS)

"""`trainshed doctor`: what this machine or a cluster has, lacks and gets wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.launch.preflight.checks import Check
    from trainshed.recipe import Cluster

_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skipped": "-"}


def doctor(
    *overrides: str,
    on: str | None = None,
    nodes: int | None = None,
    full: bool = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Look at this machine; with --on at a cluster file and its scheduler; with --nodes at its nodes too.

    Exit code 1 if something would keep a run from working.

    Parameters
    ----------
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    on
        The cluster file, by name or path; left out: this machine.
    nodes
        Take so many nodes of the cluster and prove them: GPUs, fabric, storage, pair by pair.
    full
        Measure for a minute where half a second is usual.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.errors import InputError
    from trainshed.launch.preflight.checks import worst

    if nodes is not None and on is None:
        raise InputError("nodes of which cluster?", where="--nodes", hint="write --on CLUSTER too")
    groups = _machine(full) if on is None else _cluster(on, overrides, nodes, full)
    verdict = worst(check for checks in groups.values() for check in checks)
    data: dict[str, Any] = {"schema": "trainshed.doctor/1", "on": on, "verdict": verdict}
    data["groups"] = {name: [check.to_plain() for check in checks] for name, checks in groups.items()}
    print_report(data, output, _text(groups))
    return 1 if verdict == "fail" else 0


def _machine(full: bool) -> dict[str, list[Check]]:
    from trainshed.launch.preflight.this_machine import machine_checks

    groups = {"this machine": list(machine_checks())}
    return groups | ({"preflight": _preflight_here(full=True)} if full else {})


def _cluster(on: str, overrides: tuple[str, ...], nodes: int | None, full: bool) -> dict[str, list[Check]]:
    from trainshed.launch.preflight.checks import Check
    from trainshed.launch.preflight.cluster_file import cluster_file_checks
    from trainshed.launch.preflight.schedulers import scheduler_checks
    from trainshed.recipe import load_cluster, split_overrides

    cluster = load_cluster(on, split_overrides(overrides)[1])
    groups = {"cluster file": list(cluster_file_checks(cluster))}
    if cluster.target == "local":
        return groups | {"preflight": _preflight_here(full)}
    asked = list(scheduler_checks(cluster, nodes=nodes))
    if nodes is not None and not any(check.verdict == "fail" for check in asked):
        return groups | {cluster.target: asked, "preflight": _preflight_there(cluster, nodes, full)}
    what = f"before each training (preflight: {str(cluster.preflight).lower()}); --nodes 2 looks at two of them now"
    return groups | {cluster.target: [*asked, Check("nodes", "skipped", what)]}


def _preflight_there(cluster: Cluster, nodes: int, full: bool) -> list[Check]:
    """Preflight as a job of the cluster's own, followed to its end."""
    from pathlib import Path

    from trainshed.cli.launch.follow import submit_and_follow
    from trainshed.launch.preflight.checks import Check
    from trainshed.launch.preflight.verdict import newest_verdict
    from trainshed.launch.targets import target_of
    from trainshed.workflow.proof_job import proof_job

    job = proof_job(cluster, nodes, full=full)
    ended = submit_and_follow(job, target_of(cluster))
    verdict = newest_verdict(Path(job.run))
    if verdict is None:
        what = f"{ended['state']}; its result lies in {job.run}/health on the cluster"
        return [Check("nodes", "pass" if ended["state"] == "done" else "fail", what)]
    checks = [
        Check(f"{report.host}: {check.name}", check.verdict, check.what, check.hint)
        for report in verdict.nodes
        for check in report.checks
        if check.verdict != "pass"
    ]
    outcome = verdict.outcome if verdict.outcome in ("pass", "warn") else "fail"
    return [*checks, *verdict.checks, Check("nodes", outcome, verdict.sentence)]


def _preflight_here(full: bool) -> list[Check]:
    """Preflight of this machine alone, in a folder that is thrown away."""
    import tempfile
    from importlib.util import find_spec

    from trainshed.cli.console import reporter
    from trainshed.launch.fabric import SINGLE_NODE, FabricSetup
    from trainshed.launch.preflight import PreflightJob, run_preflight
    from trainshed.launch.preflight.gpus import find_gpus
    from trainshed.storage import LocalStore

    seen = find_gpus() if find_spec("torch") is not None else None
    gpus = len(seen.gpus) if seen is not None else 0
    with tempfile.TemporaryDirectory(prefix="trainshed-doctor-") as folder:
        job = PreflightJob(LocalStore(folder), "", 1, 1, gpus, FabricSetup(SINGLE_NODE, None, ""), full=full)
        verdict = run_preflight(job, node_rank=0, board=("127.0.0.1", 0), reporter=reporter())
    return [check for report in verdict.nodes for check in report.checks] + list(verdict.checks)


def _text(groups: dict[str, list[Check]]) -> str:
    lines = []
    for group, checks in groups.items():
        lines.append(group)
        width = max((len(check.name) for check in checks), default=0)
        for check in checks:
            lines.append(f"  {_MARKS[check.verdict]:<4}  {check.name:<{width}}  {check.what}")
            if check.hint and check.verdict != "pass":
                lines.append(f"        {'':<{width}}  {check.hint}")
    return "\n".join(lines)

"""`trainshed doctor`: what this machine or a cluster has, lacks and gets wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.launch.preflight.checks import Check

_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skipped": "-"}


def doctor(
    *overrides: str,
    on: str | None = None,
    full: bool = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Look at this machine; with --on at a cluster file, its scheduler and, where that is possible, its nodes.

    Exit code 1 if something would keep a run from working.

    Parameters
    ----------
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    on
        The cluster file, by name or path; left out: this machine.
    full
        Measure for a minute where half a second is usual.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.launch.preflight.checks import worst

    groups = _machine(full) if on is None else _cluster(on, overrides, full)
    verdict = worst(check for checks in groups.values() for check in checks)
    data: dict[str, Any] = {"schema": "trainshed.doctor/1", "on": on, "verdict": verdict}
    data["groups"] = {name: [check.to_plain() for check in checks] for name, checks in groups.items()}
    print_report(data, output, _text(groups))
    return 1 if verdict == "fail" else 0


def _machine(full: bool) -> dict[str, list[Check]]:
    from trainshed.launch.preflight.this_machine import machine_checks

    groups = {"this machine": list(machine_checks())}
    return groups | ({"preflight": _preflight_here(full=True)} if full else {})


def _cluster(on: str, overrides: tuple[str, ...], full: bool) -> dict[str, list[Check]]:
    from trainshed.launch.preflight.checks import Check
    from trainshed.launch.preflight.cluster_file import cluster_file_checks
    from trainshed.launch.preflight.schedulers import scheduler_checks
    from trainshed.recipe import load_cluster, split_overrides

    cluster = load_cluster(on, split_overrides(overrides)[1])
    groups = {"cluster file": list(cluster_file_checks(cluster))}
    if cluster.target == "local":
        return groups | {"preflight": _preflight_here(full)}
    what = f"nodes are looked at before each training (preflight: {str(cluster.preflight).lower()})"
    return groups | {cluster.target: [*scheduler_checks(cluster), Check("nodes", "skipped", what)]}


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

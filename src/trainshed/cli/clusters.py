"""Cluster files: `trainshed clusters` lists, copies and checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from trainshed.cli.completion import ClusterName
from trainshed.cli.console import Output, described_names, print_report
from trainshed.cli.examples import examples_text

app = App(name="clusters", help="List the cluster files, copy one, check one.", help_epilogue=examples_text("clusters"))


@app.default
def list_clusters(*, output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text") -> None:
    """List the cluster files that `--on NAME` finds: of ./clusters, of your configuration, and the shipped ones.

    Parameters
    ----------
    output
        `json` for programs.
    """
    from trainshed.cli.recipes import first_comment
    from trainshed.recipe import known_clusters

    rows = [
        {"name": name, "file": str(file), "description": first_comment(file)} for name, file in known_clusters().items()
    ]
    lines = described_names([(row["name"], row["description"]) for row in rows])
    text = "\n".join([*lines, "", "copy one to change it: trainshed clusters copy NAME"])
    print_report({"schema": "trainshed.clusters/1", "clusters": rows}, output, text)


app.command(list_clusters, name="list")


@app.command
def copy(
    name: ClusterName,
    destination: Path = Path("clusters"),
    /,
    *,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Copy a cluster file to your folder or file.

    Parameters
    ----------
    name
        The cluster, as `trainshed clusters` lists it.
    destination
        A folder, or a new file's name; ./clusters if left out, where `--on NAME` finds it. Nothing is overwritten.
    output
        `json` for programs.
    """
    from trainshed.recipe.cluster.load import copy_cluster

    written = copy_cluster(name, destination)
    text = f"wrote {written}\ncheck it: trainshed clusters check {written}"
    print_report({"schema": "trainshed.clusters.copy/1", "file": str(written)}, output, text)


@app.command
def check(cluster: ClusterName, /, *, output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text") -> int:
    """Check a cluster file without asking the cluster: its keys, image, store, secrets, machine and number of nodes.

    `trainshed doctor --on CLUSTER` also asks the scheduler. Exit code 1 if something would keep jobs from running.

    Parameters
    ----------
    cluster
        A cluster file, or its name (`trainshed clusters`).
    output
        `json` for programs.
    """
    from dataclasses import asdict

    from trainshed.launch.preflight.doctor import cluster_file_checks
    from trainshed.recipe import load_cluster

    loaded = load_cluster(cluster)
    checks = list(cluster_file_checks(loaded))
    failed = any(entry.verdict == "fail" for entry in checks)
    lines = [f"{loaded.name}: a {loaded.target} cluster of {loaded.machine or 'this machine'}"]
    for entry in checks:
        lines.append(f"  {entry.verdict:<7} {entry.name}: {entry.what}")
        lines += [f"          {entry.hint}"] if entry.hint and entry.verdict != "pass" else []
    report = {
        "schema": "trainshed.clusters.check/1",
        "name": loaded.name,
        "target": loaded.target,
        "machine": loaded.machine,
        "checks": [asdict(entry) for entry in checks],
    }
    print_report(report, output, "\n".join(lines))
    return 1 if failed else 0

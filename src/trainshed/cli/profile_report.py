"""`trainshed metrics RUN --profiles`: what the traces of a run say, as text or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshed.cli.console import Output
    from trainshed.observe.profile_summary import ProfileSummary


def report_profiles(run_or_trace: str, on: str = "local", output: Output = "text") -> int:
    """Print the figures of a trace, or of all traces of a run; returns the exit code."""
    from tempfile import TemporaryDirectory

    from trainshed.cli.console import print_report, reporter
    from trainshed.observe.profile_summary import TRACE_FOLDERS
    from trainshed.storage import copy_tree
    from trainshed.workflow.known_runs import find_run

    with TemporaryDirectory() as copies:
        place = Path(run_or_trace).expanduser()
        if not place.is_file() or place.suffix in (".yaml", ".yml"):
            known = find_run(run_or_trace, on=on)
            place = known.folder
            if place is None and "://" in known.address:
                include = [f"{folder}/**" for folder in TRACE_FOLDERS]
                copy_tree(known.address, copies, include=include, reporter=reporter(), options=known.options)
                place = Path(copies)
            place = place or known.local_folder()
        data = profile_data(place, run_or_trace)
    print_report(data, output, profile_text(data))
    return 0


def profile_data(place: Path, name: str | None = None) -> dict[str, Any]:
    """Return the figures of the traces at a place: one trace, or a run's folder; errors call it `name`."""
    from trainshed.errors import InputError
    from trainshed.observe.profile_summary import find_reports, find_traces, read_summary

    traces = [place] if place.is_file() else find_traces(place)
    reports = [] if place.is_file() else find_reports(place)
    if not traces and not reports:
        raise InputError(
            "this run has no profiles",
            where=name or str(place),
            hint="write `observe: {profile: {start: 10, steps: 3}}` into its recipe and start it again",
        )
    return {
        "schema": "trainshed.profiles/1",
        "run": name or str(place),
        "profiles": [_plain(place, trace, read_summary(trace)) for trace in traces],
        "nsys": [str(report) for report in reports],
    }


def _plain(place: Path, trace: Path, summary: ProfileSummary) -> dict[str, Any]:
    shown = trace if trace == place else trace.relative_to(place)
    return summary.to_plain() | {"trace": str(shown)}


def profile_text(data: dict[str, Any]) -> str:
    """Return what `profile_data` found, for people."""
    from trainshed.observe.profile_summary import shorten_kernel

    lines = []
    for profile in data["profiles"]:
        rank = "" if profile["rank"] is None else f", rank {profile['rank']}"
        steps = f"{profile['steps']} steps, " if profile["steps"] else ""
        lines += [
            f"{profile['trace']}{rank}: {steps}{profile['seconds']:.3f} s on the {profile['device'].upper()}",
            f"  compute {profile['compute']:.1%}  communication that nothing hides "
            f"{profile['exposed_communication']:.1%} (of {profile['communication']:.1%})  copies "
            f"{profile['copies']:.1%}  idle {profile['idle']:.1%}",
        ]
        for kernel in profile["kernels"]:
            mark = "  communication" if kernel["communication"] else ""
            lines.append(
                f"  {kernel['share']:6.1%}  {kernel['seconds']:9.4f} s  {kernel['calls']:>7,} x  "
                f"{shorten_kernel(kernel['name'])}{mark}"
            )
    if data["profiles"]:
        lines.append("open a trace at https://ui.perfetto.dev, or with TensorBoard's profiler plugin")
    for report in data["nsys"]:
        lines.append(f"{report}: a report of nsys; open it with Nsight Systems, or `nsys stats` it")
    return "\n".join(lines)

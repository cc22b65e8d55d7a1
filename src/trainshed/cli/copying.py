"""The report of a copy, as every verb that fetches prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainshed.cli.console import Output, human, print_report

if TYPE_CHECKING:
    from trainshed.storage import CopyResult


def report_copy(result: CopyResult, schema: str, output: Output) -> None:
    """Print what a copy did: the source with its commit, how much moved, where the manifest is."""
    data = {"schema": schema, **result.as_dict()}
    moved = f"{result.copied_files} copied ({human(result.copied_bytes, 'B')})"
    kept = result.files - result.copied_files
    lines = [
        f"{result.files} files, {human(result.bytes, 'B')}: {moved}, {kept} already there",
        f"from      {result.source}",
        f"to        {result.destination}",
        f"manifest  {result.manifest}",
    ]
    if not result.complete:
        lines.append("other tasks have not finished yet; the last one writes the manifest of the whole")
    print_report(data, output, "\n".join(lines))

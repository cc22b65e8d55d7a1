"""`trainshed data fetch`: a corpus from the Hub, a list of URLs or any store into a store."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output


def fetch(
    src: str,
    dst: str,
    *,
    include: Annotated[list[str] | None, Parameter(negative="")] = None,
    exclude: Annotated[list[str] | None, Parameter(negative="")] = None,
    limit: int | None = None,
    task: str | None = None,
    workers: int = 16,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Copy a corpus into a store: parallel, checksummed, and moving only what is missing when run again.

    The copy is complete when DST/.trainshed/manifest.json is there; killed at any moment, the same command goes on
    where it stopped.

    Parameters
    ----------
    src
        A file, folder or glob in any store (hf://datasets/org/name[@revision], s3://…, gs://…, az://…, a path), one
        URL, or @FILE: a text file, local or remote, with one URL per line.
    dst
        The folder to copy into, local or in a bucket.
    include
        Copy only what matches this glob; may be repeated. Without a slash it is about file names.
    exclude
        Leave out what matches this glob; may be repeated.
    limit
        Copy only the first N files, in the order of their paths.
    task
        Copy only part i of N (i from 0): for Slurm arrays and Kubernetes indexed jobs.
    workers
        How many files to copy at a time.
    output
        Report as text or json.
    """
    from trainshed.cli.console import reporter
    from trainshed.cli.copying import report_copy
    from trainshed.cli.parsing import parse_task
    from trainshed.storage import copy_tree

    result = copy_tree(
        src,
        dst,
        include=include or (),
        exclude=exclude or (),
        limit=limit,
        task=parse_task(task) if task else None,
        workers=workers,
        reporter=reporter(),
    )
    report_copy(result, "trainshed.data.fetch/1", output)
    return 0

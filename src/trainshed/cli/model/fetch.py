"""`trainshed model fetch`: a model from the Hub or any store into a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

# The same weights a second time, as the authors' own code reads them (Llama, Mistral); the seeds leave them out too.
_USUALLY_LEFT_OUT = "original"


def fetch(
    src: str,
    dst: str,
    *,
    include: Annotated[list[str] | None, Parameter(negative="")] = None,
    exclude: Annotated[list[str] | None, Parameter(negative="")] = None,
    task: str | None = None,
    workers: int = 16,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Copy a model into a store: its revision pinned, checksummed, and moving only what is missing when run again.

    The copy is complete when DST/.trainshed/manifest.json is there; killed at any moment, the same command goes on
    where it stopped. `original/*`, the weights in their authors' own format, is left out unless --include names it.

    Parameters
    ----------
    src
        A folder in any store (hf://org/name[@revision], s3://…, gs://…, az://…, a path).
    dst
        The folder to copy into, local or in a bucket.
    include
        Copy only what matches this glob; may be repeated. Without a slash it is about file names.
    exclude
        Leave out what matches this glob; may be repeated.
    task
        Copy part i of N, written i/N and counted from 0: for Slurm arrays and Kubernetes indexed jobs.
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
        exclude=_left_out(include or (), exclude or ()),
        task=parse_task(task) if task else None,
        workers=workers,
        reporter=reporter(),
    )
    report_copy(result, "trainshed.model.fetch/1", output)
    return 0


def _left_out(include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    asked_for = any(pattern.strip("/").partition("/")[0] == _USUALLY_LEFT_OUT for pattern in include)
    return [*exclude, *([] if asked_for else [f"{_USUALLY_LEFT_OUT}/**"])]

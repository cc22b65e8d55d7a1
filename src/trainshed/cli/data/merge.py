"""`trainshed data merge`: shards into one pair of files."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output


def merge(
    *prefixes: str,
    output: Annotated[str, Parameter(name="--output")],
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    output_format: Annotated[Output, Parameter(name="-o")] = "text",
) -> int:
    """Concatenate token files, in the order given, into one PREFIX.bin and PREFIX.idx.

    The bytes are those of preparing everything into one file. Memory does not grow with the files; killed
    at any moment, the same command can be run again.

    Parameters
    ----------
    prefixes
        PREFIX of PREFIX.bin and PREFIX.idx, or of a set of shards (all of them, in order).
    output
        The PREFIX to write to.
    overwrite
        Replace the output if it exists.
    output_format
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.data.tokens.merge import merge as merge_files

    header = merge_files(prefixes, output, overwrite=overwrite, reporter=reporter())
    data = {
        "schema": "trainshed.data.tokens.merge/1",
        "prefix": output,
        "inputs": list(prefixes),
        "documents": header.documents,
        "sequences": header.sequences,
        "dtype": str(header.dtype),
    }
    print_report(data, output_format, f"{output}: {header.documents:,} documents, stored as {header.dtype}")
    return 0

"""The tables of a large checkpoint, made in a process of their own: records come by stdin, the tables go to stdout.

    python -m trainshed.checkpoints.native.table_process

The process touches no store. Rank 0 puts what it returns, so fencing and the order of the commit stay with rank 0, and
a process that is killed leaves nothing.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainshed.checkpoints.native.tables import (
    OWN_PROCESS_ITEMS,
    CheckpointContents,
    RankFileRecord,
    check_facts,
    checkpoint_contents,
)
from trainshed.errors import TrainshedError

_HEAD = struct.Struct("<Q")


def make_tables(
    parts: Sequence[RankFileRecord],
    step: int,
    attempt: int,
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    own_process_items: int | None = None,
) -> CheckpointContents:
    """Describe the files that all ranks have written; from `OWN_PROCESS_ITEMS` items on in a process of its own."""
    check_facts(facts)
    limit = OWN_PROCESS_ITEMS if own_process_items is None else own_process_items
    if sum(len(part.spans) for part in parts) < limit:
        return checkpoint_contents(parts, step, attempt, spec, facts)
    records = [part.to_bytes() for part in parts]
    head = {"step": step, "attempt": attempt, "spec": spec, "facts": facts, "records": [len(data) for data in records]}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=_framed(head, *records),
        capture_output=True,
        env=environment,
        check=False,
    )
    if process.returncode:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TrainshedError(
            f"the process that makes the checkpoint's tables ended with code {process.returncode}: {last_line}",
            hint="a negative code is the signal that ended it; -9 is often a node without memory left",
        )
    answer, rest = _unframed(process.stdout)
    if "what" in answer:
        raise TrainshedError(answer["what"], hint=answer["hint"])
    index, metadata, manifest = _cut(rest, answer["lengths"])
    return CheckpointContents(bytes(index), bytes(metadata), bytes(manifest), answer["total_bytes"])


def _framed(head: Mapping[str, Any], *parts: bytes) -> bytes:
    text = json.dumps(head, allow_nan=False).encode()
    return b"".join([_HEAD.pack(len(text)), text, *parts])


def _unframed(data: bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    (length,) = _HEAD.unpack_from(view)
    return json.loads(bytes(view[_HEAD.size : _HEAD.size + length])), view[_HEAD.size + length :]


def _cut(data: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    parts = []
    for length in lengths:
        parts.append(data[:length])
        data = data[length:]
    return parts


def main() -> None:
    """Read records, write tables."""
    head, rest = _unframed(sys.stdin.buffer.read())
    parts = [RankFileRecord.from_bytes(part) for part in _cut(rest, head["records"])]
    try:
        contents = checkpoint_contents(parts, head["step"], head["attempt"], head["spec"], head["facts"])
    except TrainshedError as error:
        sys.stdout.buffer.write(_framed({"what": error.what, "hint": error.hint}))
        return
    tables = (contents.index, contents.metadata, contents.manifest)
    lengths = [len(table) for table in tables]
    sys.stdout.buffer.write(_framed({"lengths": lengths, "total_bytes": contents.total_bytes}, *tables))


if __name__ == "__main__":
    main()

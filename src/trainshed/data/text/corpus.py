"""Which files make up a corpus, and which shard reads which of them.

A corpus may also be written by a user's own program, which is run once as `SCRIPT --target-dir DIR ARGS…`.
"""

from __future__ import annotations

import heapq
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainshed.data.text.formats import DocumentBoundary, detect_format
from trainshed.data.text.reader import InputSlice, max_splits, split_input
from trainshed.errors import AddressError, InputError, NotFound, TrainshedError
from trainshed.storage import expand, open_store, sha256_of

if TYPE_CHECKING:
    from trainshed.storage import MatchedObject, StoreOptions


def find_inputs(
    patterns: Sequence[str],
    *,
    key: str = "text",
    format: str | None = None,
    documents: DocumentBoundary = "file",
    options: StoreOptions | None = None,
) -> list[InputSlice]:
    """List the files of a corpus: patterns in the order given, the files of each sorted by path.

    The order of documents in the output is this order, so it must not depend on anything else.
    """
    inputs: list[InputSlice] = []
    seen: set[str] = set()
    for pattern in patterns:
        for match in _expand_pattern(pattern, options):
            if match.address in seen:
                raise InputError(
                    "this file is named by two inputs",
                    where=match.address,
                    hint="write inputs that do not overlap",
                )
            seen.add(match.address)
            inputs.append(
                InputSlice(
                    match.address,
                    match.info.size,
                    match.info.version,
                    detect_format(match.address, format),
                    key,
                    documents,
                )
            )
    return inputs


def _expand_pattern(pattern: str, options: StoreOptions | None) -> list[MatchedObject]:
    try:
        return expand(pattern, options)
    except NotFound as error:
        # The pattern matches nothing: that is wrong input, not a store that failed.
        raise AddressError(error.what, where=error.where, hint=error.hint) from None


def assign_shards(inputs: list[InputSlice], shards: int, options: StoreOptions | None = None) -> list[list[InputSlice]]:
    """Give each shard the same number of consecutive files; files are cut only if there are fewer than shards.

    The number counts and not the size: a file that grows then changes one shard, not the borders of all of them.
    """
    if len(inputs) < shards:
        inputs = _split_inputs(inputs, shards, options)
    if len(inputs) < shards:
        raise InputError(
            f"{shards} shards are asked for, but the input can be cut into {len(inputs)} at most",
            hint=f"write --shards {len(inputs)} or less: compressed files and whole-file documents cannot be cut",
        )
    cuts = [len(inputs) * i // shards for i in range(shards + 1)]
    return [inputs[a:b] for a, b in pairwise(cuts)]


def _split_inputs(inputs: list[InputSlice], shards: int, options: StoreOptions | None) -> list[InputSlice]:
    """Cut files until there is an input for each shard; the next cut is in the file with the largest parts."""
    stores = [open_store(item.address, options) for item in inputs]
    parts = [1] * len(inputs)
    max_parts = [max_splits(item, *store) for item, store in zip(inputs, stores, strict=True)]
    largest: list[tuple[float, int]] = [
        (-item.size, number) for number, item in enumerate(inputs) if max_parts[number] > 1
    ]
    heapq.heapify(largest)
    for _ in range(shards - len(inputs)):
        if not largest:
            break
        _, number = heapq.heappop(largest)
        parts[number] += 1
        if parts[number] < max_parts[number]:
            heapq.heappush(largest, (-inputs[number].size / parts[number], number))
    return [
        part
        for item, count, store in zip(inputs, parts, stores, strict=True)
        for part in (split_input(item, count, *store) if count > 1 else [item])
    ]


SCRIPT_LOG_LINES = 12


def script_spec(script: Path, arguments: Sequence[str]) -> dict[str, object]:
    """Return what decides a script's output, as far as we can know: its bytes, its arguments, its Python version."""
    if not script.is_file():
        raise InputError("there is no such script", where=str(script), hint="its path is relative to the recipe file")
    python = ".".join(map(str, sys.version_info[:3])) if script.suffix == ".py" else None
    return {"script": sha256_of(script.read_bytes()), "arguments": list(arguments), "python": python}


def run_script(script: Path, arguments: Sequence[str], target: Path) -> None:
    """Run the program to its end. Its output is stored in DIR/script.log, and quoted if it fails."""
    target.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, str(script)] if script.suffix == ".py" else [str(script.absolute())]
    log = target / "script.log"
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                [*launcher, "--target-dir", str(target), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
    except OSError as error:
        raise InputError(
            f"cannot be run: {error.strerror}", where=str(script), hint="make it executable, or write it in Python"
        ) from None
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()[-SCRIPT_LOG_LINES:]
        raise TrainshedError(
            f"the script ended with exit code {code}\n" + "\n".join(f"  | {line}" for line in lines),
            where=str(script),
            hint=f"it was run as: {' '.join([Path(launcher[0]).name, *launcher[1:], '--target-dir DIR', *arguments])}",
        )

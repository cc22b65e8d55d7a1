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
    kind: str | None = None,
    documents: DocumentBoundary = "file",
    options: StoreOptions | None = None,
) -> list[InputSlice]:
    """List the files of a corpus: patterns in the order given, the files of each sorted by path.

    The order of documents in the output is this order, so it must not depend on anything else.
    """
    pieces: list[InputSlice] = []
    seen: set[str] = set()
    for pattern in patterns:
        for found in _expand_pattern(pattern, options):
            if found.address in seen:
                raise InputError(
                    "this file is named by two inputs",
                    where=found.address,
                    hint="write inputs that do not overlap",
                )
            seen.add(found.address)
            pieces.append(
                InputSlice(
                    found.address,
                    found.info.size,
                    found.info.version,
                    detect_format(found.address, kind),
                    key,
                    documents,
                )
            )
    return pieces


def _expand_pattern(pattern: str, options: StoreOptions | None) -> list[MatchedObject]:
    try:
        return expand(pattern, options)
    except NotFound as error:
        # What a person wrote matches nothing: that is wrong input, not a store that failed.
        raise AddressError(error.what, where=error.where, hint=error.hint) from None


def assign_shards(pieces: list[InputSlice], shards: int, options: StoreOptions | None = None) -> list[list[InputSlice]]:
    """Give each shard a run of consecutive files, by count; cut files only where there are fewer than shards.

    By count and not by size: a file that grows then changes one shard, not the borders of all of them.
    """
    if len(pieces) < shards:
        pieces = _split_inputs(pieces, shards, options)
    if len(pieces) < shards:
        raise InputError(
            f"{shards} shards are asked for, but the input can be cut into {len(pieces)} at most",
            hint=f"write --shards {len(pieces)} or less: compressed files and whole-file documents cannot be cut",
        )
    cuts = [len(pieces) * i // shards for i in range(shards + 1)]
    return [pieces[a:b] for a, b in pairwise(cuts)]


def _split_inputs(pieces: list[InputSlice], shards: int, options: StoreOptions | None) -> list[InputSlice]:
    """Cut the files that can be cut, always the one with the largest parts, until there are enough pieces."""
    places = [open_store(piece.address, options) for piece in pieces]
    parts = [1] * len(pieces)
    room = [max_splits(piece, *place) for piece, place in zip(pieces, places, strict=True)]
    largest: list[tuple[float, int]] = [
        (-piece.size, number) for number, piece in enumerate(pieces) if room[number] > 1
    ]
    heapq.heapify(largest)
    for _ in range(shards - len(pieces)):
        if not largest:
            break
        _, number = heapq.heappop(largest)
        parts[number] += 1
        if parts[number] < room[number]:
            heapq.heappush(largest, (-pieces[number].size / parts[number], number))
    return [
        part
        for piece, count, place in zip(pieces, parts, places, strict=True)
        for part in (split_input(piece, count, *place) if count > 1 else [piece])
    ]


SCRIPT_LOG_LINES = 12


def script_spec(script: Path, arguments: Sequence[str]) -> dict[str, object]:
    """What decides a script's output as far as we can know it: its bytes, its arguments, the Python it runs under."""
    if not script.is_file():
        raise InputError("there is no such script", where=str(script), hint="its path is relative to the recipe file")
    python = ".".join(map(str, sys.version_info[:3])) if script.suffix == ".py" else None
    return {"script": sha256_of(script.read_bytes()), "arguments": list(arguments), "python": python}


def run_script(script: Path, arguments: Sequence[str], target: Path) -> None:
    """Run the program until it ends; its output is kept in DIR/script.log, and quoted if it fails."""
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

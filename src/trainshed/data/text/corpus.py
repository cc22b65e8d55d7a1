"""Which files make up a corpus, and which shard reads which of them.

A corpus may also be written by a user's own program, which is run once as `SCRIPT --target-dir DIR ARGS…`.
"""

from __future__ import annotations

import heapq
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainshed.data.text.formats import DocumentBoundary, detect_format
from trainshed.data.text.reader import InputReader, InputSlice, max_splits, split_input
from trainshed.data.text.splits import SplitTerm, parse_split, pick_files, split_of
from trainshed.errors import AddressError, InputError, NoSpace, NotFound, TrainshedError
from trainshed.storage import expand, open_store, parse, sha256_of
from trainshed.storage.listing import has_pattern, literal_folder

if TYPE_CHECKING:
    from trainshed.storage import MatchedObject, StoreOptions


RowCounter = Callable[[InputSlice], int]
Matches = list[tuple[str, list["MatchedObject"]]]


def find_inputs(
    patterns: Sequence[str],
    *,
    key: str = "text",
    format: str | None = None,
    documents: DocumentBoundary = "file",
    columns: tuple[str, ...] | None = None,
    split: str | None = None,
    limit: int | None = None,
    count_rows: RowCounter | None = None,
    options: StoreOptions | None = None,
) -> list[InputSlice]:
    """List the files of a corpus: patterns in the order given, the files of each sorted by path.

    The order of documents in the output is this order, so it must not depend on anything else. `columns` is given where
    documents are rows and not text. `split` keeps a part of the rows; `count_rows` counts those of a file for it.
    `limit` keeps the first files.
    """
    terms = parse_split(split) if split is not None else []
    if terms and documents == "blank_line":
        raise InputError(
            f"the split `{split}` is of rows, and paragraphs are not counted", hint="write one document a line"
        )
    matches = [(pattern, _expand_pattern(pattern, options)) for pattern in patterns]
    if columns is not None or terms:
        matches = [(pattern, _data_files(pattern, objects, format)) for pattern, objects in matches]
    _refuse_repeated(matches)
    matches = _first_files(matches, limit)

    def whole_file(match: MatchedObject) -> InputSlice:
        file_format = detect_format(match.address, format)
        info = match.info
        return InputSlice(match.address, info.size, info.version, file_format, key, documents, columns=columns)

    if not terms and columns is not None:
        _refuse_several_splits(matches)
    inputs = [] if terms else [whole_file(match) for _, objects in matches for match in objects]
    for term in terms:
        files = [whole_file(match) for match in _files_of_split(matches, term)]
        inputs += _slice_rows(files, term, count_rows or partial(count_file_rows, options=options))
    if terms and not inputs:
        raise InputError(f"the split `{split}` has no rows", where=patterns[0], hint="write a larger one")
    _refuse_unread(inputs, key, documents, columns)
    return inputs


def _files_of_split(matches: Matches, term: SplitTerm) -> list[MatchedObject]:
    """Return the files that belong to the split which a term names."""
    return [
        objects[number]
        for pattern, objects in matches
        for number in pick_files(
            [_path_below(pattern, match) for match in objects],
            term.name,
            named=not _is_folder(pattern, objects),
            where=pattern,
        )
    ]


def _refuse_unread(
    inputs: Sequence[InputSlice], key: str, documents: DocumentBoundary, columns: tuple[str, ...] | None
) -> None:
    """Refuse settings that no file reads, because none is in a format that has them."""
    kinds = sorted({item.format.kind for item in inputs})
    if not kinds:
        return
    if key != "text" and columns is not None:
        raise InputError(
            "--key is not read: conversations have columns", where=inputs[0].display_address, hint="write --columns"
        )
    if key != "text" and kinds == ["text"]:
        raise InputError(
            "--key is not read: plain text has no fields",
            where=inputs[0].display_address,
            hint="delete --key; or write --format jsonl where each line is a JSON object",
        )
    if documents != "file" and "text" not in kinds:
        raise InputError(
            f"--documents is not read: it is for plain text, and this is {', '.join(kinds)}",
            where=inputs[0].display_address,
            hint="delete --documents: a line or a row is a document",
        )


def _first_files(matches: Matches, limit: int | None) -> Matches:
    if limit is None:
        return matches
    kept: Matches = []
    for pattern, objects in matches:
        left = limit - sum(len(before) for _, before in kept)
        if left > 0:
            kept.append((pattern, objects[:left]))
    return kept


def count_file_rows(input_slice: InputSlice, options: StoreOptions | None = None) -> int:
    """Count the rows of a file. It is read for that, unless it is parquet."""
    return InputReader(input_slice, *open_store(input_slice.address, options)).count_rows()


def _slice_rows(inputs: list[InputSlice], term: SplitTerm, count_rows: RowCounter) -> list[InputSlice]:
    """Keep the rows of a term, of the rows of all files together."""
    if term.whole:
        return inputs
    counts = [count_rows(item) for item in inputs]
    first, last = term.rows(sum(counts))
    kept, start = [], 0
    for item, count in zip(inputs, counts, strict=True):
        rows = (max(first - start, 0), min(last - start, count))
        if rows[0] < rows[1]:
            kept.append(item if rows == (0, count) else replace(item, rows=rows))
        start += count
    return kept


NOT_DATA = ("readme", "license", "dataset_info", "dataset_infos", "config", "croissant")
"""Names, without their suffix, of files that lie beside the data of datasets on the Hub."""


def _data_files(pattern: str, objects: list[MatchedObject], format: str | None) -> list[MatchedObject]:
    """Leave out what lies beside the data in a folder: its description, hidden files, files that hold no rows."""
    if not _is_folder(pattern, objects):
        return objects
    kept = []
    for match in objects:
        path = _path_below(pattern, match)
        hidden = any(part.startswith(".") for part in path.split("/"))
        if hidden or path.rpartition("/")[2].partition(".")[0].lower() in NOT_DATA:
            continue
        with suppress(InputError):
            if detect_format(match.address, format).kind != "text" or format is not None:
                kept.append(match)
    if not kept:
        raise AddressError(
            "there are no .jsonl, .json, .parquet, .csv or .tsv files here", where=pattern, hint="name the files"
        )
    folders = {_path_below(pattern, match).rpartition("/")[0] for match in kept}
    if pattern.startswith("hf://") and len(folders) > 1:
        shown = ", ".join(sorted(folder or "." for folder in folders))
        raise InputError(
            f"this dataset has files in several folders ({shown}), which may be different configurations",
            where=pattern,
            hint=f"name one of them, e.g. {pattern}/{max(folders)}",
        )
    return kept


def _is_folder(pattern: str, objects: Sequence[MatchedObject]) -> bool:
    """Whether an address means all files below it, and not one file or those that a glob names."""
    path = parse(pattern).path
    return not has_pattern(path) and all(match.info.path != path for match in objects)


def _path_below(pattern: str, match: MatchedObject) -> str:
    """Return the path of a file below the folder that a person has named: what is above says nothing about it."""
    path = parse(pattern).path
    folder = path
    if has_pattern(path) or match.info.path == path:
        folder = literal_folder(path)
    return match.info.path.removeprefix(folder).lstrip("/")


def _refuse_several_splits(matches: Matches) -> None:
    """Refuse a folder whose files belong to several splits, where nothing says which of them is meant."""
    for pattern, objects in matches:
        if _is_folder(pattern, objects):
            splits = sorted({split_of(_path_below(pattern, match)) or "train" for match in objects})
            if len(splits) > 1:
                raise InputError(
                    f"there are files of several splits here: {', '.join(splits)}",
                    where=pattern,
                    hint=f"write --split {splits[-1]}, or name the files",
                )


def _refuse_repeated(matches: Matches) -> None:
    seen: set[str] = set()
    for match in (match for _, objects in matches for match in objects):
        if match.address in seen:
            raise InputError(
                "this file is named by two inputs", where=match.address, hint="write inputs that do not overlap"
            )
        seen.add(match.address)


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
_FULL_BYTES = 64 * 1024
"""A disk with less room than this is why a script failed that wrote to it."""


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
    if code != 0 and (free := shutil.disk_usage(target).free) < _FULL_BYTES:
        # Its last words did not fit either.
        raise NoSpace(
            f"the script ended with exit code {code}, and its disk is full: {free:,} bytes are free",
            where=str(target),
            hint="make room there, or name a store on another disk; the same command goes on",
        )
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()[-SCRIPT_LOG_LINES:]
        raise TrainshedError(
            f"the script ended with exit code {code}\n" + "\n".join(f"  | {line}" for line in lines),
            where=str(script),
            hint=f"it was run as: {' '.join([Path(launcher[0]).name, *launcher[1:], '--target-dir DIR', *arguments])}",
        )

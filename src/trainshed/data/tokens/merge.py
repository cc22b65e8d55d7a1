"""Merge token files into one by concatenation, in O(1) memory.

The result is byte for byte what preparing everything into one file would have written. Its `.idx` is renamed last: a
merge that is killed leaves none and can be run again.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainshed.data.tokens.indexed_dataset import SCAN_ITEMS, IndexedDataset, IndexHeader
from trainshed.data.tokens.manifest import combine_manifests, read_token_manifest
from trainshed.data.tokens.token_files import commit_file, learned_path, local_path, partial_file, shard_prefixes
from trainshed.data.tokens.token_source import has_learned
from trainshed.errors import InputError
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage.manifest import FileEntry

COPY_BYTES = 64 * 1024 * 1024


def merge_tokens(
    prefixes: Sequence[str], output: str, *, overwrite: bool = False, reporter: Reporter = SILENT
) -> IndexHeader:
    """Concatenate token files in the given order; a prefix may stand for its shards."""
    for prefix in (*prefixes, output):
        if local_path(prefix) is None:
            raise InputError(
                "merge reads and writes disks", where=prefix, hint="fetch the shards first: trainshed data fetch"
            )
    inputs = [shard for prefix in prefixes for shard in shard_prefixes(prefix)]
    bin_path, index_path = Path(output + ".bin"), Path(output + ".idx")
    if any(os.path.abspath(name) == os.path.abspath(output) for name in inputs):
        raise InputError("the output is also an input", where=output, hint="give another --output")
    if index_path.exists() and not overwrite:
        raise InputError("the output exists already", where=output, hint="give another --output, or --overwrite")
    with_learned = _have_learned(inputs)
    learned_file = Path(learned_path(output))
    readers = [IndexedDataset(name) for name in inputs]
    try:
        header = _joint_header(readers)
        total = sum(reader.bin_bytes for reader in readers) + header.index_bytes
        with (
            partial_file(bin_path) as tokens,
            partial_file(index_path) as index,
            partial_file(learned_file) if with_learned else nullcontext() as learned,
            reporter.task("merge", total=total, unit="B") as task,
        ):
            for reader in readers:
                reader.check()
                _append_file(Path(reader.bin_address), reader.bin_bytes, tokens, task)
                if learned is not None:
                    _append_file(Path(learned_path(reader.prefix)), reader.tokens, learned, task)
            for piece in _joint_index(header, readers):
                index.write(piece)
                task.advance(len(piece))
            # An old index or manifest must never be beside new tokens.
            Path(f"{output}.manifest.json").unlink(missing_ok=True)
            index_path.unlink(missing_ok=True)
            learned_file.unlink(missing_ok=True)
            commit_file(tokens, bin_path)
            if learned is not None:
                commit_file(learned, learned_file)
            commit_file(index, index_path)
    finally:
        for reader in readers:
            reader.close()
    _write_manifest(inputs, output)
    return header


def _write_manifest(inputs: Sequence[str], output: str) -> None:
    """Write the manifest of the result, if all parts have one and were made alike."""
    manifests = [manifest for name in inputs if (manifest := read_token_manifest(name))]
    if len(manifests) < len(inputs) or any(manifest.spec != manifests[0].spec for manifest in manifests):
        return
    files = []
    for path in (Path(f"{output}.bin"), Path(f"{output}.idx"), Path(learned_path(output))):
        if not path.exists():
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files.append(FileEntry(path.name, path.stat().st_size, f"sha256:{digest}"))
    replace(combine_manifests(manifests), files=files, shards=1).write(output)


def _have_learned(inputs: Sequence[str]) -> bool:
    """Whether all inputs say which tokens are learned; it must be all or none."""
    having = [has_learned(name, read_token_manifest(name)) for name in inputs]
    if any(having) and not all(having):
        raise InputError(
            "is text, and others are conversations that say which tokens are learned",
            where=inputs[having.index(False)],
            hint="merge conversations with conversations only",
        )
    return any(having)


def _joint_header(readers: Sequence[IndexedDataset]) -> IndexHeader:
    if not readers:
        raise InputError("nothing to merge", hint="give one prefix or more")
    first = readers[0]
    for reader in readers:
        if reader.dtype != first.dtype:
            raise InputError(
                f"holds {reader.dtype} tokens, but {first.prefix} holds {first.dtype}",
                where=reader.prefix,
                hint="prepare both with the same tokenizer",
            )
        if reader.has_modes:
            raise InputError("is a multimodal file, which merge does not take", where=reader.prefix)
    return IndexHeader(
        first.dtype, sum(reader.sequences for reader in readers), sum(reader.documents for reader in readers)
    )


def _joint_index(header: IndexHeader, readers: Sequence[IndexedDataset]) -> Iterator[bytes]:
    yield header.pack()
    for reader in readers:
        for start in range(0, reader.sequences, SCAN_ITEMS):
            yield reader.lengths[start : start + SCAN_ITEMS].tobytes()
    offset = 0
    for reader in readers:
        for start in range(0, reader.sequences, SCAN_ITEMS):
            yield (reader.pointers[start : start + SCAN_ITEMS] + offset).tobytes()
        offset += reader.bin_bytes
    yield np.zeros(1, "<i8").tobytes()
    before = 0
    for reader in readers:
        for start in range(1, reader.documents + 1, SCAN_ITEMS):
            yield (reader.document_indices[start : start + SCAN_ITEMS] + before).tobytes()
        before += reader.sequences


def _append_file(path: Path, size: int, target: BinaryIO, task: ProgressTask) -> None:
    """Copy a file to the end of `target` inside the kernel (some filesystems then share the blocks)."""
    with path.open("rb", buffering=0) as source:
        left = size
        while left:
            copied = _copy_some(source, target, min(left, COPY_BYTES))
            if copied == 0:
                raise InputError("shrank while it was copied", where=str(path), hint="merge finished files only")
            left -= copied
            task.advance(copied)


def _copy_some(source: BinaryIO, target: BinaryIO, count: int) -> int:
    try:
        return os.copy_file_range(source.fileno(), target.fileno(), count)
    except OSError as error:
        # Across filesystems, on some network mounts and old kernels. Both calls move the files' positions.
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY):
            raise
        return os.sendfile(target.fileno(), source.fileno(), None, count)

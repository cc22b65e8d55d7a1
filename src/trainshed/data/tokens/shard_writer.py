"""Writing one shard of tokens, to a disk or to a bucket.

On a disk the process may be killed at any moment. Tokens are appended to `PREFIX.bin.partial` and document lengths to
`PREFIX.lengths.partial`. About once a second a journal records the sizes of both and how far reading has got. A rerun
cuts both files back to the journal, checks the rest by its hash, and goes on; the result is the same bytes.

In a bucket a shard is one multipart object that is visible only when complete. A rerun starts the shard again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import orjson

from trainshed.errors import AccessDenied, Conflict, NoSpace, StorageError
from trainshed.reporting import Reporter
from trainshed.storage.locks import LockHolder, describe_holder, wait_for_lock
from trainshed.storage.manifest import FileEntry

if TYPE_CHECKING:
    import numpy as np

    from trainshed.data.tokenize.workers import TokenBlock
    from trainshed.storage import Store


BAD_LINES_KEPT = 20
"""How many bad lines the manifest quotes; it counts them all."""


@dataclass(frozen=True)
class TokenCounts:
    """What a shard holds so far."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    bad_line_examples: tuple[str, ...] = ()

    def plus(self, other: TokenCounts) -> TokenCounts:
        """Add two counts."""
        return TokenCounts(
            self.documents + other.documents,
            self.empty_documents + other.empty_documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.bad_lines + other.bad_lines,
            (self.bad_line_examples + other.bad_line_examples)[:BAD_LINES_KEPT],
        )


@dataclass
class ShardProgress:
    """How far a shard has got: the hashes of the inputs that are read, and a position in the next one."""

    input_hashes: list[str | None] = field(default_factory=list)
    position: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)


class ShardWriter(Protocol):
    """Takes the tokens of one shard, in order."""

    progress: ShardProgress
    """How far it has got: after opening, how far an earlier attempt had got."""

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Write a block's tokens; `position` is where reading resumes after it."""
        ...

    def input_done(self, sha256: str | None) -> None:
        """Record that an input was read to its end."""
        ...

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Make `.bin` and `.idx` complete and visible."""
        ...


@contextmanager
def explain_disk_errors(where: str) -> Iterator[None]:
    """Turn errors of the disk into our errors, with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(Path(where).parent).free
            raise NoSpace(
                f"the disk is full ({free / 1e6:.0f} MB left)",
                where=where,
                hint="free some space and run it again: it goes on where it stopped",
            ) from None
        kind = AccessDenied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
        raise kind(f"cannot be written: {(error.strerror or str(error)).lower()}", where=where) from error


JOURNAL_SECONDS = 1.0
JOURNAL_FORMAT = 1
CHECKSUM_BYTES = 8


class ShardLocked(Conflict):
    """Another process is writing the shard."""


def wait_for_shard(prefix: str, reporter: Reporter) -> None:
    """Wait while another process writes a shard, until it is done or has ended in any other way."""
    journal = _journal_path(prefix)
    wait_for_lock(prefix, _holder_path(prefix), lambda: is_shard_locked(prefix), reporter, sign_of_life=journal)


def is_shard_locked(prefix: str) -> bool:
    """Whether another process is writing a shard."""
    try:
        with open(_journal_path(prefix), "rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # nobody has begun, or the mount has no locks
    return False


def _journal_path(prefix: str) -> Path:
    return Path(f"{prefix}.journal.partial")


def _holder_path(prefix: str) -> Path:
    return Path(f"{prefix}.holder.partial")


class LocalShardWriter:
    """A shard on a local or mounted disk.

    The journal is a list of entries, only ever appended to. An entry has the inputs that were finished since the last
    one with their hashes, the position in the next input, and the sizes and hashes of both files at that moment. A
    rerun goes on from the last entry up to which every input is still the same: mending one input does not cost the
    work before it. With `bad_lines=False` that entry must also be before the first bad line that was skipped.
    """

    def __init__(
        self, prefix: str, key: str, input_ids: Sequence[str], stack: ExitStack, *, bad_lines: bool = True
    ) -> None:
        self._key, self._input_ids, self._bad_lines = key, input_ids, bad_lines
        self._bin, self._index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._tokens_path = Path(f"{prefix}.bin.partial")
        self._lengths_path = Path(f"{prefix}.lengths.partial")
        self._journal_path = _journal_path(prefix)
        self._manifest_path = Path(f"{prefix}.manifest.json")
        self._holder_path = _holder_path(prefix)
        with explain_disk_errors(prefix):
            self._journal_path.parent.mkdir(parents=True, exist_ok=True)
            # Opened first and removed last: the process that locks it has the shard.
            self._journal = stack.enter_context(open(self._journal_path, "ab+", buffering=0))
            self._lock(prefix)
            self._holder_path.write_bytes(LockHolder.here().to_bytes())
            self._tokens = stack.enter_context(open(self._tokens_path, "ab+", buffering=0))
            self._lengths = stack.enter_context(open(self._lengths_path, "ab+", buffering=0))
            self._digest, self._lengths_digest = hashlib.sha256(), hashlib.sha256()
            self.progress = self._resume()
        self._recorded_inputs = len(self.progress.input_hashes)
        self._recorded_at = time.monotonic()

    def _lock(self, prefix: str) -> None:
        taken = False
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError:
            pass  # some network mounts have no locks
        # No name left: another process finished the shard and removed it after we opened it.
        if taken or os.fstat(self._journal.fileno()).st_nlink == 0:
            raise ShardLocked(
                "another process is preparing this shard",
                where=prefix,
                hint=f"wait for it ({describe_holder(LockHolder.read(self._holder_path))}), or write another --output",
            )

    def _resume(self) -> ShardProgress:
        """Cut the files back to the last valid journal entry; without one, start again."""
        progress, entry, journal_bytes = self._last_valid_entry()
        if entry is not None:
            for file, digest, (size, sha256) in (
                (self._tokens, self._digest, entry["tokens"]),
                (self._lengths, self._lengths_digest, entry["lengths"]),
            ):
                if _size(file) > size:
                    file.truncate(size)
                _hash_into(digest, file)
                if digest.hexdigest() != sha256:
                    entry = None
                    break
        if entry is not None:
            self._journal.truncate(journal_bytes)
            return progress
        self._digest, self._lengths_digest = hashlib.sha256(), hashlib.sha256()
        for file in (self._tokens, self._lengths, self._journal):
            file.truncate(0)
        self._append_journal({"format": JOURNAL_FORMAT, "key": self._key})
        return ShardProgress()

    def _last_valid_entry(self) -> tuple[ShardProgress, dict[str, Any] | None, int]:
        self._journal.seek(0)
        lines = self._journal.read().splitlines(keepends=True)
        progress, last_entry, hashes, valid_bytes = ShardProgress(), None, [], 0
        for number, line in enumerate(lines):
            data = line[2 * CHECKSUM_BYTES :]
            if line != _with_checksum(data):
                break
            entry = orjson.loads(data)
            if number == 0:
                if entry != {"format": JOURNAL_FORMAT, "key": self._key}:
                    break
            else:
                done = [input_id for input_id, _ in entry["done"]]
                expected = list(self._input_ids[len(hashes) : len(hashes) + len(done) + 1])
                if done != expected[: len(done)] or (entry["position"] and entry["piece"] not in expected[len(done) :]):
                    break
                if entry["counts"]["bad_lines"] and not self._bad_lines:
                    break
                hashes += [sha256 for _, sha256 in entry["done"]]
                counts = entry["counts"] | {"bad_line_examples": tuple(entry["counts"]["bad_line_examples"])}
                progress, last_entry = ShardProgress(list(hashes), entry["position"], TokenCounts(**counts)), entry
            valid_bytes += len(line)
        return progress, last_entry, valid_bytes

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Append a block; write a journal entry every second or so."""
        with explain_disk_errors(str(self._bin)):
            for file, digest, data in (
                (self._tokens, self._digest, tokens.data),
                (self._lengths, self._lengths_digest, tokens.lengths),
            ):
                _write_all(file, data)
                digest.update(data)
            self.progress.counts = self.progress.counts.plus(counts)
            self.progress.position = position
            if time.monotonic() - self._recorded_at >= JOURNAL_SECONDS:
                self._write_journal_entry()

    def input_done(self, sha256: str | None) -> None:
        """Record that an input was read to its end."""
        self.progress.input_hashes.append(sha256)
        self.progress.position = 0

    def _write_journal_entry(self) -> None:
        # No fsync: the next start checks by the hashes whether the bytes have survived, even after a power cut.
        hashes = self.progress.input_hashes
        new = range(self._recorded_inputs, len(hashes))
        entry = {
            "done": [(self._input_ids[i], hashes[i]) for i in new],
            "piece": self._input_ids[len(hashes)],
            "position": self.progress.position,
            "counts": asdict(self.progress.counts),
            "tokens": (_size(self._tokens), self._digest.hexdigest()),
            "lengths": (_size(self._lengths), self._lengths_digest.hexdigest()),
        }
        self._append_journal(entry)
        self._recorded_inputs, self._recorded_at = len(hashes), time.monotonic()

    def _append_journal(self, entry: dict[str, Any]) -> None:
        _write_all(self._journal, _with_checksum(orjson.dumps(entry) + b"\n"))

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Write the index, flush everything to disk, then give both files their names."""
        from trainshed.data.tokens.indexed_dataset import encode_index, lengths_from_file

        index_digest, index_partial = hashlib.sha256(), Path(f"{self._index}.partial")
        with explain_disk_errors(str(self._index)), index_partial.open("wb") as file:
            for data in encode_index(dtype, lengths_from_file(self._lengths_path)):
                file.write(data)
                index_digest.update(data)
            file.flush()
            os.fsync(file.fileno())
            index_size = file.tell()
        size = _size(self._tokens)
        with explain_disk_errors(str(self._bin)):
            os.fsync(self._tokens.fileno())
            # Older tokens lose their manifest and index first, and the new ones get theirs last: two preparations are
            # never mixed.
            self._manifest_path.unlink(missing_ok=True)
            self._index.unlink(missing_ok=True)
            self._tokens_path.replace(self._bin)
            index_partial.replace(self._index)
            # Not needed any more. Removed before the manifest is written, so a kill after it leaves none of them.
            self._lengths_path.unlink()
            self._holder_path.unlink(missing_ok=True)
            self._journal_path.unlink()
        return [
            FileEntry(self._bin.name, size, f"sha256:{self._digest.hexdigest()}"),
            FileEntry(self._index.name, index_size, f"sha256:{index_digest.hexdigest()}"),
        ]


def _with_checksum(line: bytes) -> bytes:
    """Return a line of the journal with its checksum before it."""
    return hashlib.blake2b(line, digest_size=CHECKSUM_BYTES).hexdigest().encode() + line


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _hash_into(digest: Any, file: IO[bytes]) -> None:
    file.seek(0)
    while data := file.read(8 * 1024 * 1024):
        digest.update(data)


class RemoteShardWriter:
    """A shard in a bucket: tokens are uploaded as they come, lengths wait in a local file for the index."""

    def __init__(self, store: Store, path: str, stack: ExitStack) -> None:
        self._store, self._path = store, path
        self.progress = ShardProgress()
        # Its own stack: `finish` completes the upload, any other exit aborts it.
        self._upload = ExitStack()
        stack.callback(self._abort)
        self._writer = self._upload.enter_context(store.writer(f"{path}.bin"))
        self._lengths: IO[bytes] = stack.enter_context(tempfile.NamedTemporaryFile(prefix="trainshed-lengths-"))
        self._digest = hashlib.sha256()
        self._size = 0

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Upload a block."""
        self._writer.write(tokens.data)
        self._digest.update(tokens.data)
        self._size += len(tokens.data)
        with explain_disk_errors(self._lengths.name):
            self._lengths.write(tokens.lengths)
        self.progress.counts = self.progress.counts.plus(counts)
        self.progress.position = position

    def input_done(self, sha256: str | None) -> None:
        """Record that an input was read to its end."""
        self.progress.input_hashes.append(sha256)

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Complete the upload, then write the index."""
        from trainshed.data.tokens.indexed_dataset import encode_index, lengths_from_file

        with explain_disk_errors(self._lengths.name):
            self._lengths.flush()
        for suffix in ("manifest.json", "idx"):  # of older tokens: see LocalShardWriter.finish
            self._store.delete(f"{self._path}.{suffix}")
        self._upload.close()
        digest, size = hashlib.sha256(), 0
        with self._store.writer(f"{self._path}.idx") as writer:
            for data in encode_index(dtype, lengths_from_file(self._lengths.name)):
                writer.write(data)
                digest.update(data)
                size += len(data)
        name = self._path.rsplit("/", 1)[-1]
        return [
            FileEntry(f"{name}.bin", self._size, f"sha256:{self._digest.hexdigest()}"),
            FileEntry(f"{name}.idx", size, f"sha256:{digest.hexdigest()}"),
        ]

    def _abort(self) -> None:
        """Abort the upload as an error would: a part of a shard is never visible. A finished upload stays."""
        with suppress(_UploadAborted), self._upload:
            raise _UploadAborted


class _UploadAborted(Exception):
    pass

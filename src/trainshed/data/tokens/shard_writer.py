"""Writing one shard of tokens, to a disk or to a bucket.

On a disk the process may be killed at any moment. Tokens are appended to `PREFIX.bin.partial`, document lengths to
`PREFIX.lengths.partial`, and of conversations which tokens are learned to `PREFIX.learned.partial`. About once a second
a journal records the sizes of all and how far reading has got. A rerun cuts the files back to the journal, checks the
rest by its hash, and goes on; the result is the same bytes.

In a bucket a shard is one multipart object that is visible only when complete. A rerun starts the shard again.
"""

from __future__ import annotations

import errno
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

from trainshed.data.tokens.token_files import learned_path
from trainshed.errors import AccessDenied, Conflict, NoSpace, StorageError
from trainshed.file_locks import lock_file
from trainshed.reporting import Reporter
from trainshed.storage.locks import LockHolder, describe_holder, wait_for_lock
from trainshed.storage.manifest import FileEntry

if TYPE_CHECKING:
    import numpy as np

    from trainshed.data.tokenize.workers import TokenBlock
    from trainshed.storage import Store


BAD_LINES_KEPT = 20
"""How many bad lines the manifest quotes; it counts them all."""


@dataclass
class ChatCounts:
    """What became of the conversations of a shard; a pair of a better and a worse answer counts as one."""

    conversations: int = 0
    learned_tokens: int = 0
    truncated: int = 0
    """Cut to `sequence_length`, among them `cut_answers` that lost a part of an answer."""
    cut_answers: int = 0
    dropped_too_long: int = 0
    dropped_unlearned: int = 0
    """Left out because nothing to learn was left after they were cut."""
    longest: int = 0
    """Tokens of the longest one, before it was cut."""

    def plus(self, other: ChatCounts) -> ChatCounts:
        """Add two counts."""
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        return ChatCounts(**sums | {"longest": max(self.longest, other.longest)})


@dataclass(frozen=True)
class TokenCounts:
    """What a shard holds so far."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    bad_line_examples: tuple[str, ...] = ()
    chat: ChatCounts | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON takes it; text has no counts of conversations."""
        plain = asdict(self)
        if self.chat is None:
            del plain["chat"]
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> TokenCounts:
        """Read what `to_plain` gave."""
        chat = plain.get("chat")
        return cls(
            **plain | {"bad_line_examples": tuple(plain["bad_line_examples"]), "chat": chat and ChatCounts(**chat)}
        )

    def plus(self, other: TokenCounts) -> TokenCounts:
        """Add two counts."""
        return TokenCounts(
            self.documents + other.documents,
            self.empty_documents + other.empty_documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.bad_lines + other.bad_lines,
            (self.bad_line_examples + other.bad_line_examples)[:BAD_LINES_KEPT],
            self.chat.plus(other.chat) if self.chat and other.chat else self.chat or other.chat,
        )


@dataclass
class ShardProgress:
    """How far a shard has got: the hashes of the inputs that are read, and a position in the next one."""

    input_hashes: list[str | None] = field(default_factory=list)
    position: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)


class ShardWriter(Protocol):
    """Takes the tokens of one shard, in order. Where it is opened with `learned`, every block says what is learned."""

    progress: ShardProgress
    """How far it has got: after opening, how far an earlier attempt had got."""

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Write a block's tokens; `position` is where reading resumes after it."""
        ...

    def input_done(self, sha256: str | None) -> None:
        """Record that an input was read to its end."""
        ...

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Make `.bin`, `.idx` and, where there is one, `.learned` complete and visible."""
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
            lock_file(journal, shared=True, wait=False)
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
    one with their hashes, the position in the next input, and the sizes and hashes of all files at that moment. A
    rerun goes on from the last entry up to which every input is still the same: mending one input does not cost the
    work before it. With `bad_lines=False` that entry must also be before the first bad line that was skipped.
    """

    def __init__(
        self,
        prefix: str,
        key: str,
        input_ids: Sequence[str],
        stack: ExitStack,
        *,
        bad_lines: bool = True,
        learned: bool = False,
    ) -> None:
        self._key, self._input_ids, self._bad_lines = key, input_ids, bad_lines
        self._bin, self._index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._learned_path = Path(learned_path(prefix))
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
            self._tokens = _PartialFile(self._tokens_path, stack)
            self._lengths = _PartialFile(self._lengths_path, stack)
            self._learned = _PartialFile(Path(f"{self._learned_path}.partial"), stack) if learned else None
            self._files = {"tokens": self._tokens, "lengths": self._lengths}
            if self._learned is not None:
                self._files["learned"] = self._learned
            self.progress = self._resume()
        self._recorded_inputs = len(self.progress.input_hashes)
        self._recorded_at = time.monotonic()

    def _lock(self, prefix: str) -> None:
        taken = False
        try:
            lock_file(self._journal, wait=False)
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
        if entry is not None and all(file.cut_back(*entry[name]) for name, file in self._files.items()):
            self._journal.truncate(journal_bytes)
            return progress
        for file in self._files.values():
            file.clear()
        self._journal.truncate(0)
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
                counts = TokenCounts.from_plain(entry["counts"])
                progress, last_entry = ShardProgress(list(hashes), entry["position"], counts), entry
            valid_bytes += len(line)
        return progress, last_entry, valid_bytes

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Append a block; write a journal entry every second or so."""
        with explain_disk_errors(str(self._bin)):
            self._tokens.write(tokens.data)
            self._lengths.write(tokens.lengths)
            if self._learned is not None:
                self._learned.write(_learned_bytes(tokens))
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
            "counts": self.progress.counts.to_plain(),
        } | {name: (file.size, file.hexdigest) for name, file in self._files.items()}
        self._append_journal(entry)
        self._recorded_inputs, self._recorded_at = len(hashes), time.monotonic()

    def _append_journal(self, entry: dict[str, Any]) -> None:
        _write_all(self._journal, _with_checksum(orjson.dumps(entry) + b"\n"))

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Write the index, flush everything to disk, then give the files their names."""
        from trainshed.data.tokens.indexed_dataset import encode_index, lengths_from_file

        index_digest, index_partial = hashlib.sha256(), Path(f"{self._index}.partial")
        with explain_disk_errors(str(self._index)), index_partial.open("wb") as file:
            for data in encode_index(dtype, lengths_from_file(self._lengths_path)):
                file.write(data)
                index_digest.update(data)
            file.flush()
            os.fsync(file.fileno())
            index_size = file.tell()
        with explain_disk_errors(str(self._bin)):
            self._tokens.sync()
            if self._learned is not None:
                self._learned.sync()
            # Older tokens lose their manifest and index first, and the new ones get theirs last: two preparations are
            # never mixed.
            self._manifest_path.unlink(missing_ok=True)
            self._index.unlink(missing_ok=True)
            self._learned_path.unlink(missing_ok=True)
            self._tokens_path.replace(self._bin)
            if self._learned is not None:
                self._learned.path.replace(self._learned_path)
            index_partial.replace(self._index)
            # Not needed any more. Removed before the manifest is written, so a kill after it leaves none of them.
            self._lengths_path.unlink()
            self._holder_path.unlink(missing_ok=True)
            self._journal_path.unlink()
        entries = [
            FileEntry(self._bin.name, self._tokens.size, f"sha256:{self._tokens.hexdigest}"),
            FileEntry(self._index.name, index_size, f"sha256:{index_digest.hexdigest()}"),
        ]
        if self._learned is not None:
            entries.append(FileEntry(self._learned_path.name, self._learned.size, f"sha256:{self._learned.hexdigest}"))
        return entries


class _PartialFile:
    """A file that is appended to, with the hash of what it holds."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._file: IO[bytes] = stack.enter_context(open(path, "ab+", buffering=0))
        self._digest = hashlib.sha256()

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @property
    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        _write_all(self._file, data)
        self._digest.update(data)

    def cut_back(self, size: int, sha256: str) -> bool:
        """Cut it back to a size; return whether what is left has this hash."""
        if self.size > size:
            self._file.truncate(size)
        self._digest = hashlib.sha256()
        self._file.seek(0)
        while data := self._file.read(8 * 1024 * 1024):
            self._digest.update(data)
        return self.hexdigest == sha256

    def clear(self) -> None:
        self._file.truncate(0)
        self._digest = hashlib.sha256()

    def sync(self) -> None:
        os.fsync(self._file.fileno())


def _learned_bytes(tokens: TokenBlock) -> bytes:
    assert tokens.learned is not None, "conversations say which tokens are learned"
    return tokens.learned


def _with_checksum(line: bytes) -> bytes:
    """Return a line of the journal with its checksum before it."""
    return hashlib.blake2b(line, digest_size=CHECKSUM_BYTES).hexdigest().encode() + line


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


class RemoteShardWriter:
    """A shard in a bucket: tokens are uploaded as they come, lengths wait in a local file for the index."""

    def __init__(self, store: Store, path: str, stack: ExitStack, *, learned: bool = False) -> None:
        self._store, self._path = store, path
        self.progress = ShardProgress()
        # Its own stack: `finish` completes the upload, any other exit aborts it.
        self._upload = ExitStack()
        stack.callback(self._abort)
        self._tokens = _UploadedFile(store, f"{path}.bin", self._upload)
        self._learned = _UploadedFile(store, learned_path(path), self._upload) if learned else None
        self._lengths: IO[bytes] = stack.enter_context(tempfile.NamedTemporaryFile(prefix="trainshed-lengths-"))

    def append(self, tokens: TokenBlock, counts: TokenCounts, position: int) -> None:
        """Upload a block."""
        self._tokens.write(tokens.data)
        if self._learned is not None:
            self._learned.write(_learned_bytes(tokens))
        with explain_disk_errors(self._lengths.name):
            self._lengths.write(tokens.lengths)
        self.progress.counts = self.progress.counts.plus(counts)
        self.progress.position = position

    def input_done(self, sha256: str | None) -> None:
        """Record that an input was read to its end."""
        self.progress.input_hashes.append(sha256)

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Complete the uploads, then write the index."""
        from trainshed.data.tokens.indexed_dataset import encode_index, lengths_from_file

        with explain_disk_errors(self._lengths.name):
            self._lengths.flush()
        # Of older tokens: see LocalShardWriter.finish.
        for old in (f"{self._path}.manifest.json", f"{self._path}.idx", learned_path(self._path)):
            self._store.delete(old)
        self._upload.close()
        with ExitStack() as stack:
            index = _UploadedFile(self._store, f"{self._path}.idx", stack)
            for data in encode_index(dtype, lengths_from_file(self._lengths.name)):
                index.write(data)
        return [file.entry for file in (self._tokens, index, self._learned) if file is not None]

    def _abort(self) -> None:
        """Abort the upload as an error would: a part of a shard is never visible. A finished upload stays."""
        with suppress(_UploadAborted), self._upload:
            raise _UploadAborted


class _UploadedFile:
    """An object that is uploaded piece by piece, with the hash of what it holds."""

    def __init__(self, store: Store, path: str, stack: ExitStack) -> None:
        self._path, self._writer = path, stack.enter_context(store.writer(path))
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._writer.write(data)
        self._digest.update(data)
        self._size += len(data)

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self._path.rsplit("/", 1)[-1], self._size, f"sha256:{self._digest.hexdigest()}")


class _UploadAborted(Exception):
    pass

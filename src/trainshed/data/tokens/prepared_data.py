"""The prepared sources of a run: where their token files are, and fingerprints that tell whether they have changed.

A run stores this in its `prepared.json`. If the tokens are not those it began with, the run stops: nobody could say
any more which samples it has seen.

A fingerprint is the size of a file, its time, and the hash of some of its blocks. It is cheap enough for every start
of a run. It finds a file that was written again, cut or exchanged. It may miss a few bytes that changed without the
file system noticing; `verify_tokens` reads everything and finds those.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainshed.data.tokens.token_files import local_path
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, open_store

if TYPE_CHECKING:
    from trainshed.data.tokens.manifest import TokenManifest
    from trainshed.storage import StoreOptions


SAMPLE_VERSION = 1
SAMPLED_BLOCKS = 32
SAMPLED_BLOCK_BYTES = 4096
WHOLE_BYTES = 1024 * 1024
"""A file up to this size is hashed whole: that costs no more than its blocks would."""
SAMPLE_THREADS = 8
SHARD_SUFFIXES = ("bin", "idx")

FileChange = Literal["missing", "size", "content", "time"]


@dataclass(frozen=True)
class FileFingerprint:
    """One file as it was seen.

    `version` is the time of its last change in whole seconds on a disk (some file systems keep no finer one), the
    store's ETag elsewhere. `checksum` is the hash of the whole file where a manifest tells it.
    """

    path: str
    size: int
    version: str
    sample: str
    checksum: str | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What tells two files apart wherever they lie."""
        return (self.checksum,) if self.checksum else (self.size, self.sample)


def fingerprint_shard(
    prefix: str, manifest: TokenManifest | None = None, options: StoreOptions | None = None
) -> tuple[FileFingerprint, ...]:
    """Take the fingerprints of the `.bin` and `.idx` of one shard."""
    known = {entry.path.rpartition(".")[2]: entry.checksum for entry in manifest.files} if manifest else {}
    return tuple(fingerprint_file(f"{prefix}.{ending}", known.get(ending), options) for ending in SHARD_SUFFIXES)


def fingerprint_file(address: str, checksum: str | None = None, options: StoreOptions | None = None) -> FileFingerprint:
    """Look at one file as it is now."""
    store, path = open_store(address, options)
    size, version = _size_and_version(store, path, address)
    return FileFingerprint(address, size, version, _hash_sampled_blocks(store, path, size), checksum)


def find_file_change(known: FileFingerprint, options: StoreOptions | None = None) -> tuple[FileChange, str] | None:
    """Compare a file with how it was seen before: which kind of difference, and in words; None where there is none."""
    store, path = open_store(known.path, options)
    try:
        size, version = _size_and_version(store, path, known.path)
    except NotFound:
        return "missing", "it is gone"
    if size != known.size:
        return "size", f"it has {size:,} bytes, and had {known.size:,}"
    on_disk = local_path(known.path) is not None
    # An ETag is a function of the content: the same one needs no look inside.
    if (on_disk or version != known.version) and _hash_sampled_blocks(store, path, size) != known.sample:
        return "content", "its bytes have changed"
    if version != known.version and size > WHOLE_BYTES:
        return "time", "it was written again"
    return None


def fingerprint_from_dict(plain: dict[str, Any]) -> FileFingerprint:
    """Read what `asdict` gave."""
    return FileFingerprint(**plain)


def _size_and_version(store: Store, path: str, address: str) -> tuple[int, str]:
    local = local_path(address)
    if local is not None:
        try:
            status = os.stat(local)
        except FileNotFoundError:
            raise NotFound("no such token file", where=address) from None
        return status.st_size, str(int(status.st_mtime))
    info = store.head(path)
    if info is None:
        raise NotFound("no such token file", where=address)
    return info.size, info.version


def _hash_sampled_blocks(store: Store, path: str, size: int) -> str:
    """Hash the first block, the last one and some evenly between; which ones depends on the size alone."""
    if size <= WHOLE_BYTES:
        parts = [store.read(path)]
    else:
        starts = [(size - SAMPLED_BLOCK_BYTES) * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)]
        with ThreadPoolExecutor(SAMPLE_THREADS) as pool:
            parts = list(pool.map(lambda start: store.read(path, start, start + SAMPLED_BLOCK_BYTES), starts))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sample-{SAMPLE_VERSION}:{digest.hexdigest()[:32]}"


@dataclass(frozen=True)
class PreparedSource:
    """A source whose tokens are there and proven.

    `name` is for reports, `label` for the shuffle: renaming a source must not change the order. `content` identifies
    the lengths of its documents where a manifest tells it; None: they must be read. `files` says what the token files
    were; runs of earlier versions have not kept it.
    """

    name: str
    label: str
    weight: float | None
    prefixes: tuple[str, ...]
    content: str | None
    documents: int
    tokens: int
    reused: bool
    files: tuple[FileFingerprint, ...] = ()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PreparedSource:
        """Read what `asdict` gave."""
        files = tuple(fingerprint_from_dict(each) for each in plain.get("files", ()))
        return cls(**plain | {"prefixes": tuple(plain["prefixes"]), "files": files})


@dataclass(frozen=True)
class PreparedData:
    """The prepared sources of a run; `validation` is its own source, None where it has none or shares the corpus."""

    sources: tuple[PreparedSource, ...]
    validation: PreparedSource | None = None

    @property
    def all_sources(self) -> tuple[PreparedSource, ...]:
        """The sources of training, then that of validation."""
        return (*self.sources, self.validation) if self.validation is not None else self.sources

    def source(self, label: str) -> PreparedSource | None:
        """Return the source of a label."""
        return next((source for source in self.all_sources if source.label == label), None)

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it: kept with the run, so that ranks need not look for sources again."""
        return {
            "sources": [asdict(source) for source in self.sources],
            "validation": self.validation and asdict(self.validation),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PreparedData:
        """Read what `to_plain` gave."""
        validation = plain["validation"]
        sources = tuple(PreparedSource.from_plain(each) for each in plain["sources"])
        return cls(sources, validation and PreparedSource.from_plain(validation))

    def check_files(self, options: StoreOptions | None = None, reporter: Reporter = SILENT) -> None:
        """Hold every token file against what it was when it was proven: sizes, times and some blocks, not all bytes."""
        for source in self.all_sources:
            check_token_files(source.files, options, reporter)


def check_token_files(files: Sequence[FileFingerprint], options: StoreOptions | None, reporter: Reporter) -> None:
    """Raise for the first token file that is not what it was; a new time alone is told where no manifest can settle it.

    Files of others often come without a manifest and are copied about: there, blocks that are the same count.
    """
    for file in files:
        found = find_file_change(file, options)
        if found is None:
            continue
        kind, words = found
        if kind == "time" and file.checksum is None:
            reporter.warn(f"{file.path} was written again since the run began; the blocks looked at are the same")
        elif kind == "time":
            raise CorruptData(
                "this token file was written again since it was proven",
                where=file.path,
                hint="`trainshed run RECIPE`, or submitting it again, reads it whole and goes on if nothing changed",
            )
        else:
            raise changed_file_error(file.path, words)


def changed_file_error(path: str, words: str) -> CorruptData:
    """Return the error of a token file that is not what its run or its manifest knows."""
    prefix = path.rpartition(".")[0]
    return CorruptData(
        f"this token file is not the one that was proven: {words}",
        where=path,
        hint=f"put the old file back, or have it made again: remove {prefix}.* and run the recipe "
        f"(`trainshed data verify {prefix}` reads it whole)",
    )


@dataclass(frozen=True)
class StartedRun:
    """A run that has had an attempt: its name, and the data it began with."""

    name: str
    data: PreparedData


def refuse_changed_tokens(began: StartedRun, now: PreparedData) -> None:
    """Stop a run whose tokens are not those it began with, although each of them is proven."""
    for source in now.all_sources:
        known = began.data.source(source.label)
        if known is None or not known.files:
            continue
        if [file.content for file in known.files] == [file.content for file in source.files]:
            continue
        raise InputError(
            f"the tokens of source '{source.name}' are not those that the run {began.name} began with: "
            f"{known.tokens:,} tokens of {known.documents:,} documents then, {source.tokens:,} of "
            f"{source.documents:,} now",
            where=source.prefixes[0],
            hint=f"put back what they are made from (they were {known.prefixes[0]}), "
            "or start another run on the new ones with --id NAME",
        )

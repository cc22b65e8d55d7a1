"""A source of tokens: where its token files are, how many tokens they hold, and fingerprints that show a change.

`TokenSource` is the one description of a source. Preparing returns it, a run stores it in its `prepared.json`, and the
order of samples is built from it. If the tokens of a run have changed since it began, the run stops: otherwise nobody
could say which samples it has seen.

A fingerprint is the size of a file, its time, and the hash of some of its blocks. It is cheap enough for every start
of a run. It finds a file that was written again, cut or exchanged. It may miss a few bytes that changed without the
file system noticing; `verify_tokens` reads everything and finds those.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from trainshed.data.tokens.token_files import learned_path, local_path, shard_prefixes
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
    """One file as it was at some time.

    On a disk `version` is the time of its last change in whole seconds, since some file systems keep no finer one. In
    a store it is the ETag. `checksum` is the hash of the whole file, where a manifest records it.
    """

    path: str
    size: int
    version: str
    sample: str
    checksum: str | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What identifies the content of the file, wherever it is stored."""
        return (self.checksum,) if self.checksum else (self.size, self.sample)


def fingerprint_shard(
    prefix: str, manifest: TokenManifest | None = None, options: StoreOptions | None = None
) -> tuple[FileFingerprint, ...]:
    """Take the fingerprints of the `.bin` and `.idx` of one shard, and of its `.learned` where it has one."""
    checksums = {entry.path.rpartition(".")[2]: entry.checksum for entry in manifest.files} if manifest else {}
    files = [fingerprint_file(f"{prefix}.{suffix}", checksums.get(suffix), options) for suffix in SHARD_SUFFIXES]
    if has_learned(prefix, manifest, options):
        files.append(fingerprint_file(learned_path(prefix), checksums.get("learned"), options))
    return tuple(files)


def has_learned(prefix: str, manifest: TokenManifest | None, options: StoreOptions | None = None) -> bool:
    """Whether a shard says which tokens are learned: as its manifest says, or where it has none, by its files."""
    if manifest is not None:
        return any(entry.path.endswith(".learned") for entry in manifest.files)
    store, path = open_store(learned_path(prefix), options)
    return store.head(path) is not None


def fingerprint_file(address: str, checksum: str | None = None, options: StoreOptions | None = None) -> FileFingerprint:
    """Take the fingerprint of one file as it is now."""
    store, path = open_store(address, options)
    size, version = _size_and_version(store, path, address)
    return FileFingerprint(address, size, version, _hash_sampled_blocks(store, path, size), checksum)


def find_file_change(known: FileFingerprint, options: StoreOptions | None = None) -> tuple[FileChange, str] | None:
    """Compare a file with its fingerprint; return the kind of the difference and its description, or None."""
    store, path = open_store(known.path, options)
    try:
        size, version = _size_and_version(store, path, known.path)
    except NotFound:
        return "missing", "it is gone"
    if size != known.size:
        return "size", f"it has {size:,} bytes, and had {known.size:,}"
    on_disk = local_path(known.path) is not None
    # An ETag is a function of the content: if it is the same, nothing has to be read.
    if (on_disk or version != known.version) and _hash_sampled_blocks(store, path, size) != known.sample:
        return "content", "its bytes have changed"
    if version != known.version and size > WHOLE_BYTES:
        return "time", "it was written again"
    return None


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
class TokenSource:
    """One source of a recipe as token files; a prefix may stand for all its shards, and they are read as one.

    `name` is for reports, `label` is part of the shuffle's key. So a label contains no path: renaming or moving a
    source must not change the order. `content` identifies the lengths of the documents where a manifest records it;
    None means that they must be read. `files` says what the token files were; runs of early versions did not store it.
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
    def open(
        cls,
        label: str,
        prefixes: Sequence[str],
        *,
        name: str | None = None,
        weight: float | None = None,
        files: Sequence[FileFingerprint] = (),
        options: StoreOptions | None = None,
    ) -> TokenSource:
        """Describe token files that exist already, by their own indexes."""
        from trainshed.data.tokens.indexed_dataset import IndexedDataset

        documents = tokens = 0
        for shard in _expand_prefixes(prefixes, options):
            with IndexedDataset(shard, options) as dataset:
                documents += dataset.documents
                tokens += dataset.tokens
        return cls(name or label, label, weight, tuple(prefixes), None, documents, tokens, True, tuple(files))

    def shards(self, options: StoreOptions | None = None) -> list[str]:
        """Return the prefixes of all its shards, in order."""
        return _expand_prefixes(self.prefixes, options)

    def content_hash(self, options: StoreOptions | None = None) -> str:
        """Return `content`; where it is None, compute it."""
        return self.content or token_content_hash(self.shards(options), options)

    def learned_hash(self, options: StoreOptions | None = None) -> str:
        """Identify the `.learned` files of its shards; one without them does not hold conversations."""
        files = [file for file in self.files if file.path.endswith(learned_path(""))]
        for shard in self.shards(options) if not files else ():
            address = learned_path(shard)
            if not has_learned(shard, None, options):
                raise NotFound(
                    f"the tokens of source '{self.name}' do not say which of them are learned",
                    where=address,
                    hint="name the conversations themselves as `path`, or write `data.format: text` to learn all",
                )
            files.append(fingerprint_file(address, None, options))
        digest = hashlib.sha256()
        for file in files:
            digest.update(repr(file.content).encode())
        return digest.hexdigest()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> TokenSource:
        """Read what `asdict` gave."""
        files = tuple(FileFingerprint(**file) for file in plain.get("files", ()))
        return cls(**plain | {"prefixes": tuple(plain["prefixes"]), "files": files})


def _expand_prefixes(prefixes: Sequence[str], options: StoreOptions | None) -> list[str]:
    return [shard for prefix in prefixes for shard in shard_prefixes(prefix, options)]


def token_content_hash(shards: Sequence[str], options: StoreOptions | None = None) -> str:
    """Identify token files by what an index depends on: token type and sequence lengths, in order."""
    from trainshed.data.tokens.indexed_dataset import SCAN_ITEMS, IndexedDataset

    digest = hashlib.sha256()
    for shard in shards:
        with IndexedDataset(shard, options) as dataset:
            digest.update(f"{dataset.dtype.str} {dataset.sequences}\n".encode())
            for start in range(0, dataset.sequences, SCAN_ITEMS):
                digest.update(dataset.lengths[start : start + SCAN_ITEMS].tobytes())
    return digest.hexdigest()


VALIDATION_SET = "validation/"
"""What the name of a source begins with that is a named validation set."""


def phase_prefix(number: int) -> str:
    """Return what the names of a phase's own sources begin with; phases count from 0."""
    return f"phase-{number + 1}/"


def _is_set(name: str) -> bool:
    return name.startswith(VALIDATION_SET)


@dataclass(frozen=True)
class RunTokens:
    """The sources of a run. `validation` is a source of its own; None if there is none, or a split of the others.

    `others` are the sources of named validation sets (`validation/articles`) and of phases (`phase-2/source-0`).
    """

    sources: tuple[TokenSource, ...]
    validation: TokenSource | None = None
    others: Mapping[str, TokenSource] = field(default_factory=dict)

    @property
    def all_sources(self) -> tuple[TokenSource, ...]:
        """The sources of training, then those of validation and of phases."""
        return tuple(self.named().values())

    @property
    def validations(self) -> dict[str, TokenSource]:
        """The sources of validation sets by the names of these; a set that is a split of the others has none."""
        named = {key.removeprefix(VALIDATION_SET): source for key, source in self.others.items() if _is_set(key)}
        return named if self.validation is None else {"validation": self.validation}

    @classmethod
    def of(cls, named: Mapping[str, TokenSource]) -> RunTokens:
        """Put sources together by their names, which are those of `named`."""
        training = tuple(source for name, source in named.items() if name == source.label != "validation")
        others = {name: source for name, source in named.items() if name != source.label}
        return cls(training, named.get("validation"), others)

    def named(self) -> dict[str, TokenSource]:
        """Every source by its name in the run: its label, or one that says of which set or phase it is."""
        own = (*self.sources, self.validation) if self.validation is not None else self.sources
        return {source.label: source for source in own} | dict(self.others)

    def source(self, name: str) -> TokenSource | None:
        """Return the source of a name."""
        return self.named().get(name)

    def of_phase(self, number: int, *, own: bool) -> RunTokens:
        """Return what a phase (from 0) reads: its own sources, or those of the run."""
        if not own:
            return self
        prefix = phase_prefix(number)
        return replace(self, sources=tuple(source for key, source in self.others.items() if key.startswith(prefix)))

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON takes it. A run stores it, so that ranks need not look for their sources."""
        plain: dict[str, Any] = {
            "sources": [asdict(source) for source in self.sources],
            "validation": self.validation and asdict(self.validation),
        }
        if self.others:
            plain["others"] = {name: asdict(source) for name, source in self.others.items()}
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RunTokens:
        """Read what `to_plain` gave."""
        validation = plain["validation"]
        sources = tuple(TokenSource.from_plain(source) for source in plain["sources"])
        others = {name: TokenSource.from_plain(source) for name, source in plain.get("others", {}).items()}
        return cls(sources, validation and TokenSource.from_plain(validation), others)

    def check_files(self, options: StoreOptions | None = None, reporter: Reporter = SILENT) -> None:
        """Check every token file against its fingerprint: sizes, times and some blocks, not all bytes."""
        for source in self.all_sources:
            check_token_files(source.files, options, reporter)


def check_token_files(files: Sequence[FileFingerprint], options: StoreOptions | None, reporter: Reporter) -> None:
    """Raise for the first token file that has changed.

    If only its time has changed, a file with a manifest must be read whole to know. One without a manifest is somebody
    else's, and such files are often copied about: if its sampled blocks are the same, there is only a warning.
    """
    for file in files:
        change = find_file_change(file, options)
        if change is None:
            continue
        kind, description = change
        if kind == "time" and file.checksum is None:
            reporter.warn(f"{file.path} was written again since the run began; the blocks looked at are the same")
        elif kind == "time":
            raise CorruptData(
                "this token file was written again since it was proven",
                where=file.path,
                hint="`trainshed run RECIPE`, or submitting it again, reads it whole and goes on if nothing changed",
            )
        else:
            raise changed_file_error(file.path, description)


def changed_file_error(path: str, description: str) -> CorruptData:
    """Return the error for a token file that differs from its fingerprint or its manifest."""
    prefix = path.rpartition(".")[0]
    return CorruptData(
        f"this token file is not the one that was proven: {description}",
        where=path,
        hint=f"put the old file back, or have it made again: remove {prefix}.* and run the recipe "
        f"(`trainshed data verify {prefix}` reads it whole)",
    )


@dataclass(frozen=True)
class StartedRun:
    """A run that has had an attempt: its name, and the tokens it began with."""

    name: str
    data: RunTokens


def refuse_changed_tokens(started_run: StartedRun, current: RunTokens) -> None:
    """Stop a run whose tokens are not those it began with, even if the new ones are proven."""
    for name, source in current.named().items():
        before = started_run.data.source(name)
        if before is None or not before.files:
            continue
        if [file.content for file in before.files] == [file.content for file in source.files]:
            continue
        raise InputError(
            f"the tokens of source '{source.name}' are not those that the run {started_run.name} began with: "
            f"{before.tokens:,} tokens of {before.documents:,} documents then, {source.tokens:,} of "
            f"{source.documents:,} now",
            where=source.prefixes[0],
            hint=f"put back what they are made from (they were {before.prefixes[0]}), "
            "or start another run on the new ones with --id NAME",
        )

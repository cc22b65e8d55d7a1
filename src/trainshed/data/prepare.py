"""Text to token files in one pass: plan the shards, skip those that are proven, tokenize the rest.

The manifest of a shard is written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson

from trainshed import __version__
from trainshed.data.text.reader import (
    BadLine,
    InputReader,
    InputSlice,
    OnBadLine,
    count_lines_before,
    format_line_location,
)
from trainshed.data.tokenize.encoders import EncoderName
from trainshed.data.tokenize.tokenizer import SpecialToken, Tokenizer
from trainshed.data.tokenize.workers import BlockTask, BlockTokenizerConfig, TokenBlock, WorkerPool, default_workers
from trainshed.data.tokens.indexed_dataset import token_dtype
from trainshed.data.tokens.manifest import InputRecord, TokenManifest, delete_set_manifest, read_token_manifest
from trainshed.data.tokens.shard_writer import (
    BAD_LINES_KEPT,
    LocalShardWriter,
    RemoteShardWriter,
    ShardLocked,
    ShardWriter,
    TokenCounts,
    is_shard_locked,
    wait_for_shard,
)
from trainshed.data.tokens.token_files import local_path
from trainshed.errors import InputError
from trainshed.redaction import shown_address
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import open_store

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


@dataclass(frozen=True)
class TokenizeConfig:
    """How text becomes tokens: everything besides the text that decides the bytes of the output."""

    tokenizer: Tokenizer
    eod: SpecialToken | None
    bos: SpecialToken | None = None
    on_bad_line: OnBadLine = "stop"
    encoder: EncoderName = "auto"

    @property
    def dtype(self) -> str:
        """The token type of the files."""
        return token_dtype(self.tokenizer.vocab_size).name

    def spec(self) -> dict[str, object]:
        """What goes into the manifest, and into the key that says whether work is already done.

        `on_bad_line` is not in it: without bad lines both give the same bytes, and the manifest counts them.
        """
        return {
            "tokenizer": self.tokenizer.sha256,
            "vocab_size": self.tokenizer.vocab_size,
            "eod": self.eod and {"text": self.eod.text, "id": self.eod.id},
            "bos": self.bos and {"text": self.bos.text, "id": self.bos.id},
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class ShardJob:
    """One shard: which pieces it is made of, and the prefix it is written to."""

    prefix: str
    pieces: tuple[InputSlice, ...]


@dataclass(frozen=True)
class PrepareResult:
    """The outcome of a preparation, shard by shard in order."""

    manifests: list[TokenManifest]
    made: int
    reused: int


def prepare(
    jobs: Sequence[ShardJob],
    how: TokenizeConfig,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    wait: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> PrepareResult:
    """Make every shard that is not already there and proven; the bytes do not depend on `workers`.

    With `wait`, a shard that another process is making is waited for, and then found or made; else it is an error.
    """
    manifests: dict[str, TokenManifest] = {}
    made = 0
    while todo := _missing_shards(jobs, manifests, how, overwrite, options, reporter):
        held = next((job.prefix for job in todo if wait and _is_locked(job.prefix)), None)
        if held is not None:
            wait_for_shard(str(local_path(held)), reporter)
            continue
        if len(todo) < len(jobs):
            reporter.note(f"{len(jobs) - len(todo)} of {len(jobs)} shards are already there and proven")
        try:
            finished = _Preparation(todo, how, workers, options, reporter).run()
        except ShardLocked:
            if not wait:
                raise
            continue  # it was taken since we looked: see what is left once it is done
        manifests |= {job.prefix: manifest for job, manifest in zip(todo, finished, strict=True)}
        made += len(todo)
    if not made:
        reporter.note(f"{len(jobs)} of {len(jobs)} shards are already there and proven")
    return PrepareResult([manifests[job.prefix] for job in jobs], made=made, reused=len(jobs) - made)


def _missing_shards(
    jobs: Sequence[ShardJob],
    manifests: dict[str, TokenManifest],
    how: TokenizeConfig,
    overwrite: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> list[ShardJob]:
    """Return the shards that are still to be made, and add the manifests of the others."""
    todo: list[ShardJob] = []
    for job in jobs:
        if job.prefix in manifests:
            continue
        found = read_token_manifest(job.prefix, options)
        if found is not None and _is_current(found, job, how, overwrite, options, reporter):
            manifests[job.prefix] = found
        else:
            todo.append(job)
    return todo


def _is_locked(prefix: str) -> bool:
    local = local_path(prefix)
    return local is not None and is_shard_locked(local)


def _is_current(
    found: TokenManifest,
    job: ShardJob,
    how: TokenizeConfig,
    overwrite: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> bool:
    """Whether an existing shard is what this job would make. A changed input is made anew, another recipe refused."""
    if found.spec != how.spec():
        if overwrite:
            return False
        changed = sorted(k for k in how.spec() if how.spec()[k] != found.spec.get(k))
        raise InputError(
            f"this shard exists and was made differently ({', '.join(changed)})",
            where=job.prefix,
            hint="write another --output, or --overwrite to make it anew",
        )
    if found.counts.bad_lines and how.on_bad_line == "stop":
        reporter.note(f"{job.prefix}: made with {found.counts.bad_lines:,} bad lines left out, made anew")
        return False
    if [record.place for record in found.inputs] != [InputRecord.of(piece, None).place for piece in job.pieces]:
        reporter.note(f"{job.prefix}: made of other files than before, made anew")
        return False
    for record, piece in zip(found.inputs, job.pieces, strict=True):
        # A web server may state no version at all: then only the content tells.
        if (not piece.version or record.version != piece.version) and record.sha256 != hash_input(piece, options):
            reporter.note(f"{job.prefix}: {piece.shown} has changed, made anew")
            return False
    if not found.files_are_there(job.prefix, options):
        reporter.note(f"{job.prefix}: its files are gone or of another size than its manifest says, made anew")
        return False
    return True


def hash_input(piece: InputSlice, options: StoreOptions | None) -> str | None:
    """Read a piece for its hash alone, as the manifest records it."""
    store, path = open_store(piece.address, options)
    reader = InputReader(piece, store, path)
    for _ in reader.blocks():
        pass
    return reader.sha256


@dataclass(frozen=True)
class _BlockOrigin:
    """Where a block comes from: shard, piece of the shard, and the reading position behind it."""

    shard: int
    piece: int
    position: int
    bytes_read: int


class _Preparation:
    """One run over the shards to make. Reading runs ahead in a thread of the pool; writing follows in order."""

    def __init__(
        self,
        jobs: list[ShardJob],
        how: TokenizeConfig,
        workers: int | None,
        options: StoreOptions | None,
        reporter: Reporter,
    ) -> None:
        self._jobs, self._how, self._options, self._reporter = jobs, how, options, reporter
        pieces = [piece for job in jobs for piece in job.pieces]
        self._bytes = sum(piece.bytes for piece in pieces)
        self._workers = workers or default_workers(pieces)
        self._writers: dict[int, ShardWriter] = {}
        self._stacks: dict[int, ExitStack] = {}
        self._hashes: dict[tuple[int, int], str | None] = {}
        self._lines_before: dict[InputSlice, int] = {}

    def run(self) -> list[TokenManifest]:
        """Return a manifest per shard, in order, each already written."""
        worker_options = BlockTokenizerConfig(
            self._how.tokenizer,
            self._how.eod.id if self._how.eod else None,
            self._how.bos.id if self._how.bos else None,
            self._how.dtype,
            self._how.encoder,
        )
        manifests: list[TokenManifest] = []
        total = TokenCounts()
        with ExitStack() as stack, WorkerPool(worker_options, self._workers) as pool:
            stack.callback(lambda: [each.close() for each in self._stacks.values()])
            self._reporter.note(f"encoder: {pool.encoder_reason}")
            with (
                self._reporter.task("tokenise", total=self._bytes, unit="B") as task,
                # Closed on the way out of an error: its threads must not open another shard after that.
                closing(pool.map(self._blocks())) as results,
            ):
                for at, tokens in results:
                    while len(manifests) < at.shard:
                        manifests.append(self._finish(len(manifests), pool.encoder_name))
                    total = total.plus(self._append(at, tokens))
                    task.advance(at.bytes_read)
                    task.describe(f"{total.documents:,} documents, {total.tokens:,} tokens")
                while len(manifests) < len(self._jobs):
                    manifests.append(self._finish(len(manifests), pool.encoder_name))
        return manifests

    def _blocks(self) -> Iterator[BlockTask[_BlockOrigin]]:
        """Read the corpus; runs in a thread of the pool, some blocks ahead of the writing."""
        unreported = 0
        for shard, job in enumerate(self._jobs):
            start = self._open(shard, job).progress
            compare = True
            for number, piece in enumerate(job.pieces):
                if number < len(start.piece_hashes):
                    self._hashes[shard, number] = start.piece_hashes[number]
                    unreported += piece.bytes
                    continue
                store, path = open_store(piece.address, self._options)
                reader = InputReader(piece, store, path)
                after = start.position if number == len(start.piece_hashes) else 0
                for block in reader.blocks(after):
                    at = _BlockOrigin(shard, number, block.position, block.bytes_read + unreported)
                    yield BlockTask(block, piece.key, piece.shown, compare, at)
                    compare, unreported = False, 0
                self._hashes[shard, number] = reader.sha256

    def _open(self, shard: int, job: ShardJob) -> ShardWriter:
        stack = self._stacks[shard] = ExitStack()
        local = local_path(job.prefix)
        if local is not None:
            key = hashlib.sha256(orjson.dumps([__version__, self._how.spec()])).hexdigest()
            identities = [f"{p.version} {InputRecord.of(p, None).place}" for p in job.pieces]
            bad_lines = self._how.on_bad_line == "skip"
            writer: ShardWriter = LocalShardWriter(local, key, identities, stack, bad_lines=bad_lines)
            if writer.progress.counts.documents:
                self._reporter.note(
                    f"{job.prefix}: going on behind {writer.progress.counts.documents:,} documents done earlier"
                )
        else:
            writer = RemoteShardWriter(*open_store(job.prefix, self._options), stack)
        self._writers[shard] = writer
        return writer

    def _append(self, at: _BlockOrigin, tokens: TokenBlock) -> TokenCounts:
        lengths = np.frombuffer(tokens.lengths, "<i4")
        counts = TokenCounts(
            documents=tokens.documents,
            empty_documents=int(np.count_nonzero(lengths == 0)),
            tokens=int(lengths.sum(dtype=np.int64)),
            text_bytes=tokens.text_bytes,
            bad_lines=len(tokens.bad_lines),
            bad_line_examples=self._examples(at, tokens.bad_lines),
        )
        self._pieces_done(at.shard, at.piece)
        self._writers[at.shard].append(tokens, counts, at.position)
        return counts

    def _examples(self, at: _BlockOrigin, bad_lines: list[BadLine]) -> tuple[str, ...]:
        """The bad lines that the manifest quotes; where they are not to be skipped, the first one ends the work."""
        piece = self._jobs[at.shard].pieces[at.piece]
        if bad_lines and self._how.on_bad_line == "stop":
            raise bad_lines[0].as_error(piece, self._number(piece, bad_lines[0]))
        room = BAD_LINES_KEPT - len(self._writers[at.shard].progress.counts.bad_line_examples)
        return tuple(f"{format_line_location(piece, self._number(piece, bad))}: {bad.what}" for bad in bad_lines[:room])

    def _number(self, piece: InputSlice, bad: BadLine) -> int:
        """The line, counted from the start of the file also where the shard reads a part of it."""
        if piece not in self._lines_before:
            self._lines_before[piece] = count_lines_before(piece, *open_store(piece.address, self._options))
        return bad.number + self._lines_before[piece]

    def _pieces_done(self, shard: int, until: int) -> None:
        writer = self._writers[shard]
        while (number := len(writer.progress.piece_hashes)) < until:
            writer.piece_done(self._hashes[shard, number])

    def _finish(self, shard: int, encoder: str) -> TokenManifest:
        job, writer = self._jobs[shard], self._writers[shard]
        self._pieces_done(shard, len(job.pieces))
        delete_set_manifest(job.prefix, self._options)
        files = writer.finish(np.dtype(self._how.dtype))
        inputs = [InputRecord.of(p, sha) for p, sha in zip(job.pieces, writer.progress.piece_hashes, strict=True)]
        manifest = TokenManifest(
            spec=self._how.spec(),
            tokenizer=shown_address(self._how.tokenizer.address),
            encoder=encoder,
            inputs=inputs,
            counts=writer.progress.counts,
            files=files,
        )
        manifest.write(job.prefix, self._options)
        self._stacks[shard].close()
        del self._writers[shard]
        return manifest

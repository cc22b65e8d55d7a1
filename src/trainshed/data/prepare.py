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
    from trainshed.data.chat.tokenize import ChatSettings
    from trainshed.storage import StoreOptions


@dataclass(frozen=True)
class TokenizeConfig:
    """How text becomes tokens: everything besides the text that decides the bytes of the output."""

    tokenizer: Tokenizer
    eod: SpecialToken | None
    bos: SpecialToken | None = None
    on_bad_line: OnBadLine = "stop"
    encoder: EncoderName = "auto"
    chat: ChatSettings | None = None
    """Given where rows are conversations: then their template writes what begins and ends them."""

    @property
    def dtype(self) -> str:
        """The token type of the files."""
        return token_dtype(self.tokenizer.vocab_size).name

    def for_workers(self) -> BlockTokenizerConfig:
        """Return the part of it that the workers need."""
        eod, bos = (token.id if token else None for token in (self.eod, self.bos))
        return BlockTokenizerConfig(self.tokenizer, eod, bos, self.dtype, self.encoder, self.chat)

    def spec(self) -> dict[str, object]:
        """Return what the manifest records; it also decides whether an existing shard is the same work.

        `on_bad_line` is not in it: without bad lines both values give the same bytes, and the manifest counts them.
        """
        return {
            "tokenizer": self.tokenizer.sha256,
            "vocab_size": self.tokenizer.vocab_size,
            "eod": self.eod and {"text": self.eod.text, "id": self.eod.id},
            "bos": self.bos and {"text": self.bos.text, "id": self.bos.id},
            "dtype": self.dtype,
            **({"answers": self.chat.spec()} if self.chat is not None else {}),
        }


@dataclass(frozen=True)
class ShardJob:
    """One shard: which inputs it is made of, and the prefix it is written to."""

    prefix: str
    inputs: tuple[InputSlice, ...]


@dataclass(frozen=True)
class PrepareResult:
    """The outcome of a preparation, shard by shard in order."""

    manifests: list[TokenManifest]
    made: int
    reused: int


def prepare(
    jobs: Sequence[ShardJob],
    config: TokenizeConfig,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    wait: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> PrepareResult:
    """Make every shard that does not exist or is not proven; the bytes do not depend on `workers`.

    If another process is making a shard, that is an error. With `wait`, prepare waits until it ends and looks again.
    """
    manifests: dict[str, TokenManifest] = {}
    made = 0
    while todo := _missing_shards(jobs, manifests, config, overwrite, options, reporter):
        held = next((job.prefix for job in todo if wait and _is_locked(job.prefix)), None)
        if held is not None:
            wait_for_shard(str(local_path(held)), reporter)
            continue
        if len(todo) < len(jobs):
            reporter.note(f"{len(jobs) - len(todo)} of {len(jobs)} shards are already there and proven")
        try:
            finished = _Preparation(todo, config, workers, options, reporter).run()
        except ShardLocked:
            if not wait:
                raise
            continue  # another process has taken it since we looked
        manifests |= {job.prefix: manifest for job, manifest in zip(todo, finished, strict=True)}
        made += len(todo)
    if not made:
        reporter.note(f"{len(jobs)} of {len(jobs)} shards are already there and proven")
    return PrepareResult([manifests[job.prefix] for job in jobs], made=made, reused=len(jobs) - made)


def _missing_shards(
    jobs: Sequence[ShardJob],
    manifests: dict[str, TokenManifest],
    config: TokenizeConfig,
    overwrite: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> list[ShardJob]:
    """Return the shards that are still to be made; add the manifests of the others to `manifests`."""
    todo: list[ShardJob] = []
    for job in jobs:
        if job.prefix in manifests:
            continue
        manifest = read_token_manifest(job.prefix, options)
        if manifest is not None and _is_current(manifest, job, config, overwrite, options, reporter):
            manifests[job.prefix] = manifest
        else:
            todo.append(job)
    return todo


def _is_locked(prefix: str) -> bool:
    local = local_path(prefix)
    return local is not None and is_shard_locked(local)


def _is_current(
    manifest: TokenManifest,
    job: ShardJob,
    config: TokenizeConfig,
    overwrite: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> bool:
    """Whether an existing shard is what this job would make; one that was made differently is an error."""
    if manifest.spec != config.spec():
        if overwrite:
            return False
        keys = sorted({*config.spec(), *manifest.spec})
        changed = [key for key in keys if config.spec().get(key) != manifest.spec.get(key)]
        raise InputError(
            f"this shard exists and was made differently ({', '.join(changed)})",
            where=job.prefix,
            hint="write another --output, or --overwrite to make it anew",
        )
    if manifest.counts.bad_lines and config.on_bad_line == "stop":
        reporter.note(f"{job.prefix}: made with {manifest.counts.bad_lines:,} bad lines left out, made anew")
        return False
    if [record.identity for record in manifest.inputs] != [
        InputRecord.from_input(input_slice, None).identity for input_slice in job.inputs
    ]:
        reporter.note(f"{job.prefix}: made of other files than before, made anew")
        return False
    for record, input_slice in zip(manifest.inputs, job.inputs, strict=True):
        # A web server may give no version at all: then only the content shows a change.
        if (not input_slice.version or record.version != input_slice.version) and record.sha256 != hash_input(
            input_slice, options
        ):
            reporter.note(f"{job.prefix}: {input_slice.display_address} has changed, made anew")
            return False
    if not manifest.files_exist(job.prefix, options):
        reporter.note(f"{job.prefix}: its files are gone or of another size than its manifest says, made anew")
        return False
    return True


def hash_input(input_slice: InputSlice, options: StoreOptions | None) -> str | None:
    """Read an input for its hash alone, as the manifest records it."""
    store, path = open_store(input_slice.address, options)
    reader = InputReader(input_slice, store, path)
    for _ in reader.blocks():
        pass
    return reader.sha256


@dataclass(frozen=True)
class _BlockOrigin:
    """Where a block comes from: its shard, its input within the shard, and the reading position after it."""

    shard: int
    input: int
    position: int
    bytes_read: int


class _Preparation:
    """One pass over the shards to make. A thread of the pool reads ahead; this thread writes in order."""

    def __init__(
        self,
        jobs: list[ShardJob],
        config: TokenizeConfig,
        workers: int | None,
        options: StoreOptions | None,
        reporter: Reporter,
    ) -> None:
        self._jobs, self._config, self._options, self._reporter = jobs, config, options, reporter
        inputs = [input_slice for job in jobs for input_slice in job.inputs]
        self._bytes = sum(input_slice.read_bytes for input_slice in inputs)
        self._workers = workers or default_workers(inputs)
        self._writers: dict[int, ShardWriter] = {}
        self._stacks: dict[int, ExitStack] = {}
        self._hashes: dict[tuple[int, int], str | None] = {}
        self._lines_before: dict[InputSlice, int] = {}

    def run(self) -> list[TokenManifest]:
        """Return a manifest per shard, in order, each already written."""
        manifests: list[TokenManifest] = []
        total = TokenCounts()
        with ExitStack() as stack, WorkerPool(self._config.for_workers(), self._workers) as pool:
            stack.callback(lambda: [writer_stack.close() for writer_stack in self._stacks.values()])
            self._reporter.note(f"encoder: {pool.encoder_reason}")
            with (
                self._reporter.task("tokenise", total=self._bytes, unit="B") as task,
                # Closed after an error too: its threads must not open another shard then.
                closing(pool.map(self._blocks())) as results,
            ):
                for origin, tokens in results:
                    while len(manifests) < origin.shard:
                        manifests.append(self._finish(len(manifests), pool.encoder_name))
                    total = total.plus(self._append(origin, tokens))
                    task.advance(origin.bytes_read)
                    task.describe(f"{total.documents:,} documents, {total.tokens:,} tokens")
                while len(manifests) < len(self._jobs):
                    manifests.append(self._finish(len(manifests), pool.encoder_name))
        return manifests

    def _blocks(self) -> Iterator[BlockTask[_BlockOrigin]]:
        """Read the corpus. It runs in a thread of the pool, some blocks ahead of the writing."""
        unreported = 0
        for shard, job in enumerate(self._jobs):
            start = self._open(shard, job).progress
            # The first block of a shard is encoded by both encoders.
            compare = True
            for number, input_slice in enumerate(job.inputs):
                if number < len(start.input_hashes):
                    self._hashes[shard, number] = start.input_hashes[number]
                    unreported += input_slice.read_bytes
                    continue
                store, path = open_store(input_slice.address, self._options)
                reader = InputReader(input_slice, store, path)
                after = start.position if number == len(start.input_hashes) else 0
                for block in reader.blocks(after):
                    origin = _BlockOrigin(shard, number, block.resume_position, block.bytes_read + unreported)
                    yield BlockTask(block, input_slice.key, input_slice.display_address, compare, origin)
                    compare, unreported = False, 0
                self._hashes[shard, number] = reader.sha256

    def _open(self, shard: int, job: ShardJob) -> ShardWriter:
        stack = self._stacks[shard] = ExitStack()
        local = local_path(job.prefix)
        if local is not None:
            key = hashlib.sha256(orjson.dumps([__version__, self._config.spec()])).hexdigest()
            identities = [
                f"{input_slice.version} {InputRecord.from_input(input_slice, None).identity}"
                for input_slice in job.inputs
            ]
            bad_lines = self._config.on_bad_line == "skip"
            writer: ShardWriter = LocalShardWriter(
                local, key, identities, stack, bad_lines=bad_lines, learned=self._config.chat is not None
            )
            if writer.progress.counts.documents:
                self._reporter.note(
                    f"{job.prefix}: going on after {writer.progress.counts.documents:,} documents done earlier"
                )
        else:
            store, path = open_store(job.prefix, self._options)
            writer = RemoteShardWriter(store, path, stack, learned=self._config.chat is not None)
        self._writers[shard] = writer
        return writer

    def _append(self, origin: _BlockOrigin, tokens: TokenBlock) -> TokenCounts:
        lengths = np.frombuffer(tokens.lengths, "<i4")
        counts = TokenCounts(
            documents=tokens.documents,
            empty_documents=int(np.count_nonzero(lengths == 0)),
            tokens=int(lengths.sum(dtype=np.int64)),
            text_bytes=tokens.text_bytes,
            bad_lines=len(tokens.bad_lines),
            bad_line_examples=self._bad_line_examples(origin, tokens.bad_lines),
            chat=tokens.chat,
        )
        self._finish_inputs(origin.shard, origin.input)
        self._writers[origin.shard].append(tokens, counts, origin.position)
        return counts

    def _bad_line_examples(self, origin: _BlockOrigin, bad_lines: list[BadLine]) -> tuple[str, ...]:
        """Return the bad lines that the manifest quotes. If they are not to be skipped, the first one is an error."""
        input_slice = self._jobs[origin.shard].inputs[origin.input]
        for bad in bad_lines:
            if bad.fatal or self._config.on_bad_line == "stop":
                raise bad.to_error(input_slice, self._line_number(input_slice, bad))
        room = BAD_LINES_KEPT - len(self._writers[origin.shard].progress.counts.bad_line_examples)
        return tuple(
            f"{format_line_location(input_slice, self._line_number(input_slice, bad))}: {bad.what}"
            for bad in bad_lines[:room]
        )

    def _line_number(self, input_slice: InputSlice, bad: BadLine) -> int:
        """Return the number of a line in its file, even if the shard reads only a part of the file."""
        if input_slice not in self._lines_before:
            self._lines_before[input_slice] = count_lines_before(
                input_slice, *open_store(input_slice.address, self._options)
            )
        return bad.number + self._lines_before[input_slice]

    def _finish_inputs(self, shard: int, until: int) -> None:
        writer = self._writers[shard]
        while (number := len(writer.progress.input_hashes)) < until:
            writer.input_done(self._hashes[shard, number])

    def _finish(self, shard: int, encoder: str) -> TokenManifest:
        job, writer = self._jobs[shard], self._writers[shard]
        self._finish_inputs(shard, len(job.inputs))
        delete_set_manifest(job.prefix, self._options)
        files = writer.finish(np.dtype(self._config.dtype))
        inputs = [
            InputRecord.from_input(input_slice, sha)
            for input_slice, sha in zip(job.inputs, writer.progress.input_hashes, strict=True)
        ]
        manifest = TokenManifest(
            spec=self._config.spec(),
            tokenizer=shown_address(self._config.tokenizer.address),
            encoder=encoder,
            inputs=inputs,
            counts=writer.progress.counts,
            files=files,
        )
        manifest.write(job.prefix, self._options)
        self._stacks[shard].close()
        del self._writers[shard]
        return manifest

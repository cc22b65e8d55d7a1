"""Verify token files: structure, sizes, hashes, counts, token range, end-of-document tokens and learned tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.manifest import TokenManifest, read_token_manifest
from trainshed.data.tokens.token_files import learned_path, open_token_file, shard_prefixes
from trainshed.data.tokens.token_source import has_learned
from trainshed.errors import CorruptData, NotFound
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import ObjectInfo, open_store, sha256_of

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


EXAMPLES = 3
"""How many places of one problem are named."""

LEARNED_SEQUENCES = 4096
"""Sequences whose learned tokens are checked at a time."""


@dataclass
class ShardVerdict:
    """The result for one pair of files: if `problems` is empty, they are proven as far as `checked` says."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems


def verify_tokens(
    prefix: str,
    *,
    tokenizer: Tokenizer | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> list[ShardVerdict]:
    """Verify every shard of a prefix; problems are collected, not raised."""
    shards = shard_prefixes(prefix, options)
    infos = [_object_info(f"{shard}.bin", options) for shard in shards]
    with reporter.task("verify", total=sum(info.size for info in infos if info), unit="B") as task:
        return [_verify_shard(shard, tokenizer, options, task) for shard in shards]


def _verify_shard(
    prefix: str, tokenizer: Tokenizer | None, options: StoreOptions | None, task: ProgressTask
) -> ShardVerdict:
    verdict = ShardVerdict(prefix)
    try:
        manifest = read_token_manifest(prefix, options)
    except CorruptData as error:
        verdict.problems.append(str(error))
        manifest = None
    try:
        with IndexedDataset(prefix, options) as reader:
            reader.check()
            verdict.documents, verdict.tokens = reader.documents, reader.tokens
            verdict.checked.append("structure")
            scan = _TokenScan(reader, manifest, tokenizer)
            scan.run(task)
            verdict.checked += scan.checked
            verdict.problems += scan.problems
            if has_learned(prefix, manifest, options):
                verdict.problems += _check_learned(prefix, reader, manifest, options)
                verdict.checked.append("learned tokens")
    except (CorruptData, NotFound) as error:
        verdict.problems.append(f"{error.where}: {error.what}" if error.where else error.what)
        scan = None
    if manifest is not None:
        bin_sha256 = scan.bin_sha256 if scan else None
        verdict.problems += _compare_to_manifest(prefix, manifest, verdict, bin_sha256, options)
        verdict.checked.append("manifest")
    return verdict


def _compare_to_manifest(
    prefix: str,
    manifest: TokenManifest,
    verdict: ShardVerdict,
    bin_sha256: str | None,
    options: StoreOptions | None,
) -> list[str]:
    problems: list[str] = []
    folder = prefix.rpartition("/")[0]
    for file in manifest.files:
        address = f"{folder}/{file.path}" if "/" in prefix else file.path
        info = _object_info(address, options)
        if info is None:
            problems.append(f"{address}: missing")
        elif info.size != file.size:
            problems.append(f"{address}: {info.size} bytes, its manifest says {file.size}")
        else:
            sha256 = bin_sha256 if address.endswith(".bin") and bin_sha256 else _sha256(address, options)
            if sha256 != file.checksum:
                problems.append(
                    f"{address}: its bytes have changed since it was made ({sha256}, its manifest says {file.checksum})"
                )
    if verdict.documents and verdict.documents != manifest.counts.documents:
        problems.append(f"{verdict.documents:,} documents, its manifest says {manifest.counts.documents:,}")
    if verdict.tokens and verdict.tokens != manifest.counts.tokens:
        problems.append(f"{verdict.tokens:,} tokens, its manifest says {manifest.counts.tokens:,}")
    return problems


def _check_learned(
    prefix: str, reader: IndexedDataset, manifest: TokenManifest | None, options: StoreOptions | None
) -> list[str]:
    """Check that there is a 0 or a 1 for every token, and something to learn in every sequence."""
    address = learned_path(prefix)
    file = open_token_file(address, options)
    try:
        if file.size != reader.tokens:
            return [f"{address}: {file.size:,} bytes for {reader.tokens:,} tokens"]
        learned_total, odd, unlearned = 0, [], []
        for first in range(0, reader.sequences, LEARNED_SEQUENCES):
            lengths = reader.lengths[first : first + LEARNED_SEQUENCES].astype(np.int64)
            start = int(reader.pointers[first]) // reader.dtype.itemsize
            flags = np.empty(int(lengths.sum()), np.uint8)
            file.read_into(flags.data, start)
            odd += [start + int(at) for at in np.flatnonzero(flags > 1)[:EXAMPLES]]
            sums = np.diff(np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))[np.cumsum([0, *lengths])])
            unlearned += [first + int(at) for at in np.flatnonzero(sums == 0)[:EXAMPLES]]
            learned_total += int(sums.sum())
    finally:
        file.close()
    problems = [f"{address}: token {at:,} is neither 0 nor 1" for at in odd[:EXAMPLES]]
    problems += [f"{address}: nothing of sequence {number:,} is learned" for number in unlearned[:EXAMPLES]]
    chat = manifest.counts.chat if manifest is not None else None
    if chat is not None and chat.learned_tokens != learned_total:
        problems.append(f"{learned_total:,} learned tokens, its manifest says {chat.learned_tokens:,}")
    return problems


def _object_info(address: str, options: StoreOptions | None) -> ObjectInfo | None:
    store, path = open_store(address, options)
    return store.head(path)


def _sha256(address: str, options: StoreOptions | None) -> str:
    store, path = open_store(address, options)
    return sha256_of(store.stream(path))


class _TokenScan:
    """One pass over the tokens of a shard: their hash, their range, and how documents end."""

    def __init__(self, reader: IndexedDataset, manifest: TokenManifest | None, tokenizer: Tokenizer | None) -> None:
        self._reader = reader
        spec: dict[str, Any] = manifest.spec if manifest else {}
        self._vocab_size: int | None = tokenizer.vocab_size if tokenizer else spec.get("vocab_size")
        self._eod = (spec.get("eod") or {}).get("id")
        self.checked: list[str] = []
        self.problems: list[str] = []
        self.bin_sha256: str | None = None
        if tokenizer and spec and spec["tokenizer"] != tokenizer.sha256:
            self.problems.append(f"made with another tokenizer than {tokenizer.address}")

    def run(self, task: ProgressTask) -> None:
        """Read everything once."""
        digest = hashlib.sha256()
        out_of_vocabulary: list[int] = []
        missing_eod: list[int] = []
        sequence = start = 0
        for tokens in self._reader.token_chunks():
            digest.update(tokens.view(np.uint8).data)
            task.advance(tokens.nbytes)
            if self._vocab_size is not None and len(out_of_vocabulary) < EXAMPLES:
                out_of_vocabulary += _find_out_of_vocabulary(tokens, self._vocab_size, start)
            if self._eod is not None:
                sequence = self._check_ends(tokens, start, sequence, missing_eod)
            start += len(tokens)
        self.bin_sha256 = f"sha256:{digest.hexdigest()}"
        if self._vocab_size is not None:
            self.checked.append(f"token range below {self._vocab_size:,}")
            self.problems += [
                f"token {at:,} is {self._reader.read(at, 1)[0]}, outside the vocabulary of {self._vocab_size:,}"
                for at in out_of_vocabulary[:EXAMPLES]
            ]
        if self._eod is not None:
            self.checked.append("end-of-document tokens")
            self.problems += [f"sequence {i:,} does not end with the token {self._eod}" for i in missing_eod[:EXAMPLES]]

    def _check_ends(self, tokens: np.ndarray, start: int, sequence: int, missing_eod: list[int]) -> int:
        """Check the sequences from `sequence` on that end within these tokens; return the first that does not."""
        reader = self._reader
        end = start + len(tokens)
        begun = int(np.searchsorted(reader.pointers, end * reader.dtype.itemsize, "left"))
        lasts = reader.pointers[sequence:begun] // reader.dtype.itemsize + reader.lengths[sequence:begun] - 1
        ended = int(np.searchsorted(lasts, end, "left"))
        lasts, filled = lasts[:ended], reader.lengths[sequence : sequence + ended] > 0
        if len(missing_eod) < EXAMPLES and len(lasts):
            wrong = filled & (tokens[np.maximum(lasts - start, 0)] != self._eod)
            missing_eod += [sequence + int(i) for i in np.flatnonzero(wrong)[:EXAMPLES]]
        return sequence + ended


def _find_out_of_vocabulary(tokens: np.ndarray, vocab_size: int, first: int) -> list[int]:
    """Return the positions of the first few tokens that are not in a vocabulary of that size."""
    if len(tokens) == 0 or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return []
    return [first + int(at) for at in np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[:EXAMPLES]]

"""Verify token files in one pass: structure, sizes, hashes, counts, token range and end-of-document tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.manifest import TokenManifest, read_token_manifest
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.errors import CorruptData, NotFound
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import ObjectInfo, open_store, sha256_of

EXAMPLES = 3
"""How many places of one problem are named."""


@dataclass
class ShardVerdict:
    """What was found in one pair of files: `problems` empty means proven as far as `checked` says."""

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
    prefix: str, *, tokenizer: Tokenizer | None = None, reporter: Reporter = SILENT
) -> list[ShardVerdict]:
    """Verify every shard behind a prefix; problems are collected, not raised."""
    shards = shard_prefixes(prefix)
    sizes = [_object_info(f"{shard}.bin") for shard in shards]
    with reporter.task("verify", total=sum(info.size for info in sizes if info), unit="B") as task:
        return [_verify_shard(shard, tokenizer, task) for shard in shards]


def _verify_shard(prefix: str, tokenizer: Tokenizer | None, task: ProgressTask) -> ShardVerdict:
    verdict = ShardVerdict(prefix)
    try:
        manifest = read_token_manifest(prefix)
    except CorruptData as error:
        verdict.problems.append(str(error))
        manifest = None
    try:
        with IndexedDataset(prefix) as reader:
            reader.check()
            verdict.documents, verdict.tokens = reader.documents, reader.tokens
            verdict.checked.append("structure")
            scan = _TokenScan(reader, manifest, tokenizer)
            scan.run(task)
            verdict.checked += scan.checked
            verdict.problems += scan.problems
    except (CorruptData, NotFound) as error:
        verdict.problems.append(f"{error.where}: {error.what}" if error.where else error.what)
        scan = None
    if manifest is not None:
        verdict.problems += _against_manifest(prefix, manifest, verdict, scan.bin_sha256 if scan else None)
        verdict.checked.append("manifest")
    return verdict


def _against_manifest(prefix: str, manifest: TokenManifest, verdict: ShardVerdict, bin_sha256: str | None) -> list[str]:
    problems: list[str] = []
    folder = prefix.rpartition("/")[0]
    for file in manifest.files:
        address = f"{folder}/{file.path}" if "/" in prefix else file.path
        found = _object_info(address)
        if found is None:
            problems.append(f"{address}: missing")
        elif found.size != file.size:
            problems.append(f"{address}: {found.size} bytes, its manifest says {file.size}")
        else:
            sha256 = bin_sha256 if address.endswith(".bin") and bin_sha256 else _sha256(address)
            if sha256 != file.checksum:
                problems.append(
                    f"{address}: its bytes have changed since it was made ({sha256}, its manifest says {file.checksum})"
                )
    if verdict.documents and verdict.documents != manifest.counts.documents:
        problems.append(f"{verdict.documents:,} documents, its manifest says {manifest.counts.documents:,}")
    if verdict.tokens and verdict.tokens != manifest.counts.tokens:
        problems.append(f"{verdict.tokens:,} tokens, its manifest says {manifest.counts.tokens:,}")
    return problems


def _object_info(address: str) -> ObjectInfo | None:
    store, path = open_store(address)
    return store.head(path)


def _sha256(address: str) -> str:
    store, path = open_store(address)
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
        outside: list[int] = []
        unended: list[int] = []
        sequence = start = 0
        for tokens in self._reader.token_chunks():
            digest.update(tokens.view(np.uint8).data)
            task.advance(tokens.nbytes)
            if self._vocab_size is not None and len(outside) < EXAMPLES:
                outside += _out_of_vocabulary(tokens, self._vocab_size, start)
            if self._eod is not None:
                sequence = self._check_ends(tokens, start, sequence, unended)
            start += len(tokens)
        self.bin_sha256 = f"sha256:{digest.hexdigest()}"
        if self._vocab_size is not None:
            self.checked.append(f"token range below {self._vocab_size:,}")
            self.problems += [
                f"token {at:,} is {self._reader.read(at, 1)[0]}, outside the vocabulary of {self._vocab_size:,}"
                for at in outside[:EXAMPLES]
            ]
        if self._eod is not None:
            self.checked.append("end-of-document tokens")
            self.problems += [f"sequence {i:,} does not end with the token {self._eod}" for i in unended[:EXAMPLES]]

    def _check_ends(self, tokens: np.ndarray, start: int, sequence: int, unended: list[int]) -> int:
        """Check the sequences from `sequence` on that end within these tokens; return the first that does not."""
        reader = self._reader
        end = start + len(tokens)
        begun = int(np.searchsorted(reader.pointers, end * reader.dtype.itemsize, "left"))
        lasts = reader.pointers[sequence:begun] // reader.dtype.itemsize + reader.lengths[sequence:begun] - 1
        ended = int(np.searchsorted(lasts, end, "left"))
        lasts, filled = lasts[:ended], reader.lengths[sequence : sequence + ended] > 0
        if len(unended) < EXAMPLES and len(lasts):
            wrong = filled & (tokens[np.maximum(lasts - start, 0)] != self._eod)
            unended += [sequence + int(i) for i in np.flatnonzero(wrong)[:EXAMPLES]]
        return sequence + ended


def _out_of_vocabulary(tokens: np.ndarray, vocab_size: int, first: int) -> list[int]:
    """Positions of the first few tokens that no vocabulary of that size has."""
    if len(tokens) == 0 or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return []
    return [first + int(at) for at in np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[:EXAMPLES]]

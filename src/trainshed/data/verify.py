"""Proving token files: structure, sizes, hashes, counts, token range and end-of-document tokens, in one pass."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainshed.data.indexed import SCAN_ITEMS, IndexedReader, shard_prefixes
from trainshed.data.token_manifest import TokenManifest, read_token_manifest
from trainshed.data.tokenizer import Tokenizer
from trainshed.errors import CorruptData, NotFound
from trainshed.reporting import SILENT, Reporter, Task

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


def verify(prefix: str, *, tokenizer: Tokenizer | None = None, reporter: Reporter = SILENT) -> list[ShardVerdict]:
    """Verify every shard behind a prefix; problems are collected, not raised."""
    shards = shard_prefixes(prefix)
    total = sum(Path(f"{shard}.bin").stat().st_size for shard in shards if Path(f"{shard}.bin").exists())
    with reporter.task("verify", total=total, unit="B") as task:
        return [_verify_shard(shard, tokenizer, task) for shard in shards]


def _verify_shard(prefix: str, tokenizer: Tokenizer | None, task: Task) -> ShardVerdict:
    verdict = ShardVerdict(prefix)
    try:
        manifest = read_token_manifest(prefix)
    except CorruptData as error:
        verdict.problems.append(str(error))
        manifest = None
    try:
        with IndexedReader(prefix) as reader:
            reader.check()
            verdict.documents, verdict.tokens = reader.documents, reader.tokens
            verdict.checked.append("structure")
            scan = _Scan(reader, manifest, tokenizer)
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
    for file in manifest.files:
        path = Path(prefix).parent / file.path
        if not path.exists():
            problems.append(f"{path}: missing")
            continue
        if path.stat().st_size != file.size:
            problems.append(f"{path}: {path.stat().st_size} bytes, its manifest says {file.size}")
            continue
        found = bin_sha256 if path.suffix == ".bin" and bin_sha256 else _sha256(path)
        if found != file.sha256:
            problems.append(
                f"{path}: its bytes have changed since it was made ({found}, its manifest says {file.sha256})"
            )
    if verdict.documents and verdict.documents != manifest.counts.documents:
        problems.append(f"{verdict.documents:,} documents, its manifest says {manifest.counts.documents:,}")
    if verdict.tokens and verdict.tokens != manifest.counts.tokens:
        problems.append(f"{verdict.tokens:,} tokens, its manifest says {manifest.counts.tokens:,}")
    return problems


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


class _Scan:
    """One pass over the tokens of a shard: their hash, their range, and how documents end."""

    def __init__(self, reader: IndexedReader, manifest: TokenManifest | None, tokenizer: Tokenizer | None) -> None:
        self._reader = reader
        spec: dict[str, Any] = manifest.spec if manifest else {}
        self._vocab_size: int | None = tokenizer.vocab_size if tokenizer else spec.get("vocab_size")
        self._eod = (spec.get("eod") or {}).get("id")
        self.checked: list[str] = []
        self.problems: list[str] = []
        self.bin_sha256: str | None = None
        if tokenizer and spec and spec["tokenizer"] != tokenizer.sha256:
            self.problems.append(f"made with another tokenizer than {tokenizer.address}")

    def run(self, task: Task) -> None:
        """Read everything once."""
        digest = hashlib.sha256()
        outside: list[int] = []
        for number, tokens in enumerate(self._reader.token_chunks()):
            digest.update(tokens.view(np.uint8).data)
            task.advance(tokens.nbytes)
            if self._vocab_size is not None and len(outside) < EXAMPLES:
                outside += _outside(tokens, self._vocab_size, number * SCAN_ITEMS)
        self.bin_sha256 = f"sha256:{digest.hexdigest()}"
        if self._vocab_size is not None:
            self.checked.append(f"token range below {self._vocab_size:,}")
            self.problems += [
                f"token {at:,} is {self._reader.read(at, 1)[0]}, outside the vocabulary of {self._vocab_size:,}"
                for at in outside[:EXAMPLES]
            ]
        if self._eod is not None:
            self._documents_end()

    def _documents_end(self) -> None:
        """Every sequence must end with the end-of-document token that the manifest names."""
        reader = self._reader
        wrong: list[int] = []
        for first in range(0, reader.sequences, SCAN_ITEMS):
            lengths = reader.lengths[first : first + SCAN_ITEMS]
            pointers = reader.pointers[first : first + SCAN_ITEMS] // reader.dtype.itemsize
            lasts = pointers + lengths - 1
            tokens = _gather(reader, lasts)
            wrong += [first + int(i) for i in np.flatnonzero(tokens != self._eod)[:EXAMPLES]]
        self.checked.append("end-of-document tokens")
        self.problems += [f"sequence {i:,} does not end with the token {self._eod}" for i in wrong[:EXAMPLES]]


def _outside(tokens: np.ndarray, vocab_size: int, first: int) -> list[int]:
    """Positions of the first few tokens that no vocabulary of that size has."""
    if len(tokens) == 0 or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return []
    return [first + int(at) for at in np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[:EXAMPLES]]


def _gather(reader: IndexedReader, positions: np.ndarray) -> np.ndarray:
    """Tokens at ascending positions, read in runs of at most a few megabytes."""
    out = np.empty(len(positions), reader.dtype)
    at = 0
    while at < len(positions):
        until = int(np.searchsorted(positions, positions[at] + 4 * SCAN_ITEMS, side="left"))
        start = int(positions[at])
        run = reader.read(start, int(positions[until - 1]) - start + 1)
        out[at:until] = run[positions[at:until] - start]
        at = until
    return out

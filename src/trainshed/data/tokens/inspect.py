"""Describe token files: how many documents and tokens, how long they are, and what some of them say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.indexed_dataset import SCAN_ITEMS, IndexedDataset
from trainshed.data.tokens.manifest import combine_manifests, read_token_manifest
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.reporting import SILENT, Reporter

SAMPLE_TOKENS = 60


@dataclass(frozen=True)
class DocumentSample:
    """The beginning of one document."""

    document: int
    tokens: int
    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class TokenInspection:
    """The token files of a prefix. `histogram` counts documents by length: bucket b is 2^b to 2^(b+1)-1 tokens."""

    prefix: str
    shards: int
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    file_bytes: int
    bytes_per_token: float | None
    shortest: int
    longest: int
    mean_length: float
    histogram: dict[int, int]
    largest_id: int
    eod: dict[str, object] | None
    eod_count: int | None
    eod_inside_documents: int | None
    bos: dict[str, object] | None
    bos_count: int | None
    samples: list[DocumentSample]


def inspect_tokens(
    prefix: str, *, tokenizer: Tokenizer | None = None, samples: int = 3, reporter: Reporter = SILENT
) -> TokenInspection:
    """Read all token files of a prefix once and describe them."""
    shards = shard_prefixes(prefix)
    readers = [IndexedDataset(shard) for shard in shards]
    manifests = [manifest for shard in shards if (manifest := read_token_manifest(shard))]
    manifest = combine_manifests(manifests) if len(manifests) == len(shards) else None
    spec = manifest.spec if manifest else {}
    eod, bos = _special_token("eos", spec.get("eod"), tokenizer), _special_token("bos", spec.get("bos"), tokenizer)

    buckets = np.zeros(64, np.int64)
    shortest, longest, empty, inside = 2**62, 0, 0, 0
    for reader in readers:
        for first in range(0, reader.documents, SCAN_ITEMS):
            lengths = _document_lengths(reader, first, min(SCAN_ITEMS, reader.documents - first))
            filled = lengths[lengths > 0]
            empty += len(lengths) - len(filled)
            if len(filled):
                shortest, longest = min(shortest, int(filled.min())), max(longest, int(filled.max()))
                buckets += np.bincount(np.log2(filled).astype(np.int64), minlength=64)
    counts = {"eod": 0, "bos": 0, "largest": 0}
    with reporter.task("inspect", total=sum(reader.bin_bytes for reader in readers), unit="B") as task:
        for reader in readers:
            for tokens in reader.token_chunks():
                counts["largest"] = max(counts["largest"], int(tokens.max(initial=0)))
                counts["eod"] += int(np.count_nonzero(tokens == eod["id"])) if eod else 0
                counts["bos"] += int(np.count_nonzero(tokens == bos["id"])) if bos else 0
                task.advance(tokens.nbytes)
    documents = sum(reader.documents for reader in readers)
    tokens_total = sum(reader.tokens for reader in readers)
    if eod and spec.get("eod"):
        inside = counts["eod"] - (documents - empty)
    result = TokenInspection(
        prefix=prefix,
        shards=len(shards),
        dtype=readers[0].dtype.name,
        documents=documents,
        empty_documents=empty,
        sequences=sum(reader.sequences for reader in readers),
        tokens=tokens_total,
        file_bytes=sum(reader.bin_bytes + reader.header.index_bytes for reader in readers),
        bytes_per_token=manifest.counts.text_bytes / tokens_total if manifest and tokens_total else None,
        shortest=shortest if longest else 0,
        longest=longest,
        mean_length=tokens_total / (documents - empty) if documents > empty else 0.0,
        histogram={bucket: int(count) for bucket, count in enumerate(buckets) if count},
        largest_id=counts["largest"],
        eod=eod,
        eod_count=counts["eod"] if eod else None,
        eod_inside_documents=inside if eod and spec.get("eod") else None,
        bos=bos,
        bos_count=counts["bos"] if bos else None,
        samples=_samples(readers, tokenizer, samples),
    )
    for reader in readers:
        reader.close()
    return result


def _special_token(
    role: str, recorded: dict[str, object] | None, tokenizer: Tokenizer | None
) -> dict[str, object] | None:
    """Return the special token that a manifest records, otherwise the one that the tokenizer names."""
    if recorded or tokenizer is None:
        return recorded
    named = tokenizer.config.get(f"{role}_token")
    text = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token(text) if isinstance(text, str) else None
    return {"text": token.text, "id": token.id} if token else None


def _document_lengths(reader: IndexedDataset, first: int, count: int) -> np.ndarray:
    """Return the number of tokens of each document, over all its sequences."""
    bounds = reader.document_indices[first : first + count + 1]
    lengths = reader.lengths[bounds[0] : bounds[-1]].astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return np.diff(ends[bounds - bounds[0]])


def _samples(readers: list[IndexedDataset], tokenizer: Tokenizer | None, count: int) -> list[DocumentSample]:
    """Return the beginnings of documents, spread evenly over all shards."""
    total = sum(reader.documents for reader in readers)
    picked: list[DocumentSample] = []
    for number in sorted({total * i // max(count, 1) for i in range(count)} if total else ()):
        local, reader = number, readers[0]
        for reader in readers:
            if local < reader.documents:
                break
            local -= reader.documents
        tokens = reader.document(local)
        ids = tokens[:SAMPLE_TOKENS].tolist()
        picked.append(DocumentSample(number, len(tokens), ids, tokenizer.decode(ids) if tokenizer else None))
    return picked

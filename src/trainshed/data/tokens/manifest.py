"""`PREFIX.manifest.json`: what token files were made of, how, and the hashes that prove them. Written last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson

from trainshed.data.text.reader import InputSlice
from trainshed.data.tokens.shard_writer import TokenCounts
from trainshed.data.tokens.token_files import set_prefix, shard_name
from trainshed.errors import CorruptData, NotFound
from trainshed.storage import open_store
from trainshed.storage.manifest import FileEntry, Manifest, broken_manifest

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


TOKENS_KIND = "tokens"


@dataclass(frozen=True)
class InputRecord:
    """An input as it was read. For parquet the hash is of the column's texts, else of the file's bytes."""

    address: str
    size: int
    version: str
    sha256: str | None
    key: str
    documents: str
    start: int = 0
    end: int | None = None

    @classmethod
    def from_input(cls, input_slice: InputSlice, sha256: str | None) -> InputRecord:
        """Record an input with the hash of what was read."""
        return cls(
            input_slice.display_address,
            input_slice.size,
            input_slice.version,
            sha256,
            input_slice.key,
            input_slice.documents if input_slice.format.kind == "text" else input_slice.format.kind,
            input_slice.start,
            input_slice.end,
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Which bytes of which file these are, whatever their content."""
        return (self.address, self.key, self.documents, self.start, self.end)


@dataclass(frozen=True)
class TokenManifest:
    """The proof of one shard, or of a whole set of shards (then `shards` says how many).

    `spec` is all that decides the bytes besides the inputs. `tokenizer` is the address of the tokenizer.
    """

    spec: dict[str, Any]
    tokenizer: str
    encoder: str
    inputs: list[InputRecord]
    counts: TokenCounts
    files: list[FileEntry]
    shards: int = 1

    def to_manifest(self) -> Manifest:
        """Return it in the form of every artefact's manifest."""
        facts = {
            "tokenizer": self.tokenizer,
            "encoder": self.encoder,
            "inputs": [asdict(record) for record in self.inputs],
            "counts": asdict(self.counts),
            "shards": self.shards,
        }
        return Manifest.of(TOKENS_KIND, self.spec, self.files, facts)

    @classmethod
    def from_manifest(cls, manifest: Manifest, where: str) -> TokenManifest:
        """Read what is specific to tokens; `where` names the file in errors."""
        if manifest.kind != TOKENS_KIND:
            raise CorruptData(f"this is the manifest of {manifest.kind}, not of tokens", where=where)
        facts = manifest.facts
        try:
            counts = facts["counts"] | {"bad_line_examples": tuple(facts["counts"]["bad_line_examples"])}
            return cls(
                spec=dict(manifest.spec),
                tokenizer=facts["tokenizer"],
                encoder=facts["encoder"],
                inputs=[InputRecord(**record) for record in facts["inputs"]],
                counts=TokenCounts(**counts),
                files=list(manifest.files),
                shards=facts["shards"],
            )
        except (KeyError, TypeError) as error:
            raise broken_manifest(f"this manifest is damaged ({type(error).__name__}: {error})", where) from None

    def write(self, prefix: str, options: StoreOptions | None = None) -> None:
        """Write it beside the files that it proves, atomically."""
        self.to_manifest().write(*open_store(f"{prefix}.manifest.json", options))

    def files_exist(self, prefix: str, options: StoreOptions | None = None) -> bool:
        """Whether the files it lists exist with the right sizes; `verify_tokens` reads them."""
        folder = prefix.rpartition("/")[0]
        for file in self.files:
            store, path = open_store(f"{folder}/{file.path}" if "/" in prefix else file.path, options)
            info = store.head(path)
            if info is None or info.size != file.size:
                return False
        return True


def read_token_manifest(prefix: str, options: StoreOptions | None = None) -> TokenManifest | None:
    """Read the manifest of a prefix, or None if there is none."""
    address = f"{prefix}.manifest.json"
    try:
        manifest = Manifest.read(*open_store(address, options))
    except NotFound:
        return None
    return TokenManifest.from_manifest(manifest, address)


def combine_manifests(manifests: Sequence[TokenManifest]) -> TokenManifest:
    """Return the manifest of a set of shards: the sum of theirs."""
    counts = TokenCounts()
    for manifest in manifests:
        counts = counts.plus(manifest.counts)
    first = manifests[0]
    return TokenManifest(
        spec=first.spec,
        tokenizer=first.tokenizer,
        encoder=", ".join(sorted({manifest.encoder for manifest in manifests})),
        inputs=[record for manifest in manifests for record in manifest.inputs],
        counts=counts,
        files=[file for manifest in manifests for file in manifest.files],
        shards=len(manifests),
    )


def delete_set_manifest(prefix: str, options: StoreOptions | None = None) -> None:
    """Remove the manifest of the set that a shard belongs to, before the shard is made anew.

    Every task does so before it writes the manifest of its shard, and reads the others' manifests only after that. So
    the last task finds them all, and nobody removes what it writes.
    """
    whole = set_prefix(prefix)
    if whole is not None:
        store, path = open_store(f"{whole}.manifest.json", options)
        store.delete(path)


def write_set_manifest(prefix: str, shards: int, options: StoreOptions | None = None) -> TokenManifest | None:
    """Write `PREFIX.manifest.json` for a set of shards once all exist; return None while some are missing.

    Several tasks may finish at once and all write it: the bytes are the same.
    """
    manifests: list[TokenManifest] = []
    for shard in range(shards):
        manifest = read_token_manifest(shard_name(prefix, shard, shards), options)
        if manifest is None:
            return None
        manifests.append(manifest)
    if len({orjson.dumps(manifest.spec, option=orjson.OPT_SORT_KEYS) for manifest in manifests}) > 1:
        return None
    if shards == 1:
        return manifests[0]
    combined = combine_manifests(manifests)
    combined.write(prefix, options)
    return combined

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
    columns: tuple[str, ...] | None = None
    rows: tuple[int, int] | None = None

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> InputRecord:
        """Read what `to_plain` gave."""
        lists: dict[str, Any] = {
            name: tuple(plain[name]) for name in ("columns", "rows") if plain.get(name) is not None
        }
        return cls(**plain | lists)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON takes it; whole files of text have no columns or rows."""
        plain = asdict(self)
        return {name: value for name, value in plain.items() if name not in ("columns", "rows") or value is not None}

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
            input_slice.columns,
            input_slice.rows,
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Which bytes of which file these are, whatever their content."""
        return (self.address, self.key, self.documents, self.start, self.end, self.columns, self.rows)


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
            "inputs": [record.to_plain() for record in self.inputs],
            "counts": self.counts.to_plain(),
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
            return cls(
                spec=dict(manifest.spec),
                tokenizer=facts["tokenizer"],
                encoder=facts["encoder"],
                inputs=[InputRecord.from_plain(record) for record in facts["inputs"]],
                counts=TokenCounts.from_plain(facts["counts"]),
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


def describe_conversations(counts: TokenCounts) -> str:
    """Say what became of conversations, for people: how many there are, what is learned, what was cut or left out."""
    chat = counts.chat
    assert chat is not None
    share = chat.learned_tokens / counts.tokens if counts.tokens else 0.0
    parts = [f"{chat.conversations:,} conversations, {counts.tokens:,} tokens, {share:.1%} of them learned"]
    for number, what in (
        (chat.truncated, f"truncated ({chat.cut_answers:,} in an answer)"),
        (chat.dropped_too_long, "dropped as too long"),
        (chat.dropped_unlearned, "dropped because nothing to learn was left after truncating"),
        (counts.bad_lines, "bad lines skipped"),
    ):
        if number:
            parts.append(f"{number:,} {what}")
    return "; ".join(parts)


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

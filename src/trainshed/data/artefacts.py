"""The data artefacts of a recipe: text, tokenizer, tokens and their index, found by hash or made.

Everything lies under `<store>/artefacts/<kind>/<hash>/` and is shared by runs: the hash is of what the artefact is made
from, so a rerun finds it and a change makes another one. Each shard of tokens is an artefact of its own: a changed
input costs its shard and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trainshed.data.encode.tokenizer import Tokenizer, load_tokenizer
from trainshed.data.encode.training import train_tokenizer
from trainshed.data.prepare import ShardJob, Tokenizing, prepare
from trainshed.data.text.corpus import assign_shards, find_pieces
from trainshed.data.text.reading import Piece
from trainshed.data.text.script import run_script, script_spec
from trainshed.data.tokens.manifest import TokenManifest, read_token_manifest
from trainshed.data.tokens.shards import shard_prefixes
from trainshed.data.tokens.verify import verify
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.recipe import Recipe, TrainedTokenizer
from trainshed.recipe.data import SourceKeys
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, StoreOptions, sha256_of
from trainshed.storage.artefact_folder import artefact_folder, only_maker
from trainshed.storage.manifest import FileEntry, Manifest

MANIFEST = "manifest.json"
VERDICT_SCHEMA = "trainshed.verdict/1"


@dataclass(frozen=True)
class PreparedSource:
    """A source whose tokens are there and proven.

    `name` is for reports, `label` for the shuffle: renaming a source must not change the order. `content` identifies
    the lengths of its documents where a manifest tells it; None: they must be read.
    """

    name: str
    label: str
    weight: float | None
    prefixes: tuple[str, ...]
    content: str | None
    documents: int
    tokens: int
    reused: bool


class DataArtefacts:
    """Makes and finds the data artefacts of one recipe.

    With `make=False` nothing is made: what is missing is an error that says which command makes it.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: Path,
        *,
        make: bool = True,
        workers: int | None = None,
        options: StoreOptions | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        self._recipe, self._root = recipe, store / "artefacts"
        self._make, self._workers, self._options, self._reporter = make, workers, options, reporter
        self._tokenizer: Tokenizer | None = None

    @property
    def indexes(self) -> Path:
        """Where the indexes of sources are kept."""
        return self._root / "index"

    def tokenizer(self) -> Tokenizer | None:
        """The recipe's tokenizer, learned from its sources if it says so; None where it names none."""
        if self._tokenizer is None and self._recipe.tokenizer is not None:
            if isinstance(self._recipe.tokenizer, TrainedTokenizer):
                self._tokenizer = load_tokenizer(str(self._learned_tokenizer(self._recipe.tokenizer)), self._options)
            else:
                self._tokenizer = load_tokenizer(self._recipe.tokenizer, self._options)
        return self._tokenizer

    def source(self, source: SourceKeys, label: str, weight: float | None = None) -> PreparedSource:
        """Make or find the tokens of one source; `label` is its part of the shuffle's key."""
        name = source.name or label
        if source.tokens is not None:
            return self._given_tokens(source.tokens, name, label, weight)
        how = self._tokenizing()
        jobs = self._shard_jobs(source, how)
        manifests = [read_token_manifest(job.prefix) for job in jobs]
        reused = all(m is not None and m.files_are_there(j.prefix) for m, j in zip(manifests, jobs, strict=True))
        if not reused:
            self._must_make(f"the tokens of source '{name}'")
            prepared = prepare(jobs, how, workers=self._workers, options=self._options, reporter=self._reporter)
            manifests = list(prepared.manifests)
        found = [manifest for manifest in manifests if manifest is not None]
        for job, manifest in zip(jobs, found, strict=True):
            self._prove(job.prefix, manifest)
        return PreparedSource(
            name=name,
            label=label,
            weight=weight,
            prefixes=tuple(job.prefix for job in jobs),
            content=_content(found),
            documents=sum(manifest.counts.documents for manifest in found),
            tokens=sum(manifest.counts.tokens for manifest in found),
            reused=reused,
        )

    def make_part(self, source: SourceKeys, part: int, parts: int) -> int:
        """Make every `parts`-th shard of a source, beginning with `part`; returns how many shards were tokenised."""
        if source.tokens is not None:
            return 0
        how = self._tokenizing()
        jobs = self._shard_jobs(source, how)[part::parts]
        prepared = prepare(jobs, how, workers=self._workers, options=self._options, reporter=self._reporter)
        for job, manifest in zip(jobs, prepared.manifests, strict=True):
            self._prove(job.prefix, manifest)
        return prepared.made

    def _shard_jobs(self, source: SourceKeys, how: Tokenizing) -> list[ShardJob]:
        return [
            ShardJob(str(self._folder("tokens", _shard_spec(pieces, how)) / "tokens"), tuple(pieces))
            for pieces in assign_shards(self._pieces(source), self._recipe.data.shards, self._options)
        ]

    def _pieces(self, source: SourceKeys) -> list[Piece]:
        patterns = list(source.path) if source.path is not None else [str(self._script_output(source))]
        return find_pieces(
            patterns, key=source.key or "text", documents=source.documents or "file", options=self._options
        )

    def _tokenizing(self) -> Tokenizing:
        tokenizer, data = self.tokenizer(), self._recipe.data
        if tokenizer is None:
            raise InputError("there is text to tokenise and no tokenizer", where=self._recipe.where("tokenizer"))
        wanted = data.eod if isinstance(data.eod, str) else None
        return Tokenizing(
            tokenizer,
            eod=tokenizer.end_of_document(wanted) if data.eod else None,
            bos=tokenizer.beginning_of_document() if data.bos else None,
            on_bad_line=data.on_bad_line,
        )

    def _script_output(self, source: SourceKeys) -> Path:
        script = self._recipe.folder / str(source.script)
        spec = script_spec(script, source.args)
        folder = self._folder("text", spec)
        with self._making(folder, f"the text that {source.script} writes") as partial:
            if partial is not None:
                self._reporter.note(f"running {source.script}")
                run_script(script, source.args, partial)
                (partial / "script.log").unlink()
                if not any(partial.iterdir()):
                    raise InputError(
                        "the script has written nothing",
                        where=str(script),
                        hint="it is run with --target-dir DIR and must leave .jsonl files there",
                    )
                _publish(partial, folder, "text", spec)
        # Named one by one, so that the manifest beside them is not read as text.
        return folder / "files"

    def _learned_tokenizer(self, section: TrainedTokenizer) -> Path:
        pieces = [
            piece for source in self._recipe.data.train if source.tokens is None for piece in self._pieces(source)
        ]
        spec = {"training": section.train.model_dump(), "inputs": [_identity(piece) for piece in pieces]}
        folder = self._folder("tokenizer", spec)
        with self._making(folder, "the recipe's tokenizer") as partial:
            if partial is not None:
                files = train_tokenizer(
                    pieces,
                    vocab_size=section.train.vocab_size,
                    min_frequency=section.train.min_frequency,
                    eod=section.train.eod,
                    options=self._options,
                    reporter=self._reporter,
                )
                for name, data in files.items():
                    (partial / name).write_bytes(data)
                _publish(partial, folder, "tokenizer", spec)
        return folder / "files"

    def _given_tokens(self, prefixes: Sequence[str], name: str, label: str, weight: float | None) -> PreparedSource:
        from trainshed.data.tokens.indexed import IndexedReader

        documents = tokens = 0
        tokenizer = self.tokenizer()
        for prefix in prefixes:
            for shard in shard_prefixes(prefix):
                manifest = read_token_manifest(shard, self._options)
                if manifest is None:
                    self._reporter.note(f"{shard}: no manifest (not made by Trainshed); taken as it is")
                elif tokenizer is not None and manifest.spec["tokenizer"] != tokenizer.sha256:
                    raise InputError(
                        f"these tokens were made with another tokenizer ({manifest.tokenizer})",
                        where=shard,
                        hint=f"prepare the text again with {tokenizer.address}, or name its tokenizer in the recipe",
                    )
                with IndexedReader(shard) as reader:
                    documents += reader.documents
                    tokens += reader.tokens
        return PreparedSource(name, label, weight, tuple(prefixes), None, documents, tokens, reused=True)

    def _prove(self, prefix: str, manifest: TokenManifest) -> None:
        """Read new tokens back once and store the verdict beside them."""
        path, proven = Path(f"{prefix}.verdict.json"), manifest.manifest().sha256
        if path.exists() and orjson.loads(path.read_bytes()).get("manifest") == proven:
            return
        self._must_make(f"the verdict on {prefix}")
        (verdict,) = verify(prefix, reporter=self._reporter)
        if not verdict.passed:
            raise CorruptData(
                f"tokens just written do not read back: {'; '.join(verdict.problems)}",
                where=prefix,
                hint="check the disk, then run it again",
            )
        body = {"schema": VERDICT_SCHEMA, "manifest": proven, "passed": True, "checked": verdict.checked}
        LocalStore(path.parent).put(path.name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")

    def _folder(self, kind: str, spec: dict[str, Any]) -> Path:
        return artefact_folder(self._root, kind, spec)

    @contextmanager
    def _making(self, folder: Path, what: str) -> Iterator[Path | None]:
        """Yield an empty folder to make an artefact in, or None if it is already there."""
        if _is_there(folder):
            yield None
            return
        self._must_make(what)
        with only_maker(folder):
            yield None if _is_there(folder) else _emptied(folder)

    def _must_make(self, what: str) -> None:
        if not self._make:
            raise NotFound(f"{what} is not made yet", where=str(self._root), hint="run `trainshed run RECIPE` first")


def _identity(piece: Piece) -> dict[str, Any]:
    """What a piece is, without reading it: a store's version changes whenever the content does."""
    identity = asdict(piece)
    if "://" not in piece.address:
        identity["address"] = os.path.abspath(piece.address)
    elif piece.shown != piece.address:
        # A recipe's query holds no credential, but is not written anywhere: `?file=a` and `?file=b` differ by its hash.
        identity |= {"address": piece.shown, "query": hashlib.sha256(piece.address.encode()).hexdigest()[:16]}
    return identity


def _shard_spec(pieces: Sequence[Piece], how: Tokenizing) -> dict[str, Any]:
    return {"how": how.spec(), "on_bad_line": how.on_bad_line, "inputs": [_identity(piece) for piece in pieces]}


def _content(manifests: Sequence[TokenManifest]) -> str:
    """The hashes of the `.idx` files: they hold the token type and every length, all that an index depends on."""
    digests = [file.checksum for manifest in manifests for file in manifest.files if file.path.endswith(".idx")]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _is_there(folder: Path) -> bool:
    """Whether an artefact has its manifest; one whose files have changed since is an error, not an absence."""
    store = LocalStore(folder)
    try:
        manifest = Manifest.read(store, MANIFEST)
    except NotFound:
        return False
    manifest.verify_files(store, "files", deep=False)
    return True


def _emptied(folder: Path) -> Path:
    """A fresh folder to make an artefact in; what a killed attempt left is thrown away."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _publish(partial: Path, folder: Path, kind: str, spec: dict[str, Any]) -> None:
    """Move finished files into place, then write their manifest: from then on the artefact exists."""
    store = LocalStore(partial)
    entries = [FileEntry(info.path, info.size, sha256_of(store.stream(info.path))) for info in store.list()]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    partial.replace(folder / "files")
    Manifest.of(kind, spec, entries).write(LocalStore(folder), MANIFEST)

"""The data artefacts of a recipe: text, tokenizer, tokens and their index, found by hash or made.

Each one is kept in `<store>/artefacts/<kind>/<hash>/` and shared by runs. The hash is of what the artefact is made
from, so a rerun finds it and a change makes another one. Each shard of tokens is an artefact of its own: a changed
input costs its shard and nothing else.

The code that reads text names the flags of `data prepare` in its errors. A person who runs a recipe writes keys
instead of flags, so here errors are rewritten to name the keys.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from trainshed.data.prepare import PrepareResult, ShardJob, TokenizeConfig, hash_input, prepare
from trainshed.data.text.corpus import assign_shards, find_inputs, run_script, script_spec
from trainshed.data.text.reader import InputSlice
from trainshed.data.tokenize.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from trainshed.data.tokens.manifest import InputRecord, TokenManifest, read_token_manifest
from trainshed.data.tokens.prepared_data import (
    FileFingerprint,
    PreparedSource,
    StartedRun,
    changed_file_error,
    check_token_files,
    find_file_change,
    fingerprint_from_dict,
    fingerprint_shard,
)
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import CorruptData, InputError, NotFound, RecipeError
from trainshed.plugins import source_hash
from trainshed.recipe import Recipe, TrainedTokenizer
from trainshed.recipe.data import Source, SourceKeys
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, StoreOptions, sha256_of
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import FileEntry, Manifest, artefact_folder

RECIPE_KEYS = (
    (r"--format with", "`format` with"),
    (r"--format (\w+)", r"`format: \1`"),
    (r"--key", "`key`"),
    (r"--on-bad-line (\w+)", r"`data.on_bad_line: \1`"),
    (r"--shards (\d+)", r"`data.shards: \1`"),
    (r"--no-eod", "`data.eod: false`"),
    (r"--eod (TOKEN)", r"`data.eod: \1`"),
    (r"--eod", "`data.eod`"),
    (r"no --bos", "`data.bos: false`"),
    (r"--bos", "`data.bos`"),
    (
        r"write --encoder tokenizers",
        "prepare the text by `trainshed data prepare --encoder tokenizers` and name it as `tokens: PREFIX`",
    ),
)
"""Flags of `data prepare` and the keys that stand for them."""


def flags_to_recipe_keys(text: str) -> str:
    """Write the keys of a recipe in place of flags."""
    for flag, key in RECIPE_KEYS:
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", key, text)
    return text


@contextmanager
def errors_with_recipe_keys(place: str) -> Iterator[None]:
    """Let errors about text name keys; `place` says where in the recipe the source or the section stands."""
    try:
        yield
    except RecipeError:
        raise
    except InputError as error:
        what, hint = flags_to_recipe_keys(error.what), flags_to_recipe_keys(error.hint or "")
        if (what, hint) == (error.what, error.hint or ""):
            raise
        raise type(error)(what, where=error.where, hint=f"{hint} ({place})" if hint else f"see {place}") from None


MANIFEST = "manifest.json"
VERDICT_SCHEMA = "trainshed.verdict/1"


class DataArtefacts:
    """Makes and finds the data artefacts of one recipe.

    With `make=False` nothing is made: what is missing is an error that says which command makes it. `began` is the run
    that they are for, where it has begun: it goes on with the text and the tokens it began with, or not at all.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: Path,
        *,
        make: bool = True,
        tokenizer: Tokenizer | None = None,
        workers: int | None = None,
        options: StoreOptions | None = None,
        began: StartedRun | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        self._recipe, self._root, self._began = recipe, store / "artefacts", began
        self._make, self._workers, self._options, self._reporter = make, workers, options, reporter
        self._tokenizer = tokenizer

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

    def source(self, source: SourceKeys, label: str) -> PreparedSource:
        """Make or find the tokens of one source; `label` is its part of the shuffle's key."""
        name, weight = source.name or label, source.weight if isinstance(source, Source) else None
        if source.tokens is not None:
            return self._given_tokens(source.tokens, name, label, weight)
        how = self._tokenizing()
        jobs = self._shard_jobs(source, how)
        manifests = [read_token_manifest(job.prefix) for job in jobs]
        reused = all(m is not None and m.files_are_there(j.prefix) for m, j in zip(manifests, jobs, strict=True))
        if not reused:
            self._must_make(f"the tokens of source '{name}'")
            prepared = self._prepare(source, jobs, how)
            manifests, reused = list(prepared.manifests), not prepared.made
        found = [manifest for manifest in manifests if manifest is not None]
        files = [file for job, manifest in zip(jobs, found, strict=True) for file in self._prove(job.prefix, manifest)]
        return PreparedSource(
            name=name,
            label=label,
            weight=weight,
            prefixes=tuple(job.prefix for job in jobs),
            content=_index_files_hash(found),
            documents=sum(manifest.counts.documents for manifest in found),
            tokens=sum(manifest.counts.tokens for manifest in found),
            reused=reused,
            files=tuple(files),
        )

    def make_part(self, source: SourceKeys, part: int, parts: int) -> int:
        """Make every `parts`-th shard of a source, beginning with `part`; returns how many shards were tokenised."""
        if source.tokens is not None:
            return 0
        how = self._tokenizing()
        jobs = self._shard_jobs(source, how)[part::parts]
        prepared = self._prepare(source, jobs, how)
        for job, manifest in zip(jobs, prepared.manifests, strict=True):
            self._prove(job.prefix, manifest)
        return prepared.made

    def refuse_changed_text(self, sources: Mapping[str, SourceKeys]) -> None:
        """Stop before any work where the text that a begun run was tokenised from has changed."""
        for label, source in sources.items():
            known = self._began.data.source(label) if self._began is not None else None
            if self._began is None or known is None or source.tokens is not None:
                continue
            manifests = [manifest for prefix in known.prefixes if (manifest := read_token_manifest(prefix)) is not None]
            if len(manifests) < len(known.prefixes):
                continue  # they are made again, and then compared with what they were
            records = [record for manifest in manifests for record in manifest.inputs]
            change = self._text_change(records, [piece for pieces in self._shards(source) for piece in pieces])
            if change is not None:
                raise InputError(
                    f"the text of source '{known.name}' has changed since the run {self._began.name} began: {change}",
                    where=self._place(source, source.kind),
                    hint="put the old text back, or start another run on the new one with --id NAME",
                )

    def _prepare(self, source: SourceKeys, jobs: Sequence[ShardJob], how: TokenizeConfig) -> PrepareResult:
        """Make shards; those that another run is making are waited for, since they are the same."""
        with errors_with_recipe_keys(self._place(source)):
            return prepare(jobs, how, workers=self._workers, wait=True, options=self._options, reporter=self._reporter)

    def _place(self, source: SourceKeys, key: str | None = None) -> str:
        """Where a source, or a key of it, stands in the recipe."""
        number = next((at for at, each in enumerate(self._recipe.data.train) if each is source), None)
        path = "data.validation" if number is None else f"data.train.{number}"
        return self._recipe.where(f"{path}.{key}" if key else path)

    def _shard_jobs(self, source: SourceKeys, how: TokenizeConfig) -> list[ShardJob]:
        return [
            ShardJob(str(self._folder("tokens", _shard_spec(pieces, how)) / "tokens"), tuple(pieces))
            for pieces in self._shards(source)
        ]

    def _shards(self, source: SourceKeys) -> list[list[InputSlice]]:
        pieces = self._pieces(source)
        with errors_with_recipe_keys(self._recipe.where("data.shards")):
            return assign_shards(pieces, self._recipe.data.shards, self._options)

    def _pieces(self, source: SourceKeys) -> list[InputSlice]:
        patterns = list(source.path) if source.path is not None else [str(self._script_output(source))]
        with errors_with_recipe_keys(self._place(source)):
            return find_inputs(
                patterns,
                key=source.key or "text",
                kind=source.format,
                documents=source.documents or "file",
                options=self._options,
            )

    def _tokenizing(self) -> TokenizeConfig:
        tokenizer, data = self.tokenizer(), self._recipe.data
        if tokenizer is None:
            raise InputError("there is text to tokenise and no tokenizer", where=self._recipe.where("tokenizer"))
        wanted = data.eod if isinstance(data.eod, str) else None
        with errors_with_recipe_keys(self._recipe.where("data")):
            return TokenizeConfig(
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
        spec = {"training": section.train.model_dump(), "inputs": [_input_identity(piece) for piece in pieces]}
        folder = self._folder("tokenizer", spec)
        with self._making(folder, "the recipe's tokenizer") as partial:
            if partial is not None:
                with errors_with_recipe_keys(self._recipe.where("data.train")):
                    files = train_tokenizer(
                        pieces,
                        vocab_size=section.train.vocab_size,
                        min_frequency=section.train.min_frequency,
                        eod=section.train.eod,
                        on_bad_line=self._recipe.data.on_bad_line,
                        options=self._options,
                        reporter=self._reporter,
                    )
                for name, data in files.items():
                    (partial / name).write_bytes(data)
                _publish(partial, folder, "tokenizer", spec)
        return folder / "files"

    def _given_tokens(self, prefixes: Sequence[str], name: str, label: str, weight: float | None) -> PreparedSource:
        from trainshed.data.tokens.indexed_dataset import IndexedDataset

        documents = tokens = 0
        tokenizer = self.tokenizer()
        files: list[FileFingerprint] = []
        for prefix in prefixes:
            for shard in shard_prefixes(prefix):
                manifest = read_token_manifest(shard, self._options)
                files += self._given_files(shard, manifest, label)
                if manifest is None:
                    self._reporter.note(f"{shard}: no manifest (not made by Trainshed); taken as it is")
                elif tokenizer is not None and manifest.spec["tokenizer"] != tokenizer.sha256:
                    raise InputError(
                        f"these tokens were made with another tokenizer ({manifest.tokenizer})",
                        where=shard,
                        hint=f"prepare the text again with {tokenizer.address}, or name its tokenizer in the recipe",
                    )
                config = self._recipe.model.config
                if manifest is not None and config is not None and manifest.spec["vocab_size"] > config.vocab_size:
                    raise InputError(
                        f"these tokens are of a vocabulary of {manifest.spec['vocab_size']:,} ({manifest.tokenizer}), "
                        f"more than the {config.vocab_size:,} rows of the model's embedding",
                        where=shard,
                        hint="name the model that they were made for, or prepare the text again with its tokenizer",
                    )
                with IndexedDataset(shard) as reader:
                    documents += reader.documents
                    tokens += reader.tokens
        return PreparedSource(
            name, label, weight, tuple(prefixes), None, documents, tokens, reused=True, files=tuple(files)
        )

    def _given_files(self, shard: str, manifest: TokenManifest | None, label: str) -> tuple[FileFingerprint, ...]:
        """Look at tokens that were given: against their manifest's sizes, and what they were when the run began."""
        known = self._began.data.source(label) if self._began is not None else None
        seen = [file for file in known.files if file.path.rpartition(".")[0] == shard] if known is not None else []
        differences = [found for file in seen if (found := find_file_change(file, self._options)) is not None]
        if self._make and manifest is not None and differences and all(kind == "time" for kind, _ in differences):
            self._read_whole(shard, "was written again since the run began")
        else:
            check_token_files(seen, self._options, self._reporter)
        files = fingerprint_shard(shard, manifest, self._options)
        sizes = {entry.path.rpartition(".")[2]: entry.size for entry in manifest.files} if manifest else {}
        for file in files:
            expected = sizes.get(file.path.rpartition(".")[2], file.size)
            if file.size != expected:
                raise changed_file_error(file.path, f"it has {file.size:,} bytes, its manifest says {expected:,}")
        return files

    def _prove(self, prefix: str, manifest: TokenManifest) -> tuple[FileFingerprint, ...]:
        """Read new tokens back once and store the verdict beside them; later, see that they are still what was read.

        That costs a look at their sizes, times and a few blocks. Only tokens that were written again are read again.
        """
        path, proven = Path(f"{prefix}.verdict.json"), manifest.manifest().sha256
        kept = orjson.loads(path.read_bytes()) if path.exists() else {}
        why = None
        if kept.get("manifest") == proven and "files" in kept:
            known = [fingerprint_from_dict(each | {"path": str(path.parent / each["path"])}) for each in kept["files"]]
            if not self._make:
                check_token_files(known, self._options, self._reporter)
                return tuple(known)
            differences = [(file, found) for file in known if (found := find_file_change(file)) is not None]
            if not differences:
                return tuple(known)
            for file, (kind, words) in differences:
                if kind != "time":
                    raise changed_file_error(file.path, words)
            why = "was written again since it was proven"
        elif kept.get("manifest") == proven:
            why = "was proven by a version that kept no fingerprint"
        self._must_make(f"the verdict on {prefix}")
        # Before reading: what is written from then on has another time.
        files = fingerprint_shard(prefix, manifest)
        checked = self._read_whole(prefix, why)
        body = {
            "schema": VERDICT_SCHEMA,
            "manifest": proven,
            "passed": True,
            "checked": checked,
            "files": [asdict(replace(file, path=Path(file.path).name)) for file in files],
        }
        LocalStore(path.parent).put(path.name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
        return files

    def _read_whole(self, prefix: str, why: str | None) -> list[str]:
        """Read every byte of a shard against its manifest, and return what was checked; `why` where it is not new."""
        if why is not None:
            self._reporter.note(f"{prefix} {why}: it is read whole")
        (verdict,) = verify_tokens(prefix, reporter=self._reporter)
        if verdict.passed:
            return verdict.checked
        raise CorruptData(
            f"these tokens are not what their manifest says: {'; '.join(verdict.problems)}",
            where=prefix,
            hint=f"put the old files back, or have them made again: remove {prefix}.* and run the recipe",
        )

    def _text_change(self, records: Sequence[InputRecord], pieces: Sequence[InputSlice]) -> str | None:
        """Say what is different in a corpus; a file of the same size and another time is read to know."""
        before = {record.address: record.size for record in records}
        now = {piece.address: piece.size for piece in pieces}
        for address in before:
            if address not in now:
                return f"{address} is no longer part of it"
        for address, size in now.items():
            if address not in before:
                return f"{address} is new"
            if size != before[address]:
                return f"{address} has {size:,} bytes, and had {before[address]:,}"
        known = {record.place: record for record in records}
        for piece in pieces:
            record = known.get(InputRecord.of(piece, None).place)
            if record is None or record.version == piece.version:
                continue
            if record.sha256 != hash_input(piece, self._options):
                return f"{piece.address} holds other text of the same size"
        return None

    def _folder(self, kind: str, spec: dict[str, Any]) -> Path:
        return artefact_folder(self._root, kind, spec)

    @contextmanager
    def _making(self, folder: Path, what: str) -> Iterator[Path | None]:
        """Yield an empty folder to make an artefact in, or None if it is already there."""
        if _artefact_exists(folder):
            yield None
            return
        self._must_make(what)
        with artefact_lock(folder, self._reporter):
            yield None if _artefact_exists(folder) else _fresh_folder(folder)

    def _must_make(self, what: str) -> None:
        if not self._make:
            raise NotFound(f"{what} is not made yet", where=str(self._root), hint="run `trainshed run RECIPE` first")


def _input_identity(piece: InputSlice) -> dict[str, Any]:
    """What a piece is, without reading it: a store's version changes whenever the content does."""
    identity = asdict(piece)
    if "://" not in piece.address:
        identity["address"] = os.path.abspath(piece.address)
    elif piece.shown != piece.address:
        # A recipe's query holds no credential, but is not written anywhere: `?file=a` and `?file=b` differ by its hash.
        identity |= {"address": piece.shown, "query": hashlib.sha256(piece.address.encode()).hexdigest()[:16]}
    if (reader := source_hash("text format", piece.format.kind)) is not None:
        identity["reader"] = reader
    return identity


def _shard_spec(pieces: Sequence[InputSlice], how: TokenizeConfig) -> dict[str, Any]:
    return {"how": how.spec(), "on_bad_line": how.on_bad_line, "inputs": [_input_identity(piece) for piece in pieces]}


def _index_files_hash(manifests: Sequence[TokenManifest]) -> str:
    """The hashes of the `.idx` files: they hold the token type and every length, all that an index depends on."""
    digests = [file.checksum for manifest in manifests for file in manifest.files if file.path.endswith(".idx")]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _artefact_exists(folder: Path) -> bool:
    """Whether an artefact has its manifest; one whose files have changed since is an error, not an absence."""
    store = LocalStore(folder)
    try:
        manifest = Manifest.read(store, MANIFEST)
    except NotFound:
        return False
    manifest.verify_files(store, "files", deep=False)
    return True


def _fresh_folder(folder: Path) -> Path:
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

"""The data artefacts of a recipe: text, tokenizer, tokens and their index, found by hash or made.

Each one is kept in `<store>/artefacts/<kind>/<hash>/` and shared by runs. The hash is of what the artefact is made
from, so a rerun finds it and a change makes another one. Each shard of tokens is an artefact of its own: a changed
input costs its shard and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from trainshed.data.chat.conversation import row_columns
from trainshed.data.chat.inspect import ChatInspection, inspect_conversations, inspect_rows
from trainshed.data.chat.tokenize import check_markers, recipe_chat_settings
from trainshed.data.prepare import PrepareResult, ShardJob, TokenizeConfig, hash_input, prepare
from trainshed.data.recipe_keys import errors_with_recipe_keys
from trainshed.data.text.corpus import assign_shards, count_file_rows, find_inputs, run_script, script_spec
from trainshed.data.text.reader import InputSlice
from trainshed.data.tokenize.added_tokens import added_token_files, read_generation_config
from trainshed.data.tokenize.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files, train_tokenizer
from trainshed.data.tokens.manifest import (
    InputRecord,
    TokenManifest,
    combine_manifests,
    describe_conversations,
    read_token_manifest,
)
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.data.tokens.token_source import (
    FileFingerprint,
    StartedRun,
    TokenSource,
    changed_file_error,
    check_token_files,
    find_file_change,
    fingerprint_shard,
    has_learned,
)
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.plugins import source_hash
from trainshed.recipe import Recipe, TrainedTokenizer
from trainshed.recipe.data import Source, SourceKeys
from trainshed.recipe.yaml_io import dotted_key
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, StoreOptions, sha256_of
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import MANIFEST, FileEntry, Manifest, artefact_folder

VERDICT_SCHEMA = "trainshed.verdict/1"


class DataArtefacts:
    """Makes and finds the data artefacts of one recipe.

    With `make=False` nothing is made: what is missing is an error that says which command makes it. `started_run` is
    the run that they are for, if it has started: it must go on with the text and the tokens it began with. `tokenizer`
    is the one at the recipe's address, if it is loaded already, without the tokens that `model.added_tokens` adds.
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
        started_run: StartedRun | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        self._recipe, self._root, self._started_run = recipe, store / "artefacts", started_run
        self._make, self._workers, self.options, self._reporter = make, workers, options, reporter
        self._loaded_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None

    @property
    def indexes(self) -> Path:
        """Where the indexes of sources are kept."""
        return self._root / "index"

    def tokenizer(self) -> Tokenizer | None:
        """Return the recipe's tokenizer, trained on its sources if the recipe says so; None if it names none.

        It has the tokens of `model.added_tokens`.
        """
        if self._tokenizer is None:
            plain, texts = self._plain_tokenizer(), self._recipe.model.added_tokens
            self._tokenizer = plain if plain is None or not texts else self._extended_tokenizer(plain, texts)
        return self._tokenizer

    def _plain_tokenizer(self) -> Tokenizer | None:
        if self._loaded_tokenizer is None and self._recipe.tokenizer is not None:
            if isinstance(self._recipe.tokenizer, TrainedTokenizer):
                address = str(self._trained_tokenizer(self._recipe.tokenizer))
            else:
                address = self._recipe.tokenizer
            self._loaded_tokenizer = load_tokenizer(address, self.options)
        return self._loaded_tokenizer

    def _extended_tokenizer(self, plain: Tokenizer, texts: Sequence[str]) -> Tokenizer:
        """Return a tokenizer with added tokens as an artefact; where it is not made yet and may not be, in memory."""
        files = added_token_files(plain, texts)
        spec = {
            "tokenizer": plain.sha256,
            "added_tokens": list(texts),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        }
        folder = self._folder("tokenizer", spec)
        if not self._make and not _artefact_exists(folder):
            return tokenizer_from_files(plain.address, files)
        with self._making_artefact(folder, "the tokenizer with added tokens") as partial:
            if partial is not None:
                for name, data in {**files, **read_generation_config(plain.address, self.options)}.items():
                    (partial / name).write_bytes(data)
                _publish(partial, folder, "tokenizer", spec)
        return load_tokenizer(str(folder / "files"), self.options)

    def source(self, source: SourceKeys, label: str) -> TokenSource:
        """Make or find the tokens of one source; `label` is its part of the shuffle's key."""
        name, weight = source.name or label, source.weight if isinstance(source, Source) else None
        if source.tokens is not None:
            return self._given_tokens(source.tokens, name, label, weight)
        config = self._tokenize_config(source)
        jobs = self._shard_jobs(source, config)
        existing = [manifest for job in jobs if (manifest := self._existing_manifest(job.prefix)) is not None]
        if len(existing) == len(jobs):
            manifests, reused = existing, True
        else:
            self._require_making_allowed(f"the tokens of source '{name}'")
            prepared = self._prepare(source, jobs, config)
            manifests, reused = prepared.manifests, not prepared.made
        proven = [self._verify_once(job.prefix, manifest) for job, manifest in zip(jobs, manifests, strict=True)]
        self._report_conversations(name, manifests)
        return TokenSource(
            name=name,
            label=label,
            weight=weight,
            prefixes=tuple(job.prefix for job in jobs),
            content=_index_files_hash(manifests),
            documents=sum(manifest.counts.documents for manifest in manifests),
            tokens=sum(manifest.counts.tokens for manifest in manifests),
            reused=reused,
            files=tuple(file for files in proven for file in files),
        )

    def inspect(self, source: SourceKeys, label: str, *, rows: int, samples: int) -> ChatInspection:
        """Describe the conversations of a source: prepared ones, or the first rows of those that are to be."""
        if source.tokens is not None:
            return inspect_conversations(source.tokens[0], self.tokenizer(), samples=samples, reporter=self._reporter)
        config = self._tokenize_config(source)
        assert config.chat is not None, "only conversations are inspected"
        inputs = self._inputs(source)
        return inspect_rows(
            source.name or label,
            inputs,
            config.tokenizer,
            config.chat,
            rows=rows,
            samples=samples,
            options=self.options,
        )

    def make_shards(self, source: SourceKeys, part: int, parts: int) -> int:
        """Make every `parts`-th shard of a source, from shard `part` on; return how many shards were tokenized."""
        if source.tokens is not None:
            return 0
        config = self._tokenize_config(source)
        jobs = self._shard_jobs(source, config)[part::parts]
        prepared = self._prepare(source, jobs, config)
        for job, manifest in zip(jobs, prepared.manifests, strict=True):
            self._verify_once(job.prefix, manifest)
        return prepared.made

    def refuse_changed_text(self, sources: Mapping[str, SourceKeys]) -> None:
        """Stop before any work if the text of a run has changed since the run started."""
        run = self._started_run
        for label, source in sources.items():
            before = run.data.source(label) if run is not None else None
            if run is None or before is None or source.tokens is not None:
                continue
            manifests = [file for prefix in before.prefixes if (file := read_token_manifest(prefix)) is not None]
            if len(manifests) < len(before.prefixes):
                continue  # they are made again, and then compared with what they were
            records = [record for manifest in manifests for record in manifest.inputs]
            change = self._text_change(records, [item for inputs in self._assigned_shards(source) for item in inputs])
            if change is not None:
                raise InputError(
                    f"the text of source '{before.name}' has changed since the run {run.name} began: {change}",
                    where=self._recipe_location(source, source.kind),
                    hint="put the old text back, or start another run on the new one with --id NAME",
                )

    def _existing_manifest(self, prefix: str) -> TokenManifest | None:
        """Return the manifest of a shard, if the shard has one and its files exist."""
        manifest = read_token_manifest(prefix)
        return manifest if manifest is not None and manifest.files_exist(prefix) else None

    def _prepare(self, source: SourceKeys, jobs: Sequence[ShardJob], config: TokenizeConfig) -> PrepareResult:
        """Make shards; wait for those that another run is making, since they are the same."""
        with errors_with_recipe_keys(self._recipe_location(source)):
            return prepare(
                jobs, config, workers=self._workers, wait=True, options=self.options, reporter=self._reporter
            )

    def _recipe_location(self, source: SourceKeys, key: str | None = None) -> str:
        """Return where a source, or a key of it, is in the recipe."""
        path = next((path for path, item in self._recipe.sources() if item is source), ("data", "validation"))
        return self._recipe.where(dotted_key((*path, key) if key else path))

    def _shard_jobs(self, source: SourceKeys, config: TokenizeConfig) -> list[ShardJob]:
        return [
            ShardJob(str(self._folder("tokens", _shard_spec(inputs, config)) / "tokens"), tuple(inputs))
            for inputs in self._assigned_shards(source)
        ]

    def _assigned_shards(self, source: SourceKeys) -> list[list[InputSlice]]:
        inputs = self._inputs(source)
        with errors_with_recipe_keys(self._recipe.where("data.shards")):
            return assign_shards(inputs, self._recipe.data.shards, self.options)

    def _inputs(self, source: SourceKeys) -> list[InputSlice]:
        patterns = list(source.path) if source.path is not None else [str(self._script_output(source))]
        with errors_with_recipe_keys(self._recipe_location(source)):
            return find_inputs(
                patterns,
                key=source.key or "text",
                format=source.format,
                documents=source.documents or "file",
                columns=self._row_columns(source),
                split=source.split,
                limit=source.limit,
                count_rows=self._count_rows,
                options=self.options,
            )

    def _row_columns(self, source: SourceKeys) -> tuple[str, ...] | None:
        """Return the columns that conversations of a source are read from; None where its documents are text."""
        if self._recipe.sample_format == "text":
            return None
        return row_columns(self._recipe.sample_format, source.columns or {})

    def _count_rows(self, item: InputSlice) -> int:
        """Count the rows of a file once: a file that has to be read for it is not read at every start."""
        folder = self._folder("rows", _input_identity(item))
        path = folder / "rows.json"
        if path.exists():
            return int(orjson.loads(path.read_bytes())["rows"])
        rows = count_file_rows(item, self.options)
        folder.mkdir(parents=True, exist_ok=True)
        LocalStore(folder).put(path.name, orjson.dumps({"rows": rows}) + b"\n")
        return rows

    def _tokenize_config(self, source: SourceKeys) -> TokenizeConfig:
        tokenizer, data = self.tokenizer(), self._recipe.data
        if tokenizer is None:
            raise InputError("there is text to tokenise and no tokenizer", where=self._recipe.where("tokenizer"))
        if self._recipe.sample_format != "text":
            chat = recipe_chat_settings(self._recipe, tokenizer, source, self.options)
            with errors_with_recipe_keys(self._recipe.where("data.template")):
                check_markers(chat, tokenizer, self._reporter)
            return TokenizeConfig(tokenizer, eod=None, on_bad_line=data.on_bad_line, chat=chat)
        eod = data.eod if isinstance(data.eod, str) else None
        with errors_with_recipe_keys(self._recipe.where("data")):
            return TokenizeConfig(
                tokenizer,
                eod=tokenizer.end_of_document(eod) if data.eod else None,
                bos=tokenizer.beginning_of_document() if data.bos else None,
                on_bad_line=data.on_bad_line,
            )

    def _report_conversations(self, name: str, manifests: Sequence[TokenManifest]) -> None:
        counts = combine_manifests(manifests).counts
        if counts.chat is not None:
            self._reporter.note(f"{name}: {describe_conversations(counts)}")

    def _script_output(self, source: SourceKeys) -> Path:
        script = self._recipe.folder / str(source.script)
        spec = script_spec(script, source.args)
        folder = self._folder("text", spec)
        with self._making_artefact(folder, f"the text that {source.script} writes") as partial:
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

    def _trained_tokenizer(self, section: TrainedTokenizer) -> Path:
        inputs = [item for source in self._recipe.data.train if source.tokens is None for item in self._inputs(source)]
        spec = {"training": section.train.model_dump(), "inputs": [_input_identity(item) for item in inputs]}
        folder = self._folder("tokenizer", spec)
        with self._making_artefact(folder, "the recipe's tokenizer") as partial:
            if partial is not None:
                with errors_with_recipe_keys(self._recipe.where("data.train")):
                    files = train_tokenizer(
                        inputs,
                        vocab_size=section.train.vocab_size,
                        min_frequency=section.train.min_frequency,
                        eod=section.train.eod,
                        on_bad_line=self._recipe.data.on_bad_line,
                        options=self.options,
                        reporter=self._reporter,
                    )
                for name, data in files.items():
                    (partial / name).write_bytes(data)
                _publish(partial, folder, "tokenizer", spec)
        return folder / "files"

    def _given_tokens(self, prefixes: Sequence[str], name: str, label: str, weight: float | None) -> TokenSource:
        """Check tokens that the recipe names as they are, and describe them."""
        files: list[FileFingerprint] = []
        for shard in (shard for prefix in prefixes for shard in shard_prefixes(prefix, self.options)):
            manifest = read_token_manifest(shard, self.options)
            files += self._given_files(shard, manifest, label)
            if manifest is None:
                self._reporter.note(f"{shard}: no manifest (not made by Trainshed); taken as it is")
            else:
                self._check_vocabulary(shard, manifest)
            self._check_learned(shard, manifest)
        return TokenSource.open(label, prefixes, name=name, weight=weight, files=files, options=self.options)

    def _check_learned(self, shard: str, manifest: TokenManifest | None) -> None:
        """Refuse conversations where the recipe wants text, text where it wants conversations, and too long ones."""
        wanted, length = self._recipe.sample_format, self._recipe.data.sequence_length
        learned = has_learned(shard, manifest, self.options)
        if learned and wanted == "text":
            raise InputError(
                "these tokens are conversations: some of them are learned, and others are not",
                where=shard,
                hint="write `train.mode: finetune` without `data.format: text`",
            )
        if not learned and wanted != "text":
            raise InputError(
                "these tokens do not say which of them are learned (there is no .learned file)",
                where=shard,
                hint="prepare them from conversations, or write `data.format: text` to learn all of them",
            )
        answers = manifest.spec.get("answers") if manifest is not None else None
        if answers is None or wanted == "text":
            return
        if (answers["format"] == "preference") != (wanted == "preference"):
            raise InputError(
                f"these tokens were made of {answers['format']} rows, and the recipe wants {wanted}",
                where=shard,
                hint="prepare them again, or write another `train.mode`",
            )
        if length is not None and answers["sequence_length"] > length:
            raise InputError(
                f"these conversations have up to {answers['sequence_length']:,} tokens, more than the {length:,} of "
                "data.sequence_length",
                where=shard,
                hint=f"write `data.sequence_length: {answers['sequence_length']}`, or prepare them again",
            )

    def _check_vocabulary(self, shard: str, manifest: TokenManifest) -> None:
        """Refuse tokens of another tokenizer than the recipe's, or of a larger vocabulary than the model's."""
        tokenizer, config = self.tokenizer(), self._recipe.model.config
        if tokenizer is not None and manifest.spec["tokenizer"] != tokenizer.sha256:
            raise InputError(
                f"these tokens were made with another tokenizer ({manifest.tokenizer})",
                where=shard,
                hint=f"prepare the text again with {tokenizer.address}, or name its tokenizer in the recipe",
            )
        grows = tokenizer is not None and self._recipe.model.added_tokens is not None
        if config is not None and not grows and manifest.spec["vocab_size"] > config.vocab_size:
            raise InputError(
                f"these tokens are of a vocabulary of {manifest.spec['vocab_size']:,} ({manifest.tokenizer}), "
                f"more than the {config.vocab_size:,} rows of the model's embedding",
                where=shard,
                hint="name the model that they were made for, or prepare the text again with its tokenizer",
            )

    def _given_files(self, shard: str, manifest: TokenManifest | None, label: str) -> tuple[FileFingerprint, ...]:
        """Check given tokens against the sizes in their manifest, and against what they were when the run began."""
        before = self._started_run.data.source(label) if self._started_run is not None else None
        known = [file for file in before.files if file.path.rpartition(".")[0] == shard] if before is not None else []
        changes = [change for file in known if (change := find_file_change(file, self.options)) is not None]
        if self._make and manifest is not None and changes and all(kind == "time" for kind, _ in changes):
            self._verify_fully(shard, "was written again since the run began")
        else:
            check_token_files(known, self.options, self._reporter)
        files = fingerprint_shard(shard, manifest, self.options)
        sizes = {entry.path.rpartition(".")[2]: entry.size for entry in manifest.files} if manifest else {}
        for file in files:
            expected = sizes.get(file.path.rpartition(".")[2], file.size)
            if file.size != expected:
                raise changed_file_error(file.path, f"it has {file.size:,} bytes, its manifest says {expected:,}")
        return files

    def _verify_once(self, prefix: str, manifest: TokenManifest) -> tuple[FileFingerprint, ...]:
        """Verify new tokens fully and store the verdict beside them; later, check that they have not changed since.

        The later check looks at sizes, times and a few blocks. Tokens that were written again are verified again.
        """
        path, proven = Path(f"{prefix}.verdict.json"), manifest.to_manifest().sha256
        verdict = orjson.loads(path.read_bytes()) if path.exists() else {}
        reason = None
        if verdict.get("manifest") == proven and "files" in verdict:
            known = [FileFingerprint(**file | {"path": str(path.parent / file["path"])}) for file in verdict["files"]]
            if not self._make:
                check_token_files(known, self.options, self._reporter)
                return tuple(known)
            changes = [(file, change) for file in known if (change := find_file_change(file)) is not None]
            if not changes:
                return tuple(known)
            for file, (kind, description) in changes:
                if kind != "time":
                    raise changed_file_error(file.path, description)
            reason = "was written again since it was proven"
        elif verdict.get("manifest") == proven:
            reason = "was proven by a version that kept no fingerprint"
        self._require_making_allowed(f"the verdict on {prefix}")
        # Before reading: a file that is written later has another time.
        files = fingerprint_shard(prefix, manifest)
        checked = self._verify_fully(prefix, reason)
        body = {
            "schema": VERDICT_SCHEMA,
            "manifest": proven,
            "passed": True,
            "checked": checked,
            "files": [asdict(replace(file, path=Path(file.path).name)) for file in files],
        }
        LocalStore(path.parent).put(path.name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
        return files

    def _verify_fully(self, prefix: str, reason: str | None) -> list[str]:
        """Read every byte of a shard and return what was checked; `reason` says why, unless the shard is new."""
        if reason is not None:
            self._reporter.note(f"{prefix} {reason}: it is read whole")
        (verdict,) = verify_tokens(prefix, options=self.options, reporter=self._reporter)
        if verdict.passed:
            return verdict.checked
        raise CorruptData(
            f"these tokens are not what their manifest says: {'; '.join(verdict.problems)}",
            where=prefix,
            hint=f"put the old files back, or have them made again: remove {prefix}.* and run the recipe",
        )

    def _text_change(self, records: Sequence[InputRecord], inputs: Sequence[InputSlice]) -> str | None:
        """Describe what is different in a corpus; a file of the same size but another time is read to know."""
        before = {record.address: record.size for record in records}
        now = {item.address: item.size for item in inputs}
        for address in before:
            if address not in now:
                return f"{address} is no longer part of it"
        for address, size in now.items():
            if address not in before:
                return f"{address} is new"
            if size != before[address]:
                return f"{address} has {size:,} bytes, and had {before[address]:,}"
        record_by_identity = {record.identity: record for record in records}
        for item in inputs:
            record = record_by_identity.get(InputRecord.from_input(item, None).identity)
            if record is None or record.version == item.version:
                continue
            if record.sha256 != hash_input(item, self.options):
                return f"{item.address} holds other text of the same size"
        return None

    def _folder(self, kind: str, spec: dict[str, Any]) -> Path:
        return artefact_folder(self._root, kind, spec)

    @contextmanager
    def _making_artefact(self, folder: Path, what: str) -> Iterator[Path | None]:
        """Yield an empty folder to make an artefact in, or None if the artefact exists."""
        if _artefact_exists(folder):
            yield None
            return
        self._require_making_allowed(what)
        with artefact_lock(folder, self._reporter):
            yield None if _artefact_exists(folder) else _fresh_folder(folder)

    def _require_making_allowed(self, what: str) -> None:
        if not self._make:
            raise NotFound(f"{what} is not made yet", where=str(self._root), hint="run `trainshed run RECIPE` first")


def _input_identity(input_slice: InputSlice) -> dict[str, Any]:
    """Identify an input without reading it: a store's version changes whenever the content does."""
    identity: dict[str, Any] = asdict(input_slice)
    for name in ("columns", "rows"):  # whole files of text are identified as ever
        if identity[name] is None:
            del identity[name]
    if "://" not in input_slice.address:
        identity["address"] = os.path.abspath(input_slice.address)
    elif input_slice.display_address != input_slice.address:
        # The query of a URL is never stored, so its hash makes `?file=a` and `?file=b` differ.
        query = hashlib.sha256(input_slice.address.encode()).hexdigest()[:16]
        identity |= {"address": input_slice.display_address, "query": query}
    if (reader := source_hash("text format", input_slice.format.kind)) is not None:
        identity["reader"] = reader
    return identity


def _shard_spec(inputs: Sequence[InputSlice], config: TokenizeConfig) -> dict[str, Any]:
    identities = [_input_identity(item) for item in inputs]
    return {"how": config.spec(), "on_bad_line": config.on_bad_line, "inputs": identities}


def _index_files_hash(manifests: Sequence[TokenManifest]) -> str:
    """Hash the hashes of the `.idx` files, which hold the token type and every length: all an index depends on."""
    digests = [file.checksum for manifest in manifests for file in manifest.files if file.path.endswith(".idx")]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _artefact_exists(folder: Path) -> bool:
    """Whether an artefact has its manifest. If its files have changed since, that is an error, not an absence."""
    store = LocalStore(folder)
    try:
        manifest = Manifest.read(store, MANIFEST)
    except NotFound:
        return False
    manifest.verify_files(store, "files", deep=False)
    return True


def _fresh_folder(folder: Path) -> Path:
    """Make an empty folder to make an artefact in; what a killed attempt left is removed."""
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

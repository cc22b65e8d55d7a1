"""The base weights of a run as an artefact: fetched once, hashed, opened and checked against their config.

`<artefacts>/weights/<hash>/` holds the manifest, the probe and, for a remote address, the `files`. A local folder is
used in place; its manifest lists its files, and a file that has changed since is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainshed.checkpoints.added_rows import open_with_added_rows
from trainshed.checkpoints.formats import detect_format, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.megatron.iterations import LATEST_ITERATION, read_latest_iteration
from trainshed.checkpoints.native.folder import BEST, LATEST, find_checkpoint
from trainshed.checkpoints.prove.verdict import VERDICT
from trainshed.checkpoints.weights import Weights
from trainshed.data.tokenize.tokenizer import TOKENIZER_FILES
from trainshed.errors import AddressError, CorruptData, NoSuchName, NotFound
from trainshed.models.parameters import AddedRows, parameter_count
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import (
    FileEntry,
    Hasher,
    LocalStore,
    Manifest,
    ObjectInfo,
    StoreOptions,
    algorithm_of,
    copy_tree,
    join,
    open_folder,
    open_store,
    parse,
)
from trainshed.storage.checksum import DEFAULT_ALGORITHM, ChecksumAlgorithm, sha256_of
from trainshed.storage.copy import COPY_MANIFEST
from trainshed.storage.listing import is_selected
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import MANIFEST, artefact_folder

KIND = "weights"
VERSIONS_FILE = "seen.json"
HF_INCLUDE = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    VERDICT,
)
"""Which files of a folder for transformers are fetched. Its order is hashed into the names of artefacts: keep it."""
# Subfolders hold other formats (`original/`, `onnx/`); Mistral stores all its weights a second time as
# `consolidated*.safetensors`.
HF_EXCLUDE = ("*/**", "consolidated*")


@dataclass(frozen=True)
class BaseWeights:
    """Fetched weights: `folder` is the artefact (manifest, probe), `files` the folder of config and weights."""

    folder: Path
    files: Path
    manifest: Manifest
    reused: bool = field(default=False, compare=False)
    """Whether fetching found them made and proven."""

    @classmethod
    def from_folder(cls, folder: Path) -> BaseWeights:
        """Open an artefact's folder; only its manifest and the sizes of its files are checked.

        Ranks use this: `find_base` would list the bucket once for each of them.
        """
        manifest = Manifest.read(LocalStore(folder), MANIFEST)
        files = Path(manifest.spec["from"]) if manifest.spec.get("in_place") else folder / "files"
        manifest.verify_files(LocalStore(files), deep=False)
        return cls(folder, files, manifest)

    @property
    def sha256(self) -> str:
        """One hash of all files: the same for the same weights, wherever they are."""
        entries = [[entry.path, entry.size, entry.checksum] for entry in self.manifest.files]
        return sha256_of(json.dumps(entries).encode())

    @cached_property
    def mtp_layers(self) -> int:
        """How many layers for multi-token prediction they have."""
        with open_weights(self.files) as weights:
            return weights.config.mtp_layers

    def open(self, config: ModelConfig | None = None, added: AddedRows | None = None) -> Weights:
        """Open the weights, as their own files describe them or as `config` does; `added`: with rows for added tokens.

        `config` counts the rows of added tokens then.
        """
        return open_with_added_rows(self.files, config, added)


def fetch_base(
    address: str,
    artefacts_root: Path,
    *,
    config: ModelConfig | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
    accept: Callable[[Path], None] = lambda _: None,
) -> BaseWeights:
    """Make the artefact of base weights, or find it. This happens before any GPU is allocated.

    `address` is a folder in any store, in any format. `config` replaces the architecture in config.json. `accept` is
    called with the folder of the files before they become an artefact; it raises to refuse them.
    """
    base = _BaseArtefact(address, artefacts_root, options)
    with artefact_lock(base.folder, reporter):
        reused = base.exists()
        if base.in_place or reused:
            accept(base.files)
        if reused:
            base.check(reporter)
        elif base.in_place:
            base.hash_in_place(config, reporter)
        else:
            base.copy(config, options, reporter, accept)
    return replace(BaseWeights.from_folder(base.folder), reused=reused)


def find_base(address: str, artefacts_root: Path, *, options: StoreOptions | None = None) -> BaseWeights:
    """Return base weights that `fetch_base` has made; nothing is made here."""
    base = _BaseArtefact(address, artefacts_root, options)
    if not base.exists():
        base.refuse_absent()
        raise NotFound(
            f"the base weights {address} are not fetched yet",
            where=str(artefacts_root),
            hint="run `trainshed run RECIPE`, which makes what is missing",
        )
    return BaseWeights.from_folder(base.folder)


class _BaseArtefact:
    def __init__(self, address: str, root: Path, options: StoreOptions | None) -> None:
        parsed = parse(address)
        if parsed.scheme in ("http", "https"):
            raise AddressError(
                "weights are a folder, and a web server lists none",
                where=address,
                hint="write hf://org/name, a bucket or a path",
            )
        self.in_place = parsed.scheme == "file"
        self.spec = _spec_in_place(address) if self.in_place else _spec_elsewhere(address, options)
        self.folder = artefact_folder(root, KIND, self.spec)
        self.files = Path(self.spec["from"]) if self.in_place else self.folder / "files"

    def exists(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def check(self, reporter: Reporter) -> None:
        """Hash again the files that have a new version; only we write into an artefact's own folder."""
        if not self.in_place:
            return
        manifest, store = BaseWeights.from_folder(self.folder).manifest, LocalStore(self.files)
        infos = {entry.path: store.head(entry.path) for entry in manifest.files}
        versions = self._read_versions()
        touched = [info for path, info in infos.items() if info is not None and versions.get(path) != info.version]
        known = {entry.path: entry.checksum for entry in manifest.files}
        algorithms = {path: algorithm_of(checksum) for path, checksum in known.items()}
        hashed = _hash_files(store, touched, reporter, algorithms)
        changed = [entry.path for entry in hashed if entry.checksum != known[entry.path]]
        if changed:
            raise CorruptData(
                f"the base weights have changed since they were first used: {', '.join(changed)}",
                where=str(self.files),
                hint=f"put the old files back, or remove {self.folder} to start from the new ones",
            )
        self._write_versions([info for info in infos.values() if info is not None])

    def copy(
        self,
        config: ModelConfig | None,
        options: StoreOptions | None,
        reporter: Reporter,
        accept: Callable[[Path], None],
    ) -> None:
        include, exclude = self.spec["include"], self.spec["exclude"]
        copy_tree(
            self.spec["from"], str(self.files), include=include, exclude=exclude, options=options, reporter=reporter
        )
        accept(self.files)
        self._publish(Manifest.read(LocalStore(self.files), COPY_MANIFEST).files, config)

    def refuse_absent(self) -> None:
        """Raise where a local folder does not exist or holds no weights."""
        if self.in_place and not self.files.is_dir():
            raise NoSuchName("there is no such folder", where=str(self.files), hint="name the folder of a model")
        if self.in_place:
            detect_format(self.files)

    def hash_in_place(self, config: ModelConfig | None, reporter: Reporter) -> None:
        self.refuse_absent()
        store = LocalStore(self.files)
        globs = _weights_globs(str(self.files), None)
        # The verdict is left out: weights that are proven again are still the same weights.
        infos = [info for info in store.list() if is_selected(info.path, *globs) and info.path != VERDICT]
        open_weights(self.files, config=config, reporter=reporter).close()  # fails at once, before an hour of hashing
        entries = _hash_files(store, infos, reporter)
        self._write_versions(infos)
        self._publish(entries, config)

    def _publish(self, entries: Iterable[FileEntry], config: ModelConfig | None) -> None:
        """Check that the weights can be opened, then write the manifest: from now on the artefact exists."""
        with open_weights(self.files, config=config) as weights:
            if isinstance(weights, HfWeights):
                weights.check_tied_head()
            model = weights.config
            facts = {"family": model.family, "parameters": parameter_count(model), "dtypes": weights.dtypes}
        Manifest.of(KIND, self.spec, entries, facts).write(LocalStore(self.folder), MANIFEST)

    def _read_versions(self) -> dict[str, str]:
        try:
            return json.loads(LocalStore(self.folder).read(VERSIONS_FILE))
        except (NotFound, ValueError):
            return {}

    def _write_versions(self, infos: list[ObjectInfo]) -> None:
        """Store the versions of files whose hash is known; not in the manifest, which holds no times."""
        versions = {info.path: info.version for info in infos}
        if versions != self._read_versions():
            LocalStore(self.folder).put(VERSIONS_FILE, json.dumps(versions, indent=1, sort_keys=True).encode() + b"\n")


def _spec_in_place(address: str) -> dict[str, Any]:
    return {"from": os.path.abspath(str(parse(address))), "in_place": True}


def _spec_elsewhere(address: str, options: StoreOptions | None) -> dict[str, Any]:
    """Return the spec of a fetch: it names a commit on the Hub, or the versions of the files in a bucket."""
    store, path = open_store(address, options)
    on_hub = parse(address).scheme == "hf"  # models there are for transformers; `detect_format` would cost a request
    include, exclude = (HF_INCLUDE, HF_EXCLUDE) if on_hub else _weights_globs(address, options)
    spec: dict[str, Any] = {"from": join(store.url, path), "include": include, "exclude": exclude}
    if not on_hub:
        infos = (info for info in open_folder(address, options).list() if is_selected(info.path, include, exclude))
        spec["files"] = [[info.path, info.size, info.version] for info in infos]
    return spec


def _weights_globs(address: str, options: StoreOptions | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which files of a folder belong to its weights, as globs to include and to exclude.

    Of a run's checkpoints, or Megatron's, they are those of the best or latest and the pointers to it. A run that
    continues changes a pointer, so its newer weights are not mistaken for these.
    """
    format = detect_format(address, options)
    if format == "hf":
        return HF_INCLUDE, HF_EXCLUDE
    beside = (VERDICT, "tokenizer/*")
    if format == "native":
        store, path = open_store(address, options)
        step = find_checkpoint(store, path).path.removeprefix(path.strip("/")).strip("/")
        pointers = (f"checkpoints/{LATEST}", LATEST, f"checkpoints/{BEST}", BEST)
        return ((f"{step}/*", *pointers, *beside) if step else ("*",)), ()
    iteration = read_latest_iteration(open_folder(address, options))
    return (("**",) if iteration is None else (LATEST_ITERATION, f"{iteration}/**", *beside)), ()


def _hash_files(
    store: LocalStore, infos: list[ObjectInfo], reporter: Reporter, known: Mapping[str, ChecksumAlgorithm] | None = None
) -> tuple[FileEntry, ...]:
    """Hash files; `known` says which algorithm a file was hashed with before."""
    entries = []
    with reporter.task("hashing the base weights", total=sum(info.size for info in infos), unit="B") as task:
        for info in infos:
            hasher = Hasher((known or {}).get(info.path, DEFAULT_ALGORITHM))
            for chunk in store.stream(info.path):
                hasher.update(chunk)
                task.advance(len(chunk))
            entries.append(FileEntry(info.path, hasher.size, hasher.checksum))
    return tuple(entries)

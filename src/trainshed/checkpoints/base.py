"""The base weights of a run as an artefact: fetched once, hashed, opened and held against their config.

`<artefacts>/weights/<hash>/` holds the manifest, the probe and, for an address elsewhere, the `files`. A local folder
is used where it lies; its manifest says what was in it, and a file that has changed since is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.formats import MEGATRON_POINTER, detect_format, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.checkpoints.prove.probe import MANIFEST
from trainshed.checkpoints.prove.verdict import VERDICT
from trainshed.checkpoints.weights import Weights
from trainshed.data.tokenize.tokenizer import TOKENIZER_FILES
from trainshed.errors import AddressError, CorruptData, NoSuchName, NotFound
from trainshed.models.parameters import parameter_count
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
from trainshed.storage.checksum import DEFAULT_ALGORITHM, ChecksumAlgorithm
from trainshed.storage.copy import COPY_MANIFEST
from trainshed.storage.listing import is_selected
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import artefact_folder

KIND = "weights"
SEEN = "seen.json"
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
"""What is taken of a folder for transformers."""
# Below the folder lie other formats (`original/`, `onnx/`); Mistral keeps all its weights a second time as
# `consolidated*.safetensors`.
HF_EXCLUDE = ("*/**", "consolidated*")


@dataclass(frozen=True)
class BaseWeights:
    """Weights that are there: `folder` is the artefact (manifest, probe), `files` where config and weights lie."""

    folder: Path
    files: Path
    manifest: Manifest

    @classmethod
    def at(cls, folder: Path) -> BaseWeights:
        """The weights of an artefact's folder, by its manifest and the sizes of its files alone.

        What ranks call: asking for an address again would cost each of them a listing of the bucket.
        """
        manifest = Manifest.read(LocalStore(folder), MANIFEST)
        files = Path(manifest.spec["from"]) if manifest.spec.get("in_place") else folder / "files"
        manifest.verify_files(LocalStore(files), deep=False)
        return cls(folder, files, manifest)

    def open(self, config: ModelConfig | None = None) -> Weights:
        """Open the weights, as their own files describe them or as `config` does."""
        return open_weights(self.files, config=config)


def fetch_base(
    address: str,
    artefacts_root: Path,
    *,
    config: ModelConfig | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
    accept: Callable[[Path], None] = lambda _: None,
) -> BaseWeights:
    """Make the artefact of base weights, or find it: everything that must be done before GPUs are held.

    `address` is a folder in any store, in any format. With `config` the architecture is that one, and config.json is
    not asked. `accept` sees the folder of the files before they become an artefact, and refuses them by raising.
    """
    base = _BaseArtefact(address, artefacts_root, options)
    with artefact_lock(base.folder, reporter):
        if base.in_place or base.is_there():
            accept(base.files)
        if base.is_there():
            base.check(reporter)
        elif base.in_place:
            base.hash_in_place(config, reporter)
        else:
            base.copy(config, options, reporter, accept)
    return BaseWeights.at(base.folder)


def find_base(address: str, artefacts_root: Path, *, options: StoreOptions | None = None) -> BaseWeights:
    """Return base weights that `fetch_base` has made; nothing is made here."""
    base = _BaseArtefact(address, artefacts_root, options)
    if not base.is_there():
        base.refuse_absent()
        raise NotFound(
            f"the base weights {address} are not fetched yet",
            where=str(artefacts_root),
            hint="run `trainshed run RECIPE`, which makes what is missing",
        )
    return BaseWeights.at(base.folder)


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

    def is_there(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def check(self, reporter: Reporter) -> None:
        """Hash again what has been touched since; nobody but us writes into an artefact's own folder."""
        if not self.in_place:
            return
        manifest, store = BaseWeights.at(self.folder).manifest, LocalStore(self.files)
        infos = {entry.path: store.head(entry.path) for entry in manifest.files}
        seen = self._seen()
        touched = [info for path, info in infos.items() if info is not None and seen.get(path) != info.version]
        known = {entry.path: entry.checksum for entry in manifest.files}
        hashed = _hash_files(store, touched, reporter, {path: algorithm_of(each) for path, each in known.items()})
        changed = [entry.path for entry in hashed if entry.checksum != known[entry.path]]
        if changed:
            raise CorruptData(
                f"the base weights have changed since they were first used: {', '.join(changed)}",
                where=str(self.files),
                hint=f"put the old files back, or remove {self.folder} to start from the new ones",
            )
        self._remember([info for info in infos.values() if info is not None])

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
        """Raise where a folder on this disk is not there, or holds no weights."""
        if self.in_place and not self.files.is_dir():
            raise NoSuchName("there is no such folder", where=str(self.files), hint="name the folder of a model")
        if self.in_place:
            detect_format(self.files)

    def hash_in_place(self, config: ModelConfig | None, reporter: Reporter) -> None:
        self.refuse_absent()
        store = LocalStore(self.files)
        taken = _weights_globs(str(self.files), None)
        # A verdict is asked anew each time: weights that are proven again are the same weights.
        infos = [info for info in store.list() if is_selected(info.path, *taken) and info.path != VERDICT]
        open_weights(self.files, config=config).close()  # before hashing for an hour what cannot be used
        entries = _hash_files(store, infos, reporter)
        self._remember(infos)
        self._publish(entries, config)

    def _publish(self, entries: Iterable[FileEntry], config: ModelConfig | None) -> None:
        """Prove that the weights can be used, then write the manifest: from here on the artefact exists."""
        with open_weights(self.files, config=config) as weights:
            if isinstance(weights, HfWeights):
                weights.check_tied_head()
            found = weights.config
            facts = {"family": found.family, "parameters": parameter_count(found), "dtypes": weights.dtypes}
        Manifest.of(KIND, self.spec, entries, facts).write(LocalStore(self.folder), MANIFEST)

    def _seen(self) -> dict[str, str]:
        try:
            return json.loads(LocalStore(self.folder).read(SEEN))
        except (NotFound, ValueError):
            return {}

    def _remember(self, infos: list[ObjectInfo]) -> None:
        """Note the versions of files whose hash is known; apart from the manifest, which holds no times."""
        versions = {info.path: info.version for info in infos}
        if versions != self._seen():
            LocalStore(self.folder).put(SEEN, json.dumps(versions, indent=1, sort_keys=True).encode() + b"\n")


def _spec_in_place(address: str) -> dict[str, Any]:
    return {"from": os.path.abspath(str(parse(address))), "in_place": True}


def _spec_elsewhere(address: str, options: StoreOptions | None) -> dict[str, Any]:
    """What makes two fetches the same: on the Hub a commit, in a bucket the versions of the files."""
    store, path = open_store(address, options)
    on_hub = parse(address).scheme == "hf"  # whose models are transformers'; asking would cost a request each time
    include, exclude = (HF_INCLUDE, HF_EXCLUDE) if on_hub else _weights_globs(address, options)
    spec: dict[str, Any] = {"from": join(store.url, path), "include": include, "exclude": exclude}
    if not on_hub:
        infos = (info for info in open_folder(address, options).list() if is_selected(info.path, include, exclude))
        spec["files"] = [[info.path, info.size, info.version] for info in infos]
    return spec


def _weights_globs(address: str, options: StoreOptions | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What of a folder belongs to its weights, as globs to take and to leave.

    Of a run's checkpoints or Megatron's that is the latest and what points to it: a run that goes on changes the
    pointer, and its newer weights are then not taken for these.
    """
    format = detect_format(address, options)
    if format == "hf":
        return HF_INCLUDE, HF_EXCLUDE
    beside = (VERDICT, "tokenizer/*")
    if format == "native":
        store, path = open_store(address, options)
        step = find_checkpoint(store, path).path.removeprefix(path.strip("/")).strip("/")
        return ((f"{step}/*", "checkpoints/latest", "latest", *beside) if step else ("*",)), ()
    place = open_folder(address, options)
    if place.head(MEGATRON_POINTER) is None:
        return ("**",), ()
    named = place.read(MEGATRON_POINTER).decode().strip()
    return (MEGATRON_POINTER, f"{f'iter_{int(named):07d}' if named.isdigit() else named}/**", *beside), ()


def _hash_files(
    store: LocalStore, infos: list[ObjectInfo], reporter: Reporter, known: Mapping[str, ChecksumAlgorithm] | None = None
) -> tuple[FileEntry, ...]:
    """Hash files; `known` says with which algorithm each was hashed before."""
    entries = []
    with reporter.task("hashing the base weights", total=sum(info.size for info in infos), unit="B") as task:
        for info in infos:
            hasher = Hasher((known or {}).get(info.path, DEFAULT_ALGORITHM))
            for chunk in store.stream(info.path):
                hasher.update(chunk)
                task.advance(len(chunk))
            entries.append(FileEntry(info.path, hasher.size, hasher.checksum))
    return tuple(entries)

"""The manifest of an artefact: its files with checksums, the spec that made it, and where it is stored.

It is written last and in one step; an artefact without one does not exist. The same artefact gives the same
bytes: keys are sorted and no clock, host or user is in it. An artefact is stored in
`<root>/<kind>/<hash of the spec>/`.

A file's checksum is under `sha256` in format 1 and under `checksum` in format 2, which knows other algorithms
as well. Where all are SHA-256 format 1 is written, as ever: whatever names a manifest by its own hash goes on to
find it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trainshed
from trainshed.errors import CorruptData, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage.address import join
from trainshed.storage.checksum import Hasher, is_checksum, is_sha256, sha256_of
from trainshed.storage.store import ObjectInfo, Store

MANIFEST = "manifest.json"
"""The name of the file."""
MANIFEST_FORMAT = 2
_CHECKSUM_KEYS = {1: "sha256", 2: "checksum"}
_MAX_NAMED = 5  # how many files an error names before it only counts


@dataclass(frozen=True)
class FileEntry:
    """One file of an artefact; the path is relative to the artefact."""

    path: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """`spec` is what was asked for, `facts` what was found out on the way (counts, versions of tools)."""

    kind: str
    spec: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    made_by: str = f"trainshed {trainshed.__version__}"
    format: int = MANIFEST_FORMAT

    @classmethod
    def of(
        cls, kind: str, spec: Mapping[str, Any], files: Iterable[FileEntry], facts: Mapping[str, Any] | None = None
    ) -> Manifest:
        """A manifest with its files in order."""
        ordered = tuple(sorted(files, key=lambda file: file.path))
        format = 1 if all(is_sha256(entry.checksum) for entry in ordered) else MANIFEST_FORMAT
        return cls(kind, dict(spec), ordered, dict(facts or {}), format=format)

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def sha256(self) -> str:
        """The checksum of the manifest itself: one short name for everything in it."""
        return sha256_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The manifest as it is stored."""
        key = _CHECKSUM_KEYS[self.format]
        document = {
            "format": self.format,
            "kind": self.kind,
            "made_by": self.made_by,
            "spec": self.spec,
            "facts": self.facts,
            "files": [{"path": f.path, "size": f.size, key: f.checksum} for f in self.files],
            "totals": {"files": len(self.files), "bytes": self.total_bytes},
        }
        text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str | None = None) -> Manifest:
        """Read a manifest, or say what is wrong with it."""
        try:
            document = json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise _unreadable_manifest(f"not JSON ({error})", where) from None
        if not isinstance(document, dict) or not isinstance(document.get("format"), int):
            raise _unreadable_manifest("it has no format number", where)
        if document["format"] < 1:
            raise _unreadable_manifest(f"there is no format {document['format']}", where)
        if document["format"] > MANIFEST_FORMAT:
            raise CorruptData(
                f"the manifest has format {document['format']}, this Trainshed reads up to {MANIFEST_FORMAT}",
                where=where,
                hint="pip install --upgrade trainshed",
            )
        for key, kind in {"kind": str, "made_by": str, "spec": dict, "facts": dict, "files": list}.items():
            if not isinstance(document.get(key), kind):
                raise _unreadable_manifest(f"'{key}' is missing or of the wrong kind", where)
        files = tuple(_file_entry(entry, document["format"], where) for entry in document["files"])
        if len({entry.path for entry in files}) != len(files):
            raise _unreadable_manifest("a file stands in it twice", where)
        manifest = cls(
            document["kind"], document["spec"], files, document["facts"], document["made_by"], document["format"]
        )
        if document.get("totals") != {"files": len(files), "bytes": manifest.total_bytes}:
            raise _unreadable_manifest("its totals do not fit its files", where)
        return manifest

    def write(self, store: Store, path: str, *, expect: str | None = None) -> ObjectInfo:
        """Store the manifest in one step, last of all; `expect` as for `Store.put`."""
        return store.put(path, self.to_bytes(), expect=expect)

    @classmethod
    def read(cls, store: Store, path: str) -> Manifest:
        """Read a stored manifest; `NotFound` means that the artefact does not exist (yet)."""
        where = join(store.url, path)
        try:
            data = store.read(path)
        except NotFound:
            raise NotFound(
                "there is no manifest", where=where, hint="whatever should have written it has not finished"
            ) from None
        return cls.from_bytes(data, where)

    def verify_files(
        self, store: Store, folder: str = "", *, workers: int = 8, deep: bool = True, reporter: Reporter = SILENT
    ) -> None:
        """Compare every file below `folder` with this manifest; `deep` reads all bytes, else sizes alone."""
        folder = folder.strip("/")
        there = {info.path: info for info in store.list(folder)}
        wanted = {f"{folder}/{entry.path}" if folder else entry.path: entry for entry in self.files}
        missing = [entry.path for path, entry in wanted.items() if path not in there]
        if missing:
            raise _differing_files("missing", missing, join(store.url, folder))
        resized = [e.path for path, e in wanted.items() if there[path].size != e.size]
        if resized:
            raise _differing_files("of another size than their manifest says", resized, join(store.url, folder))
        if not deep:
            return
        with (
            reporter.task("verifying", total=self.total_bytes, unit="B") as task,
            ThreadPoolExecutor(workers) as pool,
        ):

            def check(path: str) -> bool:
                hasher = Hasher.like(wanted[path].checksum)
                for chunk in store.stream(path):
                    hasher.update(chunk)
                    task.advance(len(chunk))
                return hasher.checksum == wanted[path].checksum

            good = list(pool.map(check, wanted))
        changed = [wanted[path].path for path, same in zip(wanted, good, strict=True) if not same]
        if changed:
            raise _differing_files("not what their manifest says", changed, join(store.url, folder))


def _file_entry(entry: Any, format: int, where: str | None) -> FileEntry:
    key = _CHECKSUM_KEYS[format]
    path, size, checksum = (entry.get(name) if isinstance(entry, dict) else None for name in ("path", "size", key))
    if not isinstance(path, str) or not path or any(part in ("", ".", "..") for part in path.split("/")):
        raise _unreadable_manifest(f"a file with the path {path!r}", where)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not is_checksum(checksum):
        raise _unreadable_manifest(f"'{path}' has no size or no {key}", where)
    return FileEntry(path, size, str(checksum))


def _unreadable_manifest(why: str, where: str | None) -> CorruptData:
    return broken_manifest(f"a manifest that cannot be read: {why}", where)


def broken_manifest(what: str, where: str | None) -> CorruptData:
    """Return the error for a damaged manifest, with the command that removes it.

    What has no manifest does not exist, so the next run of what made it makes it again.
    """
    return CorruptData(
        what,
        where=where,
        hint=f"{_removal_hint(where)}, then run the same command again: what it describes is made anew",
    )


def _removal_hint(where: str | None) -> str:
    if where is None:
        return "remove it"
    if where.startswith("s3://"):
        return f"remove it (`aws s3 rm {shlex.quote(where)}`)"
    if where.startswith("gs://"):
        return f"remove it (`gcloud storage rm {shlex.quote(where)}`)"
    return "remove this object" if "://" in where else f"remove it (`rm {shlex.quote(where)}`)"


def _differing_files(how: str, paths: list[str], where: str) -> CorruptData:
    named = ", ".join(paths[:_MAX_NAMED]) + (f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else "")
    files = "1 file is" if len(paths) == 1 else f"{len(paths)} files are"
    return CorruptData(f"{files} {how}: {named}", where=where, hint="copy or make the artefact again")


def artefact_folder(root: Path, kind: str, spec: Mapping[str, Any]) -> Path:
    """Return the folder of the artefact that a spec describes: the same spec finds it again, another makes another."""
    import orjson

    canonical = orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)
    return root / kind / hashlib.sha256(canonical).hexdigest()[:16]

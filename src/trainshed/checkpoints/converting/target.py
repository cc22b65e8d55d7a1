"""Where a conversion puts what it has made: a folder that appears by a rename, or a bucket; the manifest comes last."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainshed.checkpoints.converting.folder import ConversionFolder
from trainshed.checkpoints.proving.verdict import VERDICT, Verdict
from trainshed.errors import CorruptData, InputError, NoSpace, NotFound, TrainshedError
from trainshed.storage import LocalStore, Manifest, StoreOptions, join, open_folder, parse
from trainshed.storage.artefact_folder import artefact_folder

MANIFEST = "manifest.json"


class ConversionTarget:
    """The place at an address; `folder` is where everything is made first."""

    def __init__(self, address: str, scratch: Path | None, options: StoreOptions | None) -> None:
        self.address = address
        self.folder = ConversionFolder(_working_place(address, scratch))
        self._parsed = parse(address)
        self._store = open_folder(address, options)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on this machine."""
        return self._parsed.scheme == "file"

    @property
    def path(self) -> Path:
        """The folder, where it is one."""
        assert self.is_local
        return Path(str(self._parsed))

    def finished(self) -> Manifest | None:
        """Return the manifest of what is there, None where nothing is; anything without a manifest is refused."""
        try:
            return Manifest.read(self._store, MANIFEST)
        except NotFound:
            # A bucket shows the files of an upload that was killed; a folder of ours appears whole.
            if self.is_local and any(True for _ in self._store.list()):
                raise self.occupied("something that is no finished conversion") from None
            return None
        except CorruptData:
            raise self.occupied("something whose manifest nobody can read") from None

    def verdict(self) -> Verdict:
        """Return the verdict of what is there."""
        return Verdict.from_bytes(self._store.read(VERDICT), join(self.address, VERDICT))

    def occupied(self, what: str) -> InputError:
        """The error for a target that is not free."""
        hint = "choose another folder, or remove this one first"
        return InputError(f"there is {what} already", where=self.address, hint=hint)

    def upload(self, path: str) -> None:
        """Put one finished file into a bucket; a folder gets all of them at once in the end."""
        if self.is_local:
            return
        local = LocalStore(self.folder.target)
        info = local.head(path)
        with self._store.writer(path, size=info.size if info else None) as writer:
            for chunk in local.stream(path):
                writer.write(chunk)

    def publish(self, manifest: Manifest, uploaded: set[str]) -> None:
        """Let the target exist: what is not uploaded yet, then the manifest; or all of it by one rename."""
        if self.is_local:
            manifest.write(LocalStore(self.folder.target), MANIFEST)
            with explained(self.path):
                self.folder.publish(self.path)
            return
        for entry in manifest.files:
            if entry.path not in uploaded:
                self.upload(entry.path)
        manifest.write(self._store, MANIFEST)
        self.folder.remove()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Tell the disk's errors in our words, whichever writer meets them."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space or write elsewhere, then run the same command again: it goes on"
            raise NoSpace("the disk is full", where=str(path), hint=hint) from error
        raise TrainshedError((error.strerror or str(error)).lower(), where=str(path)) from error


def _working_place(address: str, scratch: Path | None) -> Path:
    """Hidden beside a folder, so that a rename is enough; for a bucket below `scratch`, found again by its address."""
    parsed = parse(address)
    if parsed.scheme in ("hf", "http", "https"):
        raise InputError("nothing can be written there", where=address, hint="write to a path, s3://, gs:// or az://")
    if parsed.scheme != "file":
        root = scratch or Path(tempfile.gettempdir())
        return artefact_folder(root, "trainshed-convert", {"target": join(parsed.url, parsed.path)})
    path = Path(os.path.abspath(str(parsed)))
    if not path.name:
        raise InputError("the target is the root of the disk", where=address, hint="name a folder in it")
    return path.with_name(f".{path.name}.converting")

"""What a token file is without reading it whole: its size, its time, and the hash of some of its blocks.

Cheap enough for every start of a run. It finds a file that was written again, cut or exchanged; a few bytes changed
behind the back of the file system are found by `verify`, which reads everything.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainshed.data.tokens.token_file import local_path
from trainshed.errors import NotFound
from trainshed.storage import Store, open_store

if TYPE_CHECKING:
    from trainshed.data.tokens.manifest import TokenManifest
    from trainshed.storage import StoreOptions

SAMPLE_VERSION = 1
SAMPLED_BLOCKS = 32
BLOCK_BYTES = 4096
WHOLE_BYTES = 1024 * 1024
"""A file up to this size is hashed whole: that costs no more than its blocks would."""
READERS = 8
ENDINGS = ("bin", "idx")

Difference = Literal["missing", "size", "content", "time"]


@dataclass(frozen=True)
class Fingerprint:
    """One file as it was seen.

    `version` is the time of its last change in whole seconds on a disk (some file systems keep no finer one), the
    store's ETag elsewhere. `checksum` is the hash of the whole file where a manifest tells it.
    """

    path: str
    size: int
    version: str
    sample: str
    checksum: str | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What tells two files apart wherever they lie."""
        return (self.checksum,) if self.checksum else (self.size, self.sample)


def fingerprints_of(
    prefix: str, manifest: TokenManifest | None = None, options: StoreOptions | None = None
) -> tuple[Fingerprint, ...]:
    """Take the fingerprints of the `.bin` and `.idx` of one shard."""
    known = {entry.path.rpartition(".")[2]: entry.checksum for entry in manifest.files} if manifest else {}
    return tuple(take_fingerprint(f"{prefix}.{ending}", known.get(ending), options) for ending in ENDINGS)


def take_fingerprint(address: str, checksum: str | None = None, options: StoreOptions | None = None) -> Fingerprint:
    """Look at one file as it is now."""
    store, path = open_store(address, options)
    size, version = _seen(store, path, address)
    return Fingerprint(address, size, version, _sample(store, path, size), checksum)


def difference(known: Fingerprint, options: StoreOptions | None = None) -> tuple[Difference, str] | None:
    """Compare a file with how it was seen before: which kind of difference, and in words; None where there is none."""
    store, path = open_store(known.path, options)
    try:
        size, version = _seen(store, path, known.path)
    except NotFound:
        return "missing", "it is gone"
    if size != known.size:
        return "size", f"it has {size:,} bytes, and had {known.size:,}"
    on_disk = local_path(known.path) is not None
    # An ETag is a function of the content: the same one needs no look inside.
    if (on_disk or version != known.version) and _sample(store, path, size) != known.sample:
        return "content", "its bytes have changed"
    if version != known.version and size > WHOLE_BYTES:
        return "time", "it was written again"
    return None


def fingerprint_from(plain: dict[str, Any]) -> Fingerprint:
    """Read what `asdict` gave."""
    return Fingerprint(**plain)


def _seen(store: Store, path: str, address: str) -> tuple[int, str]:
    local = local_path(address)
    if local is not None:
        try:
            status = os.stat(local)
        except FileNotFoundError:
            raise NotFound("no such token file", where=address) from None
        return status.st_size, str(int(status.st_mtime))
    info = store.head(path)
    if info is None:
        raise NotFound("no such token file", where=address)
    return info.size, info.version


def _sample(store: Store, path: str, size: int) -> str:
    """Hash the first block, the last one and some evenly between; which ones depends on the size alone."""
    if size <= WHOLE_BYTES:
        parts = [store.read(path)]
    else:
        starts = [(size - BLOCK_BYTES) * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)]
        with ThreadPoolExecutor(READERS) as pool:
            parts = list(pool.map(lambda start: store.read(path, start, start + BLOCK_BYTES), starts))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sample-{SAMPLE_VERSION}:{digest.hexdigest()[:32]}"

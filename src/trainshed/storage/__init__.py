"""One Store over local disk, S3/MinIO, GCS, Azure, the Hugging Face Hub and HTTP; copies and manifests.

Importing this costs nothing: obstore, httpx2 and huggingface_hub are imported when an address first needs them.
"""

from __future__ import annotations

from trainshed.storage.address import Address, join, parse
from trainshed.storage.copy import CopyResult, copy_tree
from trainshed.storage.globs import Found, expand
from trainshed.storage.hashing import Hasher, algorithm_of, checksum_of, hashing, sha256_of
from trainshed.storage.local import LocalStore
from trainshed.storage.manifest import FileEntry, Manifest
from trainshed.storage.opening import Folder, open_folder, open_store
from trainshed.storage.options import Endpoint, StoreOptions
from trainshed.storage.retry import Retry
from trainshed.storage.store import ABSENT, CHUNK_BYTES, ObjectInfo, Store, Writer, read_into

__all__ = [
    "ABSENT",
    "CHUNK_BYTES",
    "Address",
    "CopyResult",
    "Endpoint",
    "FileEntry",
    "Folder",
    "Found",
    "Hasher",
    "LocalStore",
    "Manifest",
    "ObjectInfo",
    "Retry",
    "Store",
    "StoreOptions",
    "Writer",
    "algorithm_of",
    "checksum_of",
    "copy_tree",
    "expand",
    "hashing",
    "join",
    "open_folder",
    "open_store",
    "parse",
    "read_into",
    "sha256_of",
]

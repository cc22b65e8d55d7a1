"""One Store over local disk, S3/MinIO, GCS, Azure, the Hugging Face Hub and HTTP; copies and manifests.

Importing this costs nothing: obstore, httpx2 and huggingface_hub are imported when an address first needs them.
"""

from __future__ import annotations

from trainshed.storage.address import Address, join, parse
from trainshed.storage.checksum import Hasher, algorithm_of, checksum_of, hashing, sha256_of
from trainshed.storage.copy import CopyResult, copy_tree
from trainshed.storage.listing import MatchedObject, expand
from trainshed.storage.local import LocalStore
from trainshed.storage.manifest import FileEntry, Manifest
from trainshed.storage.open import Folder, open_folder, open_store
from trainshed.storage.store import (
    ABSENT,
    CHUNK_BYTES,
    Endpoint,
    ObjectInfo,
    Retry,
    Store,
    StoreOptions,
    Writer,
    list_after,
    list_folders,
    read_into,
)

__all__ = [
    "ABSENT",
    "CHUNK_BYTES",
    "Address",
    "CopyResult",
    "Endpoint",
    "FileEntry",
    "Folder",
    "Hasher",
    "LocalStore",
    "Manifest",
    "MatchedObject",
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
    "list_after",
    "list_folders",
    "open_folder",
    "open_store",
    "parse",
    "read_into",
    "sha256_of",
]

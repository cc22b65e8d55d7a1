from __future__ import annotations

import subprocess
import sys

import trainshed.storage

NAMES = """
    ABSENT CHUNK_BYTES Address CopyResult Endpoint FileEntry Folder Hasher LocalStore Manifest MatchedObject ObjectInfo
    Retry Store StoreOptions Writer algorithm_of checksum_of copy_tree expand hashing join list_after list_folders
    open_folder open_store parse read_into sha256_of
"""


def test_the_names_we_promise() -> None:
    assert sorted(trainshed.storage.__all__) == sorted(NAMES.split())
    assert all(hasattr(trainshed.storage, name) for name in NAMES.split())


def test_importing_the_room_imports_no_client() -> None:
    code = (
        "import sys, trainshed.storage; print(*[m for m in ('obstore','httpx2','huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""

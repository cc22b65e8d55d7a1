"""A copy killed in the middle, by a real SIGKILL at chosen and at random moments, and run again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainshed.storage import Manifest, Store, copy_tree, expand, open_folder

MANIFEST = ".trainshed/manifest.json"
FILES = 40

# Kills itself after a number of writes, somewhere inside an object; journal_seconds=0 stores each record at once.
KILLED = """
import os, signal, sys
from trainshed.storage import copy_tree, local, object_store
source, destination, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = 0
def dying(original):
    def write(self, data):
        global count
        count += 1
        if count > limit:
            original(self, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, data)
    return write
local._LocalWriter.write = dying(local._LocalWriter.write)
object_store._PartWriter.write = dying(object_store._PartWriter.write)
copy_tree(source, destination, workers=3, journal_seconds=0)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number:02d}.bin").write_bytes(random.Random(number).randbytes(5000))
    return source


def kill_after(source: Path, destination: str, writes: int) -> None:
    command = [sys.executable, "-c", KILLED, str(source), destination, str(writes)]
    assert subprocess.run(command, env=dict(os.environ)).returncode == -signal.SIGKILL


def whole_files(folder: Store) -> int:
    found = [info for info in folder.list() if not info.path.startswith(".trainshed")]
    assert all(info.size == 5000 for info in found), "a half-written object is visible"
    return len(found)


def check_rerun(source: Path, destination: str) -> int:
    folder = open_folder(destination)
    there = whole_files(folder)
    assert folder.head(MANIFEST) is None, "an interrupted copy looks complete"
    result = copy_tree(str(source), destination)
    assert result.files == FILES
    # What arrived in the last moment may not have reached the journal; it is at most one object per worker.
    assert FILES - there <= result.copied_files <= FILES - there + 3
    Manifest.read(folder, MANIFEST).verify_files(folder)
    assert {found.info.size for found in expand(destination)} == {5000}
    return there


@pytest.mark.parametrize("when", ["at once", "after one", "somewhere", "before the last"])
def test_a_copy_to_disk_killed_anywhere_is_finished_by_a_rerun(tree: Path, tmp_path: Path, when: str) -> None:
    somewhere = random.Random().randrange(2, FILES - 1)
    writes = {"at once": 0, "after one": 1, "somewhere": somewhere, "before the last": FILES - 1}[when]
    kill_after(tree, f"{tmp_path}/copy", writes)
    assert check_rerun(tree, f"{tmp_path}/copy") <= writes


def test_killed_again_and_again_it_still_gets_on(tree: Path, tmp_path: Path) -> None:
    progress = []
    for _ in range(3):
        kill_after(tree, f"{tmp_path}/copy", 8)
        progress.append(whole_files(open_folder(f"{tmp_path}/copy")))
    assert progress == sorted(set(progress))
    check_rerun(tree, f"{tmp_path}/copy")


def test_a_copy_killed_over_an_older_complete_one_does_not_look_complete(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy")
    for number in range(10):
        (tree / f"{number:02d}.bin").write_bytes(random.Random(-number).randbytes(5000))
    kill_after(tree, f"{tmp_path}/copy", 4)
    folder = open_folder(f"{tmp_path}/copy")
    assert folder.head(MANIFEST) is None
    copy_tree(str(tree), f"{tmp_path}/copy")
    Manifest.read(folder, MANIFEST).verify_files(folder)


@pytest.mark.s3
def test_a_copy_to_a_bucket_killed_in_the_middle_is_finished_by_a_rerun(tree: Path, s3_bucket: str) -> None:
    kill_after(tree, f"s3://{s3_bucket}/copy", 17)
    check_rerun(tree, f"s3://{s3_bucket}/copy")

"""Copies token files to a disk of this node before a foreign engine maps them.

A file of the job: it runs in the engine's image, so it needs the standard library of Python 3.8 and nothing of
Trainshed.

    python3 stage_tokens.py PREFIXES FOLDER      prints PREFIXES with the paths of the copies

PREFIXES is a file that lists weights and prefixes as quoted words (`EngineInput`: data-prefix). Each `.bin` and `.idx`
is copied once per node: a copy of the same size and time is used again. Another start waits until the first is through.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

SUFFIXES = (".bin", ".idx")
_SPARE_BYTES = 1 << 30
_QUOTED_PATH = re.compile(r"'(/(?:[^'\\]|\\.)*)'")


def stage_file(source: Path, target: Path) -> None:
    """Copy a file unless it is there; it appears when it is whole."""
    there = source.stat()
    if target.is_file():
        copied = target.stat()
        if copied.st_size == there.st_size and int(copied.st_mtime) == int(there.st_mtime):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(str(target.parent)).free
    if free < there.st_size + _SPARE_BYTES:
        raise SystemExit(f"error: {target.parent} has {free >> 30} GiB left, and {source} takes {there.st_size >> 30}")
    partial = target.with_name(f"{target.name}.partial")
    shutil.copyfile(str(source), str(partial))
    if partial.stat().st_size != there.st_size:
        raise SystemExit(f"error: {source} changed while it was copied")
    os.utime(str(partial), (there.st_atime, there.st_mtime))
    os.replace(str(partial), str(target))


def stage_prefix(prefix: str, folder: Path) -> str:
    """Copy the files of a prefix and return the prefix of the copies."""
    name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
    target = folder / name / os.path.basename(prefix)
    for suffix in SUFFIXES:
        stage_file(Path(prefix + suffix), target.with_name(target.name + suffix))
    return str(target)


def main(arguments: list[str]) -> None:
    """Copy what a file lists and print the list with the new paths."""
    prefixes, folder = Path(arguments[0]), Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = prefixes.read_text(encoding="utf-8")
        sys.stdout.write(_QUOTED_PATH.sub(lambda word: f"'{stage_prefix(word[1], folder)}'", text))


if __name__ == "__main__":
    main(sys.argv[1:])

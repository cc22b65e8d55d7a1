"""Our own code as it is sent with each job; what it runs in are images and environments (`images.py`).

It is packed from the installed files, so that uncommitted changes are sent too; the commit and the diff are recorded
with it. The same files give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import trainshed
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import CodeArchive
from trainshed.plugins import PluginSource
from trainshed.recipe import Cluster
from trainshed.shipped import shipped_folder
from trainshed.storage import LocalStore

_SKIPPED_SUFFIXES = ("__pycache__", ".pyc", ".pyo")
# Only `plan validate` reads the published measurements, and no node runs it.
_NOT_PACKED = "shipped/measurements/*"
_MOST_DIFF_BYTES = 128 * 1024


def pack_code(plugins: Sequence[PluginSource] = ()) -> CodeArchive:
    """Pack the running package, with the shipped recipes and clusters, and a recipe's plugins beside it.

    One solid archive: as a wheel it would be twice the size, and a ConfigMap holds a mebibyte.
    """
    files = _package_files(Path(trainshed.__file__).parent)
    for kind in ("recipes", "clusters"):
        folder = shipped_folder(kind)
        files |= {
            f"trainshed/shipped/{kind}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.endswith(_SKIPPED_SUFFIXES) for part in path.parts)
        }
    for plugin in plugins:
        files |= plugin.read()
    data = _cached_archive(files)
    sha256 = hashlib.sha256(data).hexdigest()
    version = trainshed.__version__
    return CodeArchive(f"trainshed-{version}-{sha256[:12]}.tar.xz", sha256, data, version)


def job_code(cluster: Cluster, plugins: Sequence[PluginSource] = ()) -> CodeArchive | None:
    """Return the code that is sent with a job; None if the cluster's image has it (`kubernetes.code: image`)."""
    if cluster.target != "kubernetes" or cluster.on_kubernetes.code != "image":
        return pack_code(plugins)
    if plugins:
        raise InputError(
            f"the plugin `{plugins[0].name}` travels with our code, and the image has that",
            where=cluster.where("kubernetes.code"),
            hint="delete `code: image`, or leave the plugin out",
        )
    return None


def provenance(recipe_folder: Path) -> dict[str, Any]:
    """Return where a recipe comes from: the commit of the repository around it, and what differs from that."""
    commit = _run_git(recipe_folder, "rev-parse", "HEAD")
    body: dict[str, Any] = {"trainshed": trainshed.__version__, "commit": commit and commit.strip()}
    diff = _run_git(recipe_folder, "diff", "HEAD", "--no-color", "--no-ext-diff") if commit else None
    if diff:
        body["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest()
        if len(diff.encode()) <= _MOST_DIFF_BYTES:
            body["diff"] = diff
    return body


def _package_files(folder: Path) -> dict[str, bytes]:
    return {
        f"trainshed/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.endswith(_SKIPPED_SUFFIXES) for part in path.relative_to(folder).parts)
        and not path.relative_to(folder).match(_NOT_PACKED)
    }


def _cached_archive(files: dict[str, bytes]) -> bytes:
    """Pack files once and keep the archive in the user's cache: compressing takes a second."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainshed" / "code"
    name = f"{digest.hexdigest()}.tar.xz"
    try:
        return LocalStore(cache).read(name)
    except TrainshedError:
        pass
    data = _pack(files)
    with suppress(TrainshedError, OSError):  # a home that cannot be written must not prevent a submission
        LocalStore(cache).put(name, data)
    return data


def _pack(files: dict[str, bytes]) -> bytes:
    buffer = BytesIO()
    # Without owners and times, so that only names and content count.
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6, format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, BytesIO(files[name]))
    return buffer.getvalue()


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None

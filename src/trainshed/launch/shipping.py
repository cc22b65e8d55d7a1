"""Our own code on its way to a cluster: the package as it runs here, packed and named by its content.

Packed from the installed files, so that a change nobody has committed travels too; where it comes from (commit and
diff) is written down beside it. The same files give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import trainshed
from trainshed.errors import TrainshedError
from trainshed.launch.job import Code
from trainshed.shipped import shipped_folder
from trainshed.storage import LocalStore

_SKIPPED = ("__pycache__", ".pyc", ".pyo")
# The world's measurements judge the planner, which no node asks: a fifth of the archive.
_LEFT_HERE = "plan/published/*.csv"
_MOST_DIFF_BYTES = 128 * 1024


def pack_code() -> Code:
    """Pack the running package, with the shipped recipes and clusters.

    One solid archive: as a wheel it would be twice the size, and a ConfigMap holds a mebibyte.
    """
    files = _package_files(Path(trainshed.__file__).parent)
    for kind in ("recipes", "clusters"):
        folder = shipped_folder(kind)
        files |= {
            f"trainshed/shipped/{kind}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.endswith(_SKIPPED) for part in path.parts)
        }
    data = _packed(files)
    sha256 = hashlib.sha256(data).hexdigest()
    version = trainshed.__version__
    return Code(f"trainshed-{version}-{sha256[:12]}.tar.xz", sha256, data, version)


def provenance(recipe_folder: Path) -> dict[str, Any]:
    """Return where recipe and code come from: the commit of the project they lie in, and what differs from it."""
    commit = _git(recipe_folder, "rev-parse", "HEAD")
    found: dict[str, Any] = {"trainshed": trainshed.__version__, "commit": commit and commit.strip()}
    diff = _git(recipe_folder, "diff", "HEAD", "--no-color", "--no-ext-diff") if commit else None
    if diff:
        found["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest()
        if len(diff.encode()) <= _MOST_DIFF_BYTES:
            found["diff"] = diff
    return found


def _package_files(folder: Path) -> dict[str, bytes]:
    return {
        f"trainshed/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.endswith(_SKIPPED) for part in path.relative_to(folder).parts)
        and not path.relative_to(folder).match(_LEFT_HERE)
    }


def _packed(files: dict[str, bytes]) -> bytes:
    """Pack files once and keep the archive in the user's cache: to compress takes a second, to look takes none."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainshed" / "code"
    name = f"{digest.hexdigest()}.tar.xz"
    try:
        return LocalStore(cache).read(name)
    except TrainshedError:
        pass
    data = _archived(files)
    with suppress(TrainshedError, OSError):  # a home that cannot be written is no reason not to submit
        LocalStore(cache).put(name, data)
    return data


def _archived(files: dict[str, bytes]) -> bytes:
    buffer = BytesIO()
    # No owners, no times: only names and content count.
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6, format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, BytesIO(files[name]))
    return buffer.getvalue()


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None

"""What jobs run in: an environment with the package's dependencies, and our own code, which is sent with each job.

The environment is a container image, or a Python environment on a disk that all nodes share. A base image has its own
PyTorch, which is kept: vendors build theirs for their GPUs and networks. The code is packed from the installed files,
so that uncommitted changes are sent too; the commit and the diff are recorded with it. The same files give the same
bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import requires
from io import BytesIO
from pathlib import Path
from typing import Any

import trainshed
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import CodeArchive
from trainshed.plugins import PluginSource
from trainshed.shipped import shipped_folder
from trainshed.storage import LocalStore

NODE_EXTRAS = ("data", "train", "serve", "health", "tensorboard")
"""What a node needs besides the core: to tokenise, train and serve, to read devices and stacks, to show pages."""
DEFAULT_BASE_IMAGE = "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime"
# An image reference: registry, name, tag or digest; nothing that means more to a shell or a Dockerfile.
_IMAGE_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def image_requirements() -> list[str]:
    """Return what an image must have installed, as pip takes it, PyTorch included."""
    requirements = []
    for line in requires("trainshed") or []:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if (extra is None or extra[1] in NODE_EXTRAS) and "trainshed[" not in requirement:
            requirements.append(requirement.strip().replace(" ", ""))
    return sorted(set(requirements))


def dockerfile(base: str = DEFAULT_BASE_IMAGE) -> str:
    """Write the Dockerfile of an image for jobs; the PyTorch of the base stays as it is."""
    if not _IMAGE_REFERENCE.fullmatch(base):
        raise InputError(f"`{base}` is no image", where="--base", hint=f"write for example {DEFAULT_BASE_IMAGE}")
    print_torch_version = "import importlib.metadata as m; print('torch==' + m.version('torch'))"
    requirements = " ".join(shlex.quote(requirement) for requirement in image_requirements())
    return (
        f"# Written by `trainshed image build`: what jobs need besides the code, which travels with each of them.\n"
        f"FROM {base}\n"
        f'RUN python3 -c "{print_torch_version}" > /tmp/kept.txt \\\n'
        f" && python3 -m pip install --no-cache-dir -c /tmp/kept.txt {requirements} \\\n"
        f" && rm /tmp/kept.txt\n"
        f"WORKDIR /workspace\n"
    )


def image_build_commands(tag: str, folder: str, *, tool: str = "docker", push: bool = False) -> list[list[str]]:
    """Return the commands that build an image from the folder of its Dockerfile, and push it."""
    if not _IMAGE_REFERENCE.fullmatch(tag):
        raise InputError(f"`{tag}` is no name of an image", where="--tag", hint="write registry/name:tag")
    commands = [[tool, "build", "--tag", tag, folder]]
    return [*commands, [tool, "push", tag]] if push else commands


def venv_script(path: str, python: str = "python3") -> str:
    """Write the script that makes a Python environment on a shared disk; it appears when it is complete."""
    partial = shlex.quote(f"{path}.partial")
    requirements = " ".join(shlex.quote(requirement) for requirement in image_requirements())
    return (
        "set -euo pipefail\n"
        f"if [ -e {shlex.quote(path)} ]; then echo {shlex.quote(f'{path} is already there')} >&2; exit 2; fi\n"
        f"rm -rf {partial}\n"
        f"mkdir -p -- {shlex.quote(path.rsplit('/', 1)[0] or '/')}\n"
        # The files of an environment contain its path: it is made beside its place, then the path in them is changed.
        f"{shlex.quote(python)} -m venv --copies {partial}\n"
        f"{partial}/bin/python -m pip install --disable-pip-version-check {requirements}\n"
        f"grep -rlIZ -- {partial} {partial}/bin | xargs -0 -r "
        f"sed -i 's|{_quote_for_sed(path)}\\.partial|{_quote_for_sed(path)}|g'\n"
        f"mv -- {partial} {shlex.quote(path)}\n"
        f"{shlex.quote(path)}/bin/python -c 'import torch, pydantic; print(torch.__version__)'\n"
    )


def _quote_for_sed(path: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._/+-]+", path):
        raise InputError(
            f"`{path}` cannot hold a Python environment: its programs begin with that path",
            where="--venv",
            hint="write an absolute path of letters, digits, dots and dashes",
        )
    return path.replace(".", "\\.")


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

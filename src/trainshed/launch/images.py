"""The environment jobs run in: a container image, or a Python environment on a disk that all nodes share.

Both hold what the package depends on; the package itself travels with each job. A base image brings its own PyTorch,
which is kept: vendors build theirs for their GPUs and networks.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import requires

from trainshed.errors import InputError

EXTRAS = ("data", "train", "serve")
"""What a node needs besides the core: to tokenise, to train, and to serve."""
DEFAULT_BASE = "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime"
# An image reference: registry, name, tag or digest; nothing a shell or a Dockerfile would read otherwise.
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def requirements() -> list[str]:
    """Return what an image must have installed, as pip takes it, PyTorch included."""
    found = []
    for line in requires("trainshed") or []:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if (extra is None or extra[1] in EXTRAS) and "trainshed[" not in requirement:
            found.append(requirement.strip().replace(" ", ""))
    return sorted(set(found))


def dockerfile(base: str = DEFAULT_BASE) -> str:
    """Write the Dockerfile of an image for jobs; the PyTorch of the base stays as it is."""
    if not _REFERENCE.fullmatch(base):
        raise InputError(f"`{base}` is no image", where="--base", hint=f"write for example {DEFAULT_BASE}")
    kept = "import importlib.metadata as m; print('torch==' + m.version('torch'))"
    wanted = " ".join(shlex.quote(each) for each in requirements())
    return (
        f"# Written by `trainshed image build`: what jobs need besides the code, which travels with each of them.\n"
        f"FROM {base}\n"
        f'RUN python3 -c "{kept}" > /tmp/kept.txt \\\n'
        f" && python3 -m pip install --no-cache-dir -c /tmp/kept.txt {wanted} \\\n"
        f" && rm /tmp/kept.txt\n"
        f"WORKDIR /workspace\n"
    )


def build_commands(tag: str, folder: str, *, tool: str = "docker", push: bool = False) -> list[list[str]]:
    """Return the commands that build an image from the folder of its Dockerfile, and push it."""
    if not _REFERENCE.fullmatch(tag):
        raise InputError(f"`{tag}` is no name of an image", where="--tag", hint="write registry/name:tag")
    commands = [[tool, "build", "--tag", tag, folder]]
    return [*commands, [tool, "push", tag]] if push else commands


def environment_script(path: str, python: str = "python3") -> str:
    """Write the script that makes a Python environment on a shared disk; it appears only when it is complete."""
    partial = shlex.quote(f"{path}.partial")
    wanted = " ".join(shlex.quote(each) for each in requirements())
    return (
        "set -euo pipefail\n"
        f"if [ -e {shlex.quote(path)} ]; then echo {shlex.quote(f'{path} is already there')} >&2; exit 2; fi\n"
        f"rm -rf {partial}\n"
        f"mkdir -p -- {shlex.quote(path.rsplit('/', 1)[0] or '/')}\n"
        # Environments name their own place: made where it will stay, hidden by its name until it is complete.
        f"{shlex.quote(python)} -m venv --copies {partial}\n"
        f"{partial}/bin/python -m pip install --disable-pip-version-check {wanted}\n"
        f"grep -rlIZ -- {partial} {partial}/bin | xargs -0 -r "
        f"sed -i 's|{_in_sed(path)}\\.partial|{_in_sed(path)}|g'\n"
        f"mv -- {partial} {shlex.quote(path)}\n"
        f"{shlex.quote(path)}/bin/python -c 'import torch, pydantic; print(torch.__version__)'\n"
    )


def _in_sed(path: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._/+-]+", path):
        raise InputError(
            f"`{path}` cannot hold a Python environment: its programs begin with that path",
            where="--venv",
            hint="write an absolute path of letters, digits, dots and dashes",
        )
    return path.replace(".", "\\.")

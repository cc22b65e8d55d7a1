"""Secrets on Slurm: by the name of a variable where the job is submitted, or from a file that nodes read.

A script holds the reference, never the value, and nothing prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from shlex import quote

from trainshed.errors import RecipeError
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import SecretReference

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported_names(cluster: Cluster) -> list[str]:
    """Return the variables of whoever submits that jobs may see."""
    return sorted({reference.env for _, reference in _references(cluster) if reference.env is not None})


def secret_lines(cluster: Cluster) -> list[str]:
    """Return the lines of bash that set the secrets on a node, or end the job by name where one is missing."""
    lines = []
    for name, reference in _references(cluster):
        if reference.env is not None:
            lines.append(f'export {name}="${{{reference.env}:?is not set where the job was submitted}}"')
        elif reference.file is not None:
            # Apart from `export`, which would hide that the file cannot be read.
            lines += [f'{name}="$(cat -- {quote(reference.file)})"', f"export {name}"]
    return lines


def _references(cluster: Cluster) -> Iterator[tuple[str, SecretReference]]:
    for name, reference in sorted(cluster.secrets.items()):
        where = cluster.where(f"secrets.{name}")
        for each in (name, reference.env):
            if each is not None and not _NAME.fullmatch(each):
                raise RecipeError(f"{each!r} is no name of a variable", where=where, hint="write for example HF_TOKEN")
        if reference.file is not None and ("\x00" in reference.file or "\n" in reference.file):
            raise RecipeError("this is no path", where=where, hint="write the path of a file that every node reads")
        yield name, reference

"""What every door asks of a cluster file besides its schema: a machine, only keys that are read, no secret in clear."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainshed.recipe.cluster.readers import unread_keys
from trainshed.recipe.cluster.schema import Cluster
from trainshed.recipe.messages import as_recipe_error
from trainshed.recipe.places import KeyPath
from trainshed.recipe.resolved import to_plain
from trainshed.recipe.secret_values import known_shape, secret_in
from trainshed.recipe.section import Problem

_ASSIGNMENT = re.compile(r"(?:^|[\s;&|])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)")


def check_cluster(cluster: Cluster) -> None:
    """Raise one error with all that keeps jobs from doing what the file says."""
    problems = [*_missing_machine(cluster), *unread_keys(cluster), *_written_secrets(cluster)]
    if problems:
        raise as_recipe_error(problems, cluster.places)


def _missing_machine(cluster: Cluster) -> Iterator[Problem]:
    if cluster.machine is None and cluster.target != "local":
        yield Problem(
            ("machine",),
            "is missing: what machines are its nodes?",
            "write `machine: dgx-h100` (a name in the catalog, an instance type, or a file that describes it), "
            "or `machine: cpu` for nodes without GPUs",
        )


def _written_secrets(cluster: Cluster) -> Iterator[Problem]:
    """Find secrets that are written out: by name and by shape in variables, by shape in every other text."""
    for name, value in cluster.environment.items():
        what = secret_in(name, value)
        if what is not None:
            yield _in_clear(cluster, ("environment", name), what, name)
    for number, line in enumerate(cluster.setup):
        found = ((name, secret_in(name, value.strip("\"'"))) for name, value in _ASSIGNMENT.findall(line))
        name, what = next(((name, what) for name, what in found if what is not None), ("NAME", known_shape(line)))
        if what is not None:
            yield _in_clear(cluster, ("setup", number), what, name)
    plain = to_plain(cluster, defaults=False)
    for path, text in _texts({key: value for key, value in plain.items() if key not in ("environment", "setup")}, ()):
        what = known_shape(text)
        if what is not None:
            yield _in_clear(cluster, path, what, "NAME")


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*path, number))


def _in_clear(cluster: Cluster, path: KeyPath, what: str, name: str) -> Problem:
    """Name the line to write; the value itself is not repeated."""
    if cluster.target == "kubernetes":
        made = f"kubectl create secret generic {name.lower().replace('_', '-')} --from-literal=key=…"
        instead = f"{{k8s: {name.lower().replace('_', '-')}/key}}`, after `{made}"
    else:
        instead = f"{{env: {name}}}`, or `{{file: PATH}}"
    return Problem(
        path,
        f"holds {what}, which would stand in scripts and manifests in clear",
        f"delete it and write below `secrets`: `{name}: {instead}`",
    )

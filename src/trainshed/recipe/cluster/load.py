"""Cluster files by path or by name: from the project, the user's own folder, or the shipped ones.

`check_cluster` is what every command asks of a file besides its schema: a machine, only keys that its target
reads, no secret in clear.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainshed.errors import InputError, RecipeError
from trainshed.recipe.cluster.kubernetes_values import value_problems
from trainshed.recipe.cluster.schema import Cluster
from trainshed.recipe.cluster.target_keys import unread_keys
from trainshed.recipe.load import YAML_SUFFIXES, check_format, to_plain
from trainshed.recipe.overrides import Override, apply_overrides
from trainshed.recipe.registered import load_named_plugins
from trainshed.recipe.secret_detection import find_secret, secret_shape, secret_texts
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error, validate
from trainshed.recipe.yaml_io import KeyPath, YamlDocument, decode_utf8, parse_yaml
from trainshed.shipped import shipped_folder

DEFAULT_CLUSTER = "local"


def load_cluster(
    name_or_path: str | os.PathLike[str] = DEFAULT_CLUSTER, overrides: Iterable[str] = (), *, checked: bool = True
) -> Cluster:
    """Load a cluster file by path, or by name from the project, the user's own folder or the shipped ones.

    `checked=False` is for the copy that was kept with a run: what an older version took, `status` and `cancel` take.
    """
    file = find_cluster(name_or_path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(file)) from None
    return parse_cluster(decode_utf8(data, str(file)), overrides, source=str(file), folder=file.parent, checked=checked)


def as_cluster(cluster: Cluster | str | os.PathLike[str] = DEFAULT_CLUSTER, overrides: Iterable[str] = ()) -> Cluster:
    """Return a cluster that is at hand, or load it; with overrides (without `cluster.`) in both cases."""
    return cluster.with_overrides(overrides) if isinstance(cluster, Cluster) else load_cluster(cluster, overrides)


def parse_cluster(
    text: str,
    overrides: Iterable[str | Override] = (),
    *,
    source: str = "cluster.yaml",
    folder: Path | None = None,
    checked: bool = True,
) -> Cluster:
    """Load a cluster from text; errors call it `source`, and plugins lie in `folder`."""
    document = parse_yaml(text, source)
    document.places.text = text
    overrides = list(overrides)
    _refuse_locked_overrides(document, overrides)
    apply_overrides(document, overrides, prefix="cluster.")
    check_format(document)
    document.places.folder = folder or Path()
    load_named_plugins(document)
    cluster = validate(Cluster, document)
    cluster._places = document.places
    if checked:
        check_cluster(cluster)
    return cluster


def _refuse_locked_overrides(document: YamlDocument, overrides: list[str | Override]) -> None:
    """Refuse to override what the file locks; mistakes in the list itself are reported when it is checked."""
    locked = document.value.get("locked") if isinstance(document.value, dict) else None
    for key in locked if isinstance(locked, list) else []:
        for override in overrides:
            written = override.key if isinstance(override, Override) else override.partition("=")[0]
            written = written.strip().replace('"', "")
            if written == "locked" or written == key or str(key).startswith(f"{written}."):
                raise RecipeError(
                    f"`{written}` is locked by whoever runs this cluster",
                    where=override.origin if isinstance(override, Override) else f"command line: cluster.{written}=…",
                    hint=f"leave it out; {document.places.where(('locked',))} says what is locked",
                )


def cluster_folders() -> list[Path]:
    """Return where cluster files are looked for: the project, the user's configuration, the shipped ones."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path("clusters"), Path(configuration) / "trainshed" / "clusters", shipped_folder("clusters")]


def known_clusters() -> dict[str, Path]:
    """Return every cluster file that a name would find."""
    files: dict[str, Path] = {}
    for folder in cluster_folders():
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            if file.suffix in YAML_SUFFIXES:
                files.setdefault(file.stem, file)
    return files


def find_cluster(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a cluster."""
    text = os.fspath(name_or_path)
    known = known_clusters()
    if text in known:
        return known[text]
    if ("/" in text or Path(text).suffix in YAML_SUFFIXES) and Path(text).is_file():
        return Path(text)
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known clusters: {', '.join(known)}"
    what = "there is no such cluster file" if text else "the name of the cluster is empty"
    raise RecipeError(what, where=text or None, hint=hint)


def copy_cluster(name: str, destination: Path) -> Path:
    """Copy a cluster file to a folder or a new file, and return it; nothing is overwritten."""
    source = find_cluster(name)
    target = destination if destination.suffix in YAML_SUFFIXES else destination / source.name
    if target.exists():
        raise InputError("is there already, and nothing is overwritten", where=str(target), hint="name another file")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


_ASSIGNMENT = re.compile(r"(?:^|[\s;&|])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)")


def check_cluster(cluster: Cluster) -> None:
    """Raise one error with all that keeps jobs from doing what the file says."""
    problems = [
        *_missing_machine(cluster),
        *unread_keys(cluster),
        *_written_secrets(cluster),
        *value_problems(cluster),
    ]
    if problems:
        raise recipe_error(problems, cluster.places)


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
        what = find_secret(name, value)
        if what is not None:
            yield _secret_in_clear(cluster, ("environment", name), what, name)
    for number, line in enumerate(cluster.setup):
        secrets = ((name, find_secret(name, value.strip("\"'"))) for name, value in _ASSIGNMENT.findall(line))
        name, what = next(((name, what) for name, what in secrets if what is not None), ("NAME", secret_shape(line)))
        if what is not None:
            yield _secret_in_clear(cluster, ("setup", number), what, name)
    plain = to_plain(cluster, defaults=False)
    rest = {key: value for key, value in plain.items() if key not in ("environment", "setup")}
    for path, what in secret_texts(rest):
        yield _secret_in_clear(cluster, path, what, "NAME")


def _secret_in_clear(cluster: Cluster, path: KeyPath, what: str, name: str) -> Problem:
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

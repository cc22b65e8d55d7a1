"""Cluster files by path or by name: from the project, the user's own folder, or the shipped ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from trainshed.errors import RecipeError
from trainshed.recipe.cluster.checking import check_cluster
from trainshed.recipe.cluster.schema import Cluster
from trainshed.recipe.load import SUFFIXES, check_format
from trainshed.recipe.messages import validate
from trainshed.recipe.overrides import apply_overrides
from trainshed.recipe.places import Document
from trainshed.recipe.yaml_source import decode, parse
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
    document = parse(decode(data, str(file)), str(file))
    overrides = list(overrides)
    _heed_locks(document, overrides)
    apply_overrides(document, overrides, prefix="cluster.")
    check_format(document)
    cluster = validate(Cluster, document)
    cluster._places = document.places
    if checked:
        check_cluster(cluster)
    return cluster


def _heed_locks(document: Document, overrides: list[str]) -> None:
    """Refuse to override what the file locks; what is wrong with the list itself is said when it is checked."""
    locked = document.value.get("locked") if isinstance(document.value, dict) else None
    for key in locked if isinstance(locked, list) else []:
        for text in overrides:
            written = text.partition("=")[0].strip().replace('"', "")
            if written == "locked" or written == key or str(key).startswith(f"{written}."):
                raise RecipeError(
                    f"`{written}` is locked by whoever runs this cluster",
                    where=f"command line: cluster.{written}=…",
                    hint=f"leave it out; {document.places.where(('locked',))} says what is locked",
                )


def cluster_folders() -> list[Path]:
    """Return where cluster files are looked for: the project, the user's configuration, the shipped ones."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path("clusters"), Path(configuration) / "trainshed" / "clusters", shipped_folder("clusters")]


def known_clusters() -> dict[str, Path]:
    """Return every cluster file that a name would find."""
    found: dict[str, Path] = {}
    for folder in cluster_folders():
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            if file.suffix in SUFFIXES:
                found.setdefault(file.stem, file)
    return found


def find_cluster(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a cluster."""
    text = os.fspath(name_or_path)
    known = known_clusters()
    if text in known:
        return known[text]
    if ("/" in text or Path(text).suffix in SUFFIXES) and Path(text).is_file():
        return Path(text)
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known clusters: {', '.join(known)}"
    raise RecipeError("there is no such cluster file", where=text, hint=hint)

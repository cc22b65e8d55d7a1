"""What a job carries along: its files and our code, in ConfigMaps that are named by what they hold.

`kubectl apply` keeps a copy of each object in an annotation of at most 256 KiB, so nothing is put into one ConfigMap
that would not fit there: files are dealt among several, the code is cut into pieces. The kubelet puts them together
again in one folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainshed.errors import InputError
from trainshed.launch.job import Code, Job
from trainshed.launch.kubernetes.kinds import CONFIG_MAP, Object, new_object
from trainshed.launch.kubernetes.manifests.naming import (
    CODE_FOLDER,
    ENTRY_FILE,
    JOB_FOLDER,
    LOCAL_FOLDER,
    fitted,
    metadata,
)

MOST_TEXT_BYTES = 200 * 1024
"""Of files in one ConfigMap, as JSON writes them."""
PIECE_BYTES = 150 * 1024
"""Of code in one ConfigMap: base64 makes 200 KiB of it."""
MOST_CODE_BYTES = 900 * 1024
MOST_FILE_BYTES = 1000 * 1024
"""The API server refuses a ConfigMap of more than 1 MiB."""
_KEY = re.compile(r"[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}")
_HOW_TO_BAKE_IN = "bake it into the image (`trainshed image build`)"


@dataclass(frozen=True)
class Content:
    """ConfigMaps, and how pods mount them."""

    objects: tuple[Object, ...]
    volumes: tuple[Object, ...]
    mounts: tuple[Object, ...]


def content(job: Job) -> Content:
    """Return a job's files and code as ConfigMaps."""
    files = dict(job.files) | {ENTRY_FILE: entry_script()}
    dealt = list(_file_maps(job, files))
    objects = [found for found, _ in dealt]
    volumes: list[Object] = [{"name": "job", "projected": {"sources": [source for _, source in dealt]}}]
    mounts: list[Object] = [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    if job.code is not None:
        pieces = list(_code_maps(job, job.code))
        sources = [{"configMap": {"name": piece["metadata"]["name"]}} for piece in pieces]
        volumes.append({"name": "code", "projected": {"sources": sources}})
        mounts.append({"name": "code", "mountPath": CODE_FOLDER, "readOnly": True})
        objects += pieces
    volumes.append({"name": "local", "emptyDir": {}})
    mounts.append({"name": "local", "mountPath": LOCAL_FOLDER})
    return Content(tuple(objects), tuple(volumes), tuple(mounts))


def entry_script() -> str:
    """Return what every container starts with."""
    return (Path(__file__).parents[1] / ENTRY_FILE).read_text(encoding="utf-8")


def _file_maps(job: Job, files: Mapping[str, str]) -> Iterator[tuple[Object, Object]]:
    """ConfigMaps of files, each with the source that mounts it: a path in folders has a key that stands for it."""
    mark = hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()[:10]
    for number, dealt in enumerate(_dealt(job, files)):
        name = fitted(job.name, f"-files-{mark}" + (f"-{number}" if number else ""))
        paths = {path if _KEY.fullmatch(path) else f"path-{place}": path for place, path in enumerate(dealt)}
        found = new_object(
            CONFIG_MAP,
            metadata(job, name, "content"),
            immutable=True,
            data={key: dealt[path] for key, path in paths.items()},
        )
        source: Object = {"name": name}
        if any(key != path for key, path in paths.items()):
            source["items"] = [{"key": key, "path": path} for key, path in paths.items()]
        yield found, {"configMap": source}


def _dealt(job: Job, files: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Deal files among ConfigMaps; a large one has its own."""
    group: dict[str, str] = {}
    taken = 0
    for name in sorted(files):
        size = len(json.dumps(files[name]))
        if size > MOST_FILE_BYTES:
            raise InputError(
                f"the job's file {name} has {size // 1024} KiB, and a ConfigMap holds 1 MiB",
                where=job.name,
                hint="put it into the store, or into the image",
            )
        if group and taken + size > MOST_TEXT_BYTES:
            yield group
            group, taken = {}, 0
        group[name] = files[name]
        taken += size
    yield group


def _code_maps(job: Job, code: Code) -> Iterator[Object]:
    if len(code.data) > MOST_CODE_BYTES:
        raise InputError(
            f"the code has {len(code.data) // 1024} KiB, and ConfigMaps carry {MOST_CODE_BYTES // 1024} at most",
            where=job.cluster.where("image"),
            hint=_HOW_TO_BAKE_IN,
        )
    for number, start in enumerate(range(0, len(code.data), PIECE_BYTES)):
        piece = base64.b64encode(code.data[start : start + PIECE_BYTES]).decode()
        yield new_object(
            CONFIG_MAP,
            metadata(job, fitted(job.name, f"-code-{code.sha256[:10]}-{number}"), "content"),
            immutable=True,
            binaryData={f"piece-{number:03d}": piece},
        )

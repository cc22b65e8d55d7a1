"""What may change in a chart without planning anew, and how it stands in the manifests until Helm fills it in.

The job is rendered once more with a mark in the place of each value; a mark is a word that occurs nowhere else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainshed.launch.job import Job
from trainshed.launch.kubernetes.kinds import Object

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_STEPS = re.compile(r"(?m)^  steps: ([0-9]+)$")
FROZEN = (
    "is part of the plan: change the recipe or the cluster file and run `trainshed render --as helm` again; "
    "a chart takes only the values of its values.yaml"
)
"""Said of every other value."""


@dataclass(frozen=True)
class Value:
    """One value of a chart."""

    name: str
    default: Any
    schema: Object
    marks: dict[str, str]
    """What stands in the manifests → what Helm makes of it."""


@dataclass(frozen=True)
class Marked:
    """A job with marks in the place of values."""

    job: Job
    values: tuple[Value, ...]
    labels_mark: str


def marked(job: Job, text: str) -> Marked:
    """Put marks into a job; `text` is what it renders to, in which no mark may occur."""
    stem = _stem(text)
    for put in _STEPS_OF_MARKING:
        job, stem = put(job, stem)
    return Marked(job, tuple(stem.values), stem.mark("labels"))


@dataclass
class _Stem:
    """The beginning of every mark, and the values found so far."""

    word: str
    values: list[Value]

    def mark(self, name: str) -> str:
        return f"{self.word}x{name.encode().hex()}x"

    def add(self, name: str, default: Any, schema: Object, marks: dict[str, str]) -> None:
        self.values.append(Value(name, default, schema, marks))


def _stem(text: str) -> _Stem:
    word = "mark" + hashlib.sha256(text.encode()).hexdigest()[:12]
    while word in text:
        word = "mark" + hashlib.sha256(word.encode()).hexdigest()[:12]
    return _Stem(word, [])


def _image(job: Job, stem: _Stem) -> tuple[Job, _Stem]:
    """The cluster's image; a stage with an image of its own has it from its engine, which is part of the plan."""
    if job.cluster.image is None:
        return job, stem
    schema = {"type": "string", "minLength": 1, "pattern": r"^\S+$", "description": "Container image, best by digest"}
    stem.add("image", job.cluster.image, schema, {stem.mark("image"): '{{ include "trainshed.text" .Values.image }}'})
    return _with_cluster(job, image=stem.mark("image")), stem


def _places(job: Job, stem: _Stem) -> tuple[Job, _Stem]:
    """Namespace and queues; a job without a queue cannot be given one, as that changes more than a label."""
    kubernetes = job.cluster.on_kubernetes
    found = {"namespace": "Namespace", "queue": "Kueue's LocalQueue", "cpu_queue": "LocalQueue of stages without GPUs"}
    changed = {}
    for name, description in found.items():
        default = getattr(kubernetes, name)
        if default is None:
            continue
        schema = {"type": "string", "pattern": _NAME, "maxLength": 63, "description": description}
        stem.add(name, default, schema, {stem.mark(name): f'{{{{ include "trainshed.text" .Values.{name} }}}}'})
        changed[name] = stem.mark(name)
    return _with_cluster(job, kubernetes=kubernetes.model_copy(update=changed)), stem


def _volumes(job: Job, stem: _Stem) -> tuple[Job, _Stem]:
    """Claims and buckets, by where they are mounted."""
    volumes, defaults, schemas, marks = [], {}, {}, {}
    for number, volume in enumerate(job.cluster.volumes):
        key = "pvc" if volume.pvc is not None else "bucket"
        default = getattr(volume, key)
        if default is None:
            volumes.append(volume)
            continue
        mark = stem.mark(f"volume{number}")
        path = _quoted(volume.mount)
        marks[mark] = f'{{{{ include "trainshed.text" (index .Values.volumes {path}) }}}}'
        defaults[volume.mount] = default
        what = "PersistentVolumeClaim" if key == "pvc" else "Bucket"
        schemas[volume.mount] = {"type": "string", "minLength": 1, "description": f"{what} at {volume.mount}"}
        volumes.append(volume.model_copy(update={key: mark}))
    if defaults:
        schema = {
            "type": "object",
            "description": "Claims and buckets by where they are mounted",
            "properties": schemas,
            "required": list(schemas),
            "additionalProperties": {"enum": [FROZEN]},
        }
        stem.add("volumes", defaults, schema, marks)
    return _with_cluster(job, volumes=tuple(volumes)), stem


def _steps(job: Job, stem: _Stem) -> tuple[Job, _Stem]:
    """The length of a training by our own engine; others have it in their arguments."""
    recipe = job.files.get("recipe.yaml", "")
    found = _STEPS.findall(recipe)
    ours = all(stage.script is None or stage.serving is not None for stage in job.stages)
    if not ours or job.steps is None or found != [str(job.steps)]:
        return job, stem
    schema = {"type": "integer", "minimum": 1, "description": "Steps of the training; extending it keeps its past"}
    stem.add("steps", job.steps, schema, {stem.mark("steps"): "{{ int .Values.steps }}"})
    files = dict(job.files) | {"recipe.yaml": _STEPS.sub(f"  steps: {stem.mark('steps')}", recipe)}
    return replace(job, files=files), stem


def _labels(job: Job, stem: _Stem) -> tuple[Job, _Stem]:
    """Labels of everything; ours are not theirs to change."""
    kubernetes = job.cluster.on_kubernetes
    schema = {
        "type": "object",
        "description": "Further labels of every object and pod",
        "propertyNames": {"not": {"pattern": r"^(app\.kubernetes\.io|kueue\.x-k8s\.io)/"}},
        "additionalProperties": {"type": "string", "maxLength": 63},
    }
    stem.add("labels", dict(kubernetes.labels), schema, {})
    mark = stem.mark("labels")
    return _with_cluster(job, kubernetes=kubernetes.model_copy(update={"labels": {mark: mark}})), stem


_STEPS_OF_MARKING: tuple[Callable[[Job, _Stem], tuple[Job, _Stem]], ...] = (
    _image,
    _places,
    _volumes,
    _steps,
    _labels,
)


def _with_cluster(job: Job, **changed: Any) -> Job:
    cluster = job.cluster.model_copy(update=changed)
    return replace(job, cluster=cluster)


def _quoted(text: str) -> str:
    """A string of Go's template language that has any content."""
    return '"' + "".join(char if char.isalnum() or char in "/._-" else f"\\u{ord(char):04x}" for char in text) + '"'

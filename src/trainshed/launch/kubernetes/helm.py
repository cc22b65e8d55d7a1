"""A job as a Helm chart: a frozen plan with the few values that may change without planning again.

`helm template` of the chart gives the objects that `render` prints. To find where each value stands, the job is
rendered once more with placeholders; a placeholder is a word that occurs nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainshed import __version__
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.objects import PLAIN_WORD, RESERVED_WORDS, KubeObject, to_yaml
from trainshed.launch.kubernetes.render import render
from trainshed.launch.target import SubmitRequest

_DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_STEPS_LINE = re.compile(r"(?m)^  steps: ([0-9]+)$")
FROZEN_VALUE_MESSAGE = (
    "is part of the plan: change the recipe or the cluster file and run `trainshed render --as helm` again; "
    "a chart takes only the values of its values.yaml"
)
"""Said of every other value."""


@dataclass(frozen=True)
class ChartValue:
    """One value of a chart."""

    name: str
    default: Any
    schema: KubeObject
    marks: dict[str, str]
    """What stands in the manifests → what Helm makes of it."""


@dataclass(frozen=True)
class JobWithPlaceholders:
    """A job with marks in the place of values."""

    job: Job
    values: tuple[ChartValue, ...]
    labels_mark: str


def with_placeholders(job: Job, text: str) -> JobWithPlaceholders:
    """Put marks into a job; `text` is what it renders to, in which no mark may occur."""
    stem = _new_placeholders(text)
    for put in _VALUE_BUILDERS:
        job, stem = put(job, stem)
    return JobWithPlaceholders(job, tuple(stem.values), stem.mark("labels"))


@dataclass
class _Placeholders:
    """The beginning of every mark, and the values found so far."""

    word: str
    values: list[ChartValue]

    def mark(self, name: str) -> str:
        return f"{self.word}x{name.encode().hex()}x"

    def add(self, name: str, default: Any, schema: KubeObject, marks: dict[str, str]) -> None:
        self.values.append(ChartValue(name, default, schema, marks))


def _new_placeholders(text: str) -> _Placeholders:
    word = "mark" + hashlib.sha256(text.encode()).hexdigest()[:12]
    while word in text:
        word = "mark" + hashlib.sha256(word.encode()).hexdigest()[:12]
    return _Placeholders(word, [])


def _image_value(job: Job, stem: _Placeholders) -> tuple[Job, _Placeholders]:
    """The cluster's image; a stage with an image of its own has it from its engine, which is part of the plan."""
    if job.cluster.image is None:
        return job, stem
    schema = {"type": "string", "minLength": 1, "pattern": r"^\S+$", "description": "Container image, best by digest"}
    stem.add("image", job.cluster.image, schema, {stem.mark("image"): '{{ include "trainshed.text" .Values.image }}'})
    return _with_cluster(job, image=stem.mark("image")), stem


def _namespace_and_queue_values(job: Job, stem: _Placeholders) -> tuple[Job, _Placeholders]:
    """Namespace and queues; a job without a queue cannot be given one, as that changes more than a label."""
    kubernetes = job.cluster.on_kubernetes
    found = {"namespace": "Namespace", "queue": "Kueue's LocalQueue", "cpu_queue": "LocalQueue of stages without GPUs"}
    changed = {}
    for name, description in found.items():
        default = getattr(kubernetes, name)
        if default is None:
            continue
        schema = {"type": "string", "pattern": _DNS_NAME, "maxLength": 63, "description": description}
        stem.add(name, default, schema, {stem.mark(name): f'{{{{ include "trainshed.text" .Values.{name} }}}}'})
        changed[name] = stem.mark(name)
    return _with_cluster(job, kubernetes=kubernetes.model_copy(update=changed)), stem


def _volume_values(job: Job, stem: _Placeholders) -> tuple[Job, _Placeholders]:
    """Claims and buckets, by where they are mounted."""
    volumes, defaults, schemas, marks = [], {}, {}, {}
    for number, volume in enumerate(job.cluster.volumes):
        key = "pvc" if volume.pvc is not None else "bucket"
        default = getattr(volume, key)
        if default is None:
            volumes.append(volume)
            continue
        mark = stem.mark(f"volume{number}")
        path = _go_quoted(volume.mount)
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
            "additionalProperties": {"enum": [FROZEN_VALUE_MESSAGE]},
        }
        stem.add("volumes", defaults, schema, marks)
    return _with_cluster(job, volumes=tuple(volumes)), stem


def _steps_value(job: Job, stem: _Placeholders) -> tuple[Job, _Placeholders]:
    """The length of a training by our own engine; others have it in their arguments."""
    recipe = job.files.get("recipe.yaml", "")
    found = _STEPS_LINE.findall(recipe)
    ours = all(stage.script is None or stage.serving is not None for stage in job.stages)
    if not ours or job.steps is None or found != [str(job.steps)]:
        return job, stem
    schema = {"type": "integer", "minimum": 1, "description": "Steps of the training; extending it keeps its past"}
    stem.add("steps", job.steps, schema, {stem.mark("steps"): "{{ int .Values.steps }}"})
    files = dict(job.files) | {"recipe.yaml": _STEPS_LINE.sub(f"  steps: {stem.mark('steps')}", recipe)}
    return replace(job, files=files), stem


def _label_values(job: Job, stem: _Placeholders) -> tuple[Job, _Placeholders]:
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


_VALUE_BUILDERS: tuple[Callable[[Job, _Placeholders], tuple[Job, _Placeholders]], ...] = (
    _image_value,
    _namespace_and_queue_values,
    _volume_values,
    _steps_value,
    _label_values,
)


def _with_cluster(job: Job, **changed: Any) -> Job:
    cluster = job.cluster.model_copy(update=changed)
    return replace(job, cluster=cluster)


def _go_quoted(text: str) -> str:
    """A string of Go's template language that has any content."""
    return '"' + "".join(char if char.isalnum() or char in "/._-" else f"\\u{ord(char):04x}" for char in text) + '"'


MAX_RELEASE_BYTES = 1024 * 1024
"""What a release may have: `helm install` keeps chart and manifests in one Secret."""
_CHANGED_SUFFIX = '{{ include "trainshed.changed" . }}'


def write_chart(job: Job, request: SubmitRequest, folder: Path) -> tuple[str, ...]:
    """Write a chart of what was rendered into a folder; says what a person should know about it."""
    found = with_placeholders(job, request.text())
    again = render(found.job)
    defaults = {value.name: value.default for value in found.values}
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    for part, original in zip(again.parts, request.parts, strict=True):
        text = _keep_config_map_names(original.text, part.text)
        (templates / part.name).write_text(_template(text, found), encoding="utf-8")
    (templates / "_text.tpl").write_text(_text_template() + _changed_template(defaults), encoding="utf-8")
    (folder / "Chart.yaml").write_text(to_yaml(_chart_metadata(job)), encoding="utf-8")
    (folder / "values.yaml").write_text(_values_text(found, defaults), encoding="utf-8")
    (folder / "values.schema.json").write_text(json.dumps(_values_schema(found), indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in templates.iterdir())
    if 2 * size > MAX_RELEASE_BYTES:
        return (
            f"`helm install` keeps a chart in a Secret of 1 MiB at most, and this one has {size // 1024} KiB: "
            f"helm template {job.name} {folder} | kubectl apply -f -",
        )
    return ()


def _chart_metadata(job: Job) -> KubeObject:
    return {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"{job.name} as Trainshed has planned it for {job.cluster.name}",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


def _values_text(found: JobWithPlaceholders, defaults: dict[str, Any]) -> str:
    head = "# What may change without planning anew; every other value is refused.\n"
    comments = {value.name: value.schema["description"] for value in found.values}
    return head + "".join(f"# {comments[name]}\n{to_yaml({name: value})}" for name, value in defaults.items())


def _values_schema(found: JobWithPlaceholders) -> KubeObject:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of this chart",
        "type": "object",
        "properties": {value.name: value.schema for value in found.values},
        "required": [value.name for value in found.values],
        # A list of allowed values with one entry, the reason: Helm prints it.
        "additionalProperties": {"enum": [FROZEN_VALUE_MESSAGE]},
    }


def _text_template() -> str:
    """A text as `yaml_text` writes it: a plain word as it is, anything else in quotes."""
    words = " ".join(json.dumps(word) for word in sorted(RESERVED_WORDS))
    return (
        '{{- define "trainshed.text" -}}\n'
        f'{{{{- if and (regexMatch "^{PLAIN_WORD.pattern}$" .) (not (has (lower .) (list {words}))) -}}}}\n'
        "{{ . }}\n{{- else -}}\n{{ . | toJson }}\n{{- end -}}\n{{- end -}}\n"
    )


def _changed_template(defaults: dict[str, Any]) -> str:
    """A suffix for ConfigMaps whose text depends on values: they are immutable, and named by what they hold."""
    names = " ".join(json.dumps(name) for name in defaults)
    planned = json.dumps(json.dumps(defaults))
    return (
        '{{- define "trainshed.changed" -}}\n'
        f"{{{{- $now := pick .Values {names} | toJson -}}}}\n"
        f"{{{{- if ne $now ({_go_string(planned)} | fromJson | toJson) -}}}}\n"
        "-{{ $now | sha256sum | trunc 6 }}\n"
        "{{- end -}}\n"
        "{{- end -}}\n"
    )


def _go_string(quoted: str) -> str:
    """A JSON string as one of Go: the same but for pairs of surrogates, which Go does not take."""
    return re.sub(
        r"\\ud([89ab][0-9a-f]{2})\\ud([c-f][0-9a-f]{2})",
        lambda pair: f"\\U{0x10000 + (int(pair[1], 16) - 0x800 << 10) + int(pair[2], 16) - 0xC00:08x}",
        quoted,
    )


def _keep_config_map_names(original: str, again: str) -> str:
    """Give ConfigMaps with marks in their text the names they had, which are made of what they hold."""
    pattern = r"-(?:files|stages)-[0-9a-f]{10}"
    names = dict(zip(_distinct_matches(pattern, again), _distinct_matches(pattern, original), strict=True))
    return re.sub(pattern, lambda found: names[found[0]], again)


def _distinct_matches(pattern: str, text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(pattern, text)))


def _template(text: str, found: JobWithPlaceholders) -> str:
    """Keep what looks like a template from being one, then put expressions in the place of marks."""
    text = text.replace("{{", '{{ "{{" }}')
    text = re.sub(r"(-(?:files|stages)-[0-9a-f]{10})(?![0-9a-f])", lambda name: name[1] + _CHANGED_SUFFIX, text)
    mark = re.escape(found.labels_mark)
    text = re.sub(rf"(?m)^( *){mark}: {mark}\n", _labels_template, text)
    for value in found.values:
        for mark, expression in value.marks.items():
            text = text.replace(mark, expression)
    return text


def _labels_template(line: re.Match[str]) -> str:
    each = (
        "{{ range $key, $value := .Values.labels }}"
        + line[1]
        + '{{ include "trainshed.text" $key }}: {{ include "trainshed.text" $value }}\n'
    )
    return each + "{{ end }}"

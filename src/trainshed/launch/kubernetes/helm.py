"""A job as a Helm chart: a frozen plan with the few values that may change without planning again.

`helm template` of the chart gives the objects that `render` prints. To find where each value occurs, the job is
rendered a second time with placeholders in place of the values; a placeholder is a word that occurs nowhere else.

Helm keeps a release in one Secret of 1 MiB, so our code is not in the chart: `code.yaml` beside it is applied first
where ConfigMaps bring the code. `helm uninstall` deletes the stages too, since they belong to a ConfigMap of the chart
(`driver.py`). `helm upgrade` starts another driver, whose name depends on the values: a Job cannot be changed.
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
from trainshed.launch.kubernetes.code import bucket_of_store
from trainshed.launch.kubernetes.kinds import KubeObject, driver_name
from trainshed.launch.kubernetes.objects import JOB_FOLDER, PLAIN_WORD, RESERVED_WORDS, is_training, to_yaml
from trainshed.launch.kubernetes.render import CODE_PART, render
from trainshed.launch.target import SubmitRequest
from trainshed.run_folder import RECIPE_FILE

_DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_IMAGE = {"type": "string", "minLength": 1, "pattern": r"^\S+$"}
_STEPS_LINE = re.compile(r"(?m)^  steps: ([0-9]+)$")
FROZEN_VALUE_MESSAGE = (
    "is part of the plan: change the recipe or the cluster file and run `trainshed render --as helm` again; "
    "a chart takes only the values of its values.yaml"
)
"""The error for every other value."""
OTHER_GPUS_MESSAGE = "another number needs another plan: `trainshed render RECIPE --on CLUSTER --gpus N --as helm`"
"""The error for another number of GPUs: Helm prints what a schema allows."""


@dataclass(frozen=True)
class ChartValue:
    """One value of a chart."""

    name: str
    default: Any
    schema: KubeObject
    placeholders: dict[str, str]
    """Placeholder in the manifests → the template expression that replaces it."""


@dataclass(frozen=True)
class JobWithPlaceholders:
    """A job with placeholders in place of values."""

    job: Job
    values: tuple[ChartValue, ...]
    labels_placeholder: str


def with_placeholders(job: Job, text: str) -> JobWithPlaceholders:
    """Put placeholders into a job; `text` is what it renders to, in which no placeholder may occur."""
    placeholders = _new_placeholders(text)
    for build in _VALUE_BUILDERS:
        job, placeholders = build(job, placeholders)
    return JobWithPlaceholders(job, tuple(placeholders.values), placeholders.placeholder("labels"))


@dataclass
class _Placeholders:
    """The beginning of every placeholder, and the values that have one so far."""

    word: str
    values: list[ChartValue]

    def placeholder(self, name: str) -> str:
        return f"{self.word}x{name.encode().hex()}x"

    def add(self, name: str, default: Any, schema: KubeObject, placeholders: dict[str, str]) -> None:
        self.values.append(ChartValue(name, default, schema, placeholders))


def _new_placeholders(text: str) -> _Placeholders:
    word = "mark" + hashlib.sha256(text.encode()).hexdigest()[:12]
    while word in text:
        word = "mark" + hashlib.sha256(word.encode()).hexdigest()[:12]
    return _Placeholders(word, [])


def _image_value(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """The cluster's image."""
    if job.cluster.image is None:
        return job, placeholders
    schema = _IMAGE | {"description": "Container image, best by digest"}
    placeholders.add(
        "image",
        job.cluster.image,
        schema,
        {placeholders.placeholder("image"): '{{ include "trainshed.text" .Values.image }}'},
    )
    return _with_cluster(job, image=placeholders.placeholder("image")), placeholders


def _engine_image_value(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """The image of a foreign engine; the version that its arguments are of is part of the plan."""
    images = {stage.image for stage in job.stages if stage.image is not None and stage.serving is None}
    if len(images) != 1:
        return job, placeholders
    (image,) = images
    schema = _IMAGE | {"description": "Image of the engine: it holds the version that the arguments are of"}
    name = placeholders.placeholder("engine_image")
    expression = '{{ include "trainshed.text" .Values.engine_image }}'
    placeholders.add("engine_image", image, schema, {name: expression})
    stages = tuple(replace(stage, image=name) if stage.image == image else stage for stage in job.stages)
    return replace(job, stages=stages), placeholders


def _namespace_and_queue_values(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """Namespace and queues; a job without a queue cannot get one, since that changes more than a label."""
    kubernetes = job.cluster.on_kubernetes
    descriptions = {
        "namespace": "Namespace",
        "queue": "Kueue's LocalQueue",
        "cpu_queue": "LocalQueue of stages without GPUs",
    }
    changed = {}
    for name, description in descriptions.items():
        default = getattr(kubernetes, name)
        if default is None:
            continue
        schema = {"type": "string", "pattern": _DNS_NAME, "maxLength": 63, "description": description}
        placeholders.add(
            name,
            default,
            schema,
            {placeholders.placeholder(name): f'{{{{ include "trainshed.text" .Values.{name} }}}}'},
        )
        changed[name] = placeholders.placeholder(name)
    return _with_cluster(job, kubernetes=kubernetes.model_copy(update=changed)), placeholders


def _volume_values(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """Claims and buckets, by where they are mounted."""
    volumes, defaults, schemas, expressions = [], {}, {}, {}
    for number, volume in enumerate(job.cluster.volumes):
        key = "pvc" if volume.pvc is not None else "bucket"
        default = getattr(volume, key)
        if default is None:
            volumes.append(volume)
            continue
        placeholder = placeholders.placeholder(f"volume{number}")
        path = _go_quoted(volume.mount)
        expressions[placeholder] = f'{{{{ include "trainshed.text" (index .Values.volumes {path}) }}}}'
        defaults[volume.mount] = default
        what = "PersistentVolumeClaim" if key == "pvc" else "Bucket"
        schemas[volume.mount] = {"type": "string", "minLength": 1, "description": f"{what} at {volume.mount}"}
        volumes.append(volume.model_copy(update={key: placeholder}))
    if defaults:
        schema = {
            "type": "object",
            "description": "Claims and buckets by where they are mounted",
            "properties": schemas,
            "required": list(schemas),
            "additionalProperties": {"enum": [FROZEN_VALUE_MESSAGE]},
        }
        placeholders.add("volumes", defaults, schema, expressions)
    return _with_cluster(job, volumes=tuple(volumes)), placeholders


def _gpus_value(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """The GPUs of the plan, for people to see: the layout depends on them, so another number needs another plan."""
    gpus = max((stage.nodes * stage.gpus_per_node for stage in job.stages), default=0)
    if gpus:
        schema = {"enum": [gpus, OTHER_GPUS_MESSAGE], "description": "GPUs of training, as planned"}
        placeholders.add("gpus", gpus, schema, {})
    return job, placeholders


def _arguments_value(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """Further arguments of a foreign engine whose script each pod of the training runs."""
    if not any(is_training(stage) and stage.script is not None for stage in job.stages):
        return job, placeholders
    if job.cluster.on_kubernetes.kind not in ("jobset", "job", "pytorchjob"):
        return job, placeholders
    schema = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Further arguments of the engine, after those of the plan; not checked before it starts. "
        "Each is a text: --set-string 'arguments={--log-interval,1}'",
    }
    placeholders.add("arguments", [], schema, {})
    return job, placeholders


def _steps_value(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """The steps of a training with our own engine; other engines have them in their arguments."""
    recipe = job.files.get(RECIPE_FILE, "")
    steps = _STEPS_LINE.findall(recipe)
    ours = all(stage.script is None or stage.serving is not None for stage in job.stages)
    if not ours or job.steps is None or steps != [str(job.steps)]:
        return job, placeholders
    schema = {"type": "integer", "minimum": 1, "description": "Steps of the training; extending it keeps its past"}
    placeholders.add("steps", job.steps, schema, {placeholders.placeholder("steps"): "{{ int .Values.steps }}"})
    files = dict(job.files) | {RECIPE_FILE: _STEPS_LINE.sub(f"  steps: {placeholders.placeholder('steps')}", recipe)}
    return replace(job, files=files), placeholders


def _label_values(job: Job, placeholders: _Placeholders) -> tuple[Job, _Placeholders]:
    """Further labels of every object; Trainshed's own cannot be changed."""
    kubernetes = job.cluster.on_kubernetes
    schema = {
        "type": "object",
        "description": "Further labels of every object and pod",
        "propertyNames": {"not": {"pattern": r"^(app\.kubernetes\.io|kueue\.x-k8s\.io)/"}},
        "additionalProperties": {"type": "string", "maxLength": 63},
    }
    placeholders.add("labels", dict(kubernetes.labels), schema, {})
    placeholder = placeholders.placeholder("labels")
    labels = {placeholder: placeholder}
    return _with_cluster(job, kubernetes=kubernetes.model_copy(update={"labels": labels})), placeholders


_VALUE_BUILDERS: tuple[Callable[[Job, _Placeholders], tuple[Job, _Placeholders]], ...] = (
    _image_value,
    _engine_image_value,
    _namespace_and_queue_values,
    _volume_values,
    _gpus_value,
    _arguments_value,
    _steps_value,
    _label_values,
)


def _with_cluster(job: Job, **changed: Any) -> Job:
    cluster = job.cluster.model_copy(update=changed)
    return replace(job, cluster=cluster)


def _go_quoted(text: str) -> str:
    """Write any text as a string of Go's template language."""
    return '"' + "".join(char if char.isalnum() or char in "/._-" else f"\\u{ord(char):04x}" for char in text) + '"'


MAX_RELEASE_BYTES = 1024 * 1024
"""The size of a release at most: `helm install` stores chart and manifests in one Secret."""
_CHANGED_SUFFIX = '{{ include "trainshed.changed" . }}'


def write_chart(job: Job, request: SubmitRequest, folder: Path) -> tuple[str, ...]:
    """Write a chart of what was rendered into a folder; returns what to do with it, for a person."""
    templated = with_placeholders(job, request.text())
    templated_request = render(templated.job)
    defaults = {value.name: value.default for value in templated.values}
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    steps = []
    for part, original in zip(templated_request.parts, request.parts, strict=True):
        if part.name == CODE_PART:
            (folder / CODE_PART).write_text(original.text, encoding="utf-8", newline="\n")
            steps.append(f"kubectl apply -f {folder / CODE_PART}   # our code, for all jobs of the namespace")
            continue
        text = _keep_config_map_names(original.text, part.text)
        (templates / part.name).write_text(_template(text, job, templated), encoding="utf-8", newline="\n")
    for path, data in request.uploads.items():
        file = folder / "store" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        steps.append(f"gcloud storage cp {file} {bucket_of_store(job)}/{path}   # our code")
    (templates / "_text.tpl").write_text(_text_template() + _changed_template(defaults), encoding="utf-8", newline="\n")
    (folder / ".helmignore").write_text(f"{CODE_PART}\nstore/\n", encoding="utf-8", newline="\n")
    (folder / "Chart.yaml").write_text(to_yaml(_chart_metadata(job)), encoding="utf-8", newline="\n")
    (folder / "values.yaml").write_text(_values_text(templated, defaults), encoding="utf-8", newline="\n")
    (folder / "values.schema.json").write_text(
        json.dumps(_values_schema(templated), indent=2) + "\n", encoding="utf-8", newline="\n"
    )
    size = sum(path.stat().st_size for path in templates.iterdir())
    if 2 * size > MAX_RELEASE_BYTES:
        return (
            f"`helm install` keeps a chart in a Secret of 1 MiB at most, and this one has {size // 1024} KiB: "
            f"helm template {job.name} {folder} | kubectl apply -f -",
        )
    return (*steps, f"helm install {job.name} {folder}")


def _chart_metadata(job: Job) -> KubeObject:
    return {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"{job.name} as Trainshed has planned it for {job.cluster.name}",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


def _values_text(templated: JobWithPlaceholders, defaults: dict[str, Any]) -> str:
    head = "# What may change without planning anew; every other value is refused.\n"
    comments = {value.name: value.schema["description"] for value in templated.values}
    return head + "".join(f"# {comments[name]}\n{to_yaml({name: value})}" for name, value in defaults.items())


def _values_schema(templated: JobWithPlaceholders) -> KubeObject:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of this chart",
        "type": "object",
        "properties": {value.name: value.schema for value in templated.values},
        "required": [value.name for value in templated.values],
        # A list of allowed values with one entry, the reason: Helm prints it.
        "additionalProperties": {"enum": [FROZEN_VALUE_MESSAGE]},
    }


def _text_template() -> str:
    """A template that writes a text as `to_yaml` does: a plain word as it is, anything else in quotes."""
    words = " ".join(json.dumps(word) for word in sorted(RESERVED_WORDS))
    return (
        '{{- define "trainshed.text" -}}\n'
        f'{{{{- if and (regexMatch "^{PLAIN_WORD.pattern}$" .) (not (has (lower .) (list {words}))) -}}}}\n'
        "{{ . }}\n{{- else -}}\n{{ . | toJson }}\n{{- end -}}\n{{- end -}}\n"
    )


def _changed_template(defaults: dict[str, Any]) -> str:
    """A template of a suffix for ConfigMaps whose text depends on values: they are immutable and named by a hash."""
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
    """Write a JSON string as a Go string: the same, except for surrogate pairs, which Go does not take."""
    return re.sub(
        r"\\ud([89ab][0-9a-f]{2})\\ud([c-f][0-9a-f]{2})",
        lambda pair: f"\\U{0x10000 + (int(pair[1], 16) - 0x800 << 10) + int(pair[2], 16) - 0xC00:08x}",
        quoted,
    )


def _keep_config_map_names(original: str, templated_text: str) -> str:
    """Give ConfigMaps with placeholders in their text their original names, which contain a hash of the text."""
    pattern = r"-(?:files|stages)-[0-9a-f]{10}"
    names = dict(zip(_distinct_matches(pattern, templated_text), _distinct_matches(pattern, original), strict=True))
    return re.sub(pattern, lambda match: names[match[0]], templated_text)


def _distinct_matches(pattern: str, text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(pattern, text)))


def _template(text: str, job: Job, templated: JobWithPlaceholders) -> str:
    """Escape what looks like a template, then replace placeholders by expressions."""
    text = text.replace("{{", '{{ "{{" }}')
    text = re.sub(r"(-(?:files|stages)-[0-9a-f]{10})(?![0-9a-f])", lambda name: name[1] + _CHANGED_SUFFIX, text)
    # The driver's own Job: only the objects before it may keep their names.
    before, driver_job, after = text.rpartition(f"kind: Job\nmetadata:\n  name: {driver_name(job.name)}\n")
    if driver_job:
        text = f"{before}{driver_job[:-1]}{_CHANGED_SUFFIX}\n{after}"
    if any(value.name == "arguments" for value in templated.values):
        text = _SCRIPT_ARGUMENT.sub(_arguments_template, text)
    placeholder = re.escape(templated.labels_placeholder)
    text = re.sub(rf"(?m)^( *){placeholder}: {placeholder}\n", _labels_template, text)
    for value in templated.values:
        for placeholder, expression in value.placeholders.items():
            text = text.replace(placeholder, expression)
    return text


# The script of a foreign engine as an item of a container's `args`.
_SCRIPT_ARGUMENT = re.compile(rf"(?m)^( *)- {re.escape(JOB_FOLDER)}/train\.sh\n")


def _arguments_template(line: re.Match[str]) -> str:
    return f"{line[0]}{{{{ range .Values.arguments }}}}{line[1]}- {{{{ . | toJson }}}}\n{{{{ end }}}}"


def _labels_template(line: re.Match[str]) -> str:
    lines = (
        "{{ range $key, $value := .Values.labels }}"
        + line[1]
        + '{{ include "trainshed.text" $key }}: {{ include "trainshed.text" $value }}\n'
    )
    return lines + "{{ end }}"

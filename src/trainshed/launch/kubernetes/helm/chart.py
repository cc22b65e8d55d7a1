"""A job as a Helm chart. `helm template` of it gives the objects that `render` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trainshed import __version__
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.helm.values import FROZEN, Marked, marked
from trainshed.launch.kubernetes.kinds import Object
from trainshed.launch.kubernetes.manifests.yaml_text import NOT_TEXT, WORD, to_yaml
from trainshed.launch.kubernetes.render import render
from trainshed.launch.target import Request

MOST_INSTALLED_BYTES = 1024 * 1024
"""What a release may have: `helm install` keeps chart and manifests in one Secret."""
_CHANGED = '{{ include "trainshed.changed" . }}'


def write_chart(job: Job, request: Request, folder: Path) -> tuple[str, ...]:
    """Write a chart of what was rendered into a folder; says what a person should know about it."""
    found = marked(job, request.text())
    again = render(found.job)
    defaults = {value.name: value.default for value in found.values}
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    for part, original in zip(again.parts, request.parts, strict=True):
        text = _with_names_of(original.text, part.text)
        (templates / part.name).write_text(_template(text, found), encoding="utf-8")
    (templates / "_text.tpl").write_text(_text_template() + _changed_template(defaults), encoding="utf-8")
    (folder / "Chart.yaml").write_text(to_yaml(_chart(job)), encoding="utf-8")
    (folder / "values.yaml").write_text(_values_text(found, defaults), encoding="utf-8")
    (folder / "values.schema.json").write_text(json.dumps(_schema(found), indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in templates.iterdir())
    if 2 * size > MOST_INSTALLED_BYTES:
        return (
            f"`helm install` keeps a chart in a Secret of 1 MiB at most, and this one has {size // 1024} KiB: "
            f"helm template {job.name} {folder} | kubectl apply -f -",
        )
    return ()


def _chart(job: Job) -> Object:
    return {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"{job.name} as Trainshed has planned it for {job.cluster.name}",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


def _values_text(found: Marked, defaults: dict[str, Any]) -> str:
    head = "# What may change without planning anew; every other value is refused.\n"
    comments = {value.name: value.schema["description"] for value in found.values}
    return head + "".join(f"# {comments[name]}\n{to_yaml({name: value})}" for name, value in defaults.items())


def _schema(found: Marked) -> Object:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of this chart",
        "type": "object",
        "properties": {value.name: value.schema for value in found.values},
        "required": [value.name for value in found.values],
        # A list of allowed values with one entry, the reason: Helm prints it.
        "additionalProperties": {"enum": [FROZEN]},
    }


def _text_template() -> str:
    """A text as `yaml_text` writes it: a plain word as it is, anything else in quotes."""
    words = " ".join(json.dumps(word) for word in sorted(NOT_TEXT))
    return (
        '{{- define "trainshed.text" -}}\n'
        f'{{{{- if and (regexMatch "^{WORD.pattern}$" .) (not (has (lower .) (list {words}))) -}}}}\n'
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


def _with_names_of(original: str, again: str) -> str:
    """Give ConfigMaps with marks in their text the names they had, which are made of what they hold."""
    pattern = r"-(?:files|stages)-[0-9a-f]{10}"
    names = dict(zip(_in_order(pattern, again), _in_order(pattern, original), strict=True))
    return re.sub(pattern, lambda found: names[found[0]], again)


def _in_order(pattern: str, text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(pattern, text)))


def _template(text: str, found: Marked) -> str:
    """Keep what looks like a template from being one, then put expressions in the place of marks."""
    text = text.replace("{{", '{{ "{{" }}')
    text = re.sub(r"(-(?:files|stages)-[0-9a-f]{10})(?![0-9a-f])", lambda name: name[1] + _CHANGED, text)
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

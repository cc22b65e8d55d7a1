"""What Kubernetes takes as names, labels and taints: its API server refuses anything else.

It would do so late: training is created by the job's driver, after the data is prepared.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from trainshed.recipe.cluster.schema import Cluster
from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import KeyPath

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and …/labels/
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"{_PART}(\.{_PART})*"
_WORD = r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_NAMESPACE = re.compile(rf"(?=.{{1,63}}$){_PART}")
_NAME = re.compile(rf"(?=.{{1,253}}$){_DOMAIN}")
_NAME_IN_LABEL = re.compile(rf"(?=.{{1,63}}$){_DOMAIN}")
_KEY = re.compile(rf"((?=[^/]{{1,253}}/){_DOMAIN}/)?{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_SECRET = re.compile(rf"(?=[^/]{{1,253}}/){_DOMAIN}/[-._A-Za-z0-9]{{1,253}}")
_NAME_HINT = "write lower-case letters, digits and dashes, as `kubectl get` lists it"
_KEY_HINT = "write letters, digits, -, _ and ., with or without a domain before it: example.com/team"
_VALUE_HINT = "write at most 63 letters, digits, -, _ and .; first and last a letter or a digit"
OWN_LABELS = (
    *("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"),
    *("app.kubernetes.io/managed-by", "app.kubernetes.io/version"),
)
"""Labels that Trainshed gives every object, by which it finds them; those of `trainshed.io` are its own too."""


def value_problems(cluster: Cluster) -> Iterator[Problem]:
    """Yield every value of a cluster file for Kubernetes that its API server would refuse."""
    if cluster.target != "kubernetes":
        return
    for path, text, pattern, kind, hint in _texts(cluster):
        if text is not None and not pattern.fullmatch(text):
            yield Problem(path, f"`{text}` is not {kind} of Kubernetes", hint)
    yield from _label_problems(cluster)
    yield from _toleration_problems(cluster)
    yield from _mount_problems(cluster)


_Text = tuple[KeyPath, str | None, re.Pattern[str], str, str]


def _texts(cluster: Cluster) -> Iterator[_Text]:
    section = cluster.on_kubernetes
    names: list[tuple[KeyPath, str | None]] = [
        (("service_account",), cluster.service_account),
        *((("kubernetes", key), getattr(section, key)) for key in ("driver_account", "runtime")),
        *((("kubernetes", "image_pull_secrets", n), name) for n, name in enumerate(section.image_pull_secrets)),
        *((("volumes", n, "pvc"), volume.pvc) for n, volume in enumerate(cluster.volumes)),
    ]
    yield ("kubernetes", "namespace"), section.namespace, _NAMESPACE, "a namespace", _NAME_HINT
    yield from ((path, name, _NAME, "a name", _NAME_HINT) for path, name in names)
    for key in ("queue", "cpu_queue", "priority"):
        yield ("kubernetes", key), getattr(section, key), _NAME_IN_LABEL, "a name", _NAME_HINT
    for name, secret in cluster.secrets.items():
        yield ("secrets", name, "k8s"), secret.k8s, _SECRET, "a secret with its key", "write {k8s: hf-token/token}"
    for number, node in enumerate(section.avoid_nodes):
        yield ("kubernetes", "avoid_nodes", number), node, _VALUE, "a hostname", _VALUE_HINT
    if section.topology is not None:
        yield ("kubernetes", "topology", "level"), section.topology.level, _KEY, "a label", _KEY_HINT
    for key in ("labels", "node_selector", "cpu_node_selector"):
        for label, value in getattr(section, key).items():
            yield ("kubernetes", key, label), label, _KEY, "a label", _KEY_HINT
            yield ("kubernetes", key, label), value, _VALUE, "a value of a label", _VALUE_HINT
    for name in section.annotations:
        yield ("kubernetes", "annotations", name), name, _KEY, "an annotation", _KEY_HINT


def _label_problems(cluster: Cluster) -> Iterator[Problem]:
    for label in cluster.on_kubernetes.labels:
        if label in OWN_LABELS or label.startswith("trainshed.io/"):
            yield Problem(("kubernetes", "labels", label), f"`{label}` is set by Trainshed", "choose another label")


def _toleration_problems(cluster: Cluster) -> Iterator[Problem]:
    for number, toleration in enumerate(cluster.on_kubernetes.tolerations):
        path = ("kubernetes", "tolerations", number)
        if toleration.key is not None and not _KEY.fullmatch(toleration.key):
            yield Problem((*path, "key"), f"`{toleration.key}` is not a key of a taint", _KEY_HINT)
        if toleration.operator == "Exists" and toleration.value is not None:
            yield Problem((*path, "value"), "`operator: Exists` compares no value", "write `operator: Equal`")
        elif toleration.value is not None and not _VALUE.fullmatch(toleration.value):
            yield Problem((*path, "value"), f"`{toleration.value}` is not a value of a taint", _VALUE_HINT)
        if toleration.operator == "Equal" and toleration.key is None:
            yield Problem((*path, "key"), "is missing: the value of which taint?", "write `key: NAME`")


_OWN_MOUNTS = ("/", "/dev/shm", "/etc/trainshed")


def _mount_problems(cluster: Cluster) -> Iterator[Problem]:
    taken: dict[str, int] = {}
    for number, volume in enumerate(cluster.volumes):
        mount = posixpath.normpath(volume.mount)
        if mount in _OWN_MOUNTS or mount.startswith("/etc/trainshed/"):
            yield Problem(("volumes", number, "mount"), f"{mount} is taken in every pod", "write another path")
        elif mount in taken:
            what = f"{mount} is where another volume is mounted (volumes.{taken[mount]})"
            yield Problem(("volumes", number, "mount"), what, "write another path")
        taken.setdefault(mount, number)

"""Kubernetes objects as we write them: labels, metadata and YAML; `kinds.py` has their kinds and names.

Objects are plain dicts, as in Kubernetes' YAML. YAML readers differ in what they read as a number, a date or a truth
value (`1e3`, `y`, `0o17`), so everything except plain words is quoted. Texts of several lines are written as blocks,
for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from trainshed import __version__
from trainshed.engines.launch import PROGRAMS
from trainshed.launch.job import MOUNTED_JOB, Job, Stage
from trainshed.launch.kubernetes.kinds import (
    COMPONENT_LABEL,
    INSTANCE_LABEL,
    MAX_NAME_LENGTH,
    MAX_TRAINING_NAME_LENGTH,
    KubeKind,
    KubeObject,
    fit_name,
)
from trainshed.recipe.yaml_io import UNICODE_LINE_BREAKS, PlainDumper


def new_object(kind: KubeKind, metadata: KubeObject, **body: Any) -> KubeObject:
    """Return an object of a kind."""
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata} | body


JOB_FOLDER = MOUNTED_JOB
CODE_FOLDER = "/etc/trainshed/code"
LOCAL_FOLDER = "/var/tmp/trainshed"
UNPACKED_FOLDER = f"{LOCAL_FOLDER}/code"
ENTRY_FILE = "entry.sh"
RAY_DRIVER_FILE = f"{PROGRAMS}/ray_driver.py"
"""The driver of a foreign engine on Ray, among the files of a job."""


def stage_object_name(job: str, stage: str, *, training: bool) -> str:
    """Return the name of a stage's object; the training has the job's name."""
    if training:
        return fit_name(job, "" if stage == "train" else f"-{stage}", MAX_TRAINING_NAME_LENGTH)
    return fit_name(job, f"-{stage}", MAX_NAME_LENGTH - 11)  # room for the index and the letters of its pods


def is_training(stage: Stage) -> bool:
    """Whether the nodes of a stage start together and train, in contrast to a CPU job or a server."""
    return stage.serving is None and (stage.name == "train" or stage.gpus_per_node > 0 or stage.nodes > 1)


def job_labels(job: Job, component: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return dict(sorted(job.cluster.on_kubernetes.labels.items())) | trainshed_labels(component, job.name)


def trainshed_labels(component: str, instance: str | None = None) -> dict[str, str]:
    """Return our own labels; `instance` is a job's name, by which `cancel` selects what it deletes."""
    return {
        "app.kubernetes.io/name": "trainshed",
        **({INSTANCE_LABEL: instance} if instance is not None else {}),
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": "trainshed",
        "app.kubernetes.io/version": __version__,
    }


def job_metadata(job: Job, name: str, component: str) -> KubeObject:
    """Return the metadata of an object in the job's namespace."""
    return {
        "name": name,
        "namespace": job.cluster.on_kubernetes.namespace,
        "labels": job_labels(job, component),
    }


PLAIN_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
RESERVED_WORDS = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])
_NEVER_FOLD = 1 << 30


class _ManifestDumper(PlainDumper):
    """Quotes everything except plain words."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style: str | None = '"'
    if PLAIN_WORD.fullmatch(text) and text.lower() not in RESERVED_WORDS:
        style = None
    elif "\n" in text and not UNICODE_LINE_BREAKS.search(text):
        style = "|"  # PyYAML quotes what a block cannot hold (tabs, spaces at the end of a line)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


def to_yaml(obj: KubeObject) -> str:
    """Write one object; the same object gives the same bytes."""
    return yaml.dump(obj, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLD)


def to_documents(objects: Iterable[KubeObject]) -> str:
    """Write objects one after another, as `kubectl apply -f -` reads them."""
    return "".join(f"---\n{to_yaml(obj)}" for obj in objects)


def read_documents(text: str) -> list[KubeObject]:
    """Read objects back."""
    return [document for document in yaml.load_all(text, Loader=_YAML_LOADER) if document]


_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

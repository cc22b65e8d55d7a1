"""Names and labels of a job's objects, and where things lie inside its pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from trainshed import __version__
from trainshed.launch.job import MOUNTED_JOB, Job, Stage
from trainshed.launch.kubernetes.kinds import JOB, Object

JOB_FOLDER = MOUNTED_JOB
CODE_FOLDER = "/etc/trainshed/code"
LOCAL_FOLDER = "/var/tmp/trainshed"
UNPACKED_FOLDER = f"{LOCAL_FOLDER}/code"
ENTRY_FILE = "entry.sh"

LONGEST_NAME = 63
# A pod of a JobSet is <name>-train-0-<four digits>-<five letters>, and JobSet refuses names that would not fit.
LONGEST_TRAINING_NAME = 44
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MOST_RESTARTS = "trainshed.io/most-restarts"
"""On a training that the driver makes anew where it fails: how often."""
RESTARTS = "trainshed.io/restarts"
"""How often it was; on its Service, which outlives it, and on itself for `status`."""
RESTARTED = "trainshed.io/restarted"
"""On its Service: the uid of the last one that was made anew, so that a driver which was killed counts it once."""


def fitted(name: str, suffix: str = "", longest: int = LONGEST_NAME) -> str:
    """Return a name with its suffix in at most `longest` characters; a cut one keeps apart by a hash of the whole."""
    room = longest - len(suffix)
    if len(name) <= room:
        return name + suffix
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: room - len(mark) - 1].rstrip('-.')}-{mark}{suffix}"


def stage_name(job: str, stage: str, *, training: bool) -> str:
    """Return the name of a stage's object; the training has the job's own."""
    if training:
        return fitted(job, "" if stage == "train" else f"-{stage}", LONGEST_TRAINING_NAME)
    return fitted(job, f"-{stage}", LONGEST_NAME - 11)  # room for the index and the letters of its pods


def is_driven(ids: Mapping[str, str]) -> bool:
    """Whether a driver creates the stages (as Kind/name): several of them, or a plain Job that it makes anew."""
    return len(ids) > 1 or ids.get("train", "").startswith(f"{JOB.name}/")


def is_training(stage: Stage) -> bool:
    """Whether a stage is a gang of nodes rather than a CPU job or a server."""
    return stage.serving is None and (stage.name == "train" or stage.gpus_per_node > 0 or stage.nodes > 1)


def labels(job: Job, component: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return dict(sorted(job.cluster.on_kubernetes.labels.items())) | {
        "app.kubernetes.io/name": "trainshed",
        INSTANCE: job.name,
        COMPONENT: component,
        "app.kubernetes.io/managed-by": "trainshed",
        "app.kubernetes.io/version": __version__,
    }


def metadata(job: Job, name: str, component: str) -> Object:
    """Return the metadata of an object in the job's namespace."""
    return {
        "name": name,
        "namespace": job.cluster.on_kubernetes.namespace,
        "labels": labels(job, component),
    }

"""What was submitted from this machine, so that `status`, `logs` and `cancel` find a run by its name.

There is one small folder per run in the user's state folder, with ids, folders and the cluster file as it was. The
state of the run itself is known to the scheduler and stored in the run's own folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, NoSuchName
from trainshed.launch.target import SubmittedJob
from trainshed.plugins import PluginSource
from trainshed.recipe import Cluster, load_cluster
from trainshed.run_folder import CLUSTER_FILE
from trainshed.storage import LocalStore

SUBMISSION_SCHEMA = "trainshed.submitted/1"


@dataclass(frozen=True)
class Submission:
    """A run that was submitted from here."""

    name: str
    id: str
    steps: int | None
    submitted: SubmittedJob
    cluster: Cluster
    at: float = 0.0
    """When, in seconds since 1970."""

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a person may write for it."""
        return self.run, self.submitted.job, self.name, self.submitted.run


def state_folder() -> Path:
    """Return where submissions are recorded."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "trainshed" / "runs"


def record_submission(
    name: str,
    id: str,
    steps: int | None,
    submitted: SubmittedJob,
    cluster_text: str,
    plugins: Sequence[PluginSource] = (),
) -> None:
    """Keep what a scheduler took, with its cluster's plugins; a run that is submitted again replaces its record."""
    store = LocalStore(state_folder() / submitted.job)
    for plugin in plugins:
        for file, source in plugin.read().items():
            store.put(file, source)
    store.put(CLUSTER_FILE, cluster_text.encode())
    body = {"schema": SUBMISSION_SCHEMA, "name": name, "id": id, "steps": steps, "submitted": asdict(submitted)}
    store.put("submitted.json", orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def submissions() -> list[Submission]:
    """Return everything that was submitted from here, newest first."""
    files = [file for file in state_folder().glob("*/submitted.json") if (file.parent / CLUSTER_FILE).is_file()]
    return [_read_submission(file) for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]


def find_submission(text: str) -> Submission:
    """Return a run by `name`, `name/id` or `name-id`; of several with one name, the newest."""
    wanted = text.strip().rstrip("/")
    known = submissions()
    for submission in known:
        if wanted in submission.names:
            return submission
    names = ", ".join(submission.run for submission in known[:5]) or "none yet"
    raise NoSuchName(
        "no such run was submitted from this machine", where=text, hint=f"submitted from here: {names} (`trainshed ls`)"
    )


def forget_submission(submission: Submission) -> None:
    """Drop the record of a run; its folder in the store stays."""
    folder = state_folder() / submission.submitted.job
    shutil.rmtree(folder, ignore_errors=True)


def _read_submission(file: Path) -> Submission:
    body: dict[str, Any] = orjson.loads(file.read_bytes())
    if body.get("schema") != SUBMISSION_SCHEMA:
        raise InputError(
            f"this record is {body.get('schema')}, and this version reads {SUBMISSION_SCHEMA}", where=str(file)
        )
    return Submission(
        name=body["name"],
        id=body["id"],
        steps=body["steps"],
        submitted=SubmittedJob(**body["submitted"]),
        cluster=load_cluster(file.parent / CLUSTER_FILE, checked=False),
        at=file.stat().st_mtime,
    )

"""The messages about a job to the recipients in `notify` of its recipe and of its cluster file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainshed.launch.job import JobFile
from trainshed.observe.notify import Notifier, notify_of_run, recipients_of
from trainshed.plugins import plugins_not_run
from trainshed.recipe import load_cluster, load_recipe
from trainshed.recipe.phase_spans import written_steps
from trainshed.run_folder import CLUSTER_FILE, RECIPE_FILE


@contextmanager
def notify_of_job(job: JobFile, folder: Path, secrets: Mapping[str, str] | None = None) -> Iterator[Notifier]:
    """Send messages about the run of a job; `folder` has its files. A job without a recipe has no recipients.

    `secrets` are values that are not in the environment of this process.
    """
    run = Path(job.run)
    if not (folder / RECIPE_FILE).is_file():
        yield Notifier(run, (), run=job.name)
        return
    with plugins_not_run():  # only `notify` is read
        recipe = load_recipe(str(folder / RECIPE_FILE))
    cluster = load_cluster(folder / CLUSTER_FILE) if (folder / CLUSTER_FILE).is_file() else None
    recipients = recipients_of(recipe, cluster)
    environment = {**os.environ, **(secrets or {})}
    name = f"{recipe.name}/{run.name}"
    with notify_of_run(run, recipients, run=name, steps=written_steps(recipe), environment=environment) as notifier:
        yield notifier

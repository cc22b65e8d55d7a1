"""A run on another cluster, followed to its end from here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.launch.job import Job
    from trainshed.launch.target import Target

_SECONDS_BETWEEN_LOOKS = 5.0


def run_elsewhere(
    recipe: str, overrides: tuple[str, ...], on: str, id: str | None, nodes: int | None, output: Output
) -> int:
    """Submit a recipe's stages and say how they go until the last has ended or serves; leaving does not end them."""
    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.launch.status import report_text
    from trainshed.cli.launch.submit import Asked, send

    sent = send(Asked(recipe, overrides, on, id, nodes), ask=True)
    if sent is None:
        return 1
    reporter().note(f"submitted {sent['run']}; it goes on without this terminal: `trainshed status {sent['run']}`")
    data = _followed(str(sent["run"]))
    print_report(data, output, report_text(data))
    return 0 if data["state"] in ("done", "serving") else 1


def submit_and_follow(job: Job, target: Target) -> dict[str, Any]:
    """Submit a job that is already built, and follow it to its end."""
    from trainshed.cli.launch.submit import keep_submission

    return _followed(keep_submission(job, target.submit(target.render(job), job)))


def _followed(run: str) -> dict[str, Any]:
    from trainshed.cli.console import reporter
    from trainshed.cli.launch.status import report
    from trainshed.launch.submissions import find_submission
    from trainshed.launch.targets import target_of

    found = find_submission(run)
    target, shown = target_of(found.cluster), reporter()
    said: dict[str, str] = {}
    while True:
        data = report(found, target.status(found.submitted))
        for stage in data["stages"]:
            line = f"{stage['stage']}: {stage['state']}  {stage['reason']}".rstrip()
            if said.get(stage["stage"]) != line:
                said[stage["stage"]] = line
                shown.note(line)
        if data["state"] in ("done", "serving", "failed", "cancelled"):
            return data
        time.sleep(_SECONDS_BETWEEN_LOOKS)

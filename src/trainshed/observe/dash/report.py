"""`report.html`: the page and its data in one file, which opens from a disk, an e-mail or an artefact store.

Needs no web server and no extra. It is written when a run ends, whatever the end, and never stands in its way.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainshed.observe.dash.page_files import SCRIPTS, STYLES, page_file
from trainshed.observe.dash.run_files import RunSource
from trainshed.observe.dash.run_reader import RunReader
from trainshed.observe.dash.views import Dashboard, to_json
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import REPORT, attempt_name, rank_name
from trainshed.storage import LocalStore

REPORT_SCHEMA = "trainshed.report/1"
_POINTS = 1_500
"""Points of a curve; a run of fewer steps has them all."""
_LOGS = 6


def write_report(
    run_folder: Path,
    *,
    steps: Callable[[], int | None] = lambda: None,
    answers: Callable[[], Sequence[dict[str, Any]]] | None = None,
    reporter: Reporter = SILENT,
) -> Path | None:
    """Write the report of a run into its folder; a failure is a warning, since the run itself has ended well or not."""
    try:
        source = RunSource(
            name=run_folder.absolute().parent.name,
            id=run_folder.absolute().name,
            address=str(run_folder),
            store=LocalStore(run_folder),
            is_running=lambda: False,
            steps=steps,
            answers=answers,
        )
        LocalStore(run_folder).put(REPORT, build_report([source]).encode())
    except Exception as error:  # whatever it is, the weights are worth more than a page about them
        reporter.warn(f"{REPORT} could not be written: {error}")
        return None
    return run_folder / REPORT


def build_report(sources: Iterable[RunSource]) -> str:
    """Return the page of some runs as one file."""
    dashboard = Dashboard(lambda: list(sources))
    readers = dashboard.readers()
    for reader in readers.values():
        reader.read_all()
    data = {
        "schema": REPORT_SCHEMA,
        "runs": orjson.Fragment(to_json(dashboard.runs())),
        "views": {key: _views(dashboard, key, reader) for key, reader in readers.items()},
    }
    script = "\n".join(page_file(name) for name in SCRIPTS)
    style = "\n".join(page_file(name) for name in STYLES)
    # `<` never appears in the data, so that nothing in it can end the element it is in.
    embedded = to_json(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    assert "</script" not in script.lower()
    assert "</style" not in style.lower()
    policy = f"default-src 'none'; img-src data:; script-src {_source_hash(script)}; style-src {_source_hash(style)}"
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>Trainshed</title>\n"
        f"<style>{style}</style>\n"
    )
    body = (
        '<div id="app"></div>\n'
        f'<script type="application/json" id="saved">{embedded}</script>\n'
        f"<script>{script}</script>\n"
    )
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{body}</body>\n</html>\n'


def _views(dashboard: Dashboard, key: str, reader: RunReader) -> dict[str, Any]:
    """Every view of a run, as the page asks for it first."""
    views: dict[str, Any] = {}
    for name in ("summary", "ranks", "timeline", "checkpoints", "plan", "answers", "evaluations", "recipe", "events"):
        views[name] = orjson.Fragment(to_json(dashboard.view(key, name, {})))
    views["series"] = {
        axis: orjson.Fragment(to_json(dashboard.view(key, "series", {"axis": axis, "points": str(_POINTS)})))
        for axis in ("step", "tokens", "time")
    }
    first = dashboard.view(key, "logs", {})
    names = [log["file"] for log in first["logs"]]
    shown = [name for name in _failed_logs(reader) if name in names]
    if first["log"] is not None:
        shown.insert(0, first["log"]["file"])
    views["logs"] = {
        "logs": [log for log in first["logs"] if log["file"] in shown[:_LOGS]],
        "files": {file: dashboard.view(key, "logs", {"file": file})["log"] for file in dict.fromkeys(shown[:_LOGS])},
    }
    return views


def _failed_logs(reader: RunReader) -> Sequence[str]:
    """The logs of ranks that failed or stalled."""
    return [
        f"{attempt_name(event['attempt'])}/{rank_name(rank)}.log"
        for event in reader.events
        if event["kind"] in ("failure", "stall")
        for rank in event["ranks"][:_LOGS]
    ]


def _source_hash(text: str) -> str:
    """What a content security policy calls a script or style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

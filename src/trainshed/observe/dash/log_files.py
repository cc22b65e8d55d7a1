"""The logs of a run: which there are, and the last lines of one, all of them or those with a text in them."""

from __future__ import annotations

import re
from typing import Any

from trainshed.errors import InputError
from trainshed.observe.dash.run_files import RunFiles
from trainshed.redaction import redacted
from trainshed.run_folder import LOGS

MOST_LINES = 500
_TAIL_BYTES = 512 * 1024
_SEARCHED_BYTES = 64 * 1024 * 1024
"""How far back a log is searched."""
_LONGEST_LINE = 4_000
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*\.log")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours of terminals, and what else is not text."""


def list_logs(files: RunFiles) -> list[dict[str, Any]]:
    """Return the logs: `attempt-0001/rank-00000.log`, `prepare/part-0000.log`."""
    logs = [{"file": info.path[len(LOGS) + 1 :], "bytes": info.size} for info in files.list(LOGS)]
    return [log for log in logs if _NAME.fullmatch(log["file"])]


def read_log(files: RunFiles, file: str, *, search: str = "", lines: int = MOST_LINES) -> dict[str, Any]:
    """Return the last lines of a log, those that hold `search` in whatever case."""
    if not _NAME.fullmatch(file):
        raise InputError("there is no such log in this run", where=file)
    path = f"{LOGS}/{file}"
    info = files.head(path)
    if info is None:
        raise InputError("there is no such log in this run", where=file)
    start = max(0, info.size - (_SEARCHED_BYTES if search else _TAIL_BYTES))
    content = files.read(path, start, info.size)
    if start:
        content = content[content.find(b"\n") + 1 :]
    # A progress bar writes its line again and again; what it wrote last counts.
    rows = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in content.split(b"\n")]
    if rows and not rows[-1]:
        rows.pop()
    needle = search.lower().encode()
    chosen = [(number, line) for number, line in enumerate(rows, 1) if needle in line.lower()] if needle else None
    numbered = list(enumerate(rows, 1)) if chosen is None else chosen
    shown = numbered[-lines:]
    return {
        "file": file,
        "bytes": info.size,
        "whole": start == 0,
        "matches": len(numbered),
        "lines": [{"number": number if start == 0 else None, "text": _line_text(line)} for number, line in shown],
    }


def _line_text(line: bytes) -> str:
    text = _CONTROL.sub("", line[:_LONGEST_LINE].decode(errors="replace"))
    return redacted(text) + ("…" if len(line) > _LONGEST_LINE else "")

"""A rank's own error, kept so that whoever started it can say it as if it had happened there."""

from __future__ import annotations

from pathlib import Path

import orjson

from trainshed.errors import InputError, TrainshedError


def health_folder(run_folder: Path, attempt: int) -> Path:
    """Where the ranks of an attempt leave what explains their end."""
    return run_folder / "health" / f"attempt-{attempt:04d}"


def write_error(folder: Path, rank: int, error: TrainshedError) -> None:
    """Keep the error that ended a rank in `health/attempt-0001`."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
    (folder / f"error-{rank:05d}.json").write_bytes(orjson.dumps(body) + b"\n")


def read_error(folder: Path) -> TrainshedError | None:
    """Return the error of the lowest rank that had one: where all ranks fail alike they say the same."""
    for path in sorted(folder.glob("error-*.json")):
        try:
            body = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError:
            continue
        kind = InputError if body["exit_code"] == InputError.exit_code else TrainshedError
        return kind(body["what"], where=body["where"], hint=body["hint"])
    return None

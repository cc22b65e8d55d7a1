"""Why an attempt failed: what its ranks left behind compared, kept as an event, said as an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainshed.errors import TrainshedError
from trainshed.observe.events import EventWriter
from trainshed.observe.flight import diagnose, read_records
from trainshed.observe.rank_error import health_folder, read_error
from trainshed.storage import LocalStore


def explain(
    run_folder: Path, attempt: int, world_size: int, *, ends: Mapping[int, str], failed: Sequence[int]
) -> TrainshedError:
    """Return what ended an attempt, after keeping it as a `failure` event.

    `ends` says of ranks that ended by themselves how they did, `failed` are all that did not end well, first of all
    the one whose log to look at where nobody stands out.
    """
    health = health_folder(run_folder, attempt)
    diagnosis = diagnose(read_records(health), world_size, ends=ends)
    error = read_error(health)
    what = diagnosis.sentence if error is None else error.what
    with EventWriter(LocalStore(run_folder), "", attempt=attempt, rank=None) as events:
        events.emit("failure", ranks=diagnosis.ranks, collective=diagnosis.collective, what=what)
    if error is not None:
        return error
    first = diagnosis.ranks[0] if diagnosis.ranks else (failed[0] if failed else 0)
    return TrainshedError(
        diagnosis.sentence,
        where=str(run_folder / "logs" / f"attempt-{attempt:04d}" / f"rank-{first:05d}.log"),
        hint="the same command goes on from the last checkpoint",
    )

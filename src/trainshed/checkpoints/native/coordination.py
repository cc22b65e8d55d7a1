"""How ranks agree on a save without a collective: records in the key-value store that started the process group.

Every rank sends a record of its file, or its failure. Rank 0 waits for all of them, commits, and sends the outcome. So
a save that fails anywhere fails everywhere, with the same error. Nothing here blocks inside the store: a `get` that
waits would hold the connection that the process group itself may need. So keys are polled until they exist.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import torch.distributed as dist

from trainshed import errors
from trainshed.errors import StorageError, TrainshedError

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.5
# How long rank 0 waits for the others to read the last outcome before it takes the key-value store down.
_FINISH_SECONDS = 10.0


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended. `discard`: nothing can have been committed, so what was written may be removed."""

    failure: TrainshedError | None = None
    discard: bool = False

    def to_bytes(self) -> bytes:
        """The outcome as it is sent to the other ranks."""
        return orjson.dumps({"failure": self.failure and _error_to_plain(self.failure), "discard": self.discard})

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveOutcome:
        """Read an outcome."""
        document = orjson.loads(data)
        return cls(document["failure"] and _error_from_plain(document["failure"]), document["discard"])


class SaveCoordinator:
    """Exchanges records and outcomes of saves, on one rank. `prefix` separates runs and attempts in a shared store."""

    def __init__(
        self, store: dist.Store | None, prefix: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        if store is None and world_size > 1:
            raise ValueError("several ranks need a torch.distributed.Store to coordinate a checkpoint")
        self._store, self._prefix = store, prefix
        self._rank, self._others = rank, range(1, world_size)
        self._timeout_seconds = timeout_seconds
        self._outcome_key: str | None = None
        self._sent_outcomes = 0
        self._stopped = threading.Event()

    def send_record(self, save: str, record: bytes) -> None:
        """Send rank 0 the record of this rank's file."""
        # A key-value store takes bytes as values, though its signature says str.
        value: Any = record
        self._call(lambda store: store.set(self._key(save, f"part-{self._rank}"), value))
        self._call(lambda store: store.add(self._key(save, "sent"), 1))

    def send_failure(self, save: str, error: TrainshedError) -> None:
        """Tell rank 0 that this rank has failed to write its file."""
        record = orjson.dumps({"rank": self._rank, **_error_to_plain(error)})
        self._call(lambda store: store.set(self._key(save, "failure"), record.decode()))

    def wait_for_records(self, save: str) -> dict[int, bytes]:
        """Wait for the records of all other ranks, or raise the first failure among them."""
        failure, sent = self._key(save, "failure"), self._key(save, "sent")
        keys = [self._key(save, f"part-{rank}") for rank in self._others]

        def all_sent(store: dist.Store) -> bool:
            # Two requests a poll, however many ranks there are.
            if store.check([failure]):
                record = orjson.loads(store.get(failure))
                raise _error_from_plain(record, f"rank {record['rank']}: ")
            return not keys or store.add(sent, 0) == len(keys)

        def missing() -> str:
            silent = [rank for rank, key in zip(self._others, keys, strict=True) if not self._call(_holds(key))]
            return f"rank {', '.join(map(str, silent))} wrote no part"

        self._poll_until(all_sent, self._timeout_seconds, missing)
        if not keys:
            return {}
        records = self._call(lambda store: _get_all(store, keys))
        for key in (*keys, sent):
            self._call(lambda store, key=key: store.delete_key(key))
        return dict(zip(self._others, records, strict=True))

    def send_outcome(self, save: str, outcome: SaveOutcome) -> None:
        """Tell the other ranks how a save ended."""
        if not self._others:
            return
        last, self._outcome_key = self._outcome_key, self._key(save, "outcome")
        key, record = self._outcome_key, outcome.to_bytes().decode()
        self._call(lambda store: store.set(key, record))
        self._sent_outcomes += 1
        if last is not None and outcome.failure is None:  # all ranks sent a record of this save: all have read the last
            self._call(lambda store: store.delete_key(last))

    def wait_for_outcome(self, save: str) -> SaveOutcome:
        """Wait until rank 0 has told how a save ended."""
        key = self._key(save, "outcome")
        # Rank 0 itself waits for the slowest rank. Its error is the more precise one, so it has the time to send it.
        self._poll_until(
            lambda store: store.check([key]),
            2 * self._timeout_seconds,
            lambda: "rank 0 did not finish the checkpoint",
        )
        outcome = SaveOutcome.from_bytes(self._call(lambda store: store.get(key)))
        if outcome.failure is not None:  # rank 0 will not fetch it any more
            self._call(lambda store: store.delete_key(self._key(save, f"part-{self._rank}")))
        self._call(lambda store: store.add(f"{self._prefix}/read", 1))
        return outcome

    def stop(self) -> None:
        """Stop waiting, in any thread."""
        self._stopped.set()

    def finish(self) -> None:
        """Let the others read the last outcome: rank 0 often is the one that serves the key-value store."""
        if self._rank == 0 and self._others and self._sent_outcomes and not self._stopped.is_set():
            expected = self._sent_outcomes * len(self._others)
            with suppress(StorageError):  # a rank that has not read it by then is gone
                self._poll_until(lambda store: store.add(f"{self._prefix}/read", 0) >= expected, _FINISH_SECONDS, str)

    def _key(self, save: str, name: str) -> str:
        return f"{self._prefix}/{save}/{name}"

    def _poll_until(
        self, ready: Callable[[dist.Store], bool], timeout_seconds: float, missing: Callable[[], str]
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._call(ready):
            if self._stopped.wait(pause_seconds):
                raise StorageError(f"{missing()} before the run ended")
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{missing()} within {timeout_seconds:.0f} s",
                    hint="its log tells what it was doing; the checkpoint before this one is untouched; "
                    "where it was only slow, raise `budgets.checkpoint`",
                )
            pause_seconds = min(_LONGEST_PAUSE_SECONDS, 1.5 * pause_seconds)

    def _call(self, ask: Callable[[dist.Store], Any]) -> Any:
        if self._store is None:
            return True
        try:
            return ask(self._store)
        except RuntimeError as error:  # torch's DistError and its children
            first_line = str(error).split("\n", 1)[0]
            raise StorageError(f"the ranks cannot reach each other: {first_line}") from error


def _holds(key: str) -> Callable[[dist.Store], bool]:
    return lambda store: store.check([key])


def _get_all(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that exist: in one request where the store can."""
    extended: Any = store  # its stubs know no `has_extended_api`
    return extended.multi_get(keys) if extended.has_extended_api() else [store.get(key) for key in keys]


def _error_to_plain(error: TrainshedError) -> dict[str, str | None]:
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def _error_from_plain(plain: Mapping[str, Any], prefix: str = "") -> TrainshedError:
    kind = getattr(errors, plain["kind"], TrainshedError)
    return kind(f"{prefix}{plain['what']}", where=plain["where"], hint=plain["hint"])

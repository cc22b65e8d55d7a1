"""How ranks agree on a save without a collective: records in the key-value store that started the process group.

Every rank publishes its part or its failure, rank 0 gathers them, commits, and announces how it ended; so a save that
fails anywhere fails everywhere, with the same error. Nothing here blocks inside the store: a `get` that waits would
hold the connection that the process group itself may need, so keys are asked for until they are there.
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
# How long rank 0 stays to let the others read the last outcome before it takes the key-value store down.
_GOODBYE_SECONDS = 10.0


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended. `discard`: nothing can have been committed, so what was written may be removed."""

    failure: TrainshedError | None = None
    discard: bool = False

    def to_bytes(self) -> bytes:
        """The outcome on its way to the other ranks."""
        return orjson.dumps({"failure": self.failure and _error_to_plain(self.failure), "discard": self.discard})

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveOutcome:
        """Read an outcome."""
        document = orjson.loads(data)
        return cls(document["failure"] and _error_from_plain(document["failure"]), document["discard"])


class SaveCoordinator:
    """One rank's side of the talk about saves. `prefix` keeps runs and attempts apart in a shared store."""

    def __init__(
        self, store: dist.Store | None, prefix: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        if store is None and world_size > 1:
            raise ValueError("several ranks need a torch.distributed.Store to coordinate a checkpoint")
        self._store, self._prefix = store, prefix
        self._rank, self._others = rank, range(1, world_size)
        self._timeout_seconds = timeout_seconds
        self._announced: str | None = None
        self._outcomes = 0
        self._stopped = threading.Event()

    def publish(self, save: str, record: bytes) -> None:
        """Tell rank 0 about this rank's part."""
        self._call(lambda store: store.set(self._key(save, f"part-{self._rank}"), record.decode()))

    def publish_failure(self, save: str, error: TrainshedError) -> None:
        """Tell rank 0 that this rank's part has failed."""
        told = orjson.dumps({"rank": self._rank, **_error_to_plain(error)})
        self._call(lambda store: store.set(self._key(save, "failure"), told.decode()))

    def gather(self, save: str) -> dict[int, bytes]:
        """Wait for the other ranks' records, or raise the first failure among them."""
        waiting, records = list(self._others), {}
        failure = self._key(save, "failure")

        def arrived(store: dist.Store) -> bool:
            if store.check([failure]):
                told = orjson.loads(store.get(failure))
                raise _error_from_plain(told, f"rank {told['rank']}: ")
            for rank in [rank for rank in waiting if store.check([self._key(save, f"part-{rank}")])]:
                key = self._key(save, f"part-{rank}")
                records[rank] = store.get(key)
                store.delete_key(key)
                waiting.remove(rank)
            return not waiting

        self._until(arrived, self._timeout_seconds, lambda: f"rank {', '.join(map(str, waiting))} wrote no part")
        return records

    def announce(self, save: str, outcome: SaveOutcome) -> None:
        """Tell the other ranks how a save ended."""
        if not self._others:
            return
        last, self._announced = self._announced, self._key(save, "outcome")
        key, told = self._announced, outcome.to_bytes().decode()
        self._call(lambda store: store.set(key, told))
        self._outcomes += 1
        if last is not None and outcome.failure is None:  # a part of this save came from everyone: all have read it
            self._call(lambda store: store.delete_key(last))

    def outcome(self, save: str) -> SaveOutcome:
        """Wait until rank 0 has told how a save ended."""
        key = self._key(save, "outcome")
        # Rank 0 waits for the slowest part first; its verdict is the better one, so it gets the time to tell it.
        patience_seconds = 2 * self._timeout_seconds
        self._until(lambda store: store.check([key]), patience_seconds, lambda: "rank 0 did not finish the checkpoint")
        outcome = SaveOutcome.from_bytes(self._call(lambda store: store.get(key)))
        if outcome.failure is not None:  # nobody will fetch it any more
            self._call(lambda store: store.delete_key(self._key(save, f"part-{self._rank}")))
        self._call(lambda store: store.add(f"{self._prefix}/read", 1))
        return outcome

    def stop(self) -> None:
        """Give up waiting, in whichever thread that is."""
        self._stopped.set()

    def leave(self) -> None:
        """Let the others read the last outcome: rank 0 often is the one that serves the key-value store."""
        if self._rank == 0 and self._others and self._outcomes and not self._stopped.is_set():
            expected = self._outcomes * len(self._others)
            with suppress(StorageError):  # whoever has not read it by then is gone
                self._until(lambda store: store.add(f"{self._prefix}/read", 0) >= expected, _GOODBYE_SECONDS, str)

    def _key(self, save: str, name: str) -> str:
        return f"{self._prefix}/{save}/{name}"

    def _until(self, ready: Callable[[dist.Store], bool], timeout_seconds: float, missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._call(ready):
            if self._stopped.wait(pause_seconds):
                raise StorageError(f"{missing()} before the run ended")
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{missing()} within {timeout_seconds:.0f} s",
                    hint="its log tells what it was doing; the checkpoint before this one is untouched",
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


def _error_to_plain(error: TrainshedError) -> dict[str, str | None]:
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def _error_from_plain(told: Mapping[str, Any], speaker: str = "") -> TrainshedError:
    kind = getattr(errors, told["kind"], TrainshedError)
    return kind(f"{speaker}{told['what']}", where=told["where"], hint=told["hint"])

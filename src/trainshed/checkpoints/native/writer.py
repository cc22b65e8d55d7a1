"""The writer of checkpoints: training stands still for a copy to memory, the rest happens in a thread.

    every rank   stage → stream its items into one file, hashing → tell rank 0
    rank 0       wait for all parts → tables of contents → manifest → `latest` → retention → tell all

No step of it uses a process group, so nothing here can get between the collectives of training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.native.gathering import Gathering
from trainshed.checkpoints.native.plan import WritePlan, plan_key, write_plan
from trainshed.checkpoints.native.saving import Saving
from trainshed.checkpoints.native.staging import Staging
from trainshed.checkpoints.pieces import Piece
from trainshed.storage.attempts import Attempt


def _unheard(kind: str, **values: Any) -> None:
    pass


class CheckpointWriter:
    """One rank's writer for one attempt. All ranks save the same steps in the same order.

    `attempt` names the store, the run's folder and the number that files carry; rank 0 takes it, the others are told.
    `coordination` is any `torch.distributed.Store` that all ranks reach; one rank alone needs none. `spec` goes into
    the manifest as what was asked for. `resumed_step` is the checkpoint this attempt went on from: saving that very
    state again does nothing. `on_event` is called as an `EventWriter`'s `emit` is, also from the writing thread.

    A save that fails on any rank fails on all: it is reported, never committed, and `wait` (or the next `save`) raises
    it. Whoever catches it may go on training; the checkpoint before is untouched.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        spec: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        coordination: dist.Store | None = None,
        keep: int | None = None,
        resumed_step: int | None = None,
        on_event: Callable[..., None] = _unheard,
        timeout_seconds: float = 1200.0,
    ) -> None:
        self._on_event = on_event
        self._gathering = Gathering(
            coordination,
            f"trainshed/checkpoints/{attempt.number}",
            rank=rank,
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )
        self._saving = Saving(attempt, self._gathering, rank=rank, keep=keep, spec=spec, on_event=on_event)
        self._stored_steps = set() if resumed_step is None else {resumed_step}
        self._staging = Staging()
        self._plan: WritePlan | None = None
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(abandon=kind is not None)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, step: int, tensors: Mapping[str, Piece], facts: Mapping[str, Any], *, blocking: bool = False
    ) -> None:
        """Copy all owned pieces and write them in the background; `facts` (JSON) are what `load` gives back.

        Waits for the save before it, and raises that one's failure instead of starting this one.
        """
        started = time.monotonic()
        self.wait()
        if step in self._stored_steps:
            self._on_event("note", step=step, text=f"the checkpoint of step {step} is stored already")
            return
        waited = time.monotonic()
        if self._plan is None or self._plan.key != plan_key(tensors):
            self._plan = write_plan(tensors)
        staged = self._staging.fill(self._plan, tensors)
        if self._staging.pageable_because:
            text = f"checkpoints are copied from the GPU into pageable memory: {self._staging.pageable_because}"
            self._on_event("warning", step=step, text=text)
            self._staging.pageable_because = None
        done = time.monotonic()
        self._on_event(
            "checkpoint",
            step=step,
            phase="staged",
            seconds=done - waited,
            stall_seconds=done - started,
            bytes=self._plan.size,
        )
        self._saves += 1
        # A daemon: a process that ends by an error does not stay to wait for ranks that are gone.
        self._thread = threading.Thread(
            target=self._write,
            args=(f"{self._saves}-{step}", step, self._plan, staged, dict(facts)),
            name="trainshed-checkpoint",
            daemon=True,
        )
        self._thread.start()
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is committed, or raise why it is not; the same failure is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, abandon: bool = False) -> None:
        """Finish what is under way and give the memory back; `abandon` leaves it to the end of the process."""
        if abandon:
            self._gathering.stop()
            return
        try:
            self.wait()
            self._gathering.leave()
        finally:
            self._staging.release()

    def _write(
        self, save: str, step: int, plan: WritePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        try:
            self._saving.run(save, step, plan, staged, facts)
        except Exception as error:
            self._failure = error
        else:
            self._stored_steps.add(step)

"""The writer of checkpoints: training waits for a copy to CPU memory, and a thread does the rest.

    every rank   stage → stream its items into one file, hashing → send a record to rank 0
    rank 0       wait for all records → index → manifest → `latest` → `best` → retention → send the outcome to all

No step uses a process group, so nothing here can interfere with the collectives of training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.native.commit import (
    commit_best,
    commit_checkpoint,
    write_index_files,
    write_rank_file,
)
from trainshed.checkpoints.native.coordination import SaveCoordinator, SaveOutcome
from trainshed.checkpoints.native.folder import (
    checkpoints_folder,
    index_name,
    keep_newest,
    rank_file_name,
    remove_leftovers,
    step_folder,
)
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, TensorShard, make_save_plan, save_plan_key
from trainshed.checkpoints.native.tables import CheckpointContents, RankFileRecord
from trainshed.errors import TrainshedError
from trainshed.storage import join
from trainshed.storage.attempts import Attempt


class StagingBuffer:
    """CPU memory for one plan, page-locked where tensors come from a GPU.

    `torch.empty(pin_memory=True)` would round its size up to a power of two. The buffer holds a rank's whole state, so
    it is allocated in its exact size and registered with the driver instead.
    """

    def __init__(self) -> None:
        self._plan: SavePlan | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False
        self.not_pinned_reason: str | None = None

    def fill(self, plan: SavePlan, tensors: Mapping[str, TensorShard]) -> list[torch.Tensor]:
        """Copy what the plan writes; return one tensor per item, each with a storage of exactly its own bytes.

        When this returns the originals may change. The caller makes sure that no thread still reads the last copy.
        """
        devices = {tensors[name].local.device for name in plan.staging_offsets if tensors[name].local.is_cuda}
        self._allocate(plan, pinned=bool(devices))
        for name, start in plan.staging_offsets.items():
            tensor = tensors[name].local.detach()
            if tensor.numel():
                memory = self._buffer[start : start + tensor.nbytes]
                memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        memory = self._buffer.numpy()
        return [
            torch.frombuffer(
                memory, dtype=DTYPES[item.dtype], count=item.size // DTYPES[item.dtype].itemsize, offset=item.start
            ).view(item.sizes)
            if item.size
            else torch.empty(item.sizes, dtype=DTYPES[item.dtype])
            for item in plan.items
        ]

    def release(self) -> None:
        """Free the memory."""
        if self._registered:
            _cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._registered = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan = None

    def _allocate(self, plan: SavePlan, *, pinned: bool) -> None:
        if self._plan is plan:
            return
        self.release()
        self._buffer = torch.empty(plan.size, dtype=torch.uint8)
        self._plan = plan
        if pinned and plan.size:
            error = int(_cudart().cudaHostRegister(self._buffer.data_ptr(), plan.size, 0))
            self._registered = error == 0
            self.not_pinned_reason = None if self._registered else f"the driver refused to lock it (error {error})"


def _cudart() -> Any:
    return torch.cuda.cudart()


class BackgroundSave:
    """Writes staged items and completes the save; it ends the same way on every rank."""

    def __init__(
        self,
        attempt: Attempt,
        coordinator: SaveCoordinator,
        *,
        rank: int,
        keep: int | None,
        spec: Mapping[str, Any],
        on_event: Callable[..., None],
    ) -> None:
        self._attempt, self._coordinator, self._rank = attempt, coordinator, rank
        self._keep, self._spec, self._on_event = keep, dict(spec), on_event
        self._folder = checkpoints_folder(attempt.run_folder)
        self._known_plan: str | None = None
        self._known_boxes: dict[str, bytes] = {}
        self._first = True

    def run(
        self,
        save: str,
        step: int,
        plan: SavePlan,
        staged: Sequence[torch.Tensor],
        facts: Mapping[str, Any],
        best_loss: float | None = None,
    ) -> None:
        """Write and commit one checkpoint, or raise why it failed; `save` is its name among the ranks."""
        started = time.monotonic()
        try:
            if self._rank == 0:
                outcome = self._save_as_rank_0(save, step, plan, staged, facts, best_loss)
            else:
                outcome = self._save_as_other_rank(save, step, plan, staged)
        except Exception as error:  # the ranks cannot reach each other
            outcome = SaveOutcome(as_trainshed_error(error))
        if outcome.failure is None:
            self._known_plan = plan.digest
            return
        if outcome.discard:
            self._discard(step)
        seconds = time.monotonic() - started
        self._on_event("checkpoint", step=step, phase="failed", seconds=seconds, what=str(outcome.failure))
        raise outcome.failure

    def _save_as_other_rank(self, save: str, step: int, plan: SavePlan, staged: Sequence[torch.Tensor]) -> SaveOutcome:
        try:
            part = self._write_part(step, plan, staged)
        except Exception as error:
            self._coordinator.send_failure(save, as_trainshed_error(error))
        else:
            known = self._known_plan == plan.digest
            self._coordinator.send_record(save, (part.without_boxes() if known else part).to_bytes())
        return self._coordinator.wait_for_outcome(save)

    def _save_as_rank_0(
        self,
        save: str,
        step: int,
        plan: SavePlan,
        staged: Sequence[torch.Tensor],
        facts: Mapping[str, Any],
        best_loss: float | None,
    ) -> SaveOutcome:
        started = time.monotonic()
        discard = True
        try:
            self._remove_leftovers_once()
            own = self._write_part(step, plan, staged)
            gathered = self._coordinator.wait_for_records(save)
            parts = [own, *(self._with_boxes(RankFileRecord.from_bytes(gathered[rank])) for rank in sorted(gathered))]
            contents = write_index_files(self._attempt, self._folder, step, parts, self._spec, facts)
            discard = False  # the manifest may exist even where its request seems to fail
            commit_checkpoint(self._attempt, self._folder, step, contents.manifest, best_loss)
        except Exception as error:
            outcome = SaveOutcome(as_trainshed_error(error), discard)
        else:
            outcome = SaveOutcome()
            self._known_boxes = {part.plan_digest: part.boxes for part in parts if part.boxes is not None}
            self._emit_committed(step, contents, time.monotonic() - started)
            if best_loss is not None:
                self._on_event("checkpoint", step=step, phase="best", loss=best_loss)
            self._retain(step)
        # Sent last: while the others wait for it, no rank writes into the folder that retention lists.
        self._coordinator.send_outcome(save, outcome)
        return outcome

    def mark_best(self, step: int, loss: float) -> None:
        """Point `best` to a step that is stored already; the other ranks have nothing to do for it."""
        if self._rank == 0:
            commit_best(self._attempt, self._folder, step, loss)
            self._on_event("checkpoint", step=step, phase="best", loss=loss)

    def _write_part(self, step: int, plan: SavePlan, staged: Sequence[torch.Tensor]) -> RankFileRecord:
        name = rank_file_name(self._rank, self._attempt.number)
        return write_rank_file(self._attempt.store, step_folder(self._folder, step), name, plan, staged)

    def _with_boxes(self, part: RankFileRecord) -> RankFileRecord:
        return part if part.boxes is not None else replace(part, boxes=self._known_boxes[part.plan_digest])

    def _emit_committed(self, step: int, contents: CheckpointContents, seconds: float) -> None:
        path = join(self._attempt.store.url, step_folder(self._folder, step))
        size = contents.total_bytes
        self._on_event("checkpoint", step=step, phase="committed", seconds=seconds, bytes=size, path=path)

    def _remove_leftovers_once(self) -> None:
        """Before the first save: remove what dead attempts have left, which may be as large as a checkpoint."""
        if self._first:
            store, number, check_fence = self._attempt.store, self._attempt.number, self._attempt.check
            check_fence()
            remove_leftovers(store, self._folder, number, committed=None, check_fence=check_fence)
            self._first = False

    def _retain(self, step: int) -> None:
        """Remove what the new checkpoint makes superfluous; a failure here does not undo the checkpoint."""
        store, number, check_fence = self._attempt.store, self._attempt.number, self._attempt.check
        try:
            for removed in keep_newest(store, self._folder, self._keep, check_fence=check_fence):
                self._on_event("checkpoint", step=removed, phase="pruned")
            remove_leftovers(store, self._folder, number, committed=step, check_fence=check_fence)
            store.sweep(self._folder, older_than_seconds=0.0)
        except Exception as error:
            text = f"step {step} is stored, but what it replaces could not be removed: {as_trainshed_error(error)}"
            self._on_event("warning", step=step, text=text)

    def _discard(self, step: int) -> None:
        """Remove what this rank wrote for a checkpoint that will not exist: it may fill the disk."""
        path, number = step_folder(self._folder, step), self._attempt.number
        names = [rank_file_name(self._rank, number), *([index_name(number)] if self._rank == 0 else [])]
        for name in names:
            with suppress(Exception):  # the first failure is the one to report
                self._attempt.store.delete(f"{path}/{name}")


def as_trainshed_error(error: Exception) -> TrainshedError:
    """Return any error as one that can be sent to another rank."""
    return error if isinstance(error, TrainshedError) else TrainshedError(f"{type(error).__name__}: {error}")


def _ignore_event(kind: str, **values: Any) -> None:
    pass


class CheckpointWriter:
    """One rank's writer for one attempt. All ranks save the same steps in the same order.

    `attempt` holds the store, the run's folder and the number in the names of files; all ranks have the same one.
    `store` is any `torch.distributed.Store` that all ranks reach; a single rank needs none. `spec` goes into the
    manifest. `resumed_step` is the checkpoint that this attempt resumed: saving that step again does nothing.
    `on_event` is called like an `EventWriter`'s `emit`, also from the writing thread.

    A save that fails on any rank fails on all: it is reported, never committed, and `wait` (or the next `save`) raises
    it. The caller may catch it and continue training; the checkpoint before is untouched.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        spec: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        store: dist.Store | None = None,
        keep: int | None = None,
        resumed_step: int | None = None,
        on_event: Callable[..., None] = _ignore_event,
        timeout_seconds: float = 1200.0,
    ) -> None:
        self._on_event = on_event
        self._coordinator = SaveCoordinator(
            store,
            f"trainshed/checkpoints/{attempt.number}",
            rank=rank,
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )
        self._background = BackgroundSave(
            attempt, self._coordinator, rank=rank, keep=keep, spec=spec, on_event=on_event
        )
        self._stored_steps = set() if resumed_step is None else {resumed_step}
        self._staging = StagingBuffer()
        self._plan: SavePlan | None = None
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
        self,
        step: int,
        tensors: Mapping[str, TensorShard],
        facts: Mapping[str, Any],
        *,
        blocking: bool = False,
        best_loss: float | None = None,
    ) -> None:
        """Copy all owned shards and write them in the background; `load_checkpoint` returns `facts` (JSON) again.

        With `best_loss` this is the best checkpoint so far. Waits for the save before, and raises its failure instead
        of starting this one.
        """
        started = time.monotonic()
        self.wait()
        if step in self._stored_steps:
            self._on_event("note", step=step, text=f"the checkpoint of step {step} is stored already")
            if best_loss is not None:
                self._background.mark_best(step, best_loss)
            return
        waited = time.monotonic()
        if self._plan is None or self._plan.key != save_plan_key(tensors):
            self._plan = make_save_plan(tensors)
        staged = self._staging.fill(self._plan, tensors)
        if self._staging.not_pinned_reason:
            text = f"checkpoints are copied from the GPU into pageable memory: {self._staging.not_pinned_reason}"
            self._on_event("warning", step=step, text=text)
            self._staging.not_pinned_reason = None
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
            args=(f"{self._saves}-{step}", step, self._plan, staged, dict(facts), best_loss),
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
        """Finish the current save and free the memory; with `abandon` the end of the process does both."""
        if abandon:
            self._coordinator.stop()
            return
        try:
            self.wait()
            self._coordinator.finish()
        finally:
            self._staging.release()

    def _write(
        self,
        save: str,
        step: int,
        plan: SavePlan,
        staged: Sequence[torch.Tensor],
        facts: Mapping[str, Any],
        best_loss: float | None,
    ) -> None:
        try:
            self._background.run(save, step, plan, staged, facts, best_loss)
        except Exception as error:
            self._failure = error
        else:
            self._stored_steps.add(step)

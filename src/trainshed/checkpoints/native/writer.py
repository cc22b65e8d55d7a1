"""The writer of checkpoints: training waits for a copy to CPU memory, and a thread does the rest.

    every rank   stage → stream its items into one file, hashing → tell rank 0
    rank 0       wait for all files → index → manifest → `latest` → retention → tell all

No step uses a process group, so nothing here can get between the collectives of training.
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

from trainshed.checkpoints.native.commit import RankFileRecord, commit_checkpoint, write_index_files, write_rank_file
from trainshed.checkpoints.native.coordination import SaveCoordinator, SaveOutcome
from trainshed.checkpoints.native.folder import (
    checkpoints_folder,
    index_name,
    keep_newest,
    rank_file_name,
    remove_leftovers,
    step_folder,
)
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, TensorShard, WriteItem, make_save_plan, save_plan_key
from trainshed.errors import TrainshedError
from trainshed.storage import Manifest, join
from trainshed.storage.attempts import Attempt


class StagingBuffer:
    """CPU memory for one plan, page-locked where tensors come from a GPU.

    `torch.empty(pin_memory=True)` would round its size up to a power of two; a buffer of a rank's whole state is
    registered with the driver instead, as it is.
    """

    def __init__(self) -> None:
        self._plan: SavePlan | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False
        self.pageable_because: str | None = None

    def fill(self, plan: SavePlan, tensors: Mapping[str, TensorShard]) -> list[torch.Tensor]:
        """Copy what the plan writes; return one tensor per item, each with a storage of just its own bytes.

        When this returns the originals may change. The caller has seen to it that nobody reads the last copy any more.
        """
        devices = {tensors[name].tensor.device for name in plan.starts if tensors[name].tensor.is_cuda}
        self._fit(plan, pinned=bool(devices))
        for name, start in plan.starts.items():
            tensor = tensors[name].tensor.detach()
            if tensor.numel():
                memory = self._buffer[start : start + tensor.nbytes]
                memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        # `torch.save` writes a tensor's whole storage: a view of the buffer would be stored as the whole buffer.
        whole = self._buffer.numpy()
        return [
            torch.frombuffer(
                whole, dtype=DTYPES[item.dtype], count=item.size // DTYPES[item.dtype].itemsize, offset=item.start
            ).view(item.box)
            if item.size
            else torch.empty(item.box, dtype=DTYPES[item.dtype])
            for item in plan.items
        ]

    def release(self) -> None:
        """Give the memory back."""
        if self._registered:
            _cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._registered = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan = None

    def _fit(self, plan: SavePlan, *, pinned: bool) -> None:
        if self._plan is plan:
            return
        self.release()
        self._buffer = torch.empty(plan.size, dtype=torch.uint8)
        self._plan = plan
        if pinned and plan.size:
            error = int(_cudart().cudaHostRegister(self._buffer.data_ptr(), plan.size, 0))
            self._registered = error == 0
            self.pageable_because = None if self._registered else f"the driver refused to lock it (error {error})"


def _cudart() -> Any:
    return torch.cuda.cudart()


class BackgroundSave:
    """Writes staged items and sees the save through to its end, the same end on every rank."""

    def __init__(
        self,
        attempt: Attempt,
        gathering: SaveCoordinator,
        *,
        rank: int,
        keep: int | None,
        spec: Mapping[str, Any],
        on_event: Callable[..., None],
    ) -> None:
        self._attempt, self._gathering, self._rank = attempt, gathering, rank
        self._keep, self._spec, self._on_event = keep, dict(spec), on_event
        self._folder = checkpoints_folder(attempt.run_folder)
        self._told_plan: str | None = None
        self._known_items: dict[str, tuple[WriteItem, ...]] = {}
        self._first = True

    def run(
        self, save: str, step: int, plan: SavePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Write and commit one checkpoint, or raise why there is none; `save` names it among the ranks."""
        started = time.monotonic()
        try:
            if self._rank == 0:
                outcome = self._lead(save, step, plan, staged, facts)
            else:
                outcome = self._follow(save, step, plan, staged)
        except Exception as error:  # the ranks have lost each other
            outcome = SaveOutcome(as_trainshed_error(error))
        if outcome.failure is None:
            self._told_plan = plan.digest
            return
        if outcome.discard:
            self._discard(step)
        seconds = time.monotonic() - started
        self._on_event("checkpoint", step=step, phase="failed", seconds=seconds, what=str(outcome.failure))
        raise outcome.failure

    def _follow(self, save: str, step: int, plan: SavePlan, staged: Sequence[torch.Tensor]) -> SaveOutcome:
        try:
            part = self._write_part(step, plan, staged)
        except Exception as error:
            self._gathering.publish_failure(save, as_trainshed_error(error))
        else:
            known = self._told_plan == plan.digest
            self._gathering.publish(save, (part.without_items() if known else part).to_bytes())
        return self._gathering.outcome(save)

    def _lead(
        self, save: str, step: int, plan: SavePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> SaveOutcome:
        started = time.monotonic()
        discard = True
        try:
            self._make_room()
            own = self._write_part(step, plan, staged)
            gathered = self._gathering.gather(save)
            parts = [own, *(self._with_items(RankFileRecord.from_bytes(gathered[rank])) for rank in sorted(gathered))]
            manifest = write_index_files(self._attempt, self._folder, step, parts, self._spec, facts)
            discard = False  # a manifest whose answer is lost may be there all the same
            commit_checkpoint(self._attempt, self._folder, step, manifest)
        except Exception as error:
            outcome = SaveOutcome(as_trainshed_error(error), discard)
        else:
            outcome = SaveOutcome()
            self._known_items = {part.plan: part.items for part in parts if part.items is not None}
            self._tell_committed(step, manifest, time.monotonic() - started)
            self._retain(step)
        # Not before: while others wait for this, nobody writes into the folder that retention looks through.
        self._gathering.announce(save, outcome)
        return outcome

    def _write_part(self, step: int, plan: SavePlan, staged: Sequence[torch.Tensor]) -> RankFileRecord:
        name = rank_file_name(self._rank, self._attempt.number)
        return write_rank_file(self._attempt.store, step_folder(self._folder, step), name, plan, staged)

    def _with_items(self, part: RankFileRecord) -> RankFileRecord:
        return part if part.items is not None else replace(part, items=self._known_items[part.plan])

    def _tell_committed(self, step: int, manifest: Manifest, seconds: float) -> None:
        path = join(self._attempt.store.url, step_folder(self._folder, step))
        size = manifest.total_bytes
        self._on_event("checkpoint", step=step, phase="committed", seconds=seconds, bytes=size, path=path)

    def _make_room(self) -> None:
        """Before the first save: remove what attempts that died have left, which may be a whole checkpoint."""
        if self._first:
            check = self._attempt.check
            check()
            remove_leftovers(self._attempt.store, self._folder, self._attempt.number, committed=None, check=check)
            self._first = False

    def _retain(self, step: int) -> None:
        """Remove what the new checkpoint makes superfluous; trouble with that does not undo the checkpoint."""
        store, number, check = self._attempt.store, self._attempt.number, self._attempt.check
        try:
            for gone in keep_newest(store, self._folder, self._keep, check=check):
                self._on_event("checkpoint", step=gone, phase="pruned")
            remove_leftovers(store, self._folder, number, committed=step, check=check)
            store.sweep(self._folder, older_than_seconds=0.0)
        except Exception as error:
            text = f"step {step} is stored, but what it replaces could not be removed: {as_trainshed_error(error)}"
            self._on_event("warning", step=step, text=text)

    def _discard(self, step: int) -> None:
        """Remove what this rank wrote for a checkpoint that will never be: the disk may be full of it."""
        path, number = step_folder(self._folder, step), self._attempt.number
        names = [rank_file_name(self._rank, number), *([index_name(number)] if self._rank == 0 else [])]
        for name in names:
            with suppress(Exception):  # the failure that led here is the one to tell
                self._attempt.store.delete(f"{path}/{name}")


def as_trainshed_error(error: Exception) -> TrainshedError:
    """Any error as one that can be told to another rank."""
    return error if isinstance(error, TrainshedError) else TrainshedError(f"{type(error).__name__}: {error}")


def _ignore_event(kind: str, **values: Any) -> None:
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
        on_event: Callable[..., None] = _ignore_event,
        timeout_seconds: float = 1200.0,
    ) -> None:
        self._on_event = on_event
        self._gathering = SaveCoordinator(
            coordination,
            f"trainshed/checkpoints/{attempt.number}",
            rank=rank,
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )
        self._saving = BackgroundSave(attempt, self._gathering, rank=rank, keep=keep, spec=spec, on_event=on_event)
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
        self, step: int, tensors: Mapping[str, TensorShard], facts: Mapping[str, Any], *, blocking: bool = False
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
        if self._plan is None or self._plan.key != save_plan_key(tensors):
            self._plan = make_save_plan(tensors)
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
        self, save: str, step: int, plan: SavePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        try:
            self._saving.run(save, step, plan, staged, facts)
        except Exception as error:
            self._failure = error
        else:
            self._stored_steps.add(step)

"""The training loop: step, read the metrics of earlier steps, validate, save, until the end or a request to stop."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from trainshed.catalog import gpu_by_device_name
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.batch_loader import BatchLoader
from trainshed.engines.torch.learning_rate import decay_span, learning_rate
from trainshed.engines.torch.rank_env import EventEmitter, TrainJob
from trainshed.engines.torch.rank_health import StopSignals, Watchdog
from trainshed.engines.torch.state import StartPoint, state_facts, state_pieces
from trainshed.engines.torch.step import DeviceTimestamp, PendingMetrics, StepMetrics, StepRunner
from trainshed.errors import TrainshedError
from trainshed.observe.mfu import measure_mfu
from trainshed.recipe.schema import Profile


@dataclass(frozen=True)
class TrainingEnd:
    """How the loop ended: after which step, and by which signal if somebody asked."""

    step: int
    signal: int | None


class Trainer:
    """One rank's training loop. Every rank takes the same decisions, as all read the same summed figures."""

    def __init__(
        self,
        job: TrainJob,
        stepper: StepRunner,
        writer: CheckpointWriter,
        voice: EventEmitter,
        watchdog: Watchdog,
        requests: StopSignals,
        profiler: StepProfiler,
        start: StartPoint,
    ) -> None:
        self.job, self.stepper, self.writer, self.voice = job, stepper, writer, voice
        self.watchdog, self.requests, self.profiler = watchdog, requests, profiler
        self.step, self.skipped = start.step, start.skipped
        self.saved = start.step or None
        mesh = stepper.model.mesh
        self.device = mesh.device
        self.feed = BatchLoader(job.order, mesh, numbered=job.recipe.train.dropout > 0)
        self._arriving: deque[tuple[int, float, PendingMetrics]] = deque()
        self._stop: int | None = None
        self._unhurried = True
        """Whether ranks may reach the next step at different times, as each loads, compiles or saves something new."""
        self._paused_for: set[str] = set()
        self._mark = DeviceTimestamp(self.device)
        self._gpu_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "this CPU"
        self._mfu_trouble = False

    def run(self) -> TrainingEnd:
        """Train to the end of the run, or to a step boundary after a request to stop."""
        # On a GPU the host stays one step ahead, so that the device never waits for it.
        behind = 1 if self.device.type == "cuda" else 0
        first, began = self.step, time.monotonic()
        self._mark = DeviceTimestamp(self.device)
        try:
            while self.step < self.job.steps and self._stop is None:
                self.watchdog.beat(self.step, "first_step" if self._unhurried else "step")
                self.profiler.before(self.step)
                self._queue_step()
                self.step += 1
                self._settle(0 if self._pause_due() or self._unhurried else behind)
                self._unhurried = False
                if self.step == first + 1:
                    self.voice("phase", name="first_step", seconds=time.monotonic() - began)
                self._end_profile()
                if self._stop is None:
                    self._pause()
            self._settle(0)
        finally:
            self.feed.close()
        if self.saved != self.step and self.step > first:
            self._save(blocking=True)
        self.watchdog.beat(self.step, "checkpoint")
        self.writer.wait()
        return TrainingEnd(self.step, self._stop)

    def _end_profile(self) -> None:
        over = self.step == self.job.steps or self._stop is not None
        if (path := self.profiler.after(self.step - 1, last=over)) is not None:
            self.voice("note", text=f"profile: {path}")

    def _queue_step(self) -> None:
        train, step = self.job.recipe.train, self.step
        fed = self.feed.batch(step, ahead=step + 1 < self.job.steps)
        lr = learning_rate(step, self.job.steps, train.optimizer.lr, train.schedule)
        arriving = self.stepper.step(fed, self.job.order.batch_size(step), lr, self.requests.votes())
        self._arriving.append((step, lr, arriving))

    def _settle(self, keep: int) -> None:
        """Read the figures of all queued steps but the newest `keep`."""
        while len(self._arriving) > keep:
            step, lr, arriving = self._arriving.popleft()
            outcome = arriving.read()
            self._report(step, lr, outcome, arriving.mark.seconds_since(self._mark))
            self._mark = arriving.mark
            if outcome.bad:
                self._bad_step(step, outcome)
            self._stop = self._stop or outcome.stop

    def _report(self, step: int, lr: float, outcome: StepMetrics, seconds: float) -> None:
        job, train = self.job, self.job.recipe.train
        length, batch = job.order.sequence_length, job.order.batch_size(step)
        rate = batch * length / seconds / job.layout.world_size
        moe = job.config.moe is not None
        mfu, mfu_full = self._mfu(rate)
        self.voice(
            "step",
            step,
            loss=_finite_or_none(outcome.loss),
            grad_norm=_finite_or_none(outcome.grad_norm),
            lr=lr,
            tokens=job.order.consumed(step + 1) * length,
            step_seconds=seconds,
            tokens_per_second_per_gpu=rate,
            mfu=mfu,
            mfu_full_attention=mfu_full,
            batch_hash=outcome.batch_hash,
            skipped=outcome.bad,
            z_loss=_finite_or_none(outcome.z_loss) if train.z_loss or outcome.z_loss else None,
            moe_balance=_finite_or_none(outcome.moe_balance) if moe else None,
            moe_z=_finite_or_none(outcome.moe_z) if moe else None,
            memory_gib=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None,
        )

    def _mfu(self, rate: float) -> tuple[float | None, float | None]:
        gpu = gpu_by_device_name(self._gpu_name)
        if gpu is None or self._mfu_trouble:
            return None, None
        try:
            measured = measure_mfu(
                rate,
                self.job.config,
                self.job.order.sequence_length,
                precision=self.job.recipe.train.precision,
                gpu=gpu,
                device_name=self._gpu_name,
            )
        except TrainshedError as error:
            # A wrong figure is said once and then left out; it is no reason to lose a run.
            self._mfu_trouble = True
            self.voice("warning", text=str(error))
            return None, None
        return measured.mfu, measured.mfu_full_attention

    def _bad_step(self, step: int, outcome: StepMetrics) -> None:
        policy = self.job.recipe.train.non_finite
        what = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        self.voice("non_finite", step, policy=policy, what=what)
        self.skipped += 1
        if policy == "skip":
            return
        self.writer.close()  # all ranks end here: each sees the last save through before one of them is gone
        kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "there is no checkpoint before it"
        order = self.job.order
        samples = order.sample_indices(step)
        without = SkipList([*order.skip.ranges, (int(samples[0]), int(samples[-1]) + 1)])
        raise TrainshedError(
            f"step {step + 1:,} has a {what}; nothing was updated, {kept}",
            hint=f"pass over such steps with `train.non_finite=skip --id {self.job.name}`, or leave its samples out "
            f"with `data.skip: {[list(each) for each in without.ranges]}`",
        )

    def _pause_due(self) -> bool:
        return self._checkpoint_due() or self._validation_due()

    def _checkpoint_due(self) -> bool:
        every = self.job.recipe.checkpoint.every
        return every is not None and self.step % every == 0 and self.step < self.job.steps

    def _validation_due(self) -> bool:
        wanted = self.job.recipe.data.validation
        if wanted is None or self.job.validation is None:
            return False
        return self.step % wanted.every == 0 or self.step == self.job.steps

    def _pause(self) -> None:
        """What happens between steps: validation, checkpoints. Their time is not the next step's."""
        if self._validation_due():
            self._validate()
        if self._checkpoint_due():
            self._save(blocking=not self.job.recipe.checkpoint.async_)
        if self._pause_due():
            self._mark = DeviceTimestamp(self.device)

    def _beat_pause(self, phase: str) -> None:
        """Say which pause begins; the first of its kind takes each rank as long as it takes, and the others wait."""
        self.watchdog.beat(self.step, phase)
        self._unhurried = self._unhurried or phase not in self._paused_for
        self._paused_for.add(phase)

    def _validate(self) -> None:
        order, wanted = self.job.validation, self.job.recipe.data.validation
        assert order is not None
        assert wanted is not None
        self._beat_pause("validation")
        began = time.monotonic()
        feed = BatchLoader(order, self.stepper.model.mesh, numbered=False)
        total = 0.0
        for number in range(wanted.batches):
            fed = feed.batch(number, ahead=number + 1 < wanted.batches)
            total += self.stepper.evaluate(fed, order.batch_size(number))
        feed.close()
        loss = _finite_or_none(total / wanted.batches)
        self.voice("validation", self.step, loss=loss, batches=wanted.batches, seconds=time.monotonic() - began)

    def _save(self, *, blocking: bool) -> None:
        self._beat_pause("checkpoint")
        decay = decay_span(self.job.steps, self.job.recipe.train.schedule)
        facts = state_facts(self.job.order, self.step, self.skipped, decay)
        pieces = state_pieces(self.stepper.model, self.stepper.optimizer)
        self.writer.save(self.step, pieces, facts, blocking=blocking)
        self.saved = self.step


def _finite_or_none(value: float) -> float | None:
    """JSON knows no NaN; a `non_finite` event says what it was."""
    return value if value - value == 0 else None


class StepProfiler:
    """Starts and stops PyTorch's profiler around the steps that were asked for; does nothing on other ranks."""

    def __init__(self, wanted: Profile | None, rank: int, first: int, folder: Path) -> None:
        """`first` is how many steps were done before: where the profile's steps are past, nothing is profiled."""
        self._steps = range(0)
        if wanted is not None and rank in wanted.ranks:
            self._steps = range(max(wanted.steps_before, first), wanted.steps_before + wanted.steps)
        self._path = folder / f"rank-{rank:05d}.json"
        self._running: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Call before each step."""
        if self._steps and step == self._steps.start:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=activities)
            self._running.start()

    def after(self, step: int, *, last: bool = False) -> Path | None:
        """Call after each step; returns the trace's file when it is written."""
        if self._running is None or not (last or step + 1 >= self._steps.stop):
            return None
        self._running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._path))
        self._running = None
        return self._path

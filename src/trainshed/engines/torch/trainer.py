"""The training loop: step, read the metrics of earlier steps, validate, save; until the end or a signal to stop."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainshed.catalog import gpu_by_device_name
from trainshed.checkpoints.native.best import ValidationRecord
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.batch_loader import BatchLoader
from trainshed.engines.torch.device_clock import DeviceTimestamp
from trainshed.engines.torch.garbage_collection import StepGarbageCollector
from trainshed.engines.torch.learning_rate import decay_span
from trainshed.engines.torch.profiler import StepProfiler
from trainshed.engines.torch.rank_env import EventEmitter, TrainJob
from trainshed.engines.torch.rank_health import Watchdog, stop_votes
from trainshed.engines.torch.rank_timing import RankTimer
from trainshed.engines.torch.sample_answers import SampleAnswers
from trainshed.engines.torch.state import StartPoint, runner_state, state_facts
from trainshed.engines.torch.step import EvaluationResult, PendingMetrics, StepMetrics, StepRunner
from trainshed.engines.torch.validation import early_stop_reason, evaluate_batches
from trainshed.errors import TrainshedError
from trainshed.observe.mfu import measure_mfu
from trainshed.recipe.train import EarlyStop
from trainshed.signals import StopSignals


@dataclass(frozen=True)
class TrainingEnd:
    """How the loop ended: after which step, and by which signal if there was one."""

    step: int
    signal: int | None
    at_boundary: bool = False
    """Whether a phase follows that needs another model or layout."""
    validation: ValidationRecord | None = None
    """The validation losses so far."""


class Trainer:
    """One rank's training loop. All ranks read the same summed figures, so they take the same decisions."""

    def __init__(
        self,
        job: TrainJob,
        runner: StepRunner,
        writer: CheckpointWriter,
        emit: EventEmitter,
        watchdog: Watchdog,
        stop_signals: StopSignals,
        profiler: StepProfiler,
        start: StartPoint,
        answers: SampleAnswers | None = None,
    ) -> None:
        self.job, self.runner, self.writer, self.emit = job, runner, writer, emit
        self.watchdog, self.stop_signals, self.profiler, self.answers = watchdog, stop_signals, profiler, answers
        self.step, self.skipped = start.step, start.skipped
        self.record = start.validation
        """The validation losses so far; None where none is measured, or where the checkpoint does not hold them."""
        if start.step == 0 and job.validations:
            self.record = ValidationRecord()
        self.last_saved_step = start.step or None
        mesh = runner.model.mesh
        self.device = mesh.device
        self.loader = self._batch_loader()
        rank = dist.get_rank() if job.layout.world_size > 1 else 0
        self.rank_timer = RankTimer(mesh.device, rank, job.layout.world_size)
        self.collector = StepGarbageCollector()
        self._pending: deque[tuple[int, float, PendingMetrics]] = deque()
        self._stop: int | None = None
        self._early_stop: str | None = None
        self._ranks_may_diverge = True
        """Whether ranks may reach the next step at different times, because they load, compile or save something."""
        self._phases_seen: set[str] = set()
        self._last_timestamp = DeviceTimestamp(self.device)
        self._gpu_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "this CPU"
        self._mfu_failed = False

    def run(self) -> TrainingEnd:
        """Train to the end of the run, to an early stop, or to the step boundary after a signal to stop."""
        # On a GPU the host stays one step ahead, so that the device never waits for it.
        steps_in_flight = 1 if self.device.type == "cuda" else 0
        first = self.step
        self.collector.start()
        try:
            self._catch_up()
            began, self._last_timestamp = time.monotonic(), DeviceTimestamp(self.device)
            self._report_phase()
            self._restart_spike_window()
            while self._goes_on():
                self.watchdog.heartbeat(self.step, "first_step" if self._ranks_may_diverge else "step")
                self.profiler.before(self.step)
                self._launch_step()
                self.step += 1
                at_once = self._between_steps_due() or self._ranks_may_diverge
                at_once = at_once or self.profiler.ends_cycle(self.step - 1)
                self._read_metrics(0 if at_once else steps_in_flight)
                self._ranks_may_diverge = False
                self.collector.after_step(self.step, first=self.step == first + 1)
                if self.step == first + 1:
                    self.emit("phase", name="first_step", seconds=time.monotonic() - began)
                self._end_profile()
                if self._stop is None:
                    self._between_steps()
            self._read_metrics(0)
            if self._early_stop is not None:
                self._end_profile()
        finally:
            self.loader.close()
            self.collector.stop()
        if self._early_stop is not None:
            assert self.record is not None
            best = {"best_step": self.record.best_step, "best_loss": self.record.best_loss}
            self.emit("early_stop", self.step, reason=self._early_stop, **best)
        if self.last_saved_step != self.step and self.step > first and self.job.recipe.checkpoint.save:
            self._save(blocking=True)
        self.watchdog.heartbeat(self.step, "checkpoint")
        self.writer.wait()
        at_boundary = self.step == self.job.last_step < self.job.steps
        at_boundary = at_boundary and self._stop is None and self._early_stop is None
        return TrainingEnd(self.step, self._stop, at_boundary, self.record)

    def _goes_on(self) -> bool:
        """Whether another step follows here. Phases with the same model and layout follow one another at no cost."""
        if self.step == self.job.last_step < self.job.steps:
            self._read_metrics(0)
            following = self.job.at(self.step)
            if self._stop is None and self._early_stop is None and self.job.continues_model(following):
                self.loader.close()
                self.job = following
                self.loader = self._batch_loader()
                self._report_phase()
                self._restart_spike_window()
        return self.step < self.job.last_step and self._stop is None and self._early_stop is None

    @property
    def _model_ends(self) -> bool:
        """Whether no step follows with this model: the run ends, or a phase follows that builds another."""
        if self.step < self.job.last_step:
            return False
        return self.step == self.job.steps or not self.job.continues_model(self.job.at(self.step))

    def _batch_loader(self) -> BatchLoader:
        regularization = self.runner.model.regularization
        return BatchLoader(
            self.job.order,
            self.runner.model.mesh,
            with_sample_ids=self.job.recipe.train.drops,
            with_sources=regularization.source_slots > 0,
        )

    def _report_phase(self) -> None:
        """Say which phase of `train.phases` begins or goes on here."""
        phase = self.job.phase
        if phase is None or self.step == phase.span.end:
            return
        self.emit(
            "train_phase",
            self.step,
            name=phase.span.name,
            number=phase.span.number + 1,
            of=len(self.job.phases),
            first_step=phase.span.start,
            last_step=phase.span.end,
            sequence_length=phase.order.sequence_length,
            global_batch=phase.order.schedule.global_batch,
            layout=str(phase.layout),
        )

    def _restart_spike_window(self) -> None:
        """Forget the window at the start of a phase whose loss and norm are not comparable with those before it."""
        begins = self.job.phase is not None and self.step == self.job.phase.span.start
        if self.runner.spikes is not None and begins and not self.job.is_like_phase_before:
            self.runner.spikes.restart()

    def _end_profile(self) -> None:
        """Report what a cycle of the profiler has left; the time to write it does not count for the next step."""
        stops = self._stop is not None or self._early_stop is not None
        written = self.profiler.after(self.step - 1, last=stops or self._model_ends)
        for profile in written:
            if profile.problem is not None:
                self.emit("warning", text=profile.problem)
            else:
                named = {"steps": profile.steps, "path": profile.path, "rank_profiled": profile.rank}
                self.emit("profile", self.step, **named, summary=profile.summary)
        if written and not self._pending:
            self._last_timestamp = DeviceTimestamp(self.device)

    def _launch_step(self) -> None:
        step = self.step
        batch = self.loader.batch(step, ahead=step + 1 < self.job.last_step)
        lr = self.job.learning_rate(step)
        votes = stop_votes(self.stop_signals) | self.rank_timer.votes()
        with self.rank_timer.step(step):
            pending = self.runner.step(batch, self.job.order.batch_size(step), lr, votes)
        self._pending.append((step, lr, pending))

    def _read_metrics(self, keep: int) -> None:
        """Read the metrics of all launched steps but the newest `keep`."""
        while len(self._pending) > keep:
            step, lr, pending = self._pending.popleft()
            metrics = pending.read()
            seconds = pending.finished_at.seconds_since(self._last_timestamp)
            self._report(step, lr, metrics, seconds)
            self._last_timestamp = pending.finished_at
            self.watchdog.add_step(seconds)
            window = self.rank_timer.finished(step, seconds, window_is_over=metrics.window_is_over)
            if window is not None:
                self.emit("ranks", step, **asdict(window))
            if metrics.non_finite:
                self._handle_non_finite(step, metrics)
            if metrics.spikes_in_a_row:
                self._handle_spike(step, metrics)
            self._stop = self._stop or metrics.stop_signal

    def _report(self, step: int, lr: float, metrics: StepMetrics, seconds: float) -> None:
        job = self.job
        length, batch = job.order.sequence_length, job.order.batch_size(step)
        rate = batch * length / seconds / job.layout.world_size
        mfu, mfu_full = self._mfu(rate, metrics, batch * length)
        self.emit(
            "step",
            step,
            loss=_finite_or_none(metrics.loss),
            grad_norm=_finite_or_none(metrics.grad_norm),
            lr=lr,
            tokens=job.order.run_tokens(step + 1),
            step_seconds=seconds,
            tokens_per_second_per_gpu=rate,
            mfu=mfu,
            mfu_full_attention=mfu_full,
            batch_hash=metrics.batch_hash,
            learned_tokens=metrics.learned_tokens,
            pairs=metrics.pairs,
            skipped=metrics.non_finite or metrics.spikes_in_a_row > 0,
            source_losses=self._source_losses(metrics),
            **self._phase_figures(step),
            **{name: _finite_or_none(value) for name, value in {**metrics.loss_terms, **metrics.rewards}.items()},
            memory_gib=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None,
        )

    def _source_losses(self, metrics: StepMetrics) -> dict[str, float | None] | None:
        """The losses of the sources that the batch has samples of, by their names; None where there is one source."""
        if metrics.source_losses is None or len(self.job.order.sources) == 1:
            return None
        named = zip(self.job.order.sources, metrics.source_losses, strict=False)
        return {source.name: _finite_or_none(loss) for source, loss in named if loss is not None}

    def _phase_figures(self, step: int) -> dict[str, Any]:
        """What only steps of phases say: which one, and how many samples the run has taken of all data."""
        if self.job.phase is None:
            return {}
        return {"train_phase": self.job.phase.span.name, "samples": self.job.order.run_samples(step + 1)}

    def _mfu(self, rate: float, metrics: StepMetrics, tokens: int) -> tuple[float | None, float | None]:
        gpu = gpu_by_device_name(self._gpu_name)
        if gpu is None or self._mfu_failed:
            return None, None
        document_length = None
        if metrics.position_sum is not None:
            # In a document of n tokens the mean position is (n - 1) / 2.
            document_length = 2 * metrics.position_sum / tokens + 1
        try:
            measured = measure_mfu(
                rate,
                self.job.config,
                self.job.order.sequence_length,
                precision=self.job.recipe.train.precision,
                gpu=gpu,
                device_name=self._gpu_name,
                lora=self.job.recipe.train.lora,
                groups=self.job.recipe.train.optimizer.groups or (),
                document_length=document_length,
                reference=self.job.recipe.train.mode == "dpo",
                engine="torch",
            )
        except TrainshedError as error:
            # A wrong figure is reported once and then left out: a run must not end because of it.
            self._mfu_failed = True
            self.emit("warning", text=str(error))
            return None, None
        return measured.mfu, measured.mfu_full_attention

    def _handle_non_finite(self, step: int, metrics: StepMetrics) -> None:
        policy = self.job.recipe.train.non_finite
        what = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"
        self.emit("non_finite", step, policy=policy, what=what)
        self.skipped += 1
        if policy == "skip":
            return
        self.writer.close()  # all ranks end here: each finishes the last save before one of them is gone
        saved = self.last_saved_step
        kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint before it"
        order = self.job.order
        samples = order.sample_indices(step)
        skip_key = "data.skip" if self.job.phase is None else f"{self.job.phase.span.data_key}.skip"
        without = SkipList([*order.skip.ranges, (int(samples[0]), int(samples[-1]) + 1)])
        raise TrainshedError(
            f"step {step + 1:,} has a {what}; nothing was updated, {kept}",
            hint=f"pass over such steps with `train.non_finite=skip --id {self.job.name}`, or leave its samples out "
            f"with `{skip_key}: {[list(skipped_range) for skipped_range in without.ranges]}`",
        )

    def _handle_spike(self, step: int, metrics: StepMetrics) -> None:
        assert self.job.recipe.train.spikes is not None
        most, in_a_row = self.job.recipe.train.spikes.max_in_a_row, metrics.spikes_in_a_row
        what = (
            f"loss {metrics.loss:.4f} (limit {metrics.loss_limit:.4f}), gradient norm {metrics.grad_norm:.4f} "
            f"(limit {metrics.grad_norm_limit:.4f})"
        )
        self.emit("spike", step, what=what, in_a_row=in_a_row)
        self.skipped += 1
        if in_a_row <= most:
            return
        self.writer.close()  # all ranks end here: each finishes the last save before one of them is gone
        raise TrainshedError(
            f"{in_a_row} steps in a row were skipped as spikes, the last is step {step + 1:,}: {what}",
            where=self.job.recipe.where("train.spikes.max_in_a_row"),
            hint="look at the data and the learning rate of these steps; the run goes on from its last checkpoint with "
            f"a larger `train.spikes.sigma` and `--id {self.job.name}`",
        )

    def _between_steps_due(self) -> bool:
        return self._checkpoint_due() or self._validation_due()

    def _checkpoint_due(self) -> bool:
        every = self.job.recipe.checkpoint.every
        saves = self.job.recipe.checkpoint.save
        return saves and every is not None and self.step % every == 0 and self.step < self.job.steps

    def _validation_due(self) -> bool:
        return any(self.job.validates(name, self.step) for name in self.job.validations)

    def _catch_up(self) -> None:
        """Do what a run that never stopped had done at this step: measure the loss, or end early.

        A run that was asked to stop saves at once, without the validation that was due. At the end of a phase the job
        is still that phase's: `first_part` sees to it.
        """
        if self.record is None or self.step == 0:
            return
        if self._validation_due() and self.record.step != self.step:
            self._validate()
            if self._stop is not None:
                return
            if self._is_best():
                self._save(blocking=True)
        self._stop_early_if_due()

    def _between_steps(self) -> None:
        """Validate and save if it is time to. The time this takes does not count for the next step."""
        if self._validation_due():
            self._validate()
            if self._stop is not None:
                return
            self._stop_early_if_due()
        if self._checkpoint_due() or self._is_best():
            self._save(blocking=not self.job.recipe.checkpoint.async_)
        if self._between_steps_due():
            self._last_timestamp = DeviceTimestamp(self.device)

    def _begin_phase(self, phase: str) -> None:
        """Tell the watchdog which phase begins; the first of its kind may take some ranks longer than others."""
        self.watchdog.heartbeat(self.step, phase)
        self._ranks_may_diverge = self._ranks_may_diverge or phase not in self._phases_seen
        self._phases_seen.add(phase)

    def _validate(self) -> None:
        sets, early_stop = self.job.recipe.data.validations, self._early_stop_settings
        self._begin_phase("validation")
        began = time.monotonic()
        results: dict[str, EvaluationResult] = {}
        for name, order in self.job.validations.items():
            if self.job.validates(name, self.step):
                with self._validated_weights():
                    results[name] = evaluate_batches(self.runner, order, sets[name].batches, self.stop_signals)
                self.watchdog.heartbeat(self.step, "validation")
                if (signal := results[name].stop_signal) is not None:
                    self._stop = signal  # the run saves now, and measures this when it goes on
                    return
        # All sets are due whenever one is: the first is always among them, and decides.
        first = next(iter(results))
        loss, named = _finite_or_none(results[first].loss), bool(self.job.recipe.data.named_validations)
        self.emit(
            "validation",
            self.step,
            loss=loss,
            batches=sets[first].batches,
            seconds=time.monotonic() - began,
            set_losses={name: _finite_or_none(result.loss) for name, result in results.items()} if named else None,
            **{name: _finite_or_none(value) for name, value in results[first].rewards.items()},
        )
        min_delta = 0.0 if early_stop is None else early_stop.min_delta
        self.record = (self.record or ValidationRecord()).after(self.step, loss, min_delta=min_delta)
        prompted = next((name for name, one_set in sets.items() if one_set.prompts is not None), first)
        if self.answers is not None and prompted in results:
            with self._validated_weights():
                self.answers.run(self.step, lambda: self.watchdog.heartbeat(self.step, "validation"))

    def _validated_weights(self) -> AbstractContextManager[None]:
        """Return the context in which the model has the weights that are validated: its own, or their averages."""
        ema, average = self.job.recipe.train.ema, self.runner.average
        return average.in_place_of_weights() if ema is not None and ema.validation and average else nullcontext()

    @property
    def _early_stop_settings(self) -> EarlyStop | None:
        return self.job.recipe.train.early_stop

    def _stop_early_if_due(self) -> None:
        if self.record is not None and self.step < self.job.steps:
            self._early_stop = early_stop_reason(self.record, self._early_stop_settings)

    def _is_best(self) -> bool:
        """Whether this step has just been measured, and is to be kept as the best."""
        best = self.job.recipe.checkpoint.best
        asked = best is not None and best.by == "validation"
        return asked and self.record is not None and self.record.best_step == self.step

    def _save(self, *, blocking: bool) -> None:
        self._begin_phase("checkpoint")
        decay = decay_span(self.job.steps, self.job.recipe.train.schedule)
        facts = state_facts(self.job.order, self.step, self.skipped, decay, self.record, self.job.phases)
        tensors = runner_state(self.runner)
        best_loss = self.record.best_loss if self.record is not None and self._is_best() else None
        self.writer.save(self.step, tensors, facts, blocking=blocking, best_loss=best_loss)
        self.last_saved_step = self.step


def _finite_or_none(value: float) -> float | None:
    """Return None for a NaN or an infinity, which JSON does not have; a `non_finite` event says what it was."""
    return value if value - value == 0 else None

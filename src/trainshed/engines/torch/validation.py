"""The validation loss of a run, and when it no longer improves.

Every rank gets the same loss, so that all of them find the same best checkpoint and end at the same step.
"""

from __future__ import annotations

from trainshed.checkpoints.native.best import ValidationRecord
from trainshed.data.order import DataOrder
from trainshed.engines.torch.batch_loader import BatchLoader
from trainshed.engines.torch.rank_health import NO_STOP_VOTES, stop_votes
from trainshed.engines.torch.step import EvaluationResult, StepRunner
from trainshed.recipe.train import EarlyStop
from trainshed.signals import StopSignals


def evaluate_batches(
    runner: StepRunner, order: DataOrder, batches: int, signals: StopSignals | None = None
) -> EvaluationResult:
    """Return the loss over the first batches of an order: its sum over all labelled tokens, divided by their number.

    Where some rank is asked to stop, all of them do after the same batch; the result then has that signal.
    """
    loader = BatchLoader(order, runner.model.mesh, with_sample_ids=False)
    results: list[EvaluationResult] = []
    try:
        for number in range(batches):
            batch = loader.batch(number, ahead=number + 1 < batches)
            votes = NO_STOP_VOTES if signals is None else stop_votes(signals)
            results.append(runner.evaluate(batch, order.batch_size(number), votes=votes))
            if results[-1].stop_signal is not None:
                break
        return EvaluationResult.mean(results)
    finally:
        loader.close()


def early_stop_reason(record: ValidationRecord, settings: EarlyStop | None) -> str | None:
    """Say why a run ends early; None while it goes on."""
    if settings is None or record.without_better < settings.patience:
        return None
    measurements = f"{record.without_better} measurement{'s' if record.without_better > 1 else ''}"
    by = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    lowest = f"; the lowest was {record.best_loss:.4f} after step {record.best_step}" if record.best_step else ""
    return f"the validation loss has not fallen{by} in {measurements}{lowest}"

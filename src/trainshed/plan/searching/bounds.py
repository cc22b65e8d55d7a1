"""What a layout cannot do better than, for less than a prediction costs: the search drops most layouts by these."""

from __future__ import annotations

from math import inf

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.predict import predict
from trainshed.plan.performance.prediction import Job, Prediction

_GIB = 2**30
_SLACK = 0.98
"""For what differs between layouts of one shape and is no part of the bound's argument: rounding, uneven chunks."""


class StateBound:
    """GiB of weights, gradients and optimiser states that some rank of a layout holds at least."""

    def __init__(self, job: Job) -> None:
        model = job.model
        self._experts = model.expert_layers * model.layer_sizes.experts
        self._dense = model.weights - self._experts
        stack, trained = job.stack, job.habits.trained_share
        self._job = job
        self._weight = stack.weight_bytes
        self._gradient = (2.0 if job.habits.half_gradients else stack.gradient_bytes) * trained
        self._optimizer = stack.optimizer_bytes * trained

    def __call__(self, layout: RankLayout) -> float:
        """Return the average over the pipeline's stages: the fullest has no less."""
        dense = self._bytes(layout, layout.dense_shards) * self._dense / layout.tp
        experts = self._bytes(layout, layout.expert_shards) * self._experts / (layout.ep * layout.etp)
        return (dense + experts) / layout.pp / _GIB * self._job.memory_calibration

    def _bytes(self, layout: RankLayout, ranks: int) -> float:
        weights = self._weight / (ranks if layout.shard == "full" else 1)
        gradients = self._gradient / (ranks if layout.shard in ("zero2", "full") else 1)
        if self._job.stack.gradients_freed and layout.micro_batches(self._job.global_batch) == 1:
            gradients = 0.0
        return weights + gradients + self._optimizer / ranks


class TimeBound:
    """Seconds that a step of a layout takes at least, from one prediction per shape.

    Layouts of one *shape* (tp, cp, ep, etp, micro_batch, recompute) make the same products and the same exchanges
    within a layer; pp only says where: a rank of twice the stages has half the layers and twice the micro-batches. So
    what all ranks are busy with together is the same for all of them. To it comes the wait that equal stages would
    have, the least there is: (pp - 1) / (micro-batches · vp) of the work. Sharing out states, sending between stages,
    uneven stages and the optimiser only add.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._busy: dict[tuple[int | str, ...], float] = {}
        self.predictions: dict[RankLayout, Prediction] = {}

    def __call__(self, layout: RankLayout) -> float:
        """Return the bound of a legal layout."""
        shape = (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute)
        busy = self._busy.get(shape)
        if busy is None:
            busy = self._busy[shape] = _busy_seconds(self.predict(layout))
        if layout.pp == 1:
            return _SLACK * busy
        idle = (layout.pp - 1) / (3 if layout.schedule == "zero_bubble" else 1)
        return _SLACK * busy * (1 + idle / (layout.micro_batches(self._job.global_batch) * layout.vp))

    def predict(self, layout: RankLayout) -> Prediction:
        """Predict a layout once."""
        found = self.predictions.get(layout)
        if found is None:
            found = self.predictions[layout] = predict(self._job, layout)
        return found


def _busy_seconds(prediction: Prediction) -> float:
    """What a rank is busy with on average over the stages; `times` are those of the busiest."""
    times = prediction.times
    busy = times.compute + times.tp + times.cp + times.ep
    stages = [stage.forward_seconds + stage.backward_seconds for stage in prediction.stages]
    most = max(stages, default=inf)
    return busy * (sum(stages) / len(stages) / most if most > 0 else 1.0)

"""The layouts that a search considers, and the bounds by which it drops most of them.

Every axis takes its sensible sizes; the engine's rules drop illegal ones as early as they apply. Sensible means: tp
divides the GPUs that fast links connect; context parallel leaves a rank 2,048 tokens of a sequence, tensor parallel
within experts 1,024 rows of an expert; a micro-batch has up to 65,536 tokens on a rank, as more make a GPU no faster;
uneven chunks of a pipeline lose 15% of the work at most, 5% where they are interleaved; hybrid sharding keeps a replica
within the fast links. A key that is fixed has that value, sensible or not.

A bound is a limit that a layout cannot beat, and is cheaper than a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, inf
from typing import Any

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.legality.check import broken_rules, engine_rules
from trainshed.plan.legality.rules import LegalityContext, divisors
from trainshed.plan.performance.memory import trained_bytes
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe.layout import PipelineSchedule, Recompute, Shard
from trainshed.recipe.section import Problem

_LEAST_CP_TOKENS = 2048
_LEAST_EXPERT_ROWS = 1024
_MOST_TOKENS = 65536
_MOST_UNEVEN = (1.15, 1.05)
"""Without and with interleaving, which must not lose what it gains."""
_RECOMPUTE_WAYS: dict[str, tuple[Recompute, ...]] = {"torchtune": ("none", "full")}
"""Ways to recompute, from the least to the most, of engines that do not have all three."""
OFFLOADING_ENGINES: dict[str, tuple[Recompute, ...]] = {"torch": ("none", "full"), "torchtune": ("full",)}
"""Ways to recompute of engines that let activations wait in the host's memory, where they do."""

OnIllegal = Callable[[RankLayout, Problem], None]


@dataclass(frozen=True)
class SearchSpace:
    """The layouts of a training on an engine; `fixed` are keys of the layout with given values."""

    training: TrainingShape
    engine: str
    fixed: Mapping[str, Any]
    context: LegalityContext

    @classmethod
    def for_training(
        cls, training: TrainingShape, engine: str, fixed: Mapping[str, Any], batch_sizes: Iterable[int] = ()
    ) -> SearchSpace:
        """Return the space of a training; `batch_sizes` are further global batch sizes of the run."""
        engine_rules(engine)
        sizes = tuple(sorted({training.global_batch, *batch_sizes}))
        # A chosen layout is written out in full, with uneven chunks.
        lora = training.lora is not None
        context = LegalityContext(training.sequence_length, sizes, lora, training.quantized, stages_written=True)
        return cls(training, engine, fixed, context)

    def layouts(self, on_illegal: OnIllegal) -> Iterator[RankLayout]:
        """Yield every legal layout, with the least recomputation; calls `on_illegal` with the others."""
        for outer in self._outer(on_illegal):
            for ep, etp in self._expert_sizes(outer.tp, outer.stage_ranks):
                for shard, replicate in self._sharding(outer):
                    for micro_batch in self._micro_batches(outer):
                        layout = self._layout(
                            outer.tp, outer.cp, outer.pp, outer.vp, outer.dp, ep, etp, shard, replicate, micro_batch
                        )
                        if self._legal(layout, on_illegal):
                            yield layout

    def with_more_recompute(self, layout: RankLayout) -> RankLayout | None:
        """Return the layout with the next way to recompute more; None if there is none."""
        ways = self._ways()
        if "recompute" in self.fixed or layout.recompute == ways[-1]:
            return None
        recompute = ways[ways.index(layout.recompute) + 1]
        if recompute == "selective" and layout.schedule == "zero_bubble":
            recompute = "full"
        return replace(layout, recompute=recompute)

    def with_most_recompute(self, layout: RankLayout) -> RankLayout:
        """Return the layout that recomputes the most."""
        while (leaner := self.with_more_recompute(layout)) is not None:
            layout = leaner
        return layout

    def _ways(self) -> tuple[Recompute, ...]:
        if "offload" in self.fixed and self.engine in OFFLOADING_ENGINES:
            return OFFLOADING_ENGINES[self.engine]
        return _RECOMPUTE_WAYS.get(self.engine, ("none", "selective", "full"))

    def _outer(self, on_illegal: OnIllegal) -> Iterator[RankLayout]:
        """Yield the axes of the dense model; a rule that they break excludes every layout with them."""
        gpus, layers = self.training.gpus, self.training.model.layers
        for tp in self._sizes("tp", self._tensor_sizes()):
            if not self._legal(self._layout(tp, 1, 1, 1, 1), on_illegal):
                continue
            for cp in self._sizes("cp", self._context_sizes(tp)):
                if not self._legal(self._layout(tp, cp, 1, 1, 1), on_illegal):
                    continue
                for pp in self._sizes("pp", [size for size in _divisors(gpus) if size <= layers]):
                    dp, left = divmod(gpus, tp * cp * pp)
                    if left or dp not in self._sizes("dp", [dp]):
                        continue
                    if not self._legal(self._layout(tp, cp, pp, 1, dp), on_illegal):
                        continue
                    for vp in self._sizes("vp", self._chunk_counts(pp)):
                        if self._even_enough(pp, vp):
                            yield self._layout(tp, cp, pp, vp, dp)

    def _legal(self, layout: RankLayout, on_illegal: OnIllegal) -> bool:
        broken = next(broken_rules(layout, self.training.model, self.context, self.engine), None)
        if broken is not None:
            on_illegal(layout, broken)
        return broken is None

    def _layout(
        self,
        tp: int,
        cp: int,
        pp: int,
        vp: int,
        dp: int,
        ep: int = 1,
        etp: int = 1,
        shard: Shard | None = None,
        replicate: int = 1,
        micro_batch: int = 1,
    ) -> RankLayout:
        # Without a shard only the outer axes are checked: rules that depend on inner axes must not be broken.
        schedule: PipelineSchedule | None = None
        if pp > 1 and shard is not None:
            schedule = self.fixed.get("schedule") or self._schedule(pp, vp, dp * micro_batch)
        return RankLayout(
            tp=tp,
            pp=pp,
            vp=vp,
            cp=cp,
            ep=ep,
            etp=etp,
            dp=dp,
            replicate=replicate,
            shard=shard or ("full" if self.engine == "torchtune" else "zero1"),
            micro_batch=micro_batch,
            recompute=self.fixed.get("recompute", self._ways()[0]),
            offload=self.fixed.get("offload"),
            overlap=self.fixed.get("overlap"),
            schedule=schedule,
            stages=tuple(self.fixed.get("stages") or ()) or _stages(self.training.model.layers, pp * vp),
        )

    def _schedule(self, pp: int, vp: int, step: int) -> PipelineSchedule:
        if vp > 1:
            return "interleaved"
        if self.engine == "torch" and self.context.batch_sizes[0] < pp * step:
            return "gpipe"
        return "1f1b"

    def _sizes(self, key: str, sensible: list[int]) -> list[int]:
        fixed = self.fixed.get(key)
        return sensible if fixed is None else [int(fixed)]

    def _tensor_sizes(self) -> list[int]:
        domain = min(max(self.training.hardware.link_domain, 1), self.training.gpus)
        return [size for size in _divisors(domain) if self.training.gpus % size == 0]

    def _context_sizes(self, tp: int) -> list[int]:
        most = max(1, self.training.sequence_length // _LEAST_CP_TOKENS)
        return [size for size in _divisors(self.training.gpus // tp) if size <= most]

    def _chunk_counts(self, pp: int) -> list[int]:
        return [1] if pp == 1 else list(range(1, self.training.model.layers // pp + 1))

    def _even_enough(self, pp: int, vp: int) -> bool:
        layers, chunks = self.training.model.layers, pp * vp
        if self.fixed.get("stages"):
            return len(self.fixed["stages"]) == chunks
        if "pp" in self.fixed and ("vp" in self.fixed or vp == 1):
            return True
        return -(-layers // chunks) * chunks <= _MOST_UNEVEN[vp > 1] * layers

    def _expert_sizes(self, tp: int, stage_ranks: int) -> Iterator[tuple[int, int]]:
        experts = self.training.model.experts
        whole = experts is None or experts.ffn < tp * _LEAST_EXPERT_ROWS
        for etp in self._sizes("etp", [1] if whole else sorted({1, tp})):
            shared = 1 if experts is None else gcd(experts.count, stage_ranks // etp)
            for ep in self._sizes("ep", _divisors(shared)):
                yield ep, etp

    def _sharding(self, outer: RankLayout) -> Iterator[tuple[Shard, int]]:
        """How states are sharded, and the number of replicas."""
        sensible: tuple[Shard, ...] = ("zero1",)
        if outer.dp * outer.cp > 1:
            if self.engine == "torchtune":
                sensible = ("full",)
            elif self.engine == "torch":
                sensible = ("zero1", "zero2", "full")
            elif outer.pp == 1:
                sensible = ("zero1", "full")
        for shard in (self.fixed["shard"],) if "shard" in self.fixed else sensible:
            for replicate in self._sizes("replicate", self._replica_counts(outer, shard)):
                if outer.dp % replicate == 0:
                    yield shard, replicate

    def _replica_counts(self, outer: RankLayout, shard: Shard) -> list[int]:
        together = self.training.hardware.link_domain // (outer.tp * outer.cp)
        if shard != "full" or self.engine == "torchtune" or together < 2 or together >= outer.dp:
            return [1]
        return [1] if outer.dp % together else [1, outer.dp // together]

    def _micro_batches(self, outer: RankLayout) -> list[int]:
        share = gcd(*self.context.batch_sizes) // outer.dp
        tokens = self.training.sequence_length // outer.cp
        return self._sizes("micro_batch", [s for s in _divisors(share) if s == 1 or s * tokens <= _MOST_TOKENS])


@cache
def _divisors(number: int) -> list[int]:
    return divisors(number)


@cache
def _stages(layers: int, chunks: int) -> tuple[int, ...]:
    return even_stages(layers, chunks)


_GIB = 2**30
_SLACK = 0.98
"""Allowance for differences between layouts of one shape that the bound ignores: rounding, uneven chunks."""


class StateMemoryBound:
    """A lower bound on the GiB of weights, gradients and optimizer states on the fullest rank of a layout."""

    def __init__(self, training: TrainingShape) -> None:
        model, lora = training.model, training.lora
        self._training = training
        self._trained = trained_bytes(training)
        self._experts = model.expert_layers * model.layer_sizes.experts
        self._dense = model.weights - self._experts
        self._frozen = 0.0
        if lora is not None or training.preference:
            usual = training.constants.weight_bytes
            self._frozen = usual if lora is None or lora.base_bytes is None else min(usual, lora.base_bytes)
        # Adapters are small, and some of them are whole on every tensor-parallel rank: the bound leaves them out.
        self._counts_trained = lora is None

    def __call__(self, layout: RankLayout) -> float:
        """Return the average over the pipeline's stages; the fullest stage has at least as much."""
        dense = self._bytes(layout, layout.dense_shards) * self._dense / layout.tp
        experts = self._bytes(layout, layout.expert_shards) * self._experts / (layout.ep * layout.etp)
        return (dense + experts) / layout.pp / _GIB * self._training.memory_calibration

    def _bytes(self, layout: RankLayout, ranks: int) -> float:
        shards = ranks if layout.shard == "full" else 1
        if not self._counts_trained:
            return self._frozen / shards
        weights = (self._trained.weight + self._frozen) / shards
        gradients = self._trained.gradient / (ranks if layout.shard in ("zero2", "full") else 1)
        if self._training.constants.gradients_freed and layout.micro_batches(self._training.global_batch) == 1:
            gradients = 0.0
        return weights + gradients + self._trained.optimizer / ranks


class StepTimeBound:
    """A lower bound on the seconds of a step, from one prediction per shape.

    Layouts of one *shape* (tp, cp, ep, etp, micro_batch, recompute) have the same matmuls and collectives in a layer.
    pp only decides which rank runs them: with twice the stages a rank has half the layers and twice the micro-batches.
    So the work of all ranks together is the same. The bubble of equal stages is added, which is the smallest possible:
    (pp - 1) / (micro-batches · vp) of the work. Sharding, sends between stages, uneven stages and the optimizer only
    add to that.
    """

    def __init__(self, training: TrainingShape) -> None:
        self._training = training
        self._busy: dict[tuple[int | str, ...], float] = {}
        self.predictions: dict[RankLayout, LayoutPrediction] = {}

    def __call__(self, layout: RankLayout) -> float:
        """Return the bound of a legal layout."""
        shape = (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute)
        busy = self._busy.get(shape)
        if busy is None:
            busy = self._busy[shape] = _busy_seconds(self.predict(layout))
        if layout.pp == 1:
            return _SLACK * busy
        idle = (layout.pp - 1) / (3 if layout.schedule == "zero_bubble" else 1)
        return _SLACK * busy * (1 + idle / (layout.micro_batches(self._training.global_batch) * layout.vp))

    def predict(self, layout: RankLayout) -> LayoutPrediction:
        """Predict a layout once."""
        prediction = self.predictions.get(layout)
        if prediction is None:
            prediction = self.predictions[layout] = predict(self._training, layout)
        return prediction


def _busy_seconds(prediction: LayoutPrediction) -> float:
    """Busy seconds of a rank, averaged over the stages; `times` are those of the busiest."""
    times = prediction.times
    busy = times.compute + times.tp + times.cp + times.ep
    stages = [stage.forward_seconds + stage.backward_seconds for stage in prediction.stages]
    most = max(stages, default=inf)
    return busy * (sum(stages) / len(stages) / most if most > 0 else 1.0)

"""Which rules hold for which engine. A layout is *illegal* where its engine cannot run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import batch_rules, megatron_rules, model_rules, torchtune_rules
from trainshed.plan.legality.asked import Asked, Rule
from trainshed.plan.performance.anatomy import Anatomy, anatomy_of
from trainshed.recipe import ModelConfig
from trainshed.recipe.section import Problem

_TORCH: tuple[Rule, ...] = (
    model_rules.heads_and_rows,
    model_rules.vocabulary_rows,
    model_rules.experts,
    model_rules.expert_mesh,
    model_rules.sequence_pieces,
    model_rules.stages,
    batch_rules.torch_sharding,
    batch_rules.torch_recompute,
    model_rules.copies,
    batch_rules.equal_shares,
    batch_rules.torch_schedule,
)
# No rule for the vocabulary: Megatron pads it until tp divides it (`layout_notes` says to what).
_MEGATRON: tuple[Rule, ...] = (
    megatron_rules.heads_groups_and_rows,
    model_rules.expert_sizes,
    megatron_rules.expert_ranks,
    model_rules.sequence_pieces,
    model_rules.stages,
    megatron_rules.equal_chunks,
    megatron_rules.sharding,
    model_rules.copies,
    megatron_rules.distributed_copies,
    batch_rules.equal_shares,
    megatron_rules.schedules,
)
_TORCHTUNE: tuple[Rule, ...] = (
    torchtune_rules.absent_axes,
    model_rules.heads_and_rows,
    torchtune_rules.tensor_parallel,
    torchtune_rules.sharding,
    torchtune_rules.recompute,
    batch_rules.equal_shares,
)
_RULES: dict[str, tuple[Rule, ...]] = {
    "torch": _TORCH,
    "megatron": _MEGATRON,
    "nemo": _MEGATRON,
    "torchtune": _TORCHTUNE,
}


def layout_problems(
    layout: RankLayout,
    model: ModelConfig | Anatomy,
    *,
    sequence_length: int,
    batch_sizes: Iterable[int],
    engine: str = "torch",
    lora: bool = False,
    stages_written: bool = False,
) -> list[Problem]:
    """Return everything that makes a layout illegal, with paths from the root of the recipe.

    `batch_sizes` are all global batches of the run: with a ramp, every size it passes. `stages_written` says that
    somebody wrote the layers of each chunk.
    """
    asked = Asked(sequence_length, tuple(sorted(set(batch_sizes))), lora, stages_written)
    return list(broken_rules(layout, model if isinstance(model, Anatomy) else anatomy_of(model), asked, engine))


def broken_rules(layout: RankLayout, model: Anatomy, asked: Asked, engine: str) -> Iterator[Problem]:
    """Yield what makes a layout illegal, one problem at a time: the planner's search asks for the first alone."""
    for rule in engine_rules(engine):
        yield from rule(layout, model, asked)


def engine_rules(engine: str) -> tuple[Rule, ...]:
    """Return the rules of an engine."""
    if engine not in _RULES:
        raise InputError(
            f"what the engine {engine} can run is not known here", where="engine", hint=f"engine: {', '.join(_RULES)}"
        )
    return _RULES[engine]

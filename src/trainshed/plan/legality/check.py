"""Whether a layout is legal on an engine (`layout_problems`), and whether it is wise (`layout_warnings`).

A layout is *illegal* where its engine cannot run it; the tables below say which rules each engine has. It is *unwise*
where it runs but is slow; the planner says how slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import rules
from trainshed.plan.legality.rules import LayoutRule, LegalityContext, round_up
from trainshed.plan.model_shape import ModelShape, model_shape
from trainshed.recipe import ModelConfig
from trainshed.recipe.section import Problem

_TORCH_RULES: tuple[LayoutRule, ...] = (
    rules.check_heads_and_rows,
    rules.check_vocabulary_rows,
    rules.check_experts,
    rules.check_expert_mesh,
    rules.check_sequence_pieces,
    rules.check_stages,
    rules.check_torch_sharding,
    rules.check_torch_quantized,
    rules.check_torch_recompute,
    rules.check_torch_offload,
    rules.check_torch_overlap,
    rules.check_replicate,
    rules.check_equal_shares,
    rules.check_torch_schedule,
)
# No rule for the vocabulary: Megatron pads it until tp divides it (`layout_notes` says to what).
_MEGATRON_RULES: tuple[LayoutRule, ...] = (
    rules.check_megatron_tp,
    rules.check_expert_sizes,
    rules.check_megatron_expert_ranks,
    rules.check_sequence_pieces,
    rules.check_stages,
    rules.check_megatron_chunks,
    rules.check_megatron_sharding,
    rules.check_replicate,
    rules.check_megatron_replicate,
    rules.check_equal_shares,
    rules.check_megatron_schedule,
    rules.check_no_offload,
    rules.check_no_overlap,
)
_TORCHTUNE_RULES: tuple[LayoutRule, ...] = (
    rules.check_torchtune_axes,
    rules.check_heads_and_rows,
    rules.check_torchtune_tp,
    rules.check_torchtune_sharding,
    rules.check_torchtune_recompute,
    rules.check_torchtune_offload,
    rules.check_no_overlap,
    rules.check_equal_shares,
)
_ENGINE_RULES: dict[str, tuple[LayoutRule, ...]] = {
    "torch": _TORCH_RULES,
    "megatron": _MEGATRON_RULES,
    "nemo": _MEGATRON_RULES,
    "torchtune": _TORCHTUNE_RULES,
}


def layout_problems(
    layout: RankLayout,
    model: ModelConfig | ModelShape,
    *,
    sequence_length: int,
    batch_sizes: Iterable[int],
    engine: str = "torch",
    lora: bool = False,
    quantized: bool = False,
    stages_written: bool = False,
) -> list[Problem]:
    """Return everything that makes a layout illegal, with paths from the root of the recipe.

    `batch_sizes` are all global batch sizes of the run: with a ramp, every size of it. `quantized` says that LoRA's
    frozen weights are held in 8 or 4 bits, `stages_written` that the layers of each chunk were written out.
    """
    context = LegalityContext(sequence_length, tuple(sorted(set(batch_sizes))), lora, quantized, stages_written)
    return list(broken_rules(layout, model if isinstance(model, ModelShape) else model_shape(model), context, engine))


def broken_rules(layout: RankLayout, model: ModelShape, context: LegalityContext, engine: str) -> Iterator[Problem]:
    """Yield what makes a layout illegal, one problem at a time: the search needs only the first."""
    for rule in engine_rules(engine):
        yield from rule(layout, model, context)


def engine_rules(engine: str) -> tuple[LayoutRule, ...]:
    """Return the rules of an engine."""
    if engine not in _ENGINE_RULES:
        raise InputError(
            f"what the engine {engine} can run is not known here",
            where="engine",
            hint=f"engine: {', '.join(_ENGINE_RULES)}",
        )
    return _ENGINE_RULES[engine]


_WORST_BUBBLE = 0.25
"""Idle share of a step above which a pipeline is unwise: a quarter of the GPUs' time is wasted."""
_FEW_TOKENS = 512
"""Tokens of a matmul below which reading a bf16 weight takes about as long as multiplying with it: an H100 makes 295
FLOPs in the time it reads a byte, and a token needs two per weight of two bytes."""
MEGATRON_VOCABULARY_MULTIPLE = 128
"""`--make-vocab-size-divisible-by`, times tp."""


def layout_warnings(
    layout: RankLayout,
    model: ModelConfig | ModelShape,
    *,
    sequence_length: int,
    batch_sizes: Iterable[int],
    engine: str = "torch",
    link_domain: int | None = None,
) -> list[str]:
    """Return what is unwise about a legal layout.

    `link_domain` is how many GPUs fast links connect; None where the hardware is unknown: no warning is about it then.
    """
    model = model if isinstance(model, ModelShape) else model_shape(model)
    largest = layout.micro_batches(max(batch_sizes))
    return [
        *_bubble_warnings(layout, largest),
        *_slice_warnings(layout, model, sequence_length, engine),
        *([] if link_domain is None else _hardware_warnings(layout, sequence_length, link_domain)),
    ]


def layout_notes(layout: RankLayout, model: ModelConfig | ModelShape, *, engine: str) -> list[str]:
    """Return what the engine does with a layout that its keys do not say."""
    if engine not in ("megatron", "nemo"):
        return []
    notes = []
    padded = round_up(model.vocab_size, MEGATRON_VOCABULARY_MULTIPLE * layout.tp)
    if padded != model.vocab_size:
        notes.append(
            f"Megatron pads the vocabulary of {model.vocab_size} to {padded}, "
            f"a multiple of {MEGATRON_VOCABULARY_MULTIPLE} · tp {layout.tp}"
        )
    if layout.tp > model.kv_heads:
        notes.append(
            f"tp: {layout.tp} is more than the {model.kv_heads} key/value heads: "
            f"{layout.tp // model.kv_heads} ranks work with the same one"
        )
    return notes


def pipeline_bubble(layout: RankLayout, micro_batches: int) -> float:
    """Return the idle share of a step that a pipeline costs, with chunks of equal time.

    (pp - 1) / (m · vp + pp - 1) for GPipe, 1F1B and interleaved 1F1B (Narayanan et al. 2021, section 2.2); ZB-H1 fills
    all but a third of it (Qi et al. 2024, with equal times of forward, input gradients and weight gradients).
    """
    idle = (layout.pp - 1) / (3 if layout.schedule == "zero_bubble" else 1)
    return idle / (micro_batches * layout.vp + idle)


def _bubble_warnings(layout: RankLayout, micro_batches: int) -> Iterator[str]:
    if layout.pp == 1:
        return
    bubble = pipeline_bubble(layout, micro_batches)
    if bubble > _WORST_BUBBLE:
        yield (
            f"{micro_batches} micro-batches for {layout.pp} pipeline stages: {bubble:.0%} of each step is spent "
            "waiting; a larger global batch or a smaller pp shortens it"
        )


def _slice_warnings(layout: RankLayout, model: ModelShape, sequence_length: int, engine: str) -> Iterator[str]:
    if model.vocab_size % layout.tp and engine == "torch":
        yield (
            f"the vocabulary of {model.vocab_size} does not divide by tp: {layout.tp}: "
            "its ranks get unequal parts of the embedding and the head"
        )
    if model.window is not None and layout.cp > 1 and model.window <= sequence_length // layout.cp:
        yield (
            f"cp: {layout.cp} gathers the keys of all {sequence_length} tokens, and the model looks back "
            f"{model.window} only"
        )


def _hardware_warnings(layout: RankLayout, sequence_length: int, link_domain: int) -> Iterator[str]:
    if layout.tp > link_domain:
        yield (
            f"tp: {layout.tp} reaches beyond the {link_domain} GPUs that fast links join: "
            "every layer waits for the network between nodes"
        )
    elif link_domain % layout.tp:
        yield (
            f"tp: {layout.tp} does not divide the {link_domain} GPUs that fast links join: "
            "some of its groups lie across nodes"
        )
    if layout.ep > 1 and layout.ep * layout.etp > link_domain:
        yield (
            f"ep {layout.ep} · etp {layout.etp} = {layout.ep * layout.etp} ranks hold the experts and fast links join "
            f"{link_domain} GPUs: tokens go to their experts through the network between nodes"
        )
    tokens = layout.micro_batch * sequence_length // layout.cp
    if tokens < _FEW_TOKENS:
        yield (
            f"a micro-batch of {layout.micro_batch} has {tokens} tokens on a rank, and below {_FEW_TOKENS} a GPU reads "
            "weights for as long as it multiplies: a larger micro_batch is faster"
        )

"""What a legal layout had better not do: it merely costs, and the planner says how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainshed.plan.layout import RankLayout
from trainshed.plan.legality.wording import round_up
from trainshed.plan.performance.anatomy import Anatomy, anatomy_of
from trainshed.recipe import ModelConfig

_WORST_BUBBLE = 0.25
"""Idle share of a step from which a pipeline is called unwise: a quarter of the GPUs bought for nothing."""
_FEW_TOKENS = 512
"""Rows of a product below which reading a bf16 weight takes about as long as multiplying with it: an H100 makes 295
FLOPs in the time of a byte, two per row and element of two bytes."""
MEGATRON_VOCABULARY_MULTIPLE = 128
"""`--make-vocab-size-divisible-by`, times tp."""


def layout_warnings(
    layout: RankLayout,
    model: ModelConfig | Anatomy,
    *,
    sequence_length: int,
    batch_sizes: Iterable[int],
    engine: str = "torch",
    link_domain: int | None = None,
) -> list[str]:
    """Return what is unwise about a legal layout.

    `link_domain` is how many GPUs fast links join; None where no GPU is known, and what hangs on them is not said.
    """
    model = model if isinstance(model, Anatomy) else anatomy_of(model)
    largest = layout.micro_batches(max(batch_sizes))
    return [
        *_bubble(layout, largest),
        *_slices(layout, model, sequence_length, engine),
        *([] if link_domain is None else _hardware(layout, sequence_length, link_domain)),
    ]


def layout_notes(layout: RankLayout, model: ModelConfig | Anatomy, *, engine: str) -> list[str]:
    """Return what the engine does with a layout that nobody wrote."""
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


def _bubble(layout: RankLayout, micro_batches: int) -> Iterator[str]:
    if layout.pp == 1:
        return
    bubble = pipeline_bubble(layout, micro_batches)
    if bubble > _WORST_BUBBLE:
        yield (
            f"{micro_batches} micro-batches for {layout.pp} pipeline stages: {bubble:.0%} of each step is spent "
            "waiting; a larger global batch or a smaller pp shortens it"
        )


def _slices(layout: RankLayout, model: Anatomy, sequence_length: int, engine: str) -> Iterator[str]:
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


def _hardware(layout: RankLayout, sequence_length: int, link_domain: int) -> Iterator[str]:
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

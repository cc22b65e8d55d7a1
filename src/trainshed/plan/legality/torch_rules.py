"""Rules of our own engine, many of them shared by others: what the model and the batch ask of a layout.

Every tensor, expert, token and layer must have a place, dp ranks get equal shares of the batch, and a pipeline's
schedule gets enough micro-batches. A rule yields a `Problem` with the key, the numbers that clash, and what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.model_shape import ModelShape
from trainshed.recipe.section import Problem


def key_problem(key: str, what: str, hint: str) -> Problem:
    """Return a problem of one key of the layout."""
    return Problem(("layout", key), what, hint)


def divisors(number: int) -> list[int]:
    """Return every size that divides a number, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def suggest_sizes(key: str, sizes: list[int], *, limit: int | None = None) -> str:
    """Name sizes to write, the largest six where there are many: `tp: 1, 2 or 4`."""
    shown = [str(size) for size in sizes if limit is None or size <= limit][-6:]
    return f"{key}: {shown[0]}" if len(shown) == 1 else f"{key}: {', '.join(shown[:-1])} or {shown[-1]}"


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple from a number on."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class LegalityContext:
    """A run's sizes; `batch_sizes` are all its global batches, smallest first."""

    sequence_length: int
    batch_sizes: tuple[int, ...]
    lora: bool = False
    stages_written: bool = False
    """Whether somebody wrote `stages`: engines that want equal chunks take uneven ones when told so."""


LayoutRule = Callable[[RankLayout, ModelShape, LegalityContext], Iterator[Problem]]
"""Yields what one rule has against a layout."""


def check_heads_and_rows(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """tp cuts heads, key/value heads and feed-forward rows into equal parts."""
    # Query heads are a multiple of the key/value heads, so that these decide.
    heads = "heads" if model.kv_heads == model.heads else "key/value heads"
    yield from _check_cuts(layout, [(heads, model.kv_heads), *feed_forward_cuts(model)])


def feed_forward_cuts(model: ModelShape) -> list[tuple[str, int]]:
    """What tp cuts of the feed-forward blocks, by name and size."""
    rows = [("feed-forward rows", model.ffn)]
    if model.experts is not None:
        rows.append(("rows of the shared expert", model.experts.shared_ffn))
    return rows


def _check_cuts(layout: RankLayout, cuts: list[tuple[str, int]]) -> Iterator[Problem]:
    for things, count in cuts:
        if count % layout.tp:
            legal = [size for size in divisors(layout.tp) if all(other % size == 0 for _, other in cuts)]
            yield key_problem(
                "tp", f"tp: {layout.tp} does not divide the {count} {things}", f"write {suggest_sizes('tp', legal)}"
            )


def check_vocabulary_rows(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Every tp rank holds a row of the vocabulary at least."""
    if model.vocab_size < layout.tp:
        yield key_problem(
            "tp",
            f"tp: {layout.tp} leaves ranks without a row of the {model.vocab_size} in the vocabulary",
            f"write tp: {model.vocab_size} or less",
        )


def check_experts(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """ep takes whole experts, etp equal parts of one, and etp ranks share the tokens of a tp group."""
    found = model.experts
    yield from check_expert_sizes(layout, model, asked)
    if found is not None and layout.tp % layout.etp:
        yield key_problem(
            "etp",
            f"etp: {layout.etp} does not divide tp: {layout.tp}, whose ranks share an expert's tokens",
            f"write {suggest_sizes('etp', divisors(gcd(found.ffn, layout.tp)))}",
        )


def check_expert_sizes(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """ep takes whole experts, etp equal parts of one."""
    found = model.experts
    if found is None:
        for key, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                yield key_problem(key, f"{key}: {size} spreads experts, and the model has none", "delete it")
        return
    if found.count % layout.ep:
        yield key_problem(
            "ep",
            f"ep: {layout.ep} does not divide the {found.count} experts",
            f"write {suggest_sizes('ep', divisors(found.count), limit=layout.ep)}",
        )
    if found.ffn % layout.etp:
        yield key_problem(
            "etp",
            f"etp: {layout.etp} does not divide the {found.ffn} rows of an expert",
            f"write {suggest_sizes('etp', divisors(gcd(found.ffn, layout.tp)))}",
        )


def check_expert_mesh(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """The experts of one copy lie evenly over its dp · cp · tp ranks."""
    if model.experts is None:
        return
    # With `shard: none` every dp rank is a copy for the dense weights, and experts may still lie across all of them.
    dp = layout.dp if layout.shard == "none" else layout.dp_shard
    ranks = dp * layout.cp * layout.tp
    if ranks % (layout.ep * layout.etp):
        one_copy = " of one copy" if dp != layout.dp else ""
        yield key_problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {layout.ep * layout.etp} does not divide the "
            f"dp {dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks{one_copy}",
            f"write ep and etp so that their product divides {ranks}, or dp so that {layout.ep * layout.etp} does",
        )


def check_sequence_pieces(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """cp cuts a sequence into two pieces a rank, and tp shares what a cp rank has (sequence parallel)."""
    # Each cp rank takes one piece from the front and its mirror from the back, so that causal work is even.
    length, pieces = asked.sequence_length, 2 * layout.cp if layout.cp > 1 else 1
    if length % pieces:
        yield key_problem(
            "cp",
            f"cp: {layout.cp} cuts a sequence into {pieces} pieces, and {length} tokens do not divide by that",
            f"write data.sequence_length: {round_up(length, pieces * layout.tp)}, or another cp",
        )
    elif (local := length // layout.cp) % layout.tp:
        yield key_problem(
            "tp",
            f"tp: {layout.tp} ranks share the {local} tokens of a sequence, and {local} does not divide by {layout.tp}",
            f"write data.sequence_length: {round_up(length, pieces * layout.tp)}, or another tp",
        )


def check_stages(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Every chunk has a layer, and the chunks have all of them."""
    chunks = layout.pp * layout.vp
    if model.layers < chunks:
        yield key_problem(
            "pp",
            f"pp {layout.pp} · vp {layout.vp} = {chunks} chunks, and the model has {model.layers} layers",
            f"write pp and vp with a product of {model.layers} or less",
        )
    elif sum(layout.stages) != model.layers:
        even = ", ".join(map(str, even_stages(model.layers, chunks)))
        yield key_problem(
            "stages",
            f"{' + '.join(map(str, layout.stages))} = {sum(layout.stages)} layers, and the model has {model.layers}",
            f"write stages: [{even}], or delete it",
        )


def check_copies(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """`replicate` is read only where something is shared out."""
    if layout.shard == "none" and layout.replicate not in (1, layout.dp):
        yield key_problem(
            "replicate",
            f"replicate: {layout.replicate} is not read with `shard: none`: each of the {layout.dp} dp ranks is a copy",
            "delete it, or write another shard",
        )


def check_equal_shares(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Every rank makes the same whole number of micro-batches."""
    if layout.uneven and model.experts is None:
        return  # rows without a loss make them equal; a router would count those
    step = layout.dp * layout.micro_batch
    uneven = [size for size in asked.batch_sizes if size % step]
    if uneven:
        key = "dp" if uneven[0] % layout.dp else "micro_batch"
        yield key_problem(
            key,
            f"dp {layout.dp} · micro_batch {layout.micro_batch} = {step} does not divide "
            f"the global batch of {', '.join(map(str, uneven))}",
            f"write a multiple of {step} as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        )


def check_torch_schedule(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Micro-batches as `torch.distributed.pipelining` wants them."""
    if not layout.uneven and any(size % (layout.dp * layout.micro_batch) for size in asked.batch_sizes):
        return
    if layout.schedule == "1f1b":
        yield from _check_1f1b_micro_batches(layout, asked.batch_sizes)
    elif layout.schedule in ("interleaved", "zero_bubble"):
        yield from _check_equal_rounds(layout, asked.batch_sizes)


def _check_1f1b_micro_batches(layout: RankLayout, batch_sizes: tuple[int, ...]) -> Iterator[Problem]:
    smallest = layout.micro_batches(batch_sizes[0]) if batch_sizes else layout.pp
    if smallest < layout.pp:
        yield key_problem(
            "schedule",
            f"1f1b fills its {layout.pp} stages with as many micro-batches, and a batch of {batch_sizes[0]} "
            f"makes {smallest}",
            f"write schedule: gpipe, or a global batch of {layout.pp * layout.dp * layout.micro_batch} or more",
        )


def _check_equal_rounds(layout: RankLayout, batch_sizes: tuple[int, ...]) -> Iterator[Problem]:
    # The rule of torch.distributed.pipelining: rounds of pp micro-batches or a few more, all of one size.
    for size in batch_sizes:
        count = layout.micro_batches(size)
        rounds = max(1, count // layout.pp)
        if count % rounds:
            whole = round_up(count, layout.pp)
            yield key_problem(
                "schedule",
                f"{layout.schedule} runs {rounds} equal rounds, and a batch of {size} makes {count} micro-batches",
                f"write a global batch of {whole * layout.dp * layout.micro_batch} ({whole} micro-batches)",
            )
            return


def check_torch_sharding(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """A pipeline's micro-batches keep weights and gradients of a stage whole: only optimiser states are shared out."""
    if layout.pp > 1 and layout.shard in ("zero2", "full") and max(layout.dense_shards, layout.expert_shards) > 1:
        cut = "gradients" if layout.shard == "zero2" else "weights and gradients"
        yield key_problem(
            "shard",
            f"shard: {layout.shard} with pp: {layout.pp} would leave {cut} whole on every rank, as zero1 does: our own "
            "engine does not share them out in a pipeline yet",
            "write shard: zero1, or pp: 1",
        )


def check_torch_recompute(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """What is kept selectively may be passed backward once."""
    if layout.recompute == "selective" and layout.schedule == "zero_bubble":
        # torch.utils.checkpoint: what is kept selectively may be passed backward once; this schedule does it twice.
        yield key_problem(
            "recompute",
            "selective keeps activations for one backward, and zero_bubble makes two: inputs first, weights later",
            "write recompute: full or none, or schedule: 1f1b",
        )

"""What a layout may not do, and what it had better not do.

A layout is *illegal* where its engine cannot run it: all such problems are found at once, each with the numbers that
clash and what to write. It is *unwise* where it merely costs; costs that hang on hardware are the planner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, even_stages
from trainshed.recipe import ModelConfig
from trainshed.recipe.section import Problem

_WORST_BUBBLE = 0.25
"""Idle share of a step from which a pipeline is called unwise: a quarter of the GPUs bought for nothing."""


def layout_problems(
    layout: RankLayout,
    config: ModelConfig,
    *,
    sequence_length: int,
    batch_sizes: Iterable[int],
    engine: str = "torch",
) -> list[Problem]:
    """Return everything that makes a layout illegal, with paths from the root of the recipe.

    `batch_sizes` are all global batches of the run: with a ramp, every size it passes.
    """
    if engine != "torch":
        raise InputError(f"what the engine {engine} can run is not known here", where="engine", hint="engine: torch")
    return [
        *_tensor_problems(layout, config),
        *_expert_problems(layout, config),
        *_sequence_problems(layout, sequence_length),
        *_stage_problems(layout, config),
        *_recompute_problems(layout),
        *_copy_problems(layout),
        *_batch_problems(layout, sorted(set(batch_sizes))),
    ]


def layout_warnings(
    layout: RankLayout, config: ModelConfig, *, sequence_length: int, batch_sizes: Iterable[int]
) -> list[str]:
    """Return what is unwise about a legal layout, as far as no hardware has to be known."""
    largest = layout.micro_batches(max(batch_sizes))
    return [
        *_bubble_warnings(layout, largest),
        *_sharding_warnings(layout, largest),
        *_slice_warnings(layout, config, sequence_length),
    ]


def pipeline_bubble(layout: RankLayout, micro_batches: int) -> float:
    """Return the idle share of a step that a pipeline costs, with chunks of equal time.

    (pp - 1) / (m · vp + pp - 1) for GPipe, 1F1B and interleaved 1F1B (Narayanan et al. 2021, section 2.2); ZB-H1 fills
    all but a third of it (Qi et al. 2024, with equal times of forward, input gradients and weight gradients).
    """
    idle = (layout.pp - 1) / (3 if layout.schedule == "zero_bubble" else 1)
    return idle / (micro_batches * layout.vp + idle)


def _tensor_problems(layout: RankLayout, config: ModelConfig) -> Iterator[Problem]:
    moe = config.moe
    # Query heads are a multiple of the key/value heads, so that these decide.
    heads = "heads" if config.kv_heads == config.heads else "key/value heads"
    cuts = [(heads, config.kv_heads), ("feed-forward rows", config.ffn or 0)]
    if moe is not None:
        cuts.append(("rows of the shared expert", moe.shared_ffn))
    for things, count in cuts:
        if count % layout.tp:
            legal = [size for size in _divisors(layout.tp) if all(other % size == 0 for _, other in cuts)]
            yield _problem(
                "tp", f"tp: {layout.tp} does not divide the {count} {things}", f"write {_one_of('tp', legal)}"
            )
    if config.vocab_size < layout.tp:
        yield _problem(
            "tp",
            f"tp: {layout.tp} leaves ranks without a row of the {config.vocab_size} in the vocabulary",
            f"write tp: {config.vocab_size} or less",
        )


def _expert_problems(layout: RankLayout, config: ModelConfig) -> Iterator[Problem]:
    moe = config.moe
    if moe is None:
        for key, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                yield _problem(key, f"{key}: {size} spreads experts, and the model has none", "delete it")
        return
    if moe.experts % layout.ep:
        yield _problem(
            "ep",
            f"ep: {layout.ep} does not divide the {moe.experts} experts",
            f"write {_one_of('ep', _divisors(moe.experts), limit=layout.ep)}",
        )
    legal_etp = f"write {_one_of('etp', _divisors(gcd(moe.ffn, layout.tp)))}"
    if moe.ffn % layout.etp:
        yield _problem(
            "etp",
            f"etp: {layout.etp} does not divide the {moe.ffn} rows of an expert",
            legal_etp,
        )
    if layout.tp % layout.etp:
        yield _problem(
            "etp",
            f"etp: {layout.etp} does not divide tp: {layout.tp}, whose ranks share an expert's tokens",
            legal_etp,
        )
    # With `shard: none` every dp rank is a copy for the dense weights, and experts may still lie across all of them.
    dp = layout.dp if layout.shard == "none" else layout.dp_shard
    ranks = dp * layout.cp * layout.tp
    if ranks % (layout.ep * layout.etp):
        one_copy = " of one copy" if dp != layout.dp else ""
        yield _problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {layout.ep * layout.etp} does not divide the "
            f"dp {dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks{one_copy}",
            f"write ep and etp so that their product divides {ranks}, or dp so that {layout.ep * layout.etp} does",
        )


def _sequence_problems(layout: RankLayout, sequence_length: int) -> Iterator[Problem]:
    # Each cp rank takes one piece from the front and its mirror from the back, so that causal work is even.
    pieces = 2 * layout.cp if layout.cp > 1 else 1
    if sequence_length % pieces:
        yield _problem(
            "cp",
            f"cp: {layout.cp} cuts a sequence into {pieces} pieces, and {sequence_length} tokens do not divide by that",
            f"write data.sequence_length: {_round_up(sequence_length, pieces * layout.tp)}, or another cp",
        )
    elif (local := sequence_length // layout.cp) % layout.tp:
        yield _problem(
            "tp",
            f"tp: {layout.tp} ranks share the {local} tokens of a sequence, and {local} does not divide by {layout.tp}",
            f"write data.sequence_length: {_round_up(sequence_length, pieces * layout.tp)}, or another tp",
        )


def _stage_problems(layout: RankLayout, config: ModelConfig) -> Iterator[Problem]:
    chunks = layout.pp * layout.vp
    if config.layers < chunks:
        yield _problem(
            "pp",
            f"pp {layout.pp} · vp {layout.vp} = {chunks} chunks, and the model has {config.layers} layers",
            f"write pp and vp with a product of {config.layers} or less",
        )
    elif sum(layout.stages) != config.layers:
        even = ", ".join(map(str, even_stages(config.layers, chunks)))
        yield _problem(
            "stages",
            f"{' + '.join(map(str, layout.stages))} = {sum(layout.stages)} layers, and the model has {config.layers}",
            f"write stages: [{even}], or delete it",
        )


def _recompute_problems(layout: RankLayout) -> Iterator[Problem]:
    if layout.recompute == "selective" and layout.schedule == "zero_bubble":
        # torch.utils.checkpoint: what is kept selectively may be passed backward once; this schedule does it twice.
        yield _problem(
            "recompute",
            "selective keeps activations for one backward, and zero_bubble makes two: inputs first, weights later",
            "write recompute: full or none, or schedule: 1f1b",
        )


def _copy_problems(layout: RankLayout) -> Iterator[Problem]:
    if layout.shard == "none" and layout.replicate not in (1, layout.dp):
        yield _problem(
            "replicate",
            f"replicate: {layout.replicate} is not read with `shard: none`: each of the {layout.dp} dp ranks is a copy",
            "delete it, or write another shard",
        )


def _batch_problems(layout: RankLayout, batch_sizes: list[int]) -> Iterator[Problem]:
    step = layout.dp * layout.micro_batch
    uneven = [size for size in batch_sizes if size % step]
    if uneven:
        key = "dp" if uneven[0] % layout.dp else "micro_batch"
        yield _problem(
            key,
            f"dp {layout.dp} · micro_batch {layout.micro_batch} = {step} does not divide "
            f"the global batch of {', '.join(map(str, uneven))}",
            f"write a multiple of {step} as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        )
        return
    if layout.schedule == "1f1b":
        yield from _too_few_for_1f1b(layout, batch_sizes)
    elif layout.schedule in ("interleaved", "zero_bubble"):
        yield from _uneven_rounds(layout, batch_sizes)


def _too_few_for_1f1b(layout: RankLayout, batch_sizes: list[int]) -> Iterator[Problem]:
    smallest = layout.micro_batches(batch_sizes[0]) if batch_sizes else layout.pp
    if smallest < layout.pp:
        yield _problem(
            "schedule",
            f"1f1b fills its {layout.pp} stages with as many micro-batches, and a batch of {batch_sizes[0]} "
            f"makes {smallest}",
            f"write schedule: gpipe, or a global batch of {layout.pp * layout.dp * layout.micro_batch} or more",
        )


def _uneven_rounds(layout: RankLayout, batch_sizes: list[int]) -> Iterator[Problem]:
    # The rule of torch.distributed.pipelining: rounds of pp micro-batches or a few more, all of one size.
    for size in batch_sizes:
        count = layout.micro_batches(size)
        rounds = max(1, count // layout.pp)
        if count % rounds:
            whole = _round_up(count, layout.pp)
            yield _problem(
                "schedule",
                f"{layout.schedule} runs {rounds} equal rounds, and a batch of {size} makes {count} micro-batches",
                f"write a global batch of {whole * layout.dp * layout.micro_batch} ({whole} micro-batches)",
            )
            return


def _bubble_warnings(layout: RankLayout, micro_batches: int) -> Iterator[str]:
    if layout.pp == 1:
        return
    bubble = pipeline_bubble(layout, micro_batches)
    if bubble > _WORST_BUBBLE:
        yield (
            f"{micro_batches} micro-batches for {layout.pp} pipeline stages: {bubble:.0%} of each step is spent "
            "waiting; a larger global batch or a smaller pp shortens it"
        )


def _sharding_warnings(layout: RankLayout, micro_batches: int) -> Iterator[str]:
    if layout.shard != "full" or layout.dp_shard == 1 or layout.pp == 1:
        return
    if layout.schedule == "zero_bubble":
        yield "zero_bubble keeps a stage's weights whole for the step: shard: full saves no more memory than zero2"
    elif micro_batches > 1:
        yield (
            f"shard: full gathers every stage's weights again for each of the {micro_batches} micro-batches; "
            "with a pipeline, zero1 is usually faster"
        )


def _slice_warnings(layout: RankLayout, config: ModelConfig, sequence_length: int) -> Iterator[str]:
    if config.vocab_size % layout.tp:
        yield (
            f"the vocabulary of {config.vocab_size} does not divide by tp: {layout.tp}: "
            "its ranks get unequal parts of the embedding and the head"
        )
    if config.sliding_window is not None and layout.cp > 1 and config.sliding_window <= sequence_length // layout.cp:
        yield (
            f"cp: {layout.cp} gathers the keys of all {sequence_length} tokens, and the model looks back "
            f"{config.sliding_window} only"
        )


def _problem(key: str, what: str, hint: str) -> Problem:
    return Problem(("layout", key), what, hint)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _one_of(key: str, sizes: list[int], *, limit: int | None = None) -> str:
    """Name sizes to write, the largest six where there are many: `tp: 1, 2 or 4`."""
    shown = [str(size) for size in sizes if limit is None or size <= limit][-6:]
    return f"{key}: {shown[0]}" if len(shown) == 1 else f"{key}: {', '.join(shown[:-1])} or {shown[-1]}"


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""The rules of layouts, one function each; `check.py` says which engine has which rules.

A rule yields a `Problem` with the key, the numbers that conflict, and what to write instead. First come the rules of
our own engine, many of which other engines share: every rank gets an equal part of tensors, experts, tokens, layers and
the batch, and a pipeline gets enough micro-batches for its schedule.

Megatron's rules are those of version 0.16.1, from `TransformerConfig.__post_init__`,
`parallel_state.initialize_model_parallel`, the interleaved schedule in `pipeline_parallel/schedules.py` and
`validate_args` of Megatron-LM. NeMo trains with Megatron-core and has the same. Sequence parallel is always on with tp
(Megatron requires it for tp with experts), and `etp` is independent of tp.

torchtune's distributed recipes have FSDP2 and tensor parallel for full fine-tuning, FSDP2 alone for LoRA.
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
    """What rules need to know of a run; `batch_sizes` are all its global batch sizes, smallest first."""

    sequence_length: int
    batch_sizes: tuple[int, ...]
    lora: bool = False
    quantized: bool = False
    """Whether frozen weights are held in 8 or 4 bits (`lora.quantize`)."""
    stages_written: bool = False
    """Whether `stages` was written: engines that need equal chunks accept uneven ones that are written out."""


LayoutRule = Callable[[RankLayout, ModelShape, LegalityContext], Iterator[Problem]]
"""Yields the problems of a layout with one rule."""


def check_heads_and_rows(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """tp divides heads, key/value heads and feed-forward rows into equal parts."""
    # Query heads are a multiple of the key/value heads, so key/value heads decide.
    heads = "heads" if model.kv_heads == model.heads else "key/value heads"
    yield from _check_splits(layout, [(heads, model.kv_heads), *mlp_splits(model)])


def mlp_splits(model: ModelShape) -> list[tuple[str, int]]:
    """Return which rows of the MLPs tp divides, by name and number."""
    rows = [("feed-forward rows", model.ffn)]
    if model.experts is not None:
        rows.append(("rows of the shared expert", model.experts.shared_ffn))
    return rows


def _check_splits(layout: RankLayout, splits: list[tuple[str, int]]) -> Iterator[Problem]:
    for things, count in splits:
        if count % layout.tp:
            legal = [size for size in divisors(layout.tp) if all(other % size == 0 for _, other in splits)]
            yield key_problem(
                "tp", f"tp: {layout.tp} does not divide the {count} {things}", f"write {suggest_sizes('tp', legal)}"
            )


def check_vocabulary_rows(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Every tp rank holds at least one row of the vocabulary."""
    if model.vocab_size < layout.tp:
        yield key_problem(
            "tp",
            f"tp: {layout.tp} leaves ranks without a row of the {model.vocab_size} in the vocabulary",
            f"write tp: {model.vocab_size} or less",
        )


def check_experts(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """ep divides the experts, etp each expert into equal parts, and etp ranks share the tokens of a tp group."""
    experts = model.experts
    yield from check_expert_sizes(layout, model, context)
    if experts is not None and layout.tp % layout.etp:
        yield key_problem(
            "etp",
            f"etp: {layout.etp} does not divide tp: {layout.tp}, whose ranks share an expert's tokens",
            f"write {suggest_sizes('etp', divisors(gcd(experts.ffn, layout.tp)))}",
        )


def check_expert_sizes(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """ep divides the experts, etp each expert into equal parts."""
    experts = model.experts
    if experts is None:
        for key, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                yield key_problem(key, f"{key}: {size} spreads experts, and the model has none", "delete it")
        return
    if experts.count % layout.ep:
        yield key_problem(
            "ep",
            f"ep: {layout.ep} does not divide the {experts.count} experts",
            f"write {suggest_sizes('ep', divisors(experts.count), limit=layout.ep)}",
        )
    if experts.ffn % layout.etp:
        yield key_problem(
            "etp",
            f"etp: {layout.etp} does not divide the {experts.ffn} rows of an expert",
            f"write {suggest_sizes('etp', divisors(gcd(experts.ffn, layout.tp)))}",
        )


def check_expert_mesh(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """The experts of one replica are spread evenly over its dp · cp · tp ranks."""
    if model.experts is None:
        return
    # With `shard: none` every dp rank has all dense weights, but experts may still be spread over dp ranks.
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


def check_sequence_pieces(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """cp divides a sequence into two pieces per rank, and tp divides the tokens of a cp rank (sequence parallel)."""
    # Each cp rank takes one piece from the front and its mirror from the back, so causal attention is balanced.
    length, pieces = context.sequence_length, 2 * layout.cp if layout.cp > 1 else 1
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


def check_stages(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Every chunk has a layer, and the chunks have all layers."""
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


def check_replicate(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """`replicate` has a meaning only where states are sharded."""
    if layout.shard == "none" and layout.replicate not in (1, layout.dp):
        yield key_problem(
            "replicate",
            f"replicate: {layout.replicate} is not read with `shard: none`: each of the {layout.dp} dp ranks is a copy",
            "delete it, or write another shard",
        )


def check_equal_shares(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Every rank makes the same whole number of micro-batches."""
    if layout.uneven and model.experts is None:
        return  # padding without a loss makes them equal; a router would count it
    step = layout.dp * layout.micro_batch
    uneven = [size for size in context.batch_sizes if size % step]
    if uneven:
        key = "dp" if uneven[0] % layout.dp else "micro_batch"
        yield key_problem(
            key,
            f"dp {layout.dp} · micro_batch {layout.micro_batch} = {step} does not divide "
            f"the global batch of {', '.join(map(str, uneven))}",
            f"write a multiple of {step} as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        )


def check_torch_schedule(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """The number of micro-batches is one that `torch.distributed.pipelining` takes."""
    if not layout.uneven and any(size % (layout.dp * layout.micro_batch) for size in context.batch_sizes):
        return
    if layout.schedule == "1f1b":
        yield from _check_1f1b_micro_batches(layout, context.batch_sizes)
    elif layout.schedule in ("interleaved", "zero_bubble"):
        yield from _check_equal_rounds(layout, context.batch_sizes)


def _check_1f1b_micro_batches(layout: RankLayout, batch_sizes: tuple[int, ...]) -> Iterator[Problem]:
    smallest = layout.micro_batches(batch_sizes[0]) if batch_sizes else layout.pp
    if smallest >= layout.pp:
        return
    shorter = next(
        (
            rows
            for rows in range(layout.micro_batch - 1, 0, -1)
            if all(size % (layout.dp * rows) == 0 and size // (layout.dp * rows) >= layout.pp for size in batch_sizes)
        ),
        None,
    )
    ways = [
        *([f"micro_batch: {shorter}"] if shorter is not None else []),
        "schedule: gpipe",
        f"a global batch of {layout.pp * layout.dp * layout.micro_batch} or more",
    ]
    yield key_problem(
        "schedule" if shorter is None else "micro_batch",
        f"1f1b fills its {layout.pp} stages with as many micro-batches, and a batch of {batch_sizes[0]} "
        f"makes {smallest}",
        f"write {', '.join(ways[:-1])}, or {ways[-1]}",
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


def check_torch_sharding(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """A zero-bubble pipeline has whole gradients: they come all at once, after those of a stage's inputs."""
    if (
        layout.schedule == "zero_bubble"
        and layout.shard in ("zero2", "full")
        and max(layout.dense_shards, layout.expert_shards) > 1
    ):
        yield key_problem(
            "shard",
            f"shard: {layout.shard} with schedule: zero_bubble would leave gradients whole on every rank: the "
            "schedule computes those of a stage's weights all at once, after those of its inputs",
            "write schedule: 1f1b, or shard: zero1",
        )


def check_torch_quantized(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Weights in 8 or 4 bits are whole on every dp rank: FSDP shares out tensors of floating-point numbers."""
    if context.quantized and layout.shard == "full" and max(layout.dense_shards, layout.expert_shards) > 1:
        yield key_problem(
            "shard",
            "shard: full would share out the frozen weights, which `lora.quantize` holds in 8 or 4 bits with their "
            "scales, and FSDP shares out plain tensors only",
            "write shard: zero1, or delete train.lora.quantize",
        )


def check_torch_recompute(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Selective recomputation allows one backward pass."""
    if layout.recompute == "selective" and layout.schedule == "zero_bubble":
        # torch.utils.checkpoint: kept activations are for one backward pass; this schedule makes two.
        yield key_problem(
            "recompute",
            "selective keeps activations for one backward, and zero_bubble makes two: inputs first, weights later",
            "write recompute: full or none, or schedule: 1f1b",
        )


def check_torch_offload(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """What selective recomputation keeps does not pass through autograd's hooks, by which activations are caught."""
    if layout.offload is not None and layout.recompute == "selective":
        yield key_problem(
            "offload",
            "activations that recompute: selective keeps cannot wait in the host's memory",
            "write recompute: none or full, or delete offload",
        )


def check_torch_overlap(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """A product that hides its collective is one operation: it is not cut into what is kept and what is repeated."""
    if layout.overlap is None:
        return
    if layout.recompute == "selective":
        yield key_problem(
            "overlap",
            "recompute: selective keeps products, and these come with the gathered tokens, which it would keep too",
            "write recompute: none or full, or delete overlap",
        )
    if layout.schedule == "zero_bubble":
        yield key_problem(
            "overlap",
            "zero_bubble makes two backward passes, and each would communicate",
            "write schedule: 1f1b, or delete overlap",
        )
    if context.lora:
        yield key_problem("overlap", "adapters need the gathered tokens by themselves", "delete overlap")


def check_no_overlap(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Megatron hides this communication in its own way, with its own buffers; torchtune does not hide it."""
    if layout.overlap is not None:
        yield key_problem(
            "overlap",
            "is read by the engine torch alone",
            "delete it; Megatron-LM and NeMo have engine.args: {tp_comm_overlap: true}",
        )


def check_no_offload(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Megatron's own offload is another: it names modules or counts layers."""
    if layout.offload is not None:
        yield key_problem(
            "offload",
            "is not rendered for Megatron-LM and NeMo, which offload by modules and numbers of layers",
            "delete it, and write theirs below engine.args",
        )


def check_torchtune_offload(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """torchtune offloads the inputs of checkpointed layers only."""
    if layout.offload is not None and layout.recompute != "full":
        yield key_problem(
            "offload", "torchtune offloads the inputs of recomputed layers only", "write recompute: full beside it"
        )


MEGATRON_SCHEDULES = (None, "1f1b", "interleaved")


def check_megatron_tp(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """tp divides the heads and the rows, and divides the key/value heads or is a multiple of them."""
    if not _legal_tp(layout.tp, model):
        legal = [size for size in divisors(layout.tp) if _legal_tp(size, model)]
        yield key_problem("tp", _tp_reason(layout.tp, model), f"write {suggest_sizes('tp', legal)}")


def _legal_tp(tp: int, model: ModelShape) -> bool:
    groups = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return groups and model.heads % tp == 0 and all(rows % tp == 0 for _, rows in mlp_splits(model))


def _tp_reason(tp: int, model: ModelShape) -> str:
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"tp: {tp} is neither a divisor nor a multiple of the {model.kv_heads} key/value heads"
    for things, count in (("heads", model.heads), *mlp_splits(model)):
        if count % tp:
            return f"tp: {tp} does not divide the {count} {things}"
    raise AssertionError("one of the rules above is broken")


def check_megatron_replicate(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """`replicate` (instances of the distributed optimizer) divides the ranks that hold the same experts."""
    if model.experts is None or layout.stage_ranks % (layout.ep * layout.etp):
        return
    if layout.shard != "none" and layout.edp % layout.replicate:
        yield key_problem(
            "replicate",
            f"replicate: {layout.replicate} does not divide the {layout.edp} ranks that hold the same experts "
            f"(dp {layout.dp} · cp {layout.cp} · tp {layout.tp} / ep {layout.ep} / etp {layout.etp})",
            f"write {suggest_sizes('replicate', divisors(layout.edp))}",
        )


def check_megatron_expert_ranks(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """ep · etp divides the ranks of a stage."""
    ranks, spread = layout.stage_ranks, layout.ep * layout.etp
    if model.experts is not None and ranks % spread:
        yield key_problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {spread} does not divide the "
            f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks",
            f"write ep and etp so that their product divides {ranks}, or dp so that {spread} does",
        )


def check_megatron_chunks(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Chunks are equal, or are written out (`--pipeline-model-parallel-layout`)."""
    chunks = layout.pp * layout.vp
    if context.stages_written or model.layers < chunks or model.layers % chunks == 0:
        return
    even = even_stages(model.layers, chunks)
    if layout.stages == even:
        key = "vp" if layout.vp > 1 else "pp"
        product = f"pp {layout.pp} · vp {layout.vp} = {chunks}" if layout.vp > 1 else f"pp: {chunks}"
        yield key_problem(
            key,
            f"{product} does not divide the {model.layers} layers",
            f"write the uneven chunks out, stages: [{', '.join(map(str, even))}], or another {key}",
        )


def check_megatron_schedule(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Megatron has 1F1B and interleaved 1F1B, which runs whole rounds of pp micro-batches."""
    if layout.schedule not in MEGATRON_SCHEDULES:
        yield key_problem(
            "schedule",
            f"Megatron has no {layout.schedule} schedule",
            f"write schedule: {'interleaved' if layout.vp > 1 else '1f1b'}, or delete it",
        )
    if layout.schedule != "interleaved":
        return
    step = layout.dp * layout.micro_batch
    for size in context.batch_sizes:
        count, left = divmod(size, step)
        if left == 0 and count % layout.pp:
            whole = round_up(count, layout.pp)
            yield key_problem(
                "vp",
                f"an interleaved pipeline of {layout.pp} stages takes micro-batches in rounds of {layout.pp}, and a "
                f"batch of {size} makes {count}",
                f"write a global batch of {whole * step} ({whole} micro-batches), or delete vp",
            )
            return


def check_megatron_sharding(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Megatron's FSDP, which shards gradients and weights, has no pipeline."""
    if layout.shard in ("zero2", "full") and layout.pp > 1:
        yield key_problem(
            "shard",
            f"Megatron shares out {'weights' if layout.shard == 'full' else 'gradients'} with its FSDP, which has no "
            f"pipeline, and pp is {layout.pp}",
            "write shard: zero1 (its distributed optimizer), or pp: 1",
        )


_NOT_IN_TORCHTUNE = {
    "pp": "a pipeline",
    "vp": "an interleaved pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "tensor parallel within experts",
    "replicate": "hybrid sharding",
}


def check_torchtune_axes(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """torchtune has tp and dp only."""
    for key, name in _NOT_IN_TORCHTUNE.items():
        if (size := getattr(layout, key)) > 1:
            yield key_problem(key, f"{key}: {size} is {name}, which torchtune does not have", "delete it")


def check_torchtune_tp(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """tp is not for LoRA, and divides the hidden size too."""
    if context.lora and layout.tp > 1:
        yield key_problem("tp", f"tp: {layout.tp} with LoRA is not in torchtune: adapters are not cut", "delete it")
    elif model.hidden % layout.tp:
        yield key_problem(
            "tp", f"tp: {layout.tp} does not divide the width of {model.hidden}", "write a tp that divides it"
        )


def check_torchtune_sharding(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """FSDP2 shards everything, unless there is one dp rank."""
    if layout.dp > 1 and layout.shard != "full":
        yield key_problem(
            "shard",
            f"torchtune's {layout.dp} dp ranks share out weights, gradients and optimiser states (FSDP2), "
            f"and shard is {layout.shard}",
            "write shard: full",
        )


def check_torchtune_recompute(layout: RankLayout, model: ModelShape, context: LegalityContext) -> Iterator[Problem]:
    """Activation checkpointing is on for every layer or for none."""
    if layout.recompute == "selective":
        yield key_problem(
            "recompute", "torchtune recomputes every layer or none, not selectively", "write recompute: full or none"
        )

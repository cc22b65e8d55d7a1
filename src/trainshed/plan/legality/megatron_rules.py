"""Where Megatron-core differs from our own engine: its rules as version 0.16.1 checks them, before it would.

The sources are `TransformerConfig.__post_init__`, `parallel_state.initialize_model_parallel`, the interleaved schedule
in `pipeline_parallel/schedules.py` and `validate_args` of Megatron-LM. NeMo trains with Megatron-core and has the same.
Sequence parallel is always on where tp is (Megatron asks for it with tp and experts), and `etp` is free of tp.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.legality.asked import Asked
from trainshed.plan.legality.model_rules import feed_forward_cuts
from trainshed.plan.legality.wording import divisors, one_of, problem, round_up
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.recipe.section import Problem

SCHEDULES = (None, "1f1b", "interleaved")


def heads_groups_and_rows(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """tp divides the heads and the rows, and the key/value groups or they it: groups are then held twice."""
    if not _legal_tp(layout.tp, model):
        legal = [size for size in divisors(layout.tp) if _legal_tp(size, model)]
        yield problem("tp", _tp_reason(layout.tp, model), f"write {one_of('tp', legal)}")


def _legal_tp(tp: int, model: Anatomy) -> bool:
    groups = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return groups and model.heads % tp == 0 and all(rows % tp == 0 for _, rows in feed_forward_cuts(model))


def _tp_reason(tp: int, model: Anatomy) -> str:
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"tp: {tp} is neither a divisor nor a multiple of the {model.kv_heads} key/value heads"
    for things, count in (("heads", model.heads), *feed_forward_cuts(model)):
        if count % tp:
            return f"tp: {tp} does not divide the {count} {things}"
    raise AssertionError("one of the rules above is broken")


def distributed_copies(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """`replicate` (instances of the distributed optimizer) divides the ranks that hold the same experts."""
    if model.experts is None or layout.stage_ranks % (layout.ep * layout.etp):
        return
    if layout.shard != "none" and layout.edp % layout.replicate:
        yield problem(
            "replicate",
            f"replicate: {layout.replicate} does not divide the {layout.edp} ranks that hold the same experts "
            f"(dp {layout.dp} · cp {layout.cp} · tp {layout.tp} / ep {layout.ep} / etp {layout.etp})",
            f"write {one_of('replicate', divisors(layout.edp))}",
        )


def expert_ranks(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """ep · etp divides the ranks of a stage."""
    ranks, spread = layout.stage_ranks, layout.ep * layout.etp
    if model.experts is not None and ranks % spread:
        yield problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {spread} does not divide the "
            f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks",
            f"write ep and etp so that their product divides {ranks}, or dp so that {spread} does",
        )


def equal_chunks(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Chunks are equal, or written out (`--pipeline-model-parallel-layout`)."""
    chunks = layout.pp * layout.vp
    if asked.stages_written or model.layers < chunks or model.layers % chunks == 0:
        return
    even = even_stages(model.layers, chunks)
    if layout.stages == even:
        key = "vp" if layout.vp > 1 else "pp"
        product = f"pp {layout.pp} · vp {layout.vp} = {chunks}" if layout.vp > 1 else f"pp: {chunks}"
        yield problem(
            key,
            f"{product} does not divide the {model.layers} layers",
            f"write the uneven chunks out, stages: [{', '.join(map(str, even))}], or another {key}",
        )


def schedules(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """1F1B and interleaved 1F1B are there; the latter runs whole rounds of pp micro-batches."""
    if layout.schedule not in SCHEDULES:
        yield problem(
            "schedule",
            f"Megatron has no {layout.schedule} schedule",
            f"write schedule: {'interleaved' if layout.vp > 1 else '1f1b'}, or delete it",
        )
    if layout.schedule != "interleaved":
        return
    step = layout.dp * layout.micro_batch
    for size in asked.batch_sizes:
        count, left = divmod(size, step)
        if left == 0 and count % layout.pp:
            whole = round_up(count, layout.pp)
            yield problem(
                "vp",
                f"an interleaved pipeline of {layout.pp} stages takes micro-batches in rounds of {layout.pp}, and a "
                f"batch of {size} makes {count}",
                f"write a global batch of {whole * step} ({whole} micro-batches), or delete vp",
            )
            return


def sharding(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Gradients and weights are shared out by Megatron's FSDP, which has no pipeline."""
    if layout.shard in ("zero2", "full") and layout.pp > 1:
        yield problem(
            "shard",
            f"Megatron shares out {'weights' if layout.shard == 'full' else 'gradients'} with its FSDP, which has no "
            f"pipeline, and pp is {layout.pp}",
            "write shard: zero1 (its distributed optimizer), or pp: 1",
        )

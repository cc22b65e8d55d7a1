"""Where Megatron-core and torchtune differ from our own engine; their rules are checked here before they would check.

Megatron: rules of version 0.16.1, from `TransformerConfig.__post_init__`, `parallel_state.initialize_model_parallel`,
the interleaved schedule in `pipeline_parallel/schedules.py` and `validate_args` of Megatron-LM. NeMo trains with
Megatron-core and has the same. Sequence parallel is always on where tp is (Megatron asks for it with tp and experts),
and `etp` is independent of tp.

torchtune: its distributed recipes have FSDP2 and tensor parallel for whole models, FSDP2 alone for LoRA.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.legality.torch_rules import (
    LegalityContext,
    divisors,
    feed_forward_cuts,
    key_problem,
    round_up,
    suggest_sizes,
)
from trainshed.plan.model_shape import ModelShape
from trainshed.recipe.section import Problem

MEGATRON_SCHEDULES = (None, "1f1b", "interleaved")


def check_megatron_tp(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """tp divides the heads and the rows, and the key/value groups or they it: groups are then held twice."""
    if not _legal_tp(layout.tp, model):
        legal = [size for size in divisors(layout.tp) if _legal_tp(size, model)]
        yield key_problem("tp", _tp_reason(layout.tp, model), f"write {suggest_sizes('tp', legal)}")


def _legal_tp(tp: int, model: ModelShape) -> bool:
    groups = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return groups and model.heads % tp == 0 and all(rows % tp == 0 for _, rows in feed_forward_cuts(model))


def _tp_reason(tp: int, model: ModelShape) -> str:
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"tp: {tp} is neither a divisor nor a multiple of the {model.kv_heads} key/value heads"
    for things, count in (("heads", model.heads), *feed_forward_cuts(model)):
        if count % tp:
            return f"tp: {tp} does not divide the {count} {things}"
    raise AssertionError("one of the rules above is broken")


def check_megatron_replicate(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
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


def check_megatron_expert_ranks(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """ep · etp divides the ranks of a stage."""
    ranks, spread = layout.stage_ranks, layout.ep * layout.etp
    if model.experts is not None and ranks % spread:
        yield key_problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {spread} does not divide the "
            f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks",
            f"write ep and etp so that their product divides {ranks}, or dp so that {spread} does",
        )


def check_megatron_chunks(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Chunks are equal, or written out (`--pipeline-model-parallel-layout`)."""
    chunks = layout.pp * layout.vp
    if asked.stages_written or model.layers < chunks or model.layers % chunks == 0:
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


def check_megatron_schedule(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """1F1B and interleaved 1F1B are there; the latter runs whole rounds of pp micro-batches."""
    if layout.schedule not in MEGATRON_SCHEDULES:
        yield key_problem(
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
            yield key_problem(
                "vp",
                f"an interleaved pipeline of {layout.pp} stages takes micro-batches in rounds of {layout.pp}, and a "
                f"batch of {size} makes {count}",
                f"write a global batch of {whole * step} ({whole} micro-batches), or delete vp",
            )
            return


def check_megatron_sharding(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Gradients and weights are shared out by Megatron's FSDP, which has no pipeline."""
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


def check_torchtune_axes(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """tp and dp are all there is."""
    for key, name in _NOT_IN_TORCHTUNE.items():
        if (size := getattr(layout, key)) > 1:
            yield key_problem(key, f"{key}: {size} is {name}, which torchtune does not have", "delete it")


def check_torchtune_tp(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """tp is for whole models, and cuts their width too."""
    if asked.lora and layout.tp > 1:
        yield key_problem("tp", f"tp: {layout.tp} with LoRA is not in torchtune: adapters are not cut", "delete it")
    elif model.hidden % layout.tp:
        yield key_problem(
            "tp", f"tp: {layout.tp} does not divide the width of {model.hidden}", "write a tp that divides it"
        )


def check_torchtune_sharding(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """FSDP2 shares out everything, or there is one dp rank."""
    if layout.dp > 1 and layout.shard != "full":
        yield key_problem(
            "shard",
            f"torchtune's {layout.dp} dp ranks share out weights, gradients and optimiser states (FSDP2), "
            f"and shard is {layout.shard}",
            "write shard: full",
        )


def check_torchtune_recompute(layout: RankLayout, model: ModelShape, asked: LegalityContext) -> Iterator[Problem]:
    """Activation checkpointing is on for every layer or off."""
    if layout.recompute == "selective":
        yield key_problem(
            "recompute", "torchtune recomputes every layer or none, not selectively", "write recompute: full or none"
        )

"""How a published row spread its model over GPUs, and what its run did otherwise than the usual of its engine."""

from __future__ import annotations

import re
from typing import Any

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.plan.performance.stacks import Habits
from trainshed.plan.published.row_machine import engine_of, version_of
from trainshed.plan.published.rows import Row, Skip
from trainshed.recipe.layout import Recompute, Shard


def layout_of(row: Row, model: Anatomy) -> RankLayout:
    """Return the layout of a row; columns that it leaves empty are 1."""
    tp, pp, cp = row.count("tp"), row.count("pp"), row.count("cp", 1)
    vp, ep = row.count("vp", 1), row.count("ep", 1)
    etp = row.count("etp", 1 if ep > 1 else tp)
    gpus = row.count("num_gpus")
    if gpus % (tp * pp * cp):
        raise Skip(f"tp {tp} · pp {pp} · cp {cp} does not divide the {gpus} GPUs")
    dp, micro = gpus // (tp * pp * cp), row.count("micro_batch")
    batch = global_batch_of(row, dp * micro * pp)
    if batch % (dp * micro) and batch < dp * micro:
        raise Skip(f"dp {dp} · micro-batch {micro} is more than the global batch of {batch}")
    if pp == 1:
        vp = 1
    if not model.experts or (dp * cp * tp) % (ep * etp):
        ep, etp = (1, 1) if not model.experts else (ep, 1)
    if model.experts and (dp * cp * tp) % (ep * etp):
        raise Skip(f"ep {ep} does not divide the {dp * cp * tp} ranks of a stage")
    shard, replicas = _shard(row, dp)
    return RankLayout(
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        replicate=replicas,
        shard=shard,
        micro_batch=micro,
        recompute=_recompute(row),
        schedule=None if pp == 1 else "interleaved" if vp > 1 else "1f1b",
        stages=_stages(row, model, pp, vp),
    )


def global_batch_of(row: Row, filling: int) -> int:
    """The global batch; a row that tells memory alone needs none but a full pipeline."""
    return row.count("global_batch", None if row.step_seconds is not None else filling)


def _shard(row: Row, dp: int) -> tuple[Shard, int]:
    written = row.text("dp_shard").lower()
    replicas = 1
    if found := re.search(r"group=(\d+)", written):
        replicas = max(1, dp // int(found[1]))
    if written.startswith("hsdp"):
        return "full", max(1, dp // row.count("gpus_per_node", 8))
    if "shard_grad_op" in written or "not resharded" in written:
        return "zero2", replicas
    if written.startswith("fsdp"):
        return "full", replicas
    return ("zero1", replicas) if written.startswith("zero1") else ("none", 1)


def _recompute(row: Row) -> Recompute:
    written = row.text("recompute").lower()
    if written.startswith("full"):
        return "full"
    return "selective" if written.startswith("selective") else "none"


def _stages(row: Row, model: Anatomy, pp: int, vp: int) -> tuple[int, ...]:
    if found := re.search(r"pp_layout=([a-z|()*0-9]+)", row.notes):
        chunks = _written_stages(found[1])
        if len(chunks) == pp * vp and sum(chunks) == model.layers:
            return chunks
    if row.text("engine") == "nanotron":
        return nanotron_stages(model, pp)[0]
    chunks = pp * vp
    if chunks > model.layers + 2:
        raise Skip(f"{chunks} chunks for {model.layers} layers")
    if model.extra_heads and chunks > 1:
        # Megatron-Bridge's layouts of models that predict further tokens: full chunks, and a short last one that
        # has those layers and both passes through the head besides.
        each = -(-(model.layers + model.extra_heads + 2) // chunks)
        if 0 <= model.layers - each * (chunks - 1) <= each:
            return (*[each] * (chunks - 1), model.layers - each * (chunks - 1))
    if model.layers % chunks and (model.layers + 2) % chunks == 0:
        # Megatron's account-for-embedding-in-pipeline-split (and -loss-): both count as a layer.
        each = (model.layers + 2) // chunks
        return (each - 1, *[each] * (chunks - 2), each - 1)
    return even_stages(model.layers, chunks)


def _written_stages(text: str) -> tuple[int, ...]:
    """Read Megatron's pipeline layout (`Et*4|(t*4|)*14tmL`, lower case): the layers of each chunk."""
    spread = text
    while found := re.search(r"\(([^()]*)\)\*(\d+)", spread):
        spread = spread[: found.start()] + found[1] * int(found[2]) + spread[found.end() :]
    spread = re.sub(r"([a-z])\*(\d+)", lambda match: match[1] * int(match[2]), spread)
    return tuple(chunk.count("t") for chunk in spread.split("|"))


def nanotron_stages(model: Anatomy, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage as nanotron cuts them, and the stage of the head.

    nanotron (models/base.py, build_model) gives blocks to a stage until their running cost passes its share; a block
    costs the elements of its matrices, the head too, and everything else is free.
    """
    layer = sum(p.inputs * p.outputs for p in (*model.attention_products, *model.feed_forward(model.ffn)))
    blocks = [layer] * model.layers + [model.head_weights]
    total, passed, stage = sum(blocks), 0, 0
    layers, head = [0] * pp, pp - 1
    for index, cost in enumerate(blocks):
        if index < model.layers:
            layers[stage] += 1
        else:
            head = stage
        passed += cost
        if passed > total * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(layers), head


def cannot_run(row: Row, model: Anatomy, layout: RankLayout) -> str | None:
    """Return why its engine could not have run a row, whatever the memory; None where nothing is known."""
    if row.text("engine") != "nanotron" or layout.pp == 1:
        return None
    head = nanotron_stages(model, layout.pp)[1]
    # The stage after the head's computes the loss; one further on gets no block at all.
    idle = layout.pp - head - 2
    return f"{idle} of {layout.pp} stages get no block" if idle > 1 else None


def habits_of(row: Row, model: Anatomy, layout: RankLayout) -> Habits:
    """What this run did otherwise than its engine's usual."""
    chosen: dict[str, Any] = {}
    if row.text("sp") == "0" and layout.tp > 1:
        chosen["sequence_parallel"] = False
    if row.text("engine") == "nanotron" and layout.pp > 1:
        chosen["head_chunk"] = nanotron_stages(model, layout.pp)[1]
    written = row.text("recompute").lower().removeprefix("selective:")
    if layout.recompute == "selective":
        chosen["selective"] = "" if written == "selective" else written
    if any(word in row.notes for word in ("a2a_overlap", "ep overlap on", "a2a overlap")):
        chosen["ep_overlap"] = True
    if "full_iteration" in row.notes:
        chosen["graphs"] = 1.0
    elif "cudagraph" in row.notes or "cuda_graph" in row.notes:
        chosen["graphs"] = 0.3
    elif engine_of(row) == "megatron-26.06" and row.text("precision") == "mxfp8" and row.text("gpu").startswith("GB"):
        # Megatron-Bridge's recipes for NVL72 racks capture whole iterations since 26.06.
        chosen["graphs"] = 1.0
    if "no comm overlap" in row.notes:
        chosen["overlap"] = False
    else:
        chosen["tp_overlap"] = True
    if _fused_dispatch(row):
        chosen["fused_dispatch"] = True
    if "tokendrop" in row.notes:
        chosen["fixed_routing"] = True
    if engine_of(row).startswith("megatron") and re.search(r"nemo|bridge|dgxc", row.notes + row.source.lower()):
        # NVIDIA's performance recipes: grad_reduce_in_fp32 is off.
        chosen["half_gradients"] = True
    if re.search(r"; lora|technique: lora", row.notes):
        chosen["trained_share"] = 0.0
    if "500w" in row.text("gpu").lower():
        chosen["power"] = 0.85
    return Habits(**chosen)


def _fused_dispatch(row: Row) -> bool:
    """Whether tokens went through DeepEP or HybridEP: what the row says, else what recipes of its release do."""
    if "hybridep" in row.notes or "deepep" in row.notes:
        return True
    # Megatron-Bridge's recipes have HybridEP for racks of GB200 and GB300 since 25.11 and for other Blackwell since
    # 26.02.01; tables that do not name the recipe, and most of 26.06 and later, leave it out.
    since = (25, 11) if row.text("gpu").startswith("GB") else (26, 2, 1) if row.text("gpu").startswith("B") else None
    told = "recipe=" in row.notes and version_of(row) < (26, 6)
    return since is not None and not told and (version_of(row) >= since or engine_of(row) == "megatron-26.06")

"""Published rows as trainings that the planner can predict: model, GPUs, engine, layout and options.

A table says little about the software that was measured. What a row leaves out is filled in by the rules here. A row
that is still ambiguous is skipped with a reason; nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trainshed.catalog.gpus import gpu
from trainshed.catalog.models import model_preset, preset_names
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.model_shape import ExpertShape, LatentAttention, ModelShape, model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constants
from trainshed.plan.published.finetuning import (
    has_sequence_parallel,
    is_preference,
    row_chunks,
    row_document_length,
    row_lora,
)
from trainshed.plan.published.rows import PublishedRow, SkippedRow
from trainshed.plan.training_shape import Hardware, TrainingShape
from trainshed.recipe.layout import Recompute, Shard

_NOT_GATED = ("gpt", "bloom", "mpt", "mt-nlg", "nemotron3-8b", "nemotron4", "megatron-ci:gpt3")
_OTHER_ARCHITECTURES = (
    "nemotron-3",
    "nemotron3_",
    "nemotron3-s",
    "qwen3-next",
    "deepseek-v4",
    "qwen3.",
    "glm5",
    "mamba",
)


def row_model(row: PublishedRow) -> ModelShape:
    """Return the model of a row."""
    name = row.model.lower()
    if any(word in name for word in _OTHER_ARCHITECTURES):
        raise SkippedRow(f"{row.model} is not a plain transformer")
    layers, hidden, heads = (row.count(key) for key in ("layers", "hidden", "heads"))
    if row.text("engine") == "torch" and name in preset_names():
        # Our own engine was measured with our own presets, with as many layers as fit.
        config = model_preset(name)
        positions = max(config.max_positions, row.count("seq_len"))
        return model_shape(config.model_copy(update={"layers": layers, "max_positions": positions}), row.model)
    experts_count = row.count("num_experts", 0)
    base = ModelShape(
        name=row.model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=row.count("kv_heads", heads),
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        ffn=row.count("ffn", 4 * hidden),
        vocab_size=row.count("vocab", 131072 if "megatron-ci" in name else None),
    )
    if name.startswith(_NOT_GATED) and "gpt-oss" not in name:
        base = replace(base, gated=False, tied=not name.startswith("nemotron"))
        if name.startswith("mpt"):
            base = replace(base, learned_positions=row.count("seq_len"))
        elif not name.startswith("nemotron"):
            base = replace(base, norm_vectors=2, qkv_bias=True, output_bias=True, mlp_bias=True)
        return replace(base, tied=base.tied and "untie-embeddings-and-output-weights=true" not in row.notes)
    if experts_count:
        return _with_experts(row, base, experts_count)
    if "qwen3" in name:
        base = replace(base, head_dim=128, value_dim=128, qk_norm=True)
    return _tied_if_that_fits(row, base)


def _tied_if_that_fits(row: PublishedRow, model: ModelShape) -> ModelShape:
    stated = row.value("params_b")
    if stated is None:
        return model
    choices = [replace(model, tied=tied) for tied in (False, True)]
    return min(choices, key=lambda choice: abs(choice.weights / 1e9 / stated - 1))


def _with_experts(row: PublishedRow, base: ModelShape, count: int) -> ModelShape:
    name = row.model.lower()
    experts = ExpertShape(count, row.count("top_k"), row.count("moe_ffn"))
    if "qwen3" in name:
        return replace(base, head_dim=128, value_dim=128, qk_norm=True, experts=experts, ffn=0)
    if "gpt-oss" in name:
        biases = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
        alternating = {"window": 128, "window_pattern": (True, False)}
        return replace(base, head_dim=64, value_dim=64, experts=experts, ffn=0, **alternating, **biases)
    if "deepseek" in name:
        shared = experts.ffn * (2 if "v2" in name else 1)
        return replace(
            base,
            head_dim=192,
            value_dim=128,
            latent=LatentAttention(query_rank=1536, value_rank=512, rope_dim=64),
            experts=replace(experts, shared_ffn=shared),
            dense_first=0 if base.layers < 20 else 1 if "v2" in name else 3,
            mtp_layers=0 if "w/o mtp" in row.notes or "v2" in name else 1,
        )
    if "llama4" in name:
        return replace(base, experts=replace(experts, shared_ffn=experts.ffn), experts_every=2)
    return replace(base, experts=experts, ffn=0)


_GPUS = {
    "H100-SXM-80GB": "h100-sxm",
    "H100": "h100-sxm",
    "H100-96GB-HBM2e-500W": "h100-sxm",
    "H200-SXM-141GB": "h200",
    "H200": "h200",
    "A100": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "A800-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}
# What nodes of these GPUs usually have, in Gbit a second per GPU: HDR or 1,600 Gbit RoCE for A100, NDR for Hopper,
# NDR for B200, XDR-class 800G for B300 and the NVL72 racks of GB300.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400, "gb200": 400, "b300": 800, "gb300": 800, "mi": 400}
_PLAIN_NETWORK_GBPS = 100  # of a node without a fabric for its GPUs
_RACK = 72
_ENGINES = {
    "torch": "torch",
    "nanotron": "nanotron",
    "megatron": "megatron",
    "nemo": "megatron",
    "megatron-fsdp": "megatron-fsdp",
    "primus-megatron": "megatron",
    "megatron-deepspeed": "megatron-deepspeed",
    "fsdp(composer)": "llm-foundry",
    "torchtitan-fsdp2": "torchtitan",
    "pytorch-fsdp": "torchtitan",
    "torchtune": "torchtune",
    "automodel": "automodel",
    "nemo-automodel": "automodel",
    "internevo": "internevo",
    "maxtext-jax": "jax",
    "paxml-jax": "jax",
    "meta-internal (fsdp+4D)": "torchtitan",
}


def row_engine(row: PublishedRow) -> str:
    """Return the engine of a row, by its name in `engine_constants.yaml`."""
    engine = row.text("engine")
    if engine not in _ENGINES:
        raise SkippedRow(f"the engine `{engine}` is not known here")
    known = _ENGINES[engine]
    if known == "megatron" and (row_version(row) >= (26, 6) or "verification card" in row.notes):
        return "megatron-26.06"
    if known == "megatron-deepspeed" and row.text("dp_shard") == "none" and "opa100" not in row.notes:
        # Without ZeRO it is the Megatron of 2021, except on BLOOM's Omni-Path, where the network matters more.
        return "megatron-2021"
    if known == "megatron" and row.text("precision") == "fp16" and row.text("gpu").startswith("A100"):
        return "megatron-2021"
    return known


def row_version(row: PublishedRow) -> tuple[int, ...]:
    """Return the version of NVIDIA's container that a row was measured with: (26, 6, 1)."""
    version = re.search(r"(?:nemo|bridge) (\d\d)\.(\d\d)(?:\.(\d\d))?", row.notes)
    return tuple(int(part or 0) for part in version.groups()) if version else (0, 0, 0)


def row_precision(row: PublishedRow) -> str:
    """Return the dtype of its matmuls."""
    written = row.text("precision").lower()
    if not written:
        raise SkippedRow("the row does not say its precision")
    for known in ("mxfp8", "nvfp4", "fp8", "bf16", "fp16", "fp32"):
        if written.startswith(known):
            return known
    raise SkippedRow(f"the precision `{written}` is not known here")


def row_hardware(row: PublishedRow) -> Hardware:
    """Return its GPUs and their network: the one that the row states, or the usual one of such nodes."""
    written = row.text("gpu")
    try:
        entry = gpu(_GPUS.get(written, written.lower()))
    except InputError:
        raise SkippedRow(f"the GPU `{written}` is not in the catalog") from None
    name = entry.name
    per_node = row.count("gpus_per_node", 8)
    gbps = _stated_network(row, per_node)
    if gbps is None:
        known = (value for prefix, value in _NETWORK_GBPS.items() if name.startswith(prefix))
        gbps = next(known, _PLAIN_NETWORK_GBPS / per_node)
    link = (entry.link_gb_per_s or 64.0) / 2
    if row.text("gpu") == "A800-80GB":
        link = 200.0
    return Hardware(
        gpu_name=name,
        gpu=entry,
        gpus_per_node=per_node,
        link_domain=_RACK if name.startswith("gb") else per_node,
        link_gb_per_s=link,
        network_gb_per_s=gbps / 8,
        fabric="efa" if "efa" in row.notes else "infiniband",
    )


def _stated_network(row: PublishedRow, per_node: int) -> float | None:
    if cards := re.search(r"(\d+)x(\d+)gb", row.notes):
        return int(cards[1]) * int(cards[2]) / per_node
    if rate := re.search(r"(\d+) ?gb(?:ps|/s)", row.notes):
        return int(rate[1]) / per_node
    if "4xopa100" in row.notes:
        return 400 / per_node
    return None


def row_layout(row: PublishedRow, model: ModelShape) -> RankLayout:
    """Return the layout of a row; columns that it leaves empty are 1."""
    tp, pp, cp = row.count("tp"), row.count("pp"), row.count("cp", 1)
    vp, ep = row.count("vp", row_chunks(row, model.layers, pp)), row.count("ep", 1)
    etp = row.count("etp", 1 if ep > 1 else tp)
    gpus = row.count("num_gpus")
    if gpus % (tp * pp * cp):
        raise SkippedRow(f"tp {tp} · pp {pp} · cp {cp} does not divide the {gpus} GPUs")
    dp, micro = gpus // (tp * pp * cp), row.count("micro_batch")
    batch = row_global_batch(row, dp * micro * pp)
    if batch % (dp * micro) and batch < dp * micro:
        raise SkippedRow(f"dp {dp} · micro-batch {micro} is more than the global batch of {batch}")
    if pp == 1:
        vp = 1
    if not model.experts or (dp * cp * tp) % (ep * etp):
        ep, etp = (1, 1) if not model.experts else (ep, 1)
    if model.experts and (dp * cp * tp) % (ep * etp):
        raise SkippedRow(f"ep {ep} does not divide the {dp * cp * tp} ranks of a stage")
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


def row_global_batch(row: PublishedRow, filling: int) -> int:
    """Return the global batch; a row that states memory only may leave it out: a full pipeline is assumed."""
    return row.count("global_batch", None if row.step_seconds is not None else filling)


def _shard(row: PublishedRow, dp: int) -> tuple[Shard, int]:
    written = row.text("dp_shard").lower()
    replicas = 1
    if group := re.search(r"group=(\d+)", written):
        replicas = max(1, dp // int(group[1]))
    if written.startswith("hsdp"):
        return "full", max(1, dp // row.count("gpus_per_node", 8))
    if "shard_grad_op" in written or "not resharded" in written:
        return "zero2", replicas
    if written.startswith("fsdp"):
        return "full", replicas
    return ("zero1", replicas) if written.startswith("zero1") else ("none", 1)


def _recompute(row: PublishedRow) -> Recompute:
    written = row.text("recompute").lower()
    if written.startswith("full"):
        return "full"
    return "selective" if written.startswith("selective") else "none"


def _stages(row: PublishedRow, model: ModelShape, pp: int, vp: int) -> tuple[int, ...]:
    if written := re.search(r"pp_layout=([a-z|()*0-9]+)", row.notes):
        chunks = _written_stages(written[1])
        if len(chunks) == pp * vp and sum(chunks) == model.layers:
            return chunks
    if row.text("engine") == "nanotron":
        return nanotron_stages(model, pp)[0]
    chunks = pp * vp
    if chunks > model.layers + 2:
        raise SkippedRow(f"{chunks} chunks for {model.layers} layers")
    if model.mtp_layers and chunks > 1:
        # Megatron-Bridge's layouts of models with multi-token prediction: full chunks, and a short last one that also
        # has the extra layers and both passes through the head.
        full = -(-(model.layers + model.mtp_layers + 2) // chunks)
        if 0 <= model.layers - full * (chunks - 1) <= full:
            return (*[full] * (chunks - 1), model.layers - full * (chunks - 1))
    if model.layers % chunks and (model.layers + 2) % chunks == 0:
        # Megatron's account-for-embedding-in-pipeline-split (and -loss-): both count as a layer.
        full = (model.layers + 2) // chunks
        return (full - 1, *[full] * (chunks - 2), full - 1)
    return even_stages(model.layers, chunks)


def _written_stages(text: str) -> tuple[int, ...]:
    """Read Megatron's pipeline layout (`Et*4|(t*4|)*14tmL`, lower case): the layers of each chunk."""
    expanded = text
    while group := re.search(r"\(([^()]*)\)\*(\d+)", expanded):
        expanded = expanded[: group.start()] + group[1] * int(group[2]) + expanded[group.end() :]
    expanded = re.sub(r"([a-z])\*(\d+)", lambda match: match[1] * int(match[2]), expanded)
    return tuple(chunk.count("t") for chunk in expanded.split("|"))


def nanotron_stages(model: ModelShape, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage as nanotron divides them, and the stage of the head.

    nanotron (models/base.py, build_model) gives blocks to a stage until their running cost passes its share; a block
    costs the elements of its matrices, the head too, and everything else is free.
    """
    layer = sum(p.inputs * p.outputs for p in (*model.attention_matrices, *model.mlp_matrices(model.ffn)))
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


def why_it_cannot_run(row: PublishedRow, model: ModelShape, layout: RankLayout) -> str | None:
    """Return why its engine cannot run a row, whatever the memory; None where no reason is known."""
    if row.text("engine") != "nanotron" or layout.pp == 1:
        return None
    head = nanotron_stages(model, layout.pp)[1]
    # The stage after the head computes the loss; later stages get no block at all.
    idle = layout.pp - head - 2
    return f"{idle} of {layout.pp} stages get no block" if idle > 1 else None


def row_options(row: PublishedRow, model: ModelShape, layout: RankLayout) -> EngineOptions:
    """Return the options of a run, from what its row says."""
    chosen: dict[str, Any] = {}
    if layout.tp > 1 and (row.text("sp") == "0" or not has_sequence_parallel(row)):
        chosen["sequence_parallel"] = False
    if row.text("engine") == "nanotron" and layout.pp > 1:
        chosen["head_chunk"] = nanotron_stages(model, layout.pp)[1]
    written = row.text("recompute").lower().removeprefix("selective:")
    if layout.recompute == "selective":
        chosen["selective_recompute"] = "" if written == "selective" else written
    if any(word in row.notes for word in ("a2a_overlap", "ep overlap on", "a2a overlap")):
        chosen["ep_overlap"] = True
    if "full_iteration" in row.notes:
        chosen["cuda_graph_share"] = 1.0
    elif "cudagraph" in row.notes or "cuda_graph" in row.notes:
        chosen["cuda_graph_share"] = 0.3
    elif row_engine(row) == "megatron-26.06" and row.text("precision") == "mxfp8" and row.text("gpu").startswith("GB"):
        # Megatron-Bridge's recipes for NVL72 racks capture whole iterations since 26.06.
        chosen["cuda_graph_share"] = 1.0
    if "no comm overlap" in row.notes:
        chosen["overlap"] = False
    else:
        chosen["tp_overlap"] = True
    if _fused_dispatch(row):
        chosen["fused_dispatch"] = True
    if "tokendrop" in row.notes:
        chosen["fixed_routing"] = True
    if row_engine(row).startswith("megatron") and re.search(r"nemo|bridge|dgxc", row.notes + row.source.lower()):
        # NVIDIA's performance recipes: grad_reduce_in_fp32 is off.
        chosen["bf16_gradients"] = True
    if "500w" in row.text("gpu").lower():
        chosen["clock_share"] = 0.85
    return EngineOptions(**chosen)


def _fused_dispatch(row: PublishedRow) -> bool:
    """Whether tokens went through DeepEP or HybridEP: as the row states, or as the recipes of its release do."""
    if "hybridep" in row.notes or "deepep" in row.notes:
        return True
    # Megatron-Bridge's recipes have HybridEP for racks of GB200 and GB300 since 25.11 and for other Blackwell since
    # 26.02.01; tables that do not name the recipe, and most of 26.06 and later, leave it out.
    since = (25, 11) if row.text("gpu").startswith("GB") else (26, 2, 1) if row.text("gpu").startswith("B") else None
    states_recipe = "recipe=" in row.notes and row_version(row) < (26, 6)
    if since is None or states_recipe:
        return False
    return row_version(row) >= since or row_engine(row) == "megatron-26.06"


@dataclass(frozen=True)
class PublishedCase:
    """A row as the planner predicts it."""

    training: TrainingShape
    layout: RankLayout
    cannot_run: str | None = None
    """Why its engine cannot run the layout, whatever the memory; published failures do not distinguish the two."""


def row_case(row: PublishedRow) -> PublishedCase:
    """Return the training and the layout of a row, or raise `SkippedRow`."""
    for word in ("8bit", "offload", "optimizer-in-bwd"):
        if f"technique: {word}" in row.notes.replace("+", "").replace("activation ", ""):
            raise SkippedRow(f"it is of a technique that no key here names: {word}")
    model = row_model(row)
    hardware = row_hardware(row)
    layout = row_layout(row, model)
    training = TrainingShape(
        model=model,
        sequence_length=row.count("seq_len"),
        global_batch=row_global_batch(row, layout.dp * layout.micro_batch * layout.pp),
        precision=row_precision(row),
        hardware=hardware,
        gpus=layout.world_size,
        constants=engine_constants(row_engine(row)),
        options=row_options(row, model, layout),
        lora=row_lora(row),
        document_length=row_document_length(row),
        preference=is_preference(row),
    )
    return PublishedCase(training, layout, why_it_cannot_run(row, model, layout))

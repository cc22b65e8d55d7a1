"""Which model a published row was measured with: its sizes, and by its name what a table has no column for."""

from __future__ import annotations

from dataclasses import replace

from trainshed.catalog.models import model_preset, preset_names
from trainshed.plan.performance.anatomy import Anatomy, Experts, Latent, anatomy_of
from trainshed.plan.published.rows import Row, Skip

_NOT_GATED = ("gpt", "bloom", "mpt", "mt-nlg", "nemotron3-8b", "nemotron4", "megatron-ci:gpt3")
_NOT_TRANSFORMERS = ("nemotron-3", "nemotron3_", "nemotron3-s", "qwen3-next", "deepseek-v4", "qwen3.", "glm5", "mamba")


def model_of(row: Row) -> Anatomy:
    """Return the model of a row."""
    name = row.model.lower()
    if any(word in name for word in _NOT_TRANSFORMERS):
        raise Skip(f"{row.model} is not a plain transformer")
    layers, hidden, heads = (row.count(key) for key in ("layers", "hidden", "heads"))
    if row.text("engine") == "torch" and name in preset_names():
        # Our own engine was measured with our own presets, of as many layers as fitted.
        config = model_preset(name)
        positions = max(config.max_positions, row.count("seq_len"))
        return anatomy_of(config.model_copy(update={"layers": layers, "max_positions": positions}), row.model)
    experts_count = row.count("num_experts", 0)
    base = Anatomy(
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
            base = replace(base, positions=row.count("seq_len"))
        elif not name.startswith("nemotron"):
            base = replace(base, norm_vectors=2, qkv_bias=True, output_bias=True, mlp_bias=True)
        return replace(base, tied=base.tied and "untie-embeddings-and-output-weights=true" not in row.notes)
    if experts_count:
        return _with_experts(row, base, experts_count)
    if "qwen3" in name:
        base = replace(base, head_dim=128, value_dim=128, qk_norm=True)
    return _tied_if_that_fits(row, base)


def _tied_if_that_fits(row: Row, model: Anatomy) -> Anatomy:
    stated = row.value("params_b")
    if stated is None:
        return model
    choices = [replace(model, tied=tied) for tied in (False, True)]
    return min(choices, key=lambda choice: abs(choice.weights / 1e9 / stated - 1))


def _with_experts(row: Row, base: Anatomy, count: int) -> Anatomy:
    name = row.model.lower()
    experts = Experts(count, row.count("top_k"), row.count("moe_ffn"))
    if "qwen3" in name:
        return replace(base, head_dim=128, value_dim=128, qk_norm=True, experts=experts, ffn=0)
    if "gpt-oss" in name:
        biases = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
        return replace(base, head_dim=64, value_dim=64, experts=experts, ffn=0, window=128, windowed_every=2, **biases)
    if "deepseek" in name:
        shared = experts.ffn * (2 if "v2" in name else 1)
        return replace(
            base,
            head_dim=192,
            value_dim=128,
            latent=Latent(query_rank=1536, value_rank=512, rope_dim=64),
            experts=replace(experts, shared_ffn=shared),
            dense_first=0 if base.layers < 20 else 1 if "v2" in name else 3,
            extra_heads=0 if "w/o mtp" in row.notes or "v2" in name else 1,
        )
    if "llama4" in name:
        return replace(base, experts=replace(experts, shared_ffn=experts.ffn), experts_every=2)
    return replace(base, experts=experts, ffn=0)

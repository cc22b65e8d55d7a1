"""The architecture of a NeMo file as `model.config`, held against the models of that size that the catalog knows."""

from __future__ import annotations

from typing import Any

from trainshed.catalog import model_preset, preset_names
from trainshed.engines.foreign_settings import ForeignSettings
from trainshed.engines.nemo.architecture import ACTIVATIONS
from trainshed.recipe import ModelConfig

_SIZES = {
    "model.num_layers": "layers",
    "model.hidden_size": "hidden",
    "model.num_attention_heads": "heads",
    "model.num_query_groups": "kv_heads",
    "model.max_position_embeddings": "max_positions",
    "model.init_method_std": "init_std",
    "model.layernorm_epsilon": "norm_eps",
}
_DECIDED_BY_FAMILY = (
    "model.normalization",
    "model.bias",
    "model.qkv_bias",
    "model.activation",
    "model.openai_gelu",
    "model.bias_activation_fusion",
    "model.position_embedding_type",
    "model.apply_rope_fusion",
)
GPT2_VOCABULARY = 50257
_GPT2_NAMES = ("GPT2BPETokenizer", "gpt2")
_NEMO_DEFAULTS = {"heads": 12, "layers": 12, "hidden": 768, "init_std": 0.02, "norm_eps": 1e-5}
"""megatron_gpt_config.yaml's, for files that leave them out."""


def read_model(settings: ForeignSettings) -> None:
    """Write `model` from the sizes of the file."""
    config: dict[str, Any] = {"family": _family(settings)}
    for theirs, ours in _SIZES.items():
        value = settings.get(theirs, _NEMO_DEFAULTS.get(ours))
        if value is None:
            value = config["heads"] if ours == "kv_heads" else settings.get("model.encoder_seq_length", 512)
        config[ours] = float(value) if ours in ("init_std", "norm_eps") else value
        settings.mapped(theirs, f"model.config.{ours}: {value}")
    config["head_dim"] = settings.get("model.kv_channels", config["hidden"] // config["heads"])
    settings.mapped("model.kv_channels", f"model.config.head_dim: {config['head_dim']}")
    _read_feed_forward(settings, config)
    config["vocab_size"] = GPT2_VOCABULARY
    tied = settings.get("model.share_embeddings_and_output_weights", True)
    config["tied_embeddings"] = tied
    settings.mapped("model.share_embeddings_and_output_weights", f"model.config.tied_embeddings: {str(tied).lower()}")
    if config["family"] != "gpt2":
        base = float(settings.get("model.rotary_base", 10000))
        rope: dict[str, Any] = {"base": base}
        settings.mapped("model.rotary_base", f"model.config.rope.base: {base:g}")
        if factor := settings.get("model.seq_len_interpolation_factor"):
            rope["scaling"] = {"kind": "linear", "factor": float(factor)}
        config["rope"] = rope
        settings.mapped("model.seq_len_interpolation_factor", "model.config.rope.scaling")
    for key in _DECIDED_BY_FAMILY:
        settings.mapped(key, f"model.config.family: {config['family']}")
    settings.write("model.config", config)
    settings.write("model.init", "random")
    if settings.get("model.restore_from_path") or settings.get("model.restore_from_ckpt"):
        settings.ask(
            "the file starts from weights (model.restore_from_path): write model.from: hf://org/name instead of "
            'init: random, with engine.version: "26.06"'
        )
        settings.drop_section("model.restore_from_path", "NeMo archives are not read")
    if settings.get("model.num_moe_experts") is None:
        for key in settings.left():
            if key.startswith("model.moe_"):
                settings.drop(key, "the model has no experts")
    _compare(settings, config)


def _family(settings: ForeignSettings) -> str:
    rope = settings.get("model.position_embedding_type", "learned_absolute") == "rope"
    if not rope:
        return "gpt2"
    activation = settings.get("model.activation", "gelu")
    if activation not in ("swiglu", *{name for (ours, _), name in ACTIVATIONS.items() if ours == "silu"}):
        settings.ask(f"model.activation is {activation}; model.config.family is a family with SwiGLU")
    if settings.get("model.num_moe_experts") is not None:
        return "mixtral"
    return "qwen2" if settings.get("model.qkv_bias") else "llama"


def _read_feed_forward(settings: ForeignSettings, config: dict[str, Any]) -> None:
    width = settings.get("model.ffn_hidden_size", 4 * config["hidden"])
    experts = settings.get("model.num_moe_experts")
    if experts is None:
        config["ffn"] = width
        settings.mapped("model.ffn_hidden_size", f"model.config.ffn: {width}")
        return
    top_k = settings.get("model.moe_router_topk", 2)
    config["moe"] = {"experts": experts, "top_k": top_k, "ffn": width}
    settings.mapped("model.ffn_hidden_size", f"model.config.moe.ffn: {width}")
    settings.mapped("model.num_moe_experts", f"model.config.moe.experts: {experts}")
    settings.mapped("model.moe_router_topk", f"model.config.moe.top_k: {top_k}")
    balance = float(settings.get("model.moe_aux_loss_coeff", 0.0))
    settings.take("model.moe_aux_loss_coeff", "train.moe.balance_loss", balance)
    if (z_loss := settings.get("model.moe_z_loss_coeff")) is not None:
        settings.take("model.moe_z_loss_coeff", "train.moe.z_loss", float(z_loss))
    for key in ("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_router_load_balancing_type"):
        settings.mapped(f"model.{key}", "written by Trainshed in any case")


def _compare(settings: ForeignSettings, config: dict[str, Any]) -> None:
    """Say where a model of a published size differs from the published one."""
    known = _published(config, settings.recipe["name"])
    if known is None:
        return
    name, published = known
    gpt2 = settings.get("model.tokenizer.type") in _GPT2_NAMES
    if gpt2 and published.vocab_size != GPT2_VOCABULARY:
        settings.mistake(
            "model.tokenizer.type",
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model of {name}'s size, which has {published.vocab_size}: "
            "its weights fit neither, and its speed is not that model's",
            f"tokenizer: the model's own, and model.preset: {name}",
        )
    elif not gpt2:
        config["vocab_size"] = published.vocab_size
    base = config.get("rope", {}).get("base")
    if published.rope is not None and base is not None and base != published.rope.base:
        settings.mistake(
            "model.rotary_base",
            f"the rotary base is {base:g}, and {name} has {published.rope.base:g}",
            f"model.config.rope.base: {published.rope.base:g}, where this is to be {name}",
        )


def _published(config: dict[str, Any], run: str) -> tuple[str, ModelConfig] | None:
    """Return the catalog's model of this size, the one the run is named after where there are several."""
    width = config.get("ffn") or config["moe"]["ffn"]
    sizes = (config["layers"], config["hidden"], config["heads"], config["kv_heads"], width)
    found: list[tuple[str, ModelConfig]] = []
    for name in preset_names():
        known = model_preset(name)
        known_width = known.ffn if known.moe is None else known.moe.ffn
        if (known.layers, known.hidden, known.heads, known.kv_heads, known_width) == sizes:
            found.append((name, known))
    plain = run.replace("-", "")
    named = [(name, known) for name, known in found if name.replace("-", "").replace(".", "") in plain]
    return next(iter([*named, *found]), None)

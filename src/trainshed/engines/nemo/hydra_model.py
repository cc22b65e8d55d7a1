"""The model in NeMo 24.07's Hydra file: its architecture as rows of the table, and the catalog's model of that size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainshed.catalog import model_preset, preset_names
from trainshed.checkpoints.megatron.unsupported import parts_without_argument
from trainshed.engines.importing import GPT2_VOCABULARY, ConfigImport, is_of_family
from trainshed.engines.key_table import KEEP, OMIT, WRITTEN_ANYWAY, KeyRow, follows, same, to_floats
from trainshed.engines.launch import EngineTask
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import DEFAULT_BY_FAMILY
from trainshed.recipe.section import Problem

_GPT2_NAMES = ("GPT2BPETokenizer", "gpt2")
_NORMALIZATION = {"rms": "rmsnorm", "layer": "layernorm"}
_POSITIONS = {"rope": "rope", "learned": "learned_absolute"}
# (our activation, gated) to NeMo's name. Its tanh approximation is a flag of `gelu`.
_ACTIVATIONS = {
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu",
}
_FAMILY_KEYS = (
    *("model.normalization", "model.bias", "model.qkv_bias", "model.activation", "model.openai_gelu"),
    *("model.bias_activation_fusion", "model.position_embedding_type", "model.apply_rope_fusion"),
)


def has_experts(task: EngineTask) -> bool:
    """Whether a task trains a mixture of experts."""
    return task.config.moe is not None


def _read_family(config: ConfigImport) -> str:
    family = _family(config)
    config.note_mapped(f"model.config.family: {family}", *_FAMILY_KEYS)
    if config.get("model.num_moe_experts") is None:
        experts = [key for key in config.unread_keys() if key.startswith("model.moe_")]
        config.drop("the model has no experts", *experts)
    return family


def _family(config: ConfigImport) -> str:
    if config.get("model.position_embedding_type", "learned_absolute") != "rope":
        return "gpt2"
    if config.get("model.num_moe_experts") is not None:
        return "mixtral"
    return "qwen2" if config.get("model.qkv_bias") else "llama"


def _read_activation(config: ConfigImport) -> Any:
    """Return the activation, where it is not the family's own."""
    family, name = config.recipe["model"]["config"]["family"], config.get("model.activation", "gelu")
    if family == "gpt2":
        # megatron-core's fused kernel is the tanh approximation, which `openai_gelu` asks for too.
        fused = config.get("model.openai_gelu", False) or config.get("model.bias_activation_fusion", True)
        activation = "gelu_tanh" if fused else "gelu"
    else:
        gated = {theirs.removeprefix("fast-"): ours for (ours, gate), theirs in _ACTIVATIONS.items() if gate}
        activation = gated.get(name.removeprefix("fast-"))
        if activation is None:
            config.ask(f"model.activation is {name}; model.config.family is a family with SwiGLU")
    return OMIT if activation in (None, DEFAULT_BY_FAMILY[family]["activation"]) else activation


def _by_family(key: str, value: Callable[[ModelConfig], Any]) -> KeyRow:
    """Return the row of a key that a file's family stands for."""
    return follows(f"model.{key}", "model.config.family", lambda task: value(task.config), "", decided_by="model")


def _size(key: str, name: str, **more: Any) -> KeyRow:
    """Return the row of a number of the architecture."""
    return same(f"model.{key}", f"model.config.{name}", decided_by="model", **more)


def _render_width(task: EngineTask) -> Any:
    return task.config.moe.ffn if task.config.moe else task.config.ffn


def _read_width(config: ConfigImport) -> Any:
    if config.get("model.num_moe_experts") is not None:
        return OMIT
    return _width(config)


def _width(config: ConfigImport) -> int:
    return config.get("model.ffn_hidden_size", 4 * config.recipe["model"]["config"]["hidden"])


def _render_experts(task: EngineTask) -> dict[str, int]:
    assert task.config.moe is not None, "asked for experts"
    return {"model.num_moe_experts": task.config.moe.experts, "model.moe_router_topk": task.config.moe.top_k}


def _read_experts(config: ConfigImport) -> Any:
    """Return the experts that stand in the place of the feed-forward block."""
    experts = config.get("model.num_moe_experts")
    if experts is None:
        return KEEP
    moe = {"experts": experts, "top_k": config.get("model.moe_router_topk", 2), "ffn": _width(config)}
    config.note_mapped(f"model.config.moe.experts: {experts}", "model.num_moe_experts")
    config.note_mapped(f"model.config.moe.top_k: {moe['top_k']}", "model.moe_router_topk")
    config.note_mapped(f"model.config.moe.ffn: {moe['ffn']}", "model.ffn_hidden_size")
    return moe


def _render_head_width(task: EngineTask) -> int | None:
    usual = task.config.hidden // task.config.heads
    return None if task.config.head_dim == usual else task.config.head_dim


def _read_head_width(config: ConfigImport) -> int:
    sizes = config.recipe["model"]["config"]
    return config.get("model.kv_channels", sizes["hidden"] // sizes["heads"])


def _render_rope(task: EngineTask) -> dict[str, Any]:
    rope = task.config.rope
    if rope is None:
        return {}
    factor = rope.scaling.factor if rope.scaling else None
    return {"model.rotary_base": rope.base, "model.seq_len_interpolation_factor": factor}


def _read_rope(config: ConfigImport) -> Any:
    if config.recipe["model"]["config"]["family"] == "gpt2":
        return OMIT
    base = float(config.get("model.rotary_base", 10000))
    config.note_mapped(f"model.config.rope.base: {base:g}", "model.rotary_base")
    config.note_mapped("model.config.rope.scaling", "model.seq_len_interpolation_factor")
    factor = config.get("model.seq_len_interpolation_factor")
    return {"base": base} | ({"scaling": {"kind": "linear", "factor": float(factor)}} if factor else {})


def _read_origin(config: ConfigImport) -> str:
    if config.get("model.restore_from_path") or config.get("model.restore_from_ckpt"):
        config.ask(
            "the file starts from weights (model.restore_from_path): write model.from: hf://org/name instead of "
            'init: random, with engine.version: "26.06"'
        )
        config.drop("NeMo archives are not read", "model.restore_from_path.*")
    return "random"


ARCHITECTURE_ROWS = (
    KeyRow(
        ("model.max_position_embeddings",),
        "model.config.max_positions",
        lambda task: task.config.max_positions,
        lambda config: config.get("model.max_position_embeddings", config.get("model.encoder_seq_length", 512)),
        decided_by="model",
    ),
    # Defaults are those of megatron_gpt_config.yaml.
    _size("num_layers", "layers", default=12),
    _size("hidden_size", "hidden", default=768),
    KeyRow(("model.ffn_hidden_size",), "model.config.ffn", _render_width, _read_width, decided_by="model"),
    _size("num_attention_heads", "heads", default=12),
    KeyRow(
        ("model.num_query_groups",),
        "model.config.kv_heads",
        lambda task: task.config.kv_heads,
        lambda config: config.get("model.num_query_groups", config.recipe["model"]["config"]["heads"]),
        decided_by="model",
    ),
    KeyRow(
        ("model.kv_channels",),
        "model.config.head_dim",
        _render_head_width,
        _read_head_width,
        decided_by="model",
    ),
    _size("init_method_std", "init_std", default=0.02, to_recipe=to_floats),
    KeyRow(
        ("model.normalization",),
        "model.config.family",
        lambda task: _NORMALIZATION[task.config.norm],
        _read_family,
        decided_by="model",
    ),
    _size("layernorm_epsilon", "norm_eps", default=1e-5, to_recipe=to_floats),
    _by_family("bias", lambda model: model.mlp_bias),
    KeyRow(
        ("model.activation",),
        "model.config.activation",
        lambda task: _ACTIVATIONS.get((task.config.activation, task.config.gated)),
        _read_activation,
        decided_by="model",
    ),
    _by_family("openai_gelu", lambda model: model.activation == "gelu_tanh"),
    # megatron-core's fused kernel is the tanh approximation: neither of the two others may use it.
    _by_family("bias_activation_fusion", lambda model: model.activation == "silu"),
    _by_family("position_embedding_type", lambda model: _POSITIONS[model.positions]),
    _by_family("apply_rope_fusion", lambda model: model.positions == "rope"),
    _size("share_embeddings_and_output_weights", "tied_embeddings", default=True),
    _by_family("qkv_bias", lambda model: True if model.qkv_bias and not model.mlp_bias else OMIT),
    KeyRow(
        ("model.rotary_base", "model.seq_len_interpolation_factor"),
        "model.config.rope",
        _render_rope,
        _read_rope,
        decided_by="model",
    ),
    KeyRow(
        ("model.num_moe_experts", "model.moe_router_topk"),
        "model.config.moe",
        _render_experts,
        _read_experts,
        when=has_experts,
        decided_by="model",
    ),
    KeyRow((), "model.config.vocab_size", read=lambda config: _read_vocabulary(config)),
    KeyRow((), "model.init", read=_read_origin),
)
ARCHITECTURE_ORDER = tuple(
    f"model.config.{key}"
    for key in (
        *("family", "layers", "hidden", "heads", "kv_heads", "max_positions", "init_std", "norm_eps", "head_dim"),
        *("moe", "ffn", "vocab_size", "activation", "tied_embeddings", "rope"),
    )
)


def expert_kernel(key: str, value: Any) -> KeyRow:
    """Return the row of a key that every mixture of experts is rendered with."""
    return follows(f"model.{key}", "model", lambda task: value, WRITTEN_ANYWAY, when=has_experts)


def _read_vocabulary(config: ConfigImport) -> int:
    """Return the vocabulary of the published model of this size: NeMo takes the tokenizer's, which no file says."""
    published = _published_model(config)
    gpt2 = config.get("model.tokenizer.type") in _GPT2_NAMES
    return GPT2_VOCABULARY if published is None or gpt2 else published[1].vocab_size


def note_differences(config: ConfigImport) -> None:
    """Note where a model of a published size differs from the published one."""
    known = _published_model(config)
    if known is None:
        return
    name, published = known
    if config.get("model.tokenizer.type") in _GPT2_NAMES and published.vocab_size != GPT2_VOCABULARY:
        config.add_mistake(
            "model.tokenizer.type",
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model of {name}'s size, which has {published.vocab_size}: "
            "its weights fit neither, and its speed is not that model's",
            f"tokenizer: the model's own, and model.preset: {name}",
        )
    base = config.recipe["model"]["config"].get("rope", {}).get("base")
    if published.rope is not None and base is not None and base != published.rope.base:
        config.add_mistake(
            "model.rotary_base",
            f"the rotary base is {base:g}, and {name} has {published.rope.base:g}",
            f"model.config.rope.base: {published.rope.base:g}, where this is to be {name}",
        )


def _published_model(config: ConfigImport) -> tuple[str, ModelConfig] | None:
    """Return the catalog's model of this size; of several the one that the tokenizer or the run is named after."""
    model = config.recipe["model"]["config"]
    width = model["moe"]["ffn"] if "moe" in model else model.get("ffn")
    sizes = (model["layers"], model["hidden"], model["heads"], model["kv_heads"], width)
    candidates: list[tuple[str, ModelConfig]] = []
    for name in preset_names():
        known = model_preset(name)
        known_width = known.ffn if known.moe is None else known.moe.ffn
        if (known.layers, known.hidden, known.heads, known.kv_heads, known_width) == sizes:
            candidates.append((name, known))
    plain = config.recipe["name"].replace("-", "")
    named = [(name, known) for name, known in candidates if name.replace("-", "").replace(".", "") in plain]
    tokenizer = config.get("model.tokenizer.type")
    of_tokenizer = [(name, known) for name, known in candidates if is_of_family(tokenizer, name)]
    both = [candidate for candidate in named if candidate in of_tokenizer]
    return next(iter([*both, *of_tokenizer, *named, *candidates]), None)


def architecture_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield what NeMo 24.07 cannot build."""
    newer = 'write engine: {name: nemo, version: "26.06"}, which can'
    for absent, what in (
        (config.qk_norm, "normalised queries and keys (qk_norm)"),
        (
            config.rope is not None and config.rope.scaling is not None and config.rope.scaling.kind == "llama3",
            "Llama 3.1's stretched rotary frequencies",
        ),
        (config.sliding_window is not None, "a sliding window"),
        (config.moe is not None and config.moe.shared_ffn > 0, "a shared expert"),
        (config.moe is not None and not config.moe.normalize_top_k, "expert weights that do not sum to 1"),
    ):
        if absent:
            yield Problem(("model",), f"NeMo 24.07 has no {what}", newer)
    fraction = 1.0 if config.rope is None else config.rope.fraction
    for part in [*parts_without_argument(config), *([] if fraction == 1.0 else [f"rope.fraction: {fraction}"])]:
        yield Problem(("model",), f"NeMo 24.07 cannot be told `{part}`", "write engine: torch")
    if (config.activation, config.gated) not in _ACTIVATIONS:
        gate = "with" if config.gated else "without"
        yield Problem(("model",), f"NeMo 24.07 has no {config.activation} {gate} a gate", "write engine: megatron")

"""Which models can be written as GGUF, and which in fp8: said by the architecture alone, before anything is trained."""

from __future__ import annotations

from trainshed.errors import InputError
from trainshed.models.families import HF_FAMILIES
from trainshed.recipe import ModelConfig

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Our families that GGUF has an architecture for, and that its readers compute as we do."""
_USUAL = {
    "norm": "rms",
    "activation": "silu",
    "gated": True,
    "positions": "rope",
    "norm_placement": "pre",
    "sliding_window": None,
    "attention_chunk": None,
    "attention_pattern": None,
    "query_scalar": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
    "attention_sinks": False,
    "attention_temperature": None,
    "zero_centered_norms": False,
    "scaled_embeddings": False,
    "qk_l2_norm": False,
    "moe": None,
    "mla": None,
    "output_bias": False,
    "mlp_bias": False,
}
"""What all of these architectures have in common; anything else llama.cpp would compute otherwise."""


def gguf_architecture(config: ModelConfig) -> str:
    """Return GGUF's name of the architecture; raises `InputError` for a model that it has none for."""
    name = _ARCHITECTURES.get(config.family)
    if name is None:
        raise InputError(
            f"{config.family} is not written as GGUF",
            where="format",
            hint=f"written are {', '.join(_ARCHITECTURES)}; export the others as hf",
        )
    usual = _USUAL | {"qkv_bias": name == "qwen2", "qk_norm": name == "qwen3"}
    odd = [key for key, value in usual.items() if getattr(config, key) != value]
    rope = config.rope
    if rope is not None:
        odd += [
            f"rope.{key}" for key, value in (("fraction", 1.0), ("interleaved", False)) if getattr(rope, key) != value
        ]
        odd += ["rope.local_base"] if rope.local_base is not None else []
        odd += ["rope.scaling"] if rope.scaling is not None and rope.scaling.kind in ("yarn", "longrope") else []
    if odd:
        raise InputError(
            f"GGUF's architecture `{name}` has no word for `{odd[0]}` of this model",
            where="format",
            hint="export it as hf",
        )
    return name


def check_float8(config: ModelConfig) -> None:
    """Refuse a model whose matrices are not plain ones of `Linear` modules."""
    names = HF_FAMILIES[config.family].names
    kind = None
    if config.moe is not None:
        kind = "its experts"
    elif config.mla is not None:
        kind = "its latent attention"
    elif names.transposed or names.stacked:
        kind = "its transposed matrices"
    if kind is not None:
        raise InputError(
            f"{config.family} is not exported in fp8: {kind} are stored otherwise there",
            where="dtype",
            hint="write dtype bf16; vLLM quantises it when it loads (--quantization fp8)",
        )

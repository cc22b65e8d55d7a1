"""A family whose config and tensors have names of their own, as `model_type: tern` of Hugging Face weights."""

from dataclasses import replace

from trainshed.models.families import HF_FAMILIES

LLAMA = HF_FAMILIES["llama"]

HF_FAMILIES.register(
    "tern",
    replace(
        LLAMA,
        architecture="TernForCausalLM",
        keys={**LLAMA.keys, "layers": "depth", "hidden": "width"},
        names=replace(LLAMA.names, layer="model.blocks.{layer}."),
        decoder="llama",
        fixed={"qkv_bias": True},
        filled_in={"norm_eps": 1e-6, "tied_embeddings": True},
    ),
)

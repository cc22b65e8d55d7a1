"""`model` and `tokenizer`: what is trained, from which weights, over which vocabulary.

The architecture (`model.config` in a recipe, and each entry of the catalog) begins with a family. A family fixes
how the decoder is put together and how its Hugging Face weights are named, so only sizes have to be written. What
the family leaves open can be written over; what it fixes cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag, model_validator

from trainshed.recipe.model_parts import AttentionTemperature, Mla, Moe, Rope
from trainshed.recipe.registered import choice_or_registered, registered_class
from trainshed.recipe.section import (
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    StoreAddress,
    Text,
    by_shape,
)

FamilyName = Literal[
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2",
    "olmo2", "olmo3", "gemma2", "gemma3_text", "phi3", "nemotron", "gpt_oss", "llama4_text",
]  # fmt: skip
AttentionKind = Literal["window", "chunk", "full"]

_NO_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
_NO_BIAS: dict[str, Any] = {**_NO_ATTENTION_BIAS, "mlp_bias": False}
_OPEN_DECODER: dict[str, Any] = {
    "norm": "rms",
    "gated": True,
    "positions": "rope",
    "qk_norm": False,
    "norm_placement": "pre",
    "zero_centered_norms": False,
    "qk_norm_span": "head",
    "scaled_embeddings": False,
    "attention_sinks": False,
}
"""A decoder whose biases are not fixed: transformers has switches for them, `attention_bias` and `mlp_bias`."""
_ROPE_DECODER = _OPEN_DECODER | _NO_BIAS
_ATTENTION_BIAS_DECODER = _OPEN_DECODER | {"mlp_bias": False}
"""One with the first of the two switches."""
_GEMMA = _ATTENTION_BIAS_DECODER | {"norm_placement": "both", "zero_centered_norms": True, "scaled_embeddings": True}
_OLMO = _ATTENTION_BIAS_DECODER | {"qk_norm": True, "qk_norm_span": "projection", "norm_placement": "post"}
# What makes a family: Hugging Face's modelling code of the same name.
FIXED_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": _OPEN_DECODER,
    "mistral": _ROPE_DECODER,
    "mixtral": _ROPE_DECODER,
    "qwen2": _ROPE_DECODER | {"qkv_bias": True},
    "qwen3": _ATTENTION_BIAS_DECODER | {"qk_norm": True},
    "qwen3_moe": _ATTENTION_BIAS_DECODER | {"qk_norm": True},
    "deepseek_v3": _ROPE_DECODER,
    "gpt2": {
        "norm": "layer",
        "gated": False,
        "positions": "learned",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "norm_placement": "pre",
        "zero_centered_norms": False,
        "qk_norm_span": "head",
        "scaled_embeddings": False,
        "attention_sinks": False,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"qk_norm": True},
    "phi3": _ROPE_DECODER,
    "nemotron": _OPEN_DECODER | {"norm": "layer", "gated": False, "zero_centered_norms": True},
    "gpt_oss": _ROPE_DECODER | {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "attention_sinks": True},
    "llama4_text": _ROPE_DECODER,
}
DEFAULT_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False, **_NO_BIAS},
    "mistral": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "mixtral": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "qwen2": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "qwen3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False, **_NO_ATTENTION_BIAS},
    "qwen3_moe": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False, **_NO_ATTENTION_BIAS},
    "deepseek_v3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "gpt2": {"norm_eps": 1e-5, "activation": "gelu_tanh", "tied_embeddings": True},
    "olmo2": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False, **_NO_ATTENTION_BIAS},
    "olmo3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False, **_NO_ATTENTION_BIAS},
    "gemma2": {"norm_eps": 1e-6, "activation": "gelu_tanh", "tied_embeddings": True, **_NO_ATTENTION_BIAS},
    "gemma3_text": {"norm_eps": 1e-6, "activation": "gelu_tanh", "tied_embeddings": True, **_NO_ATTENTION_BIAS},
    "phi3": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "nemotron": {"norm_eps": 1e-5, "activation": "relu2", "tied_embeddings": False, **_NO_BIAS},
    "gpt_oss": {
        "norm_eps": 1e-5,
        "activation": "clamped_swiglu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tied_embeddings": False,
    },
    "llama4_text": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
}
FILLED_IN = {
    "kv_heads": "`heads`",
    "head_dim": "hidden / heads; with `mla` its nope_dim + rope_dim",
    **dict.fromkeys((*_ROPE_DECODER, "norm_eps", "activation", "tied_embeddings"), "the family's"),
}
"""Keys that need not be written, and what fills them in."""
_EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")
_LATENT_FAMILIES = ("deepseek_v3",)


class ModelConfig(Section):
    """A decoder-only transformer."""

    family: Annotated[str, choice_or_registered("model family", FamilyName)] = Field(
        description="How the decoder is put together", examples=["llama"]
    )
    layers: PositiveInt = Field(description="Number of layers", examples=[32])
    hidden: PositiveInt = Field(description="Width of the residual stream", examples=[4096])
    heads: PositiveInt = Field(description="Query heads", examples=[32])
    kv_heads: PositiveInt = Field(description="Key and value heads", examples=[8])
    head_dim: PositiveInt = Field(description="Width of one head", examples=[128])
    ffn: PositiveInt | None = Field(
        None, description="Inner width of the feed-forward block; with `moe`, of the layers without experts"
    )
    vocab_size: PositiveInt = Field(description="Rows of the embedding", examples=[128256])
    max_positions: PositiveInt = Field(description="Longest sequence the model is made for", examples=[8192])
    norm: Literal["rms", "layer"] = Field(description="Normalisation")
    norm_eps: PositiveFloat = Field(description="Epsilon of the normalisation")
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"] = Field(
        description="Activation of the feed-forward block; `relu2` is the square of relu, `clamped_swiglu` is "
        "gpt-oss's: gate · sigmoid(swiglu_alpha · gate) · (up + 1)"
    )
    swiglu_alpha: PositiveFloat | None = Field(None, description="clamped_swiglu: what gates are multiplied by")
    swiglu_limit: PositiveFloat | None = Field(
        None, description="clamped_swiglu: gates are at most this, and ups within ± this"
    )
    gated: bool = Field(description="Gate and up projections (SwiGLU)")
    positions: Literal["rope", "learned"] = Field(description="Kind of positions")
    rope: Rope | None = Field(None, description="Rotary positions; needed where the family uses them")
    sliding_window: PositiveInt | None = Field(None, description="Attend to this many tokens back only; null: to all")
    attention_chunk: PositiveInt | None = Field(
        None, description="Attend within chunks of this many tokens only, counted from the first; null: to all"
    )
    attention_pattern: Annotated[tuple[AttentionKind, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Which layers have the sliding window or the chunks, from the first on and repeated; null: all",
        examples=[["window", "full"]],
    )
    query_scalar: PositiveInt | None = Field(
        None, description="Scores are divided by its square root (query_pre_attn_scalar); null: `head_dim`"
    )
    attention_soft_cap: PositiveFloat | None = Field(
        None, description="Scores stay between ± this, by tanh (attn_logit_softcapping); null: no bound"
    )
    attention_sinks: bool = Field(
        False, description="Each head has a learned score that takes part in its softmax and has no value"
    )
    attention_temperature: AttentionTemperature | None = Field(
        None, description="Queries of layers without positions (`rope.local_only`) grow with their place in the text"
    )
    logit_soft_cap: PositiveFloat | None = Field(
        None, description="Logits stay between ± this, by tanh (final_logit_softcapping); null: no bound"
    )
    tied_embeddings: bool = Field(description="Input and output embedding are one")
    qkv_bias: bool = Field(description="Biases on the query, key and value projections")
    output_bias: bool = Field(description="Bias on the attention's output projection")
    mlp_bias: bool = Field(description="Biases in the feed-forward block")
    qk_norm: bool = Field(description="Normalise queries and keys")
    qk_norm_span: Literal["head", "projection"] = Field(
        "head", description="What `qk_norm` normalises: each head, or all heads of a token together"
    )
    qk_l2_norm: bool = Field(
        False, description="Divide rotated queries and keys by their root mean square, without weights"
    )
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre", description="Normalise what enters attention and feed-forward block, what leaves them, or both"
    )
    zero_centered_norms: bool = Field(False, description="Norms multiply by 1 + weight")
    scaled_embeddings: bool = Field(False, description="Multiply the embedding by sqrt(hidden)")
    moe: Moe | None = Field(None, description="A mixture of experts in place of the feed-forward block")
    mla: Mla | None = Field(None, description="Latent attention; needed where the family has it")
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of fresh weights")
    mtp_layers: NotNegativeInt = Field(
        0, description="Layers after the last that each predict one token further; a recipe writes `train.mtp`"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not _is_family(given.get("family")):
            return given
        return _family_values(given["family"], given.get("heads"), given.get("hidden"), given.get("mla")) | given

    def derived_values(self) -> dict[str, Any]:
        """Return what family and sizes fill in."""
        return _family_values(self.family, self.heads, self.hidden, self.mla)

    @property
    def rotary_dim(self) -> int:
        """The width of a head that has rotary positions."""
        if self.mla is not None:
            return self.mla.rope_dim
        return self.head_dim if self.rope is None else self.rope.rotary_dim(self.head_dim)

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.mla is None else self.mla.value_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the feed-forward block."""
        if self.moe is None or layer < self.moe.dense_first:
            return False
        return (layer - self.moe.dense_first) % self.moe.every == self.moe.every - 1

    @property
    def embedding_at_both_ends(self) -> bool:
        """Whether the last pipeline stage has the embedding too: as its head, or for multi-token prediction."""
        return self.tied_embeddings or self.mtp_layers > 0

    def with_mtp_layers(self, count: int) -> ModelConfig:
        """Return the architecture with this many layers for multi-token prediction."""
        return self if count == self.mtp_layers else self.model_copy(update={"mtp_layers": count})

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a feed-forward block of its own and no experts."""
        return self.moe is None or self.moe.dense_first > 0 or self.moe.every > 1

    def problems(self) -> Iterator[Problem]:
        """What the family and the sizes ask of each other."""
        for key, fixed in fixed_by_family(self.family).items():
            if getattr(self, key) != fixed:
                shown = str(fixed).lower()
                yield Problem((key,), f"the family {self.family} has `{key}: {shown}`", "delete the line")
        if self.heads % self.kv_heads:
            yield Problem(
                ("kv_heads",),
                f"{self.kv_heads} does not divide the {self.heads} heads",
                f"write a divisor of {self.heads}",
            )
        if self.positions == "rope" and self.rope is None:
            yield Problem(
                ("rope",),
                f"is missing: the family {self.family} has rotary positions",
                "rope: {base: 10000.0}",
            )
        if self.rope is not None and self.mla is None and (turned := self.rope.rotary_dim(self.head_dim)) % 2:
            if turned == self.head_dim:
                yield Problem(
                    ("head_dim",), f"{self.head_dim} is odd; rotary positions turn pairs", "write an even number"
                )
            else:
                yield Problem(
                    ("rope", "fraction"),
                    f"{turned} of {self.head_dim} channels would be turned, which is odd",
                    "write a fraction that gives an even number",
                )
        scaling = None if self.rope is None else self.rope.scaling
        for key in ("short_factors", "long_factors"):
            factors = None if scaling is None else getattr(scaling, key)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                yield Problem(
                    ("rope", "scaling", key),
                    f"has {len(factors)} divisors, and {self.rotary_dim // 2} pairs of channels are turned",
                    "write one for each pair",
                )
        if self.positions == "learned" and self.rope is not None:
            yield Problem(("rope",), f"the family {self.family} has learned positions", "delete `rope`")
        yield from self._pattern_problems()
        yield from self._latent_problems()
        yield from self._feed_forward_problems()

    def _sees_all(self, layer: int) -> bool:
        pattern = self.attention_pattern
        return pattern is not None and pattern[layer % len(pattern)] == "full"

    def layer_window(self, layer: int) -> int | None:
        """Return how many tokens back a layer attends to; None: to all."""
        return None if self._sees_all(layer) else self.sliding_window

    def layer_chunk(self, layer: int) -> int | None:
        """Return how many tokens a chunk of a layer's attention has; None: it has no chunks."""
        return None if self._sees_all(layer) else self.attention_chunk

    def has_rope(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return self.rope is not None and not (self.rope.local_only and self._sees_all(layer))

    def has_local_rope(self, layer: int) -> bool:
        """Whether a layer has the rotary base of layers with a window."""
        return self.rope is not None and self.rope.local_base is not None and self.layer_window(layer) is not None

    def _pattern_problems(self) -> Iterator[Problem]:
        pattern = self.attention_pattern
        if self.rope is not None and self.rope.local_base is not None and self.sliding_window is None:
            yield Problem(("rope", "local_base"), "is for layers with a window, and there are none", "delete the line")
        if self.sliding_window is not None and self.attention_chunk is not None:
            yield Problem(("attention_chunk",), "`sliding_window` limits attention already", "keep one of them")
        local_only = self.rope is not None and self.rope.local_only
        if local_only and "full" not in (pattern or ()):
            yield Problem(
                ("rope", "local_only"), "no layer of `attention_pattern` sees all", "delete the line, or name some"
            )
        if self.attention_temperature is not None and not local_only:
            yield Problem(
                ("attention_temperature",), "is for layers without positions", "write `rope.local_only: true`"
            )
        if pattern is None:
            return
        for kind, key in (("window", "sliding_window"), ("chunk", "attention_chunk")):
            if kind in pattern and getattr(self, key) is None:
                yield Problem((key,), "is missing: `attention_pattern` names layers that have it", "write it")
            elif kind not in pattern and getattr(self, key) is not None:
                yield Problem((key,), f"`attention_pattern` names no {kind}", "delete the line")
        shortest = shortest_pattern([pattern[layer % len(pattern)] for layer in range(self.layers)])
        if len(shortest) == 1:
            hint = "delete it and the window" if shortest[0] == "full" else "delete `attention_pattern`"
            yield Problem(("attention_pattern",), f"gives all {self.layers} layers the same attention", hint)
        elif shortest != pattern:
            yield Problem(
                ("attention_pattern",),
                f"repeats itself, or is longer than the {self.layers} layers",
                f"write [{', '.join(shortest)}]",
            )

    def _latent_problems(self) -> Iterator[Problem]:
        latent = family_decoder(self.family) in _LATENT_FAMILIES
        if latent and self.mla is None:
            yield Problem(
                ("mla",),
                f"is missing: the family {self.family} has latent attention",
                "mla: {kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128}",
            )
        elif not latent and self.mla is not None and family_decoder(self.family) in FIXED_BY_FAMILY:
            yield Problem(
                ("mla",),
                f"the family {self.family} has no latent attention",
                f"write `family: {_LATENT_FAMILIES[0]}`",
            )
        if self.mla is None:
            return
        width = self.mla.nope_dim + self.mla.rope_dim
        if self.head_dim != width:
            yield Problem(("head_dim",), f"a head of `mla` is nope_dim + rope_dim = {width} wide", "delete the line")
        if self.kv_heads != self.heads:
            yield Problem(("kv_heads",), "latent attention has a key for each query head", "delete the line")
        for key in ("sliding_window", "attention_chunk"):
            if getattr(self, key) is not None:
                yield Problem((key,), "latent attention has no window", "delete the line")
        if self.qk_l2_norm:
            yield Problem(("qk_l2_norm",), "latent attention has norms of its own", "delete the line")

    def _feed_forward_problems(self) -> Iterator[Problem]:
        for key in ("swiglu_alpha", "swiglu_limit"):
            if self.activation == "clamped_swiglu" and getattr(self, key) is None:
                yield Problem((key,), "is missing: `activation: clamped_swiglu` needs it", "gpt-oss has 1.702 and 7.0")
            elif self.activation != "clamped_swiglu" and getattr(self, key) is not None:
                yield Problem((key,), "is for `activation: clamped_swiglu`", "delete the line")
        if self.activation == "clamped_swiglu" and not self.gated:
            yield Problem(("activation",), "clamped_swiglu is for a block with a gate", "write another activation")
        experts = family_decoder(self.family) in _EXPERT_FAMILIES
        if experts and self.moe is None:
            yield Problem(
                ("moe",),
                f"is missing: the family {self.family} has experts",
                "moe: {experts: 8, top_k: 2, ffn: 14336}",
            )
        elif not experts and self.moe is not None and family_decoder(self.family) in FIXED_BY_FAMILY:
            yield Problem(
                ("moe",), f"the family {self.family} has no experts", f"write `family: {_EXPERT_FAMILIES[0]}`"
            )
        elif self.moe is None and self.ffn is None:
            yield Problem(("ffn",), "is missing", f"ffn: {4 * self.hidden}")
        elif self.moe is not None and not any(map(self.has_experts, range(self.layers))):
            key = "dense_first" if self.moe.dense_first >= self.layers else "every"
            yield Problem(("moe", key), f"{getattr(self.moe, key)} leaves none of {self.layers} layers", "write fewer")
        elif self.has_dense_layers and self.ffn is None:
            first = "the first" if self.moe is not None and self.moe.dense_first else "some"
            yield Problem(("ffn",), f"is missing: {first} layers have no experts", f"ffn: {4 * self.hidden}")
        elif not self.has_dense_layers and self.ffn is not None:
            yield Problem(("ffn",), "is not read where every layer has experts", "write the width as `moe.ffn`")


def shortest_pattern(kinds: Sequence[AttentionKind]) -> tuple[AttentionKind, ...]:
    """Return the shortest pattern that, repeated, gives these kinds of attention layer by layer."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)


def _is_family(name: Any) -> bool:
    return name in get_args(FamilyName) or registered_class("model family", name) is not None


def family_decoder(family: str) -> str:
    """Return the built-in family whose decoder a family has: its own, or the one that a plugin names."""
    registered = registered_class("model family", family)
    return family if registered is None else str(registered.decoder)


def fixed_by_family(family: str) -> dict[str, Any]:
    """Return the keys that a family fixes; none of a family that is only known to a plugin which is not loaded."""
    registered = registered_class("model family", family)
    return FIXED_BY_FAMILY.get(family_decoder(family), {}) | dict(registered.fixed if registered else {})


def open_biases(family: str) -> dict[str, Any]:
    """Return the biases that a family leaves open, with what they are where nothing is said."""
    return {key: value for key, value in DEFAULT_BY_FAMILY.get(family_decoder(family), {}).items() if key in _NO_BIAS}


def _family_values(family: str, heads: Any, hidden: Any, mla: Any = None) -> dict[str, Any]:
    registered = registered_class("model family", family)
    defaults = DEFAULT_BY_FAMILY.get(family_decoder(family), {}) | dict(registered.filled_in if registered else {})
    filling = defaults | fixed_by_family(family)
    if isinstance(heads, int) and heads > 0:
        filling["kv_heads"] = heads
        if isinstance(hidden, int) and hidden % heads == 0:
            filling["head_dim"] = hidden // heads
    if isinstance(mla, Mla):
        filling["head_dim"] = mla.nope_dim + mla.rope_dim
    elif isinstance(mla, dict):
        plain, turned = mla.get("nope_dim"), mla.get("rope_dim")
        if isinstance(plain, int) and isinstance(turned, int):
            filling["head_dim"] = plain + turned
    return filling


# A byte-level BPE starts from the 256 bytes; one more is the end-of-document token.
SMALLEST_VOCABULARY = 257


class ModelSection(Section):
    """The model: an architecture, and weights to start from or the word `random`."""

    preset: Text | None = Field(None, description="Architecture by name from the catalog", examples=["llama3.1-8b"])
    config: ModelConfig | None = Field(None, description="Architecture written out, in place of `preset`")
    from_: StoreAddress | None = Field(
        None,
        alias="from",
        description="Address of the weights; without `preset` or `config` the architecture is read there",
        examples=["hf://meta-llama/Llama-3.1-8B@0123abc"],
    )
    init: Literal["random"] | None = Field(
        None, description="`random`: train from nothing. Must be said where there is no `from`"
    )
    verdict: Literal["ignore"] | None = Field(
        None, description="`ignore`: train on converted weights although the proof of their conversion failed"
    )
    added_tokens: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Tokens that the tokenizer of `from` lacks; their rows begin as the mean of all rows, and are "
        "trained with adapters too",
        examples=[["<tool>", "</tool>"]],
    )

    def problems(self) -> Iterator[Problem]:
        """One architecture, one origin of the weights."""
        if self.preset and self.config:
            yield Problem(("config",), "`preset` and `config` both name the architecture", "keep one of them")
        if not self.preset and not self.config and not self.from_:
            yield Problem((), "names no architecture", "write `preset: llama3.1-8b`, `config: {…}` or `from: hf://…`")
        if not self.from_ and not self.init:
            yield Problem(
                ("init",),
                "there are no weights to start from and nobody said to train from nothing",
                "write `from: hf://org/name` or `init: random` under `model`",
            )
        if self.from_ and self.init:
            yield Problem(("init",), "`from` and `init: random` contradict each other", "keep one of them")
        if self.verdict == "ignore" and not self.from_:
            yield Problem(("verdict",), "there are no weights with a verdict", "delete the line")
        if self.added_tokens is not None:
            yield from self._added_token_problems(self.added_tokens)

    def _added_token_problems(self, texts: tuple[str, ...]) -> Iterator[Problem]:
        """Added tokens are texts that can be told apart, for weights that do not know them."""
        if not self.from_:
            yield Problem(
                ("added_tokens",),
                "are for weights that lack them, and there are none to start from",
                "delete the line: a model that starts from nothing has the words of its tokenizer",
            )
        for number, text in enumerate(texts):
            if text != text.strip():
                yield Problem(
                    ("added_tokens", number),
                    f"{text!r} begins or ends with white space, which templates and tokenizers remove",
                    f"write {text.strip()!r}" if text.strip() else "write a text",
                )
            elif text in texts[:number]:
                yield Problem(("added_tokens", number), f"{text!r} is named twice", "delete one of them")


class TokenizerTraining(Section):
    """A byte-level BPE learned from the training sources themselves."""

    vocab_size: Annotated[int, Field(ge=SMALLEST_VOCABULARY)] = Field(
        description="Number of tokens, end-of-document included", examples=[8192]
    )
    min_frequency: PositiveInt = Field(2, description="A pair seen less often is not merged")
    eod: Text = Field("<|endoftext|>", description="The end-of-document token")


class TrainedTokenizer(Section):
    """A tokenizer that is made before the data is prepared."""

    train: TokenizerTraining = Field(description="Learn a byte-level BPE from the training sources")


TokenizerSection = Annotated[
    Annotated[StoreAddress, Tag("(text)")] | Annotated[TrainedTokenizer, Tag("(a mapping)")],
    by_shape,
]
"""The address of a tokenizer, or `{train: {vocab_size: …}}`."""

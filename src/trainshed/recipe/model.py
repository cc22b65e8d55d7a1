"""`model` and `tokenizer`: what is trained, from which weights, over which vocabulary.

The architecture (`model.config` in a recipe, and each entry of the catalog) begins with a family. A family fixes
how the decoder is put together and how its Hugging Face weights are named, so only sizes have to be written. What
the family leaves open can be written over; what it fixes cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag, model_validator

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
    "olmo2", "olmo3", "gemma2", "gemma3_text", "phi3", "nemotron",
]  # fmt: skip
AttentionKind = Literal["window", "full"]

_ROPE_DECODER: dict[str, Any] = {
    "norm": "rms",
    "gated": True,
    "positions": "rope",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "norm_placement": "pre",
    "zero_centered_norms": False,
    "qk_norm_span": "head",
    "scaled_embeddings": False,
}
_GEMMA = _ROPE_DECODER | {"norm_placement": "both", "zero_centered_norms": True, "scaled_embeddings": True}
_OLMO = _ROPE_DECODER | {"qk_norm": True, "qk_norm_span": "projection", "norm_placement": "post"}
# What makes a family: Hugging Face's modelling code of the same name.
FIXED_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": _ROPE_DECODER,
    "mistral": _ROPE_DECODER,
    "mixtral": _ROPE_DECODER,
    "qwen2": _ROPE_DECODER | {"qkv_bias": True},
    "qwen3": _ROPE_DECODER | {"qk_norm": True},
    "qwen3_moe": _ROPE_DECODER | {"qk_norm": True},
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
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"qk_norm": True},
    "phi3": _ROPE_DECODER,
    "nemotron": _ROPE_DECODER | {"norm": "layer", "gated": False, "zero_centered_norms": True},
}
DEFAULT_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "mistral": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "mixtral": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "qwen2": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "qwen3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "qwen3_moe": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "deepseek_v3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "gpt2": {"norm_eps": 1e-5, "activation": "gelu_tanh", "tied_embeddings": True},
    "olmo2": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "olmo3": {"norm_eps": 1e-6, "activation": "silu", "tied_embeddings": False},
    "gemma2": {"norm_eps": 1e-6, "activation": "gelu_tanh", "tied_embeddings": True},
    "gemma3_text": {"norm_eps": 1e-6, "activation": "gelu_tanh", "tied_embeddings": True},
    "phi3": {"norm_eps": 1e-5, "activation": "silu", "tied_embeddings": False},
    "nemotron": {"norm_eps": 1e-5, "activation": "relu2", "tied_embeddings": False},
}
FILLED_IN = {
    "kv_heads": "`heads`",
    "head_dim": "hidden / heads; with `mla` its nope_dim + rope_dim",
    **dict.fromkeys((*_ROPE_DECODER, "norm_eps", "activation", "tied_embeddings"), "the family's"),
}
"""Keys that need not be written, and what fills them in."""
_EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
_LATENT_FAMILIES = ("deepseek_v3",)


_LLAMA3_KEYS = ("low_frequency_factor", "high_frequency_factor", "original_positions")
_SCALING_KEYS = {
    "linear": (),
    "llama3": _LLAMA3_KEYS,
    "yarn": (
        "original_positions",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
        "mscale",
        "mscale_all_dim",
    ),
}
"""Which keys each kind of stretching reads besides `factor`."""


class RopeScaling(Section):
    """How rotary frequencies are stretched for longer contexts."""

    kind: Literal["llama3", "linear", "yarn"] = Field(
        description="`llama3` as Llama 3.1 does it, `linear` for all frequencies alike, `yarn` as in Peng et al. 2023"
    )
    factor: PositiveFloat = Field(description="How many times longer the context becomes")
    low_frequency_factor: PositiveFloat | None = Field(None, description="llama3: below this many turns, scale in full")
    high_frequency_factor: PositiveFloat | None = Field(None, description="llama3: above this many turns, leave alone")
    original_positions: PositiveInt | None = Field(None, description="llama3, yarn: context length before the stretch")
    beta_fast: PositiveFloat | None = Field(None, description="yarn: above this many turns, leave alone; null: 32")
    beta_slow: PositiveFloat | None = Field(None, description="yarn: below this many turns, scale in full; null: 1")
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: cosines and sines are multiplied by it; null: 0.1 · ln(factor) + 1"
    )
    truncate: bool | None = Field(
        None, description="yarn: round the bounds of the ramp to whole channels; null: they are rounded"
    )

    mscale: PositiveFloat | None = Field(None, description="yarn: how much cosines and sines grow with the factor")
    mscale_all_dim: PositiveFloat | None = Field(
        None, description="yarn: what `mscale` is divided by; with latent attention scores grow by it instead"
    )

    def problems(self) -> Iterator[Problem]:
        """Each kind reads its own keys; `llama3` needs all of them, `yarn` the context before the stretch."""
        read = _SCALING_KEYS[self.kind]
        for key in dict.fromkeys(key for keys in _SCALING_KEYS.values() for key in keys):
            written = getattr(self, key) is not None
            if key in _LLAMA3_KEYS and key in read and not written:
                yield Problem(
                    (key,),
                    "is missing",
                    "Llama 3.1 has low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192"
                    if self.kind == "llama3"
                    else "write the context length before the stretch, for example original_positions: 8192",
                )
            elif key not in read and written:
                kinds = " or ".join(f"`kind: {kind}`" for kind, keys in _SCALING_KEYS.items() if key in keys)
                yield Problem((key,), f"is not read with `kind: {self.kind}`", f"delete it, or write {kinds}")


class Rope(Section):
    """Rotary position embedding."""

    base: PositiveFloat = Field(description="The base of the frequencies (rope_theta)", examples=[500000.0])
    scaling: RopeScaling | None = Field(None, description="Stretching for longer contexts")
    local_base: PositiveFloat | None = Field(
        None, description="Base in layers with a sliding window, which `scaling` then leaves alone; null: as others"
    )
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Which part of each head is turned (partial_rotary_factor)"
    )

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are turned."""
        return int(head_dim * self.fraction)


class Mla(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are computed from one short vector for each token.

    That vector and the rotary part of the key, which all heads share, are all that generation keeps of a token.
    """

    query_rank: PositiveInt | None = Field(
        None, description="Width that queries are computed from; null: the residual stream", examples=[1536]
    )
    kv_rank: PositiveInt = Field(description="Width that keys and values are computed from", examples=[512])
    nope_dim: PositiveInt = Field(description="Width of a query and key head without position", examples=[128])
    rope_dim: PositiveInt = Field(description="Width of a query and key head with rotary position", examples=[64])
    value_dim: PositiveInt = Field(description="Width of a value head", examples=[128])
    rope_interleaved: bool = Field(
        True, description="Whether a pair that is turned is two neighbours; otherwise half a head apart"
    )

    def problems(self) -> Iterator[Problem]:
        """Rotary positions turn pairs."""
        if self.rope_dim % 2:
            yield Problem(("rope_dim",), f"{self.rope_dim} is odd; rotary positions turn pairs", "write an even number")


class Moe(Section):
    """A mixture of experts in place of the feed-forward block of every layer, or of all but the first."""

    experts: PositiveInt = Field(description="Number of routed experts", examples=[8])
    top_k: PositiveInt = Field(description="Experts that each token visits", examples=[2])
    ffn: PositiveInt = Field(description="Inner width of one expert", examples=[14336])
    shared_ffn: NotNegativeInt = Field(0, description="Inner width of the expert every token visits; 0: none")
    normalize_top_k: bool = Field(True, description="Scale the weights of a token's experts so that they sum to 1")
    scores: Literal["softmax", "sigmoid"] = Field("softmax", description="How the router's logits become scores")
    score_bias: bool = Field(
        False,
        description="Experts are chosen by score plus a bias, which moves towards even load at each step "
        "(`train.moe.bias_update`)",
    )
    groups: PositiveInt = Field(1, description="Groups of experts, of which a token visits only some")
    top_groups: PositiveInt = Field(1, description="Groups that each token visits")
    scale: PositiveFloat = Field(1.0, description="Factor of what routed experts add")
    dense_first: NotNegativeInt = Field(0, description="First layers that have `ffn` and no experts")

    def problems(self) -> Iterator[Problem]:
        """A token cannot visit more experts, or groups of them, than there are."""
        if self.top_k > self.experts:
            yield Problem(("top_k",), f"{self.top_k} is more than the {self.experts} experts", "write fewer")
        if self.top_groups > self.groups:
            yield Problem(("top_groups",), f"{self.top_groups} is more than the {self.groups} groups", "write fewer")
        elif self.experts % self.groups:
            yield Problem(
                ("groups",), f"{self.groups} does not divide the {self.experts} experts", "write a divisor of them"
            )
        elif self.groups > 1 and self.experts // self.groups < 2:
            yield Problem(("groups",), "a group is chosen by its two best experts, and has only one", "write fewer")
        elif self.groups > 1 and self.top_k > self.top_groups * (self.experts // self.groups):
            yield Problem(
                ("top_k",),
                f"{self.top_k} is more than the {self.top_groups * (self.experts // self.groups)} experts of "
                f"{self.top_groups} groups",
                "write fewer, or more `top_groups`",
            )
        if self.score_bias and self.scores != "sigmoid":
            yield Problem(("score_bias",), "is for scores that are independent", "write `scores: sigmoid`")


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
        None, description="Inner width of the feed-forward block; with `moe`, of its `dense_first` layers"
    )
    vocab_size: PositiveInt = Field(description="Rows of the embedding", examples=[128256])
    max_positions: PositiveInt = Field(description="Longest sequence the model is made for", examples=[8192])
    norm: Literal["rms", "layer"] = Field(description="Normalisation")
    norm_eps: PositiveFloat = Field(description="Epsilon of the normalisation")
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = Field(
        description="Activation of the feed-forward block; `relu2` is the square of relu"
    )
    gated: bool = Field(description="Gate and up projections (SwiGLU)")
    positions: Literal["rope", "learned"] = Field(description="Kind of positions")
    rope: Rope | None = Field(None, description="Rotary positions; needed where the family uses them")
    sliding_window: PositiveInt | None = Field(None, description="Attend to this many tokens back only; null: to all")
    attention_pattern: Annotated[tuple[AttentionKind, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Which layers have the sliding window, from the first on and repeated; null: all of them",
        examples=[["window", "full"]],
    )
    query_scalar: PositiveInt | None = Field(
        None, description="Scores are divided by its square root (query_pre_attn_scalar); null: `head_dim`"
    )
    attention_soft_cap: PositiveFloat | None = Field(
        None, description="Scores stay between ± this, by tanh (attn_logit_softcapping); null: no bound"
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
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre", description="Normalise what enters attention and feed-forward block, what leaves them, or both"
    )
    zero_centered_norms: bool = Field(False, description="Norms multiply by 1 + weight")
    scaled_embeddings: bool = Field(False, description="Multiply the embedding by sqrt(hidden)")
    moe: Moe | None = Field(None, description="A mixture of experts in place of the feed-forward block")
    mla: Mla | None = Field(None, description="Latent attention; needed where the family has it")
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of fresh weights")

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
        return self.moe is not None and layer >= self.moe.dense_first

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
        if self.rope is not None and (turned := self.rope.rotary_dim(self.head_dim)) % 2:
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
        if self.positions == "learned" and self.rope is not None:
            yield Problem(("rope",), f"the family {self.family} has learned positions", "delete `rope`")
        yield from self._pattern_problems()
        yield from self._latent_problems()
        yield from self._feed_forward_problems()

    def layer_window(self, layer: int) -> int | None:
        """Return how many tokens back a layer attends to; None: to all."""
        pattern = self.attention_pattern
        return None if pattern is not None and pattern[layer % len(pattern)] == "full" else self.sliding_window

    def has_local_rope(self, layer: int) -> bool:
        """Whether a layer has the rotary base of layers with a window."""
        return self.rope is not None and self.rope.local_base is not None and self.layer_window(layer) is not None

    def _pattern_problems(self) -> Iterator[Problem]:
        pattern = self.attention_pattern
        if self.rope is not None and self.rope.local_base is not None and self.sliding_window is None:
            yield Problem(("rope", "local_base"), "is for layers with a window, and there are none", "delete the line")
        if pattern is None:
            return
        if self.sliding_window is None:
            yield Problem(("sliding_window",), "is missing: `attention_pattern` names layers that have it", "write it")
        shortest = shortest_pattern([pattern[layer % len(pattern)] for layer in range(self.layers)])
        if len(shortest) == 1:
            hint = "delete `attention_pattern`" if shortest[0] == "window" else "delete it and `sliding_window`"
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
        if self.sliding_window is not None:
            yield Problem(("sliding_window",), "latent attention has no window", "delete the line")

    def _feed_forward_problems(self) -> Iterator[Problem]:
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
        elif self.moe is not None and self.moe.dense_first >= self.layers:
            yield Problem(
                ("moe", "dense_first"), f"{self.moe.dense_first} leaves none of {self.layers} layers", "write fewer"
            )
        elif self.moe is not None and self.moe.dense_first and self.ffn is None:
            yield Problem(("ffn",), "is missing: the first layers have no experts", f"ffn: {4 * self.hidden}")
        elif self.moe is not None and not self.moe.dense_first and self.ffn is not None:
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


def _family_values(family: str, heads: Any, hidden: Any, mla: Any = None) -> dict[str, Any]:
    registered = registered_class("model family", family)
    defaults = DEFAULT_BY_FAMILY.get(family_decoder(family), {}) | dict(registered.filled_in if registered else {})
    filling = fixed_by_family(family) | defaults
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

"""The parts of an architecture that have keys of their own: rotary positions, latent attention, experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainshed.recipe.section import NotNegativeInt, PositiveFloat, PositiveInt, Problem, Section

_LLAMA3_KEYS = ("low_frequency_factor", "high_frequency_factor", "original_positions")
_LONGROPE_KEYS = ("short_factors", "long_factors")
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
    "longrope": ("original_positions", "attention_factor", "short_factors", "long_factors"),
}
"""Which keys each kind of stretching reads besides `factor`."""
YARN_USUAL = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What `yarn` has where a key is null: the values of the paper, and rounded bounds."""


class RopeScaling(Section):
    """How rotary frequencies are stretched for longer contexts."""

    kind: Literal["llama3", "linear", "yarn", "longrope"] = Field(
        description="`llama3` as Llama 3.1 does it, `linear` for all frequencies alike, `yarn` as in Peng et al. 2023, "
        "`longrope` as Phi-3 and Phi-4-mini do it: each frequency has a divisor, and another in longer texts"
    )
    factor: PositiveFloat = Field(description="How many times longer the context becomes")
    low_frequency_factor: PositiveFloat | None = Field(None, description="llama3: below this many turns, scale in full")
    high_frequency_factor: PositiveFloat | None = Field(None, description="llama3: above this many turns, leave alone")
    original_positions: PositiveInt | None = Field(
        None, description="llama3, yarn, longrope: context length before the stretch"
    )
    beta_fast: PositiveFloat | None = Field(None, description="yarn: above this many turns, leave alone; null: 32")
    beta_slow: PositiveFloat | None = Field(None, description="yarn: below this many turns, scale in full; null: 1")
    attention_factor: PositiveFloat | None = Field(
        None,
        description="yarn, longrope: cosines and sines are multiplied by it; null: 0.1 · ln(factor) + 1, with longrope "
        "√(1 + ln(factor) / ln(original_positions))",
    )
    truncate: bool | None = Field(
        None, description="yarn: round the bounds of the ramp to whole channels; null: they are rounded"
    )

    mscale: PositiveFloat | None = Field(None, description="yarn: how much cosines and sines grow with the factor")
    mscale_all_dim: PositiveFloat | None = Field(
        None, description="yarn: what `mscale` is divided by; with latent attention scores grow by it instead"
    )
    short_factors: Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="longrope: what each frequency is divided by in texts of up to `original_positions`"
    )
    long_factors: Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="longrope: what each frequency is divided by in longer texts, in all of their positions"
    )

    def problems(self) -> Iterator[Problem]:
        """Each kind reads its own keys; `llama3` needs all of them, others the context before the stretch."""
        read = _SCALING_KEYS[self.kind]
        for key in dict.fromkeys(key for keys in _SCALING_KEYS.values() for key in keys):
            written = getattr(self, key) is not None
            if key in (*_LLAMA3_KEYS, *_LONGROPE_KEYS) and key in read and not written:
                if self.kind == "llama3":
                    hint = (
                        "Llama 3.1 has low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192"
                    )
                elif key in _LONGROPE_KEYS:
                    hint = "write a divisor for each pair of channels that is turned, as config.json has them"
                else:
                    hint = "write the context length before the stretch, for example original_positions: 8192"
                yield Problem((key,), "is missing", hint)
            elif key not in read and written:
                *others, last = [f"`kind: {kind}`" for kind, keys in _SCALING_KEYS.items() if key in keys]
                kinds = f"{', '.join(others)} or {last}" if others else last
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
    interleaved: bool = Field(
        False, description="Whether a pair that is turned is two neighbours; otherwise half a head apart"
    )
    local_only: bool = Field(
        False, description="Only layers with a window or chunks have positions; those that see all have none (NoPE)"
    )

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are turned."""
        return int(head_dim * self.fraction)


class AttentionTemperature(Section):
    """How queries without positions grow as texts do, so that attention stays sharp (Nakanishi 2025).

    A query at position p is multiplied by 1 + scale · ln(1 + floor((p + 1) / tokens)).
    """

    scale: PositiveFloat = Field(description="How fast they grow (attn_scale)", examples=[0.1])
    tokens: PositiveInt = Field(description="Tokens between two steps (floor_scale)", examples=[8192])


LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents: the default of DeepSeek's norm, whatever the model's own epsilon is."""


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
    """A mixture of experts in place of the feed-forward block of every layer, or of some of them."""

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
    router_bias: bool = Field(False, description="The router has a bias, which is trained as its weight is")
    dense_first: NotNegativeInt = Field(0, description="First layers that have `ffn` and no experts")
    every: PositiveInt = Field(1, description="Of so many layers the last has experts, the others have `ffn`")
    scale_inputs: bool = Field(
        False, description="The router's weight multiplies what enters an expert, not what leaves it"
    )

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

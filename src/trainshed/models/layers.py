"""The parts of every layer: Linear, Norm, MLP, dropout.

Shapes: s tokens of the sequence on this rank (cut over cp, then tp), S the same after all_gather over tp, B sequences
of the micro-batch, H hidden, F ffn (this rank's columns). Weights are kept in full precision and cast to the
activations' dtype where they are used; under FSDP they are already cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.collectives import AxisGroup, ParallelAxes, all_gather, reduce_scatter
from trainshed.models.init import dropout_mask_compiled, rng_key, rng_key_tensor
from trainshed.models.products import MatmulFunction, gather_linear, linear, linear_scatter
from trainshed.recipe import ModelConfig

if TYPE_CHECKING:
    from trainshed.models.lora import LoraAdapters
    from trainshed.models.quantization import QuantizedWeight


class Linear(nn.Module):
    """A projection.

    With `gate_up_interleaved` the rows of its weight alternate gate and up, and so do the columns of its output.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, gate_up_interleaved: bool = False) -> None:
        super().__init__()
        self.gate_up_interleaved = gate_up_interleaved
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.matmul: MatmulFunction = linear
        """Replaced by a float8 product if the recipe asks for it."""
        self.compute_weight: torch.Tensor | None = None
        """A copy of the weight in the dtype of the products, where the model keeps one (`compute_weights.py`)."""
        self.lora: LoraAdapters | None = None
        self.quantized: QuantizedWeight | None = None
        """In place of `weight`, where frozen weights are held in fewer bits."""
        self.overlaps = False
        """Whether the product hides its tensor-parallel collective (`layout.overlap: tp`)."""

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Project in the input's dtype; `samples` are the run's sample numbers [B], for the dropout of adapters."""
        out = self.product(x, samples)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def gathered(self, x: torch.Tensor, tp: AxisGroup, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Project the tokens of all tensor-parallel ranks, of which this rank has [s, B, in_features]."""
        if not self.overlaps:
            return self(all_gather(x, tp), samples)
        out = gather_linear(x, self.weight, self.compute_weight, tp)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def product(self, x: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        """Multiply with the weight, adapters included, without the bias."""
        adapters = self.lora
        return adapters(x, samples, self) if adapters is not None and adapters.enabled else self.base_product(x)

    def base_product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the weight alone."""
        return self.matmul(x, self.weight, self.compute_weight) if self.quantized is None else self.quantized.matmul(x)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as it is multiplied: [out_features, in_features]."""
        return self.weight.to(dtype) if self.quantized is None else self.quantized.dequantize(dtype)


class RowParallelLinear(Linear):
    """A projection of which each tensor-parallel rank holds some columns; the bias is added to the sum."""

    def __init__(self, in_features: int, out_features: int, group: AxisGroup, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.group = group

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Project [S, B, in_features] to this rank's tokens [s, B, out_features]."""
        if self.overlaps:
            out = linear_scatter(x, self.weight, self.compute_weight, self.group)
        else:
            out = reduce_scatter(self.product(x, samples), self.group)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class Norm(nn.Module):
    """RMS or layer normalisation over the last dim.

    Zero-centered, it multiplies by 1 + weight. The sum would lose the weight's digits in half precision, so all of it
    is then computed in float32 or better.
    """

    def __init__(self, width: int, config: ModelConfig, *, kind: str | None = None, eps: float | None = None) -> None:
        super().__init__()
        self.kind, self.eps = kind or config.norm, config.norm_eps if eps is None else eps
        self.zero_centered = config.zero_centered_norms
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if self.kind == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in the input's dtype (reductions in float32 or better)."""
        if not self.zero_centered:
            return self._normalize(x, self.weight.to(x.dtype))
        wide = torch.promote_types(x.dtype, torch.float32)
        return self._normalize(x.to(wide), 1.0 + self.weight.to(wide)).to(x.dtype)

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, weight.shape, weight, self.bias.to(x.dtype), self.eps)
        if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return _RmsNorm.apply(x, weight, self.eps)


class ProjectionNorm(Norm):
    """RMS normalisation of all heads of a token together, of which each tensor-parallel rank holds some."""

    def __init__(self, width: int, config: ModelConfig, group: AxisGroup) -> None:
        super().__init__(width // group.size, config, kind="rms")
        self.whole_width, self.group = width, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise heads [S, B, heads, D]."""
        flat = x.flatten(2)
        if self.group.size == 1:
            return super().forward(flat).view_as(x)
        wide = flat.to(torch.promote_types(x.dtype, torch.float32))
        # Gathered and added, so that backward adds what each rank's heads say about the one sum.
        total = all_gather(wide.square().sum(-1)[None], self.group).sum(0)
        inverse = (total / self.whole_width + self.eps).rsqrt()[..., None]
        weight = self.weight.to(wide.dtype)
        weight = 1.0 + weight if self.zero_centered else weight
        return (wide * inverse * weight).to(x.dtype).view_as(x)


@torch._dynamo.allow_in_graph
class _RmsNorm(torch.autograd.Function):
    """RMS normalisation for dtypes and devices without a fused kernel: a third of F.rms_norm's passes over memory.

    y = x · w / r with r² = mean(x²) + eps, so dx = g · w / r - x · mean(g · w · x) / r³.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * weight).mul_(inverse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        (grad,) = grads
        along = (grad * x).flatten(0, -2)
        shift = (along @ weight).view(inverse.shape) * inverse.pow(3) / x.shape[-1]
        grad_x = (grad * weight).mul_(inverse).addcmul_(x, shift, value=-1.0)
        return grad_x, inverse.flatten() @ along, None


def activation_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of a feed-forward block."""
    return {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2}[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def gates_first(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Put alternating gates and ups in order along a dim: all gates, then all ups."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def apply_activation(x: torch.Tensor, config: ModelConfig, *, interleaved: bool) -> torch.Tensor:
    """Apply activation and gate to an up projection: [..., 2F] to [..., F].

    Its columns alternate gate and up if they are `interleaved`; otherwise gates come first.
    """
    if not config.gated:
        return activation_function(config.activation)(x)
    gate, up = split_pairs(x) if interleaved else x.chunk(2, dim=-1)
    if config.activation == "clamped_swiglu":
        return _clamped_swiglu(gate, up, config)
    return activation_function(config.activation)(gate) * up


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Gate as gpt-oss does: nothing grows past the limit, and an up projection of 0 lets the gate through."""
    assert config.swiglu_alpha is not None, "the schema asks for it"
    assert config.swiglu_limit is not None, "the schema asks for it"
    gate = gate.clamp(max=config.swiglu_limit)
    up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * (gate * torch.sigmoid(gate * config.swiglu_alpha))


def split_pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the even and the odd columns of [..., 2F]: [..., F] each."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _SplitBf16Pairs.apply(x)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return even.contiguous(), odd.contiguous()  # activations of a CPU are slow on every second number


@torch._dynamo.allow_in_graph
class _SplitBf16Pairs(torch.autograd.Function):
    """Splits pairs of bf16 as words of 32 bits, so that compiled kernels read and write whole words.

    A kernel that writes alternating columns one by one takes twice the time that memory needs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = x.view(torch.int32)
        # The first of a pair is the low half of its word. A bf16 is the high half of the float32 of the same value.
        even, odd = (words << 16).view(torch.float32), (words & -0x10000).view(torch.float32)
        return even.to(torch.bfloat16), odd.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        even, odd = (grad.to(torch.bfloat16).view(torch.int16).to(torch.int32) for grad in grads)
        return ((odd << 16) | (even & 0xFFFF)).view(torch.bfloat16)


class MLP(nn.Module):
    """The feed-forward block with its norm, cut over tp. The input of a shared expert is already normed."""

    def __init__(self, config: ModelConfig, ffn: int, axes: ParallelAxes, *, normed: bool = False) -> None:
        super().__init__()
        self.config, self.axes = config, axes
        self.norm = nn.Identity() if normed or config.norm_placement == "post" else Norm(config.hidden, config)
        has_post_norm = not normed and config.norm_placement != "pre"
        self.post_norm = Norm(config.hidden, config) if has_post_norm else nn.Identity()
        width = ffn // axes.tp.size
        up = Linear(
            config.hidden, 2 * width if config.gated else width, bias=config.mlp_bias, gate_up_interleaved=config.gated
        )
        if config.gated:
            self.gate_up = up
        else:
            self.up = up
        self.down = RowParallelLinear(width, config.hidden, axes.tp, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Transform this rank's tokens [s, B, H]; `samples` are for the dropout of adapters."""
        up = self.gate_up if self.config.gated else self.up
        projected = up.gathered(self.norm(x), self.axes.tp, samples)
        hidden = apply_activation(projected, self.config, interleaved=up.gate_up_interleaved)
        return self.post_norm(self.down(hidden, samples))


@dataclass
class CounterDropout:
    """Dropout at one site of the model. Its masks depend on the site, the sample and the position, not on the layout.

    The key is a tensor on the device of the activations, so that all layers run the same compiled code.
    """

    layer: int
    site: str
    probability: float
    seed: int
    device: torch.device | str = "cpu"
    first_channel: int = 0
    """The number of the first channel of the activations, where ranks hold different ones."""
    key: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.probability > 0:
            self.key = rng_key_tensor(rng_key("dropout", self.seed, self.layer, self.site), self.device)

    def __call__(self, x: torch.Tensor, samples: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Drop elements of [s, B, H]; `samples` are the run's sample numbers [B], `positions` [s]."""
        if self.key is None or samples is None:
            return x
        # One counter per (sample, position, channel): at most 2^20 positions, 2^16 channels and 2^27 samples.
        token = (samples[None, :] << 36) + (positions[:, None] << 16)
        index = token[..., None] + torch.arange(x.shape[-1], device=x.device) + self.first_channel
        keep = dropout_mask_compiled(index, self.key, self.probability)
        return torch.where(keep, x / (1.0 - self.probability), torch.zeros((), dtype=x.dtype, device=x.device))

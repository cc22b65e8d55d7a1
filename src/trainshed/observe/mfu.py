"""Model FLOPs utilisation: what share of a GPU's peak went into the model's own arithmetic.

A fraction from 0 to 1, with its formula and the source of its peak. An unknown GPU has no MFU, and one above 1 is an
error: some figure in it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainshed.catalog import Gpu
from trainshed.errors import TrainshedError
from trainshed.plan.flops import WIDE_EXPERT_ENGINES, mixed_peak, token_flops, training_flops_per_token
from trainshed.recipe import Lora, ModelConfig
from trainshed.recipe.optimizer import ParameterGroup

FORMULA = (
    "MFU = tokens/s/GPU · FLOPs per token / dense peak of the products' dtype (experts that stay in bf16 beside fp8: "
    "the peak of both, by the time that each would take); FLOPs per token = 3 · forward, 2 per weight a token meets + "
    "attention over the keys it may see (full attention: all keys); recomputation not counted; "
    "frozen weights 2 · forward, as they have no gradient; a reference (DPO) 1 · forward"
)


@dataclass(frozen=True)
class Mfu:
    """One measurement; what is not known is None, and `unknown` says why.

    `mfu` counts causal attention. `mfu_full_attention` counts every key for every token, so it may be above 1 on long
    sequences. `mfu_of_bf16_peak` is for comparison if the products are narrower than bf16; it may be above 1 too.
    """

    model_tflops: float
    """TFLOP/s per GPU of the model's own arithmetic, causal attention."""
    model_tflops_full_attention: float
    """The same with attention over all keys, as NeMo 24.07, the GKE recipes and many papers count."""
    mfu: float | None = None
    mfu_full_attention: float | None = None
    mfu_of_bf16_peak: float | None = None
    peak_tflops: float | None = None
    peak_dtype: str | None = None
    source: str | None = None
    """Where the peak is published."""
    unknown: str | None = None
    formula: str = FORMULA


def measure_mfu(
    tokens_per_second_per_gpu: float,
    config: ModelConfig,
    sequence_length: int,
    *,
    precision: str,
    gpu: Gpu | None,
    device_name: str | None = None,
    lora: Lora | None = None,
    groups: Sequence[ParameterGroup] = (),
    document_length: float | None = None,
    reference: bool = False,
    engine: str | None = None,
) -> Mfu:
    """Return the utilisation of a training: of all weights but those that `groups` freeze, or of adapters (`lora`).

    `precision` is the dtype of the products' inputs: a `train.precision`, or `tf32` if fp32 inputs may be rounded.
    `gpu` is None if the device is not in the catalog. `document_length` is the length of the document that an average
    token is in, where documents are kept apart; `reference` says that a reference model runs forward too (DPO).
    `engine` is None where it is not known; in some, experts multiply in bf16 while other products are in fp8, and the
    peak is that of both (`mixed_peak`).
    """
    per_token, per_token_full = (
        training_flops_per_token(
            config,
            sequence_length,
            causal=causal,
            document_length=document_length,
            lora=lora,
            groups=groups,
            reference=reference,
        )
        for causal in (True, False)
    )
    model_tflops, model_tflops_full = (
        tokens_per_second_per_gpu * flops / 1e12 for flops in (per_token, per_token_full)
    )
    peak = gpu.dense_tflops.peak(precision) if gpu is not None else None
    if gpu is None or peak is None:
        return Mfu(model_tflops, model_tflops_full, unknown=_why_unknown(gpu, precision, device_name))
    narrow = precision in ("fp8", "fp4")
    dtype, wide_share = precision, 0.0
    if narrow and engine in WIDE_EXPERT_ENGINES:
        flops = token_flops(config, sequence_length, document_length=document_length, lora=lora, groups=groups)
        wide_share = flops.expert_share(reference=reference)
    if wide_share:
        peak = mixed_peak(peak, gpu.dense_tflops.half, wide_share)
        dtype = f"{precision}, experts ({wide_share:.0%} of the FLOPs) bf16"
    mfu = model_tflops / peak
    if mfu > 1:
        raise TrainshedError(
            f"an MFU of {mfu:.0%} is not possible: {model_tflops:.1f} TFLOP/s of a {dtype} peak of {peak:g}",
            where=device_name,
            hint=f"one of its figures is wrong: {tokens_per_second_per_gpu:g} tokens/s/GPU, {per_token:.4g} FLOPs per "
            f"token at sequence length {sequence_length}, or the peak ({gpu.source})",
        )
    return Mfu(
        model_tflops,
        model_tflops_full,
        mfu=mfu,
        mfu_full_attention=mfu * per_token_full / per_token,
        mfu_of_bf16_peak=model_tflops / gpu.dense_tflops.half if narrow else None,
        peak_tflops=peak,
        peak_dtype=dtype,
        source=gpu.source,
    )


def _why_unknown(gpu: Gpu | None, precision: str, device_name: str | None) -> str:
    if gpu is None:
        return f"the catalog knows no peak of {device_name or 'this device'}"
    return f"no {precision} peak is published for {device_name or gpu.device_names[0]}"

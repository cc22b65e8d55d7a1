"""Which arguments Megatron-LM refuses together, or takes and quietly changes: `validate_args` of its arguments.py.

The recipe's own arguments never clash; these are for what `engine.args` adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainshed.engines.megatron.settings import Settings

Test = Callable[[Settings], bool]


@dataclass(frozen=True)
class Combination:
    """An argument that asks for something else: where `broken`, `dest` cannot stay as it is."""

    dest: str
    broken: Test
    needs: str


def clashes(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each setting that does not go with the others, and what it needs."""
    for each in COMBINATIONS:
        if settings.known.has(each.dest) and settings.value(each.dest) and each.broken(settings):
            yield each.dest, each.needs


def _without(*dests: str) -> Test:
    """Broken where none of these is set."""
    return lambda settings: not any(settings.value(dest) for dest in dests)


def _with(*dests: str) -> Test:
    """Broken where one of these is set."""
    return lambda settings: any(settings.value(dest) for dest in dests)


def _larger(dest: str, number: int) -> Test:
    return lambda settings: not (settings.value(dest) or 0) > number


def _interleaved(settings: Settings) -> bool:
    chunks = (settings.value("pipeline_model_parallel_layout") or "").count("|") + 1
    virtual = settings.value("num_virtual_stages_per_pipeline_rank") or 1
    return virtual > 1 or chunks > settings.value("pipeline_model_parallel_size")


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "overlap_param_gather", _without("use_distributed_optimizer", "use_megatron_fsdp"), "layout.shard: zero1"
    ),
    Combination("overlap_param_gather", _without("overlap_grad_reduce"), "--overlap-grad-reduce"),
    Combination(
        "overlap_param_gather_with_optimizer_step", lambda _: True, "a checkpoint format other than torch_dist"
    ),
    Combination("tp_comm_overlap", _larger("tensor_model_parallel_size", 1), "layout.tp of 2 or more"),
    Combination("tp_comm_overlap", _with("deterministic_mode"), "train.deterministic: false"),
    Combination("use_flash_attn", _with("deterministic_mode"), "train.deterministic: false"),
    Combination("cross_entropy_loss_fusion", _with("deterministic_mode"), "train.deterministic: false"),
    Combination("fp8_param_gather", _without("fp8"), "train.precision: fp8"),
    Combination("fp8_param_gather", _without("use_distributed_optimizer", "use_megatron_fsdp"), "layout.shard: zero1"),
    Combination("first_last_layers_bf16", lambda s: s.value("fp8_recipe") == "delayed", "--fp8-recipe tensorwise"),
    Combination("fp16_lm_cross_entropy", _without("fp16"), "train.precision: fp16"),
    Combination("fp32_residual_connection", _without("bf16", "fp16"), "train.precision: bf16 or fp16"),
    Combination(
        "distribute_saved_activations", lambda _: True, "tensor parallel without sequence parallel, never here"
    ),
    Combination("optimizer_cpu_offload", _without("use_precision_aware_optimizer"), "--use-precision-aware-optimizer"),
    Combination("use_precision_aware_optimizer", _without("use_distributed_optimizer"), "layout.shard: zero1"),
    Combination("cpu_offloading_num_layers", lambda s: s.value("pipeline_model_parallel_size") > 1, "layout.pp: 1"),
    Combination("cpu_offloading_num_layers", _with("recompute_granularity"), "layout.recompute: none"),
    Combination("overlap_moe_expert_parallel_comm", _larger("expert_model_parallel_size", 1), "layout.ep of 2 or more"),
    Combination("overlap_moe_expert_parallel_comm", _with("recompute_granularity"), "layout.recompute: none"),
    Combination(
        "overlap_moe_expert_parallel_comm",
        lambda s: s.value("pipeline_model_parallel_size") > 1 and not _interleaved(s),
        "layout.vp of 2 or more",
    ),
    Combination("moe_shared_expert_overlap", _without("moe_shared_expert_intermediate_size"), "a shared expert"),
    Combination(
        "moe_shared_expert_overlap",
        lambda s: s.value("moe_token_dispatcher_type") != "alltoall",
        "--moe-token-dispatcher-type alltoall",
    ),
    Combination("moe_pad_expert_input_to_capacity", _without("moe_expert_capacity_factor"), "a capacity factor"),
    Combination(
        "delay_wgrad_compute", _without("overlap_moe_expert_parallel_comm"), "--overlap-moe-expert-parallel-comm"
    ),
    Combination("qk_clip", lambda s: s.value("transformer_impl") != "transformer_engine", "TransformerEngine"),
    Combination("sharp_enabled_group", _without("use_sharp"), "SHARP in the fabric of the cluster file"),
    Combination(
        "save_retain_interval",
        lambda s: s.value("save_retain_interval") % s.value("save_interval") != 0,
        "a multiple of checkpoint.every",
    ),
    Combination(
        "log_memory_interval",
        lambda s: s.value("log_memory_interval") % s.value("log_interval") != 0,
        "a multiple of --log-interval",
    ),
    Combination("use_legacy_models", lambda _: True, "the ckpt format `torch`, never written here"),
)

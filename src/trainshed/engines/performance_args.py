"""What a recipe's `engine.args` change for the planner: overlap, graphs, dispatch, recomputed modules.

Megatron-LM, NeMo and Megatron-Bridge give the same options of megatron-core the same names, up to a path before the
name (`model.tp_comm_overlap`) and NeMo's `ub_` for what runs over user buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainshed.plan.performance.engine_constants import EngineOptions

OptionChange = Callable[[Any], Mapping[str, Any]]


def apply_performance_args(args: Mapping[str, Any], usual: EngineOptions) -> tuple[EngineOptions, list[str]]:
    """Return the options that `engine.args` set, and the keys that were counted."""
    chosen: dict[str, Any] = {"cuda_graph_share": usual.cuda_graph_share}
    counted: list[str] = []
    for key, value in args.items():
        change = _CHANGES.get(_option_name(key))
        if change is None or value is None or not (changed := change(value)):
            continue
        # Two options say what graphs capture: together they save what the further-reaching one does.
        share = max(options.get("cuda_graph_share", 0.0) for options in (chosen, changed))
        chosen |= {**changed, "cuda_graph_share": share}
        counted.append(key)
    return replace(usual, **chosen), counted


def _option_name(key: str) -> str:
    return key.lstrip("-").rpartition(".")[2].replace("-", "_").removeprefix("ub_")


def _if_on(**changes: Any) -> OptionChange:
    return lambda value: changes if value is True else {}


def _if_off(**changes: Any) -> OptionChange:
    return lambda value: changes if value is False else {}


def _dispatcher(value: Any) -> Mapping[str, Any]:
    return {"fused_dispatch": value == "flex"}


def _graphs(value: Any) -> Mapping[str, Any]:
    """Whole iterations leave no launches; parts of layers, which is what other scopes capture, about two in three."""
    written = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if written in ("none", "False"):
        return {}
    return {"cuda_graph_share": 1.0 if "full_iteration" in written else 0.3}


def _modules(value: Any) -> Mapping[str, Any]:
    return {"selective_recompute": "+".join(map(str, value)) if isinstance(value, list) else str(value)}


_CHANGES: Mapping[str, OptionChange] = {
    "tp_comm_overlap": _if_on(tp_overlap=True),
    "overlap_moe_expert_parallel_comm": _if_on(ep_overlap=True),
    "overlap_grad_reduce": _if_off(overlap=False),
    "grad_reduce_in_bf16": _if_on(bf16_gradients=True),
    "grad_reduce_in_fp32": _if_off(bf16_gradients=True),
    "moe_token_dispatcher_type": _dispatcher,
    "moe_enable_deepep": _if_on(fused_dispatch=True),
    "moe_expert_capacity_factor": lambda value: {"fixed_routing": True},
    "enable_cuda_graph": _graphs,
    "external_cuda_graph": _graphs,
    "cuda_graph_impl": _graphs,
    "cuda_graph_scope": _graphs,
    "cuda_graph_modules": _graphs,
    "recompute_modules": _modules,
}

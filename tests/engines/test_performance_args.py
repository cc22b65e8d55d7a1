"""What `engine.args` change of what the planner counts."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.engines.megatron.arguments import known_arguments
from trainshed.engines.nemo.bridge_keys import BRIDGE_KEYS
from trainshed.engines.performance_args import _CHANGES, apply_performance_args
from trainshed.plan.performance.engine_constants import EngineOptions


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tp-comm-overlap": True}, {"tp_overlap": True}),
        ({"model.ub_tp_comm_overlap": True}, {"tp_overlap": True}),
        ({"tp_comm_overlap": False}, {}),
        ({"moe_token_dispatcher_type": "flex"}, {"fused_dispatch": True}),
        ({"overlap_moe_expert_parallel_comm": True}, {"ep_overlap": True}),
        ({"moe_expert_capacity_factor": 1.0}, {"fixed_routing": True}),
        ({"ddp.grad_reduce_in_fp32": False}, {"bf16_gradients": True}),
        ({"overlap_grad_reduce": False}, {"overlap": False}),
        ({"recompute_modules": ["core_attn", "moe_act"]}, {"selective_recompute": "core_attn+moe_act"}),
        ({"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_share": 0.3}),
        ({"cuda_graph_scope": ["full_iteration"], "cuda_graph_impl": "local"}, {"cuda_graph_share": 1.0}),
        ({"cuda_graph_impl": "none", "log_interval": 1, "tp_comm_overlap": None}, {}),
    ],
)
def test_arguments_change_what_is_planned(args: dict[str, Any], expected: dict[str, Any]) -> None:
    found, counted = apply_performance_args(args, EngineOptions(bf16_states=True))
    assert found == EngineOptions(bf16_states=True, **expected)
    assert bool(counted) == bool(expected)
    assert set(counted) <= set(args)


def test_every_option_that_is_counted_is_one_of_megatron_or_of_megatron_bridge() -> None:
    lists = [known_arguments(version) for version in ("0.16.1", "head")]
    of_bridge = {key.rpartition(".")[2] for key in BRIDGE_KEYS.names}
    for option in _CHANGES:
        assert any(found.has(option) for found in lists) or option in of_bridge, option

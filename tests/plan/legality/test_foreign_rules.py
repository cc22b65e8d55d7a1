"""What Megatron, NeMo and torchtune cannot run: said with numbers, and the same that megatron-core itself refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from support.models.tiny_models import tiny_config
from trainshed.plan.layout import resolve_layout
from trainshed.plan.legality import layout_notes, layout_problems, layout_warnings
from trainshed.plan.model_shape import ModelShape, model_shape
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.section import Problem

DENSE = tiny_config("llama", layers=8, heads=8, kv_heads=4, ffn=48, vocab_size=96)
EXPERTS = tiny_config(
    "mixtral", layers=8, heads=8, kv_heads=8, moe={"experts": 6, "top_k": 2, "ffn": 24, "shared_ffn": 20}
)


def problems(
    keys: dict[str, Any],
    config: ModelConfig = DENSE,
    *,
    engine: str = "megatron",
    length: int = 64,
    batches: tuple[int, ...] = (48,),
    lora: bool = False,
) -> list[Problem]:
    written = Layout.model_validate(keys)
    return layout_problems(
        resolve_layout(written, config),
        config,
        sequence_length=length,
        batch_sizes=batches,
        engine=engine,
        lora=lora,
        stages_written=written.stages is not None,
    )


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        ({"tp": 8}, DENSE),  # more than the key/value heads: they are held twice
        ({"pp": 4, "vp": 2, "dp": 2}, DENSE),
        ({"pp": 4, "dp": 24}, DENSE),  # fewer micro-batches than stages: slow and legal
        ({"pp": 3, "stages": [2, 3, 3]}, DENSE),
        ({"dp": 2, "shard": "full"}, DENSE),
        ({"dp": 4, "replicate": 2}, DENSE),
        ({"dp": 4, "etp": 2, "ep": 2}, EXPERTS),  # etp need not divide tp
        ({"tp": 2, "dp": 3, "ep": 6}, EXPERTS),
    ],
)
def test_a_layout_that_megatron_runs_has_no_problems(keys: dict[str, Any], config: ModelConfig) -> None:
    assert problems(keys, config) == []
    assert problems(keys, config, engine="nemo") == []


@pytest.mark.parametrize(
    ("keys", "config", "key", "what", "hint"),
    [
        pytest.param(
            {"tp": 6}, tiny_config("llama", heads=12, kv_heads=4, ffn=48), "tp",
            "tp: 6 is neither a divisor nor a multiple of the 4 key/value heads", "write tp: 1 or 2", id="groups",
        ),
        pytest.param(
            {"tp": 16}, DENSE, "tp",
            "tp: 16 does not divide the 8 heads", "write tp: 1, 2, 4 or 8", id="heads",
        ),
        pytest.param(
            {"tp": 4}, tiny_config("gpt2", ffn=50), "tp",
            "tp: 4 does not divide the 50 feed-forward rows", "write tp: 1 or 2", id="rows",
        ),
        pytest.param(
            {"ep": 4, "dp": 4}, EXPERTS, "ep",
            "ep: 4 does not divide the 6 experts", "write ep: 1, 2 or 3", id="experts",
        ),
        pytest.param(
            {"ep": 3, "dp": 4}, EXPERTS, "ep",
            "ep 3 · etp 1 = 3 does not divide the dp 4 · cp 1 · tp 1 = 4 ranks",
            "write ep and etp so that their product divides 4, or dp so that 3 does", id="expert ranks",
        ),
        pytest.param(
            {"ep": 2, "dp": 6, "replicate": 2}, EXPERTS, "replicate",
            "replicate: 2 does not divide the 3 ranks that hold the same experts (dp 6 · cp 1 · tp 1 / ep 2 / etp 1)",
            "write replicate: 1 or 3", id="instances",
        ),
        pytest.param(
            {"cp": 2}, DENSE, "cp",
            "cp: 2 cuts a sequence into 4 pieces, and 66 tokens do not divide by that",
            "write data.sequence_length: 68, or another cp", id="context",
        ),
        pytest.param(
            {"pp": 3}, DENSE, "pp", "pp: 3 does not divide the 8 layers",
            "write the uneven chunks out, stages: [3, 3, 2], or another pp", id="stages",
        ),
        pytest.param(
            {"pp": 2, "vp": 3}, DENSE, "vp", "pp 2 · vp 3 = 6 does not divide the 8 layers",
            "write the uneven chunks out, stages: [1, 1, 1, 2, 2, 1], or another vp", id="chunks",
        ),
        pytest.param(
            {"pp": 2, "shard": "full", "dp": 2}, DENSE, "shard",
            "Megatron shares out weights with its FSDP, which has no pipeline, and pp is 2",
            "write shard: zero1 (its distributed optimizer), or pp: 1", id="full",
        ),
        pytest.param(
            {"pp": 2, "schedule": "zero_bubble"}, DENSE, "schedule",
            "Megatron has no zero_bubble schedule", "write schedule: 1f1b, or delete it", id="schedule",
        ),
        pytest.param(
            {"pp": 4, "vp": 2, "dp": 8}, DENSE, "vp",
            "an interleaved pipeline of 4 stages takes micro-batches in rounds of 4, and a batch of 48 makes 6",
            "write a global batch of 64 (8 micro-batches), or delete vp", id="rounds",
        ),
        pytest.param(
            {"dp": 5}, DENSE, "dp",
            "dp 5 · micro_batch 1 = 5 does not divide the global batch of 48",
            "write a multiple of 5 as train.global_batch (and in batch_ramp), or smaller dp or micro_batch", id="batch",
        ),
    ],
)  # fmt: skip
def test_what_megatron_cannot_run_is_said_with_its_numbers(
    keys: dict[str, Any], config: ModelConfig, key: str, what: str, hint: str
) -> None:
    length = 66 if key == "cp" else 48 if keys.get("tp") == 6 else 64
    assert problems(keys, config, length=length) == [Problem(("layout", key), what, hint)]


@pytest.mark.parametrize(
    ("keys", "lora", "key", "what", "hint"),
    [
        ({"pp": 2}, False, "pp", "pp: 2 is a pipeline, which torchtune does not have", "delete it"),
        ({"cp": 2}, False, "cp", "cp: 2 is context parallel, which torchtune does not have", "delete it"),
        ({"tp": 8}, False, "tp", "tp: 8 does not divide the 4 key/value heads", "write tp: 1, 2 or 4"),
        ({"tp": 2}, True, "tp", "tp: 2 with LoRA is not in torchtune: adapters are not cut", "delete it"),
        (
            {"dp": 2, "shard": "zero1"}, False, "shard",
            "torchtune's 2 dp ranks share out weights, gradients and optimiser states (FSDP2), and shard is zero1",
            "write shard: full",
        ),
        (
            {"recompute": "selective"}, False, "recompute",
            "torchtune recomputes every layer or none, not selectively", "write recompute: full or none",
        ),
    ],
)  # fmt: skip
def test_what_torchtune_cannot_run_is_said_with_its_numbers(
    keys: dict[str, Any], lora: bool, key: str, what: str, hint: str
) -> None:
    assert problems(keys, engine="torchtune", lora=lora) == [Problem(("layout", key), what, hint)]
    assert problems({"dp": 4, "shard": "full", "recompute": "full"}, engine="torchtune", lora=lora) == []


def test_an_anatomy_is_held_to_the_same_rules_as_the_model_it_describes() -> None:
    layout = resolve_layout(Layout(tp=16), DENSE)
    asked: dict[str, Any] = {"sequence_length": 64, "batch_sizes": [8], "engine": "megatron"}
    described: ModelShape = model_shape(DENSE)
    assert layout_problems(layout, described, **asked) == layout_problems(layout, DENSE, **asked) != []


def test_what_megatron_does_by_itself_is_noted() -> None:
    layout = resolve_layout(Layout(tp=8), DENSE)
    assert layout_notes(layout, DENSE, engine="megatron") == [
        "Megatron pads the vocabulary of 96 to 1024, a multiple of 128 · tp 8",
        "tp: 8 is more than the 4 key/value heads: 2 ranks work with the same one",
    ]
    assert layout_notes(layout, DENSE, engine="torch") == []


@pytest.mark.parametrize(
    ("keys", "config", "said"),
    [
        ({"tp": 8, "micro_batch": 16}, DENSE, "tp: 8 reaches beyond the 4 GPUs that fast links join"),
        ({"tp": 3, "micro_batch": 16}, DENSE, "tp: 3 does not divide the 4 GPUs that fast links join"),
        (
            {"ep": 6, "dp": 6, "micro_batch": 8},
            EXPERTS,
            "ep 6 · etp 1 = 6 ranks hold the experts and fast links join 4",
        ),
        ({"micro_batch": 2}, DENSE, "a micro-batch of 2 has 128 tokens on a rank, and below 512 a GPU reads weights"),
    ],
)
def test_what_hardware_makes_unwise_is_warned_about_where_it_is_known(
    keys: dict[str, Any], config: ModelConfig, said: str
) -> None:
    layout = resolve_layout(Layout.model_validate(keys), config)
    asked: dict[str, Any] = {"sequence_length": 64, "batch_sizes": [48], "engine": "megatron"}
    (warning,) = layout_warnings(layout, config, **asked, link_domain=4)
    assert warning.startswith(said)
    assert layout_warnings(layout, config, **asked) == []


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    """megatron-core's own checks; importing them costs seconds, so once for all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_config import TransformerConfig
    return SimpleNamespace(
        torch=torch, parallel_state=parallel_state, config=TransformerConfig, layers=get_num_layers_to_build
    )


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_megatron_refuses_the_same_heads_and_groups(megatron: SimpleNamespace) -> None:
    for heads, groups in ((8, 4), (8, 8), (8, 1), (12, 4), (12, 6)):
        config = tiny_config("llama", heads=heads, kv_heads=groups, ffn=240, vocab_size=96)
        for tp in (1, 2, 3, 4, 6, 8, 12, 16):
            legal = not problems({"tp": tp}, config, length=48 * tp)
            try:
                megatron.config(
                    num_layers=2,
                    hidden_size=96,
                    num_attention_heads=heads,
                    num_query_groups=groups,
                    tensor_model_parallel_size=tp,
                )
            except ValueError:
                assert not legal, (heads, groups, tp)
            else:
                assert legal, (heads, groups, tp)


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_megatron_refuses_the_same_equal_chunks_and_takes_the_written_ones(megatron: SimpleNamespace) -> None:
    for pp, vp in ((2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (2, 4), (4, 2)):
        legal = not problems({"pp": pp, "vp": vp})
        sizes = {
            "num_layers": 8,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vp if vp > 1 else None,
            "pipeline_dtype": megatron.torch.bfloat16,
        }
        try:
            megatron.layers(megatron.config(**sizes), vp_stage=0 if vp > 1 else None, pp_rank=0)
        except AssertionError:
            assert not legal, (pp, vp)
        else:
            assert legal, (pp, vp)
        written = resolve_layout(Layout(pp=pp, vp=vp), DENSE).stages
        chunks = [["decoder"] * layers for layers in written]
        chunks[0].insert(0, "embedding")
        chunks[-1].append("loss")
        megatron.config(**sizes, pipeline_model_parallel_layout=chunks)


@pytest.fixture
def world(megatron: SimpleNamespace) -> Callable[..., bool]:
    """Groups of a world that exists on paper: megatron-core's arithmetic of ranks, without ranks."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def grouped(ranks: int, **sizes: int) -> bool:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            megatron.parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        except (RuntimeError, AssertionError):
            return False
        except ImportError:  # einops, which it wants for several instances once all checks have passed
            return True
        finally:
            megatron.parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()
        return True

    return grouped


def test_megatron_refuses_the_same_places_for_experts_and_copies(world: Callable[..., bool]) -> None:
    seen = set()
    for keys in (
        {"tp": 2, "dp": 4, "pp": 2, "ep": 2},
        {"dp": 4, "ep": 3},
        {"dp": 4, "ep": 2, "etp": 2},
        {"tp": 2, "dp": 3, "ep": 6},
        {"tp": 2, "dp": 2, "ep": 6},
        {"dp": 6, "ep": 3, "replicate": 2},
        {"dp": 6, "ep": 2, "replicate": 2},
        {"cp": 2, "dp": 3, "ep": 6},
    ):
        layout = resolve_layout(Layout.model_validate(keys), EXPERTS)
        legal = not problems(keys, EXPERTS)
        seen.add(legal)
        assert legal == world(
            layout.world_size,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            num_distributed_optimizer_instances=layout.replicate,
        ), keys
    assert seen == {True, False}

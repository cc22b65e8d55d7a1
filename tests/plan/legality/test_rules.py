"""What a layout may not do, each message with its numbers, and what it had better not do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.models.tiny_models import tiny_config
from trainshed.errors import InputError
from trainshed.plan.layout import resolve_layout
from trainshed.plan.legality import layout_problems, layout_warnings, pipeline_bubble
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.section import Problem

DENSE = tiny_config("llama", layers=8, heads=8, kv_heads=4, ffn=48, vocab_size=96)
EXPERTS = tiny_config(
    "mixtral", layers=8, heads=8, kv_heads=8, moe={"experts": 6, "top_k": 2, "ffn": 24, "shared_ffn": 20}
)


def problems(
    keys: dict[str, Any], config: ModelConfig = DENSE, *, length: int = 64, batches: tuple[int, ...] = (48,)
) -> list[Problem]:
    layout = resolve_layout(Layout.model_validate(keys), config)
    return layout_problems(layout, config, sequence_length=length, batch_sizes=batches)


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        ({}, DENSE),
        ({"tp": 4, "pp": 2, "vp": 2, "cp": 2, "dp": 2}, DENSE),
        ({"tp": 4, "cp": 2, "dp": 2, "shard": "full"}, DENSE),
        ({"pp": 2, "shard": "full"}, DENSE),
        ({"pp": 3, "schedule": "zero_bubble", "dp": 2, "replicate": 2, "micro_batch": 2}, DENSE),
        ({"tp": 2, "etp": 2, "ep": 3, "dp": 6}, EXPERTS),
        ({"ep": 6, "cp": 2, "dp": 3}, EXPERTS),
        ({"ep": 6, "dp": 6, "shard": "none"}, EXPERTS),
        ({"dp": 2, "shard": "none", "replicate": 2}, DENSE),
    ],
)
def test_a_legal_layout_has_no_problems(keys: dict[str, Any], config: ModelConfig) -> None:
    assert problems(keys, config) == []


@pytest.mark.parametrize(
    ("keys", "config", "key", "what", "hint"),
    [
        pytest.param(
            {"tp": 4}, tiny_config("gpt2", heads=6, kv_heads=6), "tp",
            "tp: 4 does not divide the 6 heads", "write tp: 1 or 2", id="heads",
        ),
        pytest.param(
            {"tp": 8}, DENSE, "tp",
            "tp: 8 does not divide the 4 key/value heads", "write tp: 1, 2 or 4", id="kv_heads",
        ),
        pytest.param(
            {"tp": 4}, tiny_config("gpt2", ffn=50), "tp",
            "tp: 4 does not divide the 50 feed-forward rows", "write tp: 1 or 2", id="ffn",
        ),
        pytest.param(
            {"tp": 8}, EXPERTS, "tp",
            "tp: 8 does not divide the 20 rows of the shared expert", "write tp: 1, 2 or 4", id="shared_ffn",
        ),
        pytest.param(
            {"tp": 4}, tiny_config("llama", kv_heads=4, vocab_size=3), "tp",
            "tp: 4 leaves ranks without a row of the 3 in the vocabulary", "write tp: 3 or less", id="vocab",
        ),
        pytest.param(
            {"ep": 2, "dp": 2}, DENSE, "ep",
            "ep: 2 spreads experts, and the model has none", "delete it", id="ep without experts",
        ),
        pytest.param(
            {"etp": 2, "tp": 2}, DENSE, "etp",
            "etp: 2 spreads experts, and the model has none", "delete it", id="etp without experts",
        ),
        pytest.param(
            {"ep": 4, "dp": 4}, EXPERTS, "ep",
            "ep: 4 does not divide the 6 experts", "write ep: 1, 2 or 3", id="experts",
        ),
        pytest.param(
            {"tp": 4, "etp": 4}, tiny_config("mixtral", kv_heads=4, moe={"experts": 4, "top_k": 2, "ffn": 6}), "etp",
            "etp: 4 does not divide the 6 rows of an expert", "write etp: 1 or 2", id="expert rows",
        ),
        pytest.param(
            {"etp": 2, "dp": 2}, EXPERTS, "etp",
            "etp: 2 does not divide tp: 1, whose ranks share an expert's tokens", "write etp: 1", id="etp in tp",
        ),
        pytest.param(
            {"ep": 3, "dp": 2, "cp": 2}, EXPERTS, "ep",
            "ep 3 · etp 1 = 3 does not divide the dp 2 · cp 2 · tp 1 = 4 ranks",
            "write ep and etp so that their product divides 4, or dp so that 3 does", id="expert mesh",
        ),
        pytest.param(
            {"ep": 6, "dp": 6, "replicate": 2}, EXPERTS, "ep",
            "ep 6 · etp 1 = 6 does not divide the dp 3 · cp 1 · tp 1 = 3 ranks of one copy",
            "write ep and etp so that their product divides 3, or dp so that 6 does", id="experts in one copy",
        ),
        pytest.param(
            {"cp": 3}, DENSE, "cp",
            "cp: 3 cuts a sequence into 6 pieces, and 64 tokens do not divide by that",
            "write data.sequence_length: 66, or another cp", id="context pieces",
        ),
        pytest.param(
            {"pp": 4, "vp": 3}, DENSE, "pp",
            "pp 4 · vp 3 = 12 chunks, and the model has 8 layers",
            "write pp and vp with a product of 8 or less", id="more chunks than layers",
        ),
        pytest.param(
            {"pp": 2, "stages": [3, 4]}, DENSE, "stages",
            "3 + 4 = 7 layers, and the model has 8", "write stages: [4, 4], or delete it", id="stages",
        ),
        pytest.param(
            {"dp": 4, "shard": "none", "replicate": 2}, DENSE, "replicate",
            "replicate: 2 is not read with `shard: none`: each of the 4 dp ranks is a copy",
            "delete it, or write another shard", id="replicate of copies",
        ),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_run_is_said_with_its_numbers(
    keys: dict[str, Any], config: ModelConfig, key: str, what: str, hint: str
) -> None:
    assert problems(keys, config) == [Problem(("layout", key), what, hint)]


def test_sequence_parallel_ranks_share_the_tokens_of_a_sequence() -> None:
    assert problems({"tp": 4, "cp": 2}, length=12) == [
        Problem(
            ("layout", "tp"),
            "tp: 4 ranks share the 6 tokens of a sequence, and 6 does not divide by 4",
            "write data.sequence_length: 16, or another tp",
        )
    ]


@pytest.mark.parametrize(
    ("keys", "batches", "key", "what", "hint"),
    [
        (
            {"dp": 4},
            (6, 8, 10),
            "dp",
            "dp 4 · micro_batch 1 = 4 does not divide the global batch of 6, 10",
            "write a multiple of 4 as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        ),
        (
            {"dp": 2, "micro_batch": 4},
            (12,),
            "micro_batch",
            "dp 2 · micro_batch 4 = 8 does not divide the global batch of 12",
            "write a multiple of 8 as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        ),
        (
            {"pp": 4, "dp": 2},
            (16, 4),
            "schedule",
            "1f1b fills its 4 stages with as many micro-batches, and a batch of 4 makes 2",
            "write schedule: gpipe, or a global batch of 8 or more",
        ),
        (
            {"pp": 2, "micro_batch": 8},
            (8, 16),
            "micro_batch",
            "1f1b fills its 2 stages with as many micro-batches, and a batch of 8 makes 1",
            "write micro_batch: 4, schedule: gpipe, or a global batch of 16 or more",
        ),
        (
            {"pp": 2, "vp": 2, "dp": 2, "micro_batch": 2},
            (8, 20),
            "schedule",
            "interleaved runs 2 equal rounds, and a batch of 20 makes 5 micro-batches",
            "write a global batch of 24 (6 micro-batches)",
        ),
        (
            {"pp": 3, "schedule": "zero_bubble"},
            (7,),
            "schedule",
            "zero_bubble runs 2 equal rounds, and a batch of 7 makes 7 micro-batches",
            "write a global batch of 9 (9 micro-batches)",
        ),
    ],
)
def test_batches_that_do_not_fit_are_said_with_what_would(
    keys: dict[str, Any], batches: tuple[int, ...], key: str, what: str, hint: str
) -> None:
    assert problems(keys, batches=batches) == [Problem(("layout", key), what, hint)]


def test_a_zero_bubble_pipeline_cannot_recompute_selectively() -> None:
    keys = {"pp": 2, "schedule": "zero_bubble", "recompute": "selective"}
    assert [(problem.path, problem.what[:39]) for problem in problems(keys)] == [
        (("layout", "recompute"), "selective keeps activations for one bac")
    ]


def test_all_problems_come_at_once() -> None:
    keys = {"tp": 8, "cp": 3, "pp": 2, "stages": [1, 1], "dp": 5, "ep": 2}
    assert [problem.path for problem in problems(keys)] == [
        ("layout", key) for key in ("tp", "ep", "cp", "stages", "dp")
    ]


def test_an_engine_whose_rules_are_not_here_is_not_waved_through() -> None:
    layout = resolve_layout(Layout(), DENSE)
    with pytest.raises(InputError, match="what the engine maxtext can run is not known here"):
        layout_problems(layout, DENSE, sequence_length=64, batch_sizes=[8], engine="maxtext")


@pytest.mark.parametrize(
    ("schedule", "name", "vp"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
    ],
)
def test_torch_refuses_the_same_numbers_of_micro_batches(schedule: str, name: str, vp: int) -> None:
    from torch.distributed.pipelining import schedules

    for pp in (2, 3, 4):
        stages = [SimpleNamespace(group_size=pp, group_rank=0, num_stages=pp * vp, submod=None) for _ in range(vp)]
        for micro_batches in range(1, 14):
            legal = not problems({"pp": pp, "vp": vp, "schedule": schedule}, batches=(micro_batches,), length=8)
            try:
                getattr(schedules, name)(stages if "Interleaved" in name else stages[0], micro_batches)
            except ValueError:
                assert not legal, (pp, micro_batches)
            else:
                assert legal, (pp, micro_batches)


def warnings(keys: dict[str, Any], config: ModelConfig = DENSE, batches: tuple[int, ...] = (48,)) -> list[str]:
    layout = resolve_layout(Layout.model_validate(keys), config)
    return layout_warnings(layout, config, sequence_length=64, batch_sizes=batches)


@pytest.mark.parametrize(
    ("keys", "config", "batches", "warning"),
    [
        (
            {"pp": 4},
            DENSE,
            (2, 4),
            "4 micro-batches for 4 pipeline stages: 43% of each step is spent waiting; "
            "a larger global batch or a smaller pp shortens it",
        ),
        (
            {"tp": 4},
            tiny_config("gpt2", vocab_size=97),
            (8,),
            "the vocabulary of 97 does not divide by tp: 4: its ranks get unequal parts of the embedding and the head",
        ),
        (
            {"cp": 2},
            tiny_config("mistral", sliding_window=8),
            (8,),
            "cp: 2 gathers the keys of all 64 tokens, and the model looks back 8 only",
        ),
    ],
)
def test_an_unwise_layout_is_legal_and_warned_about(
    keys: dict[str, Any], config: ModelConfig, batches: tuple[int, ...], warning: str
) -> None:
    assert warnings(keys, config, batches) == [warning]


def test_a_wise_layout_is_not_warned_about() -> None:
    assert warnings({"tp": 2, "pp": 2, "dp": 2, "shard": "zero1"}) == []


def test_interleaving_and_zero_bubble_shorten_the_wait() -> None:
    plain, interleaved, zero = (
        resolve_layout(Layout.model_validate({"pp": 4, **keys}), DENSE)
        for keys in ({}, {"vp": 2}, {"schedule": "zero_bubble"})
    )
    assert pipeline_bubble(plain, 9) == pytest.approx(3 / 12)
    assert pipeline_bubble(interleaved, 9) == pytest.approx(3 / 21)
    assert pipeline_bubble(zero, 9) == pytest.approx(1 / 10)


@pytest.mark.parametrize("shard", ["zero2", "full"])
@pytest.mark.parametrize("keys", [{"dp": 2}, {"cp": 2}])
def test_a_zero_bubble_pipeline_of_our_own_engine_shares_out_optimiser_states_alone(
    keys: dict[str, Any], shard: str
) -> None:
    (found,) = problems({"pp": 2, "shard": shard, "schedule": "zero_bubble", **keys}, DENSE)
    assert found.path == ("layout", "shard")
    assert found.what.startswith(f"shard: {shard} with schedule: zero_bubble would leave gradients whole")
    assert found.hint == "write schedule: 1f1b, or shard: zero1"
    assert problems({"pp": 2, "shard": "zero1", "schedule": "zero_bubble", **keys}, DENSE) == []
    for schedule in ("1f1b", "gpipe"):
        assert problems({"pp": 2, "shard": shard, "schedule": schedule, **keys}, DENSE) == []


def test_narrow_weights_are_not_shared_out_and_adapters_are_cut_with_their_projections() -> None:
    def broken(shard: str, *, quantized: bool) -> list[Problem]:
        keys = Layout.model_validate({"dp": 2, "tp": 2, "shard": shard})
        asked = {"sequence_length": 64, "batch_sizes": (48,), "lora": True}
        return layout_problems(resolve_layout(keys, DENSE), DENSE, **asked, quantized=quantized)

    assert broken("full", quantized=False) == broken("zero1", quantized=True) == []
    (problem,) = broken("full", quantized=True)
    assert problem.path == ("layout", "shard")
    assert "`lora.quantize` holds in 8 or 4 bits" in problem.what
    assert problem.hint == "write shard: zero1, or delete train.lora.quantize"

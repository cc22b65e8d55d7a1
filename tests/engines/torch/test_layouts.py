"""Every layout trains like one process: real gloo ranks, real runs, 20 steps, the figures of their events compared."""

from __future__ import annotations

from typing import Any

import pytest

from support.recipes.small_recipes import ALONE, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import (
    train_compiled,
    train_counting_stages,
    train_in_slices,
    train_unchecked,
    train_validating,
)
from support.runs.small_runs import SmallRuns, difference, events, figures

FOUR_LAYERS, FOUR_GROUPS = "model.config.layers=4", "model.config.kv_heads=4"
HYBRID = "dp=4,replicate=2,shard=full,micro_batch=2"
NAMED = [
    "tp=2,micro_batch=4",
    "pp=2,micro_batch=2",
    "dp=2,micro_batch=2",
    "dp=2,shard=full,micro_batch=2",
    "cp=2,micro_batch=4",
    "tp=2,pp=2,micro_batch=4",
    "tp=2,dp=2,micro_batch=4",
]
"""Layouts that are proven for every model in every `make test`."""
MORE = [
    "dp=2,shard=none,micro_batch=2",
    "dp=2,shard=zero2,micro_batch=2",
    HYBRID,
    "cp=2,tp=2,micro_batch=4",
    "cp=2,dp=2,shard=full,micro_batch=4",
    "pp=2,dp=2,micro_batch=2",
    "pp=2,dp=2,shard=none,micro_batch=2",
    "pp=2,dp=2,shard=zero2,micro_batch=2",
    "pp=2,dp=2,shard=full,micro_batch=2",
    "pp=2,dp=2,shard=full,recompute=selective,micro_batch=1",
    "pp=2,dp=2,shard=full,schedule=gpipe,micro_batch=1",
    "pp=2,dp=4,replicate=2,shard=full,micro_batch=1",
    "pp=2,dp=4,replicate=2,shard=zero2,micro_batch=1",
    "pp=2,cp=2,shard=full,micro_batch=4",
    "pp=2,cp=2,micro_batch=4",
    "pp=2,schedule=gpipe,micro_batch=2",
    "pp=2,schedule=zero_bubble,micro_batch=2",
    "pp=2,schedule=zero_bubble,tp=2,micro_batch=4",
    "pp=2,schedule=zero_bubble,dp=2,micro_batch=2",
    "pp=2,schedule=zero_bubble,dp=2,shard=none,micro_batch=2",
    "tp=2,recompute=full,micro_batch=4",
    "tp=2,recompute=selective,micro_batch=4",
    "dp=2,shard=full,recompute=selective,micro_batch=2",
    "pp=2,recompute=full,micro_batch=2",
    "tp=2,offload=activations,micro_batch=4",
    "tp=2,overlap=tp,micro_batch=4",
    "tp=2,overlap=tp,recompute=full,dp=2,shard=full,micro_batch=2",
    "tp=2,overlap=tp,pp=2,cp=2,micro_batch=4",
    "dp=2,shard=full,offload=activations,recompute=full,micro_batch=2",
    "dp=2,shard=full,offload=activations,micro_batch=2",
    "pp=2,schedule=zero_bubble,offload=activations,micro_batch=2",
    "cp=2,dp=2,offload=activations,micro_batch=2",
    "tp=4,micro_batch=8",
    "tp=2,pp=2,dp=2,micro_batch=2",
    "tp=2,cp=2,dp=2,shard=full,micro_batch=4",
]
CHUNKED = [
    "pp=2,vp=2,micro_batch=2",
    "pp=2,vp=2,schedule=zero_bubble,micro_batch=2",
    "pp=2,stages=1+3,micro_batch=2",
    "pp=4,micro_batch=2",
    "pp=2,vp=2,dp=2,micro_batch=2",
    "pp=2,vp=2,dp=2,shard=zero2,micro_batch=2",
    "pp=2,vp=2,dp=2,shard=full,micro_batch=1",
    "pp=2,vp=2,schedule=zero_bubble,dp=2,micro_batch=2",
    "pp=2,vp=2,tp=2,stages=1+1+1+1,micro_batch=4",
]
"""Layouts that need four layers."""
EXPERTS = [
    "dp=2,ep=2,micro_batch=4",
    "tp=2,ep=2,micro_batch=4",
    "tp=2,etp=2,micro_batch=4",
    "cp=2,ep=2,micro_batch=4",
    "dp=2,ep=2,shard=none,micro_batch=4",
    "dp=4,ep=2,shard=full,micro_batch=2",
    f"{HYBRID},ep=2",
    "dp=4,ep=4,shard=none,micro_batch=2",
    "tp=2,dp=2,ep=4,micro_batch=4",
    "tp=2,dp=2,ep=2,etp=2,micro_batch=4",
    "tp=2,dp=2,ep=2,shard=full,micro_batch=4",
    "tp=2,ep=2,recompute=selective,micro_batch=4",
    "pp=2,dp=2,ep=2,schedule=zero_bubble,micro_batch=2",
    "pp=2,dp=4,ep=2,shard=full,micro_batch=1",
    "pp=2,dp=4,ep=2,shard=zero2,micro_batch=1",
    # More ranks than some tensors have rows.
    "dp=8,ep=2,shard=full,micro_batch=1",
]
"""Layouts of models with experts."""
SAMPLED = {
    ("dense", each)
    for each in [
        "dp=2,shard=none,micro_batch=2",
        HYBRID,
        "cp=2,tp=2,micro_batch=4",
        "pp=2,schedule=zero_bubble,dp=2,micro_batch=2",
        "tp=2,recompute=selective,micro_batch=4",
        "tp=2,overlap=tp,micro_batch=4",
        "pp=2,dp=2,shard=zero2,micro_batch=2",
        "pp=2,vp=2,dp=2,shard=full,micro_batch=1",
        "pp=2,vp=2,schedule=zero_bubble,micro_batch=2",
        "pp=2,stages=1+3,micro_batch=2",
        "pp=2,schedule=zero_bubble,offload=activations,micro_batch=2",
    ]
} | {
    ("moe", each)
    for each in [
        "pp=2,vp=2,micro_batch=2",
        "tp=2,recompute=selective,micro_batch=4",
        "dp=2,shard=full,offload=activations,micro_batch=2",
        *EXPERTS[:4],
    ]
}
"""What `make test` proves besides; the rest is in `make test-all`."""


def cases() -> list[Any]:
    """All pairs of a model and a layout, with the overrides that the layout needs."""
    found = []
    for model in ("dense", "tied", "moe"):
        for layout in [*NAMED, *MORE, *CHUNKED, *(EXPERTS if model == "moe" else [])]:
            if model == "moe" and "tp=4" in layout:
                continue
            overrides = (FOUR_LAYERS,) if layout in CHUNKED else (FOUR_GROUPS,) if "tp=4" in layout else ()
            sampled = (model, layout) in SAMPLED or (layout in NAMED and (model != "tied" or "pp" in layout))
            marks = () if sampled else (pytest.mark.full,)
            found.append(pytest.param(model, layout, overrides, id=f"{model}-{layout}", marks=marks))
    return found


def assert_same_curve(
    expected: list[dict[str, Any]], got: list[dict[str, Any]], *, loss: float, grad_norm: float
) -> None:
    """Every figure of every step within its bound, and the same batches."""
    assert len({event["loss"] for event in expected}) == len(expected), "a run that learns nothing proves nothing"
    for figure in ("batch_hash", "lr", "tokens", "skipped"):
        assert [event[figure] for event in got] == [event[figure] for event in expected]
    bounds = dict.fromkeys(("grad_norm", "z_loss", "moe_balance", "moe_z", "mtp_loss"), grad_norm) | {"loss": loss}
    for figure, bound in bounds.items():
        if figure in expected[0]:
            assert difference(expected, got, figure) <= bound, figure


@pytest.mark.parametrize(("model", "layout", "overrides"), cases())
def test_a_layout_gives_the_losses_and_gradient_norms_of_one_process(
    small_runs: SmallRuns, model: str, layout: str, overrides: tuple[str, ...]
) -> None:
    expected, got = small_runs.alone(model, *overrides), small_runs.fresh(model, layout, *overrides)
    assert_same_curve(expected, got, loss=1e-9, grad_norm=1e-9)


FAMILY_SAMPLE = [
    ("olmo3", "cp=2,tp=2,micro_batch=4"),
    ("gemma3", "tp=2,pp=2,micro_batch=4"),
    ("gemma3", "dp=2,shard=full,recompute=selective,micro_batch=2"),
    ("gemma2", "cp=2,micro_batch=4"),
    ("biases", "tp=2,pp=2,micro_batch=4"),
    ("biases", "dp=2,shard=full,micro_batch=2"),
    ("phi3", "tp=2,micro_batch=4"),
    ("gpt_oss", "tp=2,etp=2,micro_batch=4"),
    ("gpt_oss", "cp=2,ep=2,micro_batch=4"),
    ("gpt_oss", "pp=2,dp=2,ep=2,shard=full,micro_batch=1"),
    ("llama4", "tp=2,cp=2,ep=2,micro_batch=4"),
    ("llama4", "pp=2,dp=2,micro_batch=2"),
]
FAMILY_LAYOUTS = [
    ("nemotron", "tp=2,pp=2,micro_batch=4"),
    *(
        (model, layout)
        for model in ("olmo3", "gemma3", "gemma2", "nemotron", "phi3", "biases")
        for layout in [*NAMED, *MORE[:6]]
    ),
    *((model, layout) for model in ("gpt_oss", "llama4") for layout in [*NAMED, *MORE[:6], *EXPERTS]),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *FAMILY_SAMPLE,
        *(pytest.param(*case, marks=pytest.mark.full) for case in FAMILY_LAYOUTS if case not in FAMILY_SAMPLE),
    ],
)
def test_what_families_add_to_the_decoder_does_not_depend_on_the_layout(
    small_runs: SmallRuns, model: str, layout: str
) -> None:
    short = ("train.steps=6",)
    expected, got = small_runs.alone(model, *short), small_runs.fresh(model, layout, *short)
    assert_same_curve(expected, got, loss=1e-9, grad_norm=1e-9)


DOCUMENTS = "data.document_mask=true"


@pytest.mark.parametrize(
    ("model", "layout", "overrides"),
    [
        *(("dense", layout, ()) for layout in NAMED),
        ("dense", "cp=2,tp=2,micro_batch=4", ("model.config.sliding_window=5", "model.config.family=mistral")),
        ("dense", "pp=2,vp=2,schedule=zero_bubble,micro_batch=2", (FOUR_LAYERS,)),
        ("dense", "tp=2,recompute=selective,micro_batch=4", ()),
        ("olmo3", "cp=2,tp=2,micro_batch=4", ("train.steps=6",)),
        pytest.param("gemma2", "cp=2,micro_batch=4", ("train.steps=6",), marks=pytest.mark.full),
        pytest.param("llama4", "tp=2,cp=2,ep=2,micro_batch=4", ("train.steps=6",), marks=pytest.mark.full),
        pytest.param("gpt_oss", "tp=2,cp=2,ep=2,micro_batch=4", ("train.steps=6",), marks=pytest.mark.full),
        ("tied", "tp=2,cp=2,micro_batch=4", ()),
        ("tied", "pp=2,dp=2,micro_batch=2", ()),
        ("moe", "tp=2,ep=2,micro_batch=4", ()),
        ("moe", "cp=2,ep=2,micro_batch=4", ()),
    ],
)
def test_documents_are_kept_apart_on_every_layout(
    small_runs: SmallRuns, model: str, layout: str, overrides: tuple[str, ...]
) -> None:
    expected = small_runs.alone(model, DOCUMENTS, *overrides)
    assert_same_curve(expected, small_runs.fresh(model, layout, DOCUMENTS, *overrides), loss=1e-9, grad_norm=1e-9)
    plain = small_runs.alone(model, *overrides)
    assert {event["learned_tokens"] < 8 * 16 for event in expected} == {True}
    assert [event["loss"] for event in plain] != [event["loss"] for event in expected]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "tp=2,pp=2,cp=2,micro_batch=4"),
        ("moe", "tp=2,pp=2,dp=2,ep=4,micro_batch=2"),
        pytest.param("tied", "tp=2,pp=2,dp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("moe", "tp=2,cp=2,dp=2,ep=4,etp=2,shard=full,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_eight_ranks_that_mix_everything_train_like_one(small_runs: SmallRuns, model: str, layout: str) -> None:
    assert_same_curve(small_runs.alone(model), small_runs.fresh(model, layout), loss=1e-9, grad_norm=1e-9)


SINGLE = [
    ("dense", "tp=2,micro_batch=4"),
    ("moe", "dp=2,ep=2,micro_batch=4"),
    ("dense", "pp=2,micro_batch=2"),
    ("dense", "dp=2,shard=full,micro_batch=2"),
    ("dense", "cp=2,micro_batch=4"),
    ("moe", "tp=2,ep=2,micro_batch=4"),
    ("moe", "cp=2,micro_batch=4"),
    ("tied", "tp=2,pp=2,micro_batch=4"),
    ("dense", "tp=2,pp=2,cp=2,micro_batch=4"),
]


@pytest.mark.parametrize(
    ("model", "layout"), [*SINGLE[:2], *(pytest.param(*case, marks=pytest.mark.full) for case in SINGLE[2:])]
)
def test_in_single_precision_layouts_differ_by_rounding_alone(small_runs: SmallRuns, model: str, layout: str) -> None:
    precision = "train.precision=fp32"
    expected, got = small_runs.alone(model, precision), small_runs.fresh(model, layout, precision)
    assert_same_curve(expected, got, loss=1e-5, grad_norm=1e-4)


@pytest.mark.parametrize("layout", ["dp=2,micro_batch=2", pytest.param("tp=2,micro_batch=4", marks=pytest.mark.full)])
def test_with_bf16_products_layouts_stay_close(small_runs: SmallRuns, layout: str) -> None:
    """8 bits of mantissa: each product is off by up to 0.4%, and 20 steps carry that along."""
    precision = "train.precision=bf16"
    expected, got = small_runs.alone("dense", precision), small_runs.fresh("dense", layout, precision)
    assert_same_curve(expected, got, loss=2e-3, grad_norm=5e-2)


@pytest.mark.parametrize(
    ("model", "layout", "override"),
    [
        ("dense", "tp=2,pp=2,micro_batch=2", "train.batch_ramp={start: 4, increment: 2, samples: 24}"),
        ("dense", "tp=2,micro_batch=4", "train.z_loss=0.001"),
        ("dense", "cp=2,tp=2,micro_batch=4", "train.dropout=0.1"),
        pytest.param("moe", "dp=2,ep=2,micro_batch=1", "train.batch_ramp={start: 4, increment: 2, samples: 24}"),
        pytest.param("moe", "pp=2,micro_batch=2", "train.dropout=0.1", marks=pytest.mark.full),
        pytest.param("dense", "dp=2,shard=full,micro_batch=1", "train.dropout=0.1", marks=pytest.mark.full),
        pytest.param("tied", "tp=2,pp=2,micro_batch=4", "train.dropout=0.1", marks=pytest.mark.full),
        pytest.param("dense", "pp=2,micro_batch=2", "train.z_loss=0.001", marks=pytest.mark.full),
        pytest.param("dense", "tp=2,micro_batch=4", "train.optimizer.clip=0.01", marks=pytest.mark.full),
        pytest.param("dense", "cp=2,micro_batch=4", "model.config.sliding_window=5", marks=pytest.mark.full),
    ],
)
def test_what_a_recipe_adds_to_training_does_not_depend_on_the_layout(
    small_runs: SmallRuns, model: str, layout: str, override: str
) -> None:
    expected, got = small_runs.alone(model, override), small_runs.fresh(model, layout, override)
    assert_same_curve(expected, got, loss=1e-9, grad_norm=1e-9)
    plain = small_runs.alone(model)
    assert [event["loss"] for event in plain] != [event["loss"] for event in expected], f"{override} does nothing"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "tp=2,recompute=selective,micro_batch=4"),
        pytest.param("dense", "tp=2,pp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("moe", "dp=2,shard=full,micro_batch=4", marks=pytest.mark.full),
        pytest.param("dense", "pp=2,schedule=zero_bubble,micro_batch=2", marks=pytest.mark.full),
        pytest.param("dense", "dp=2,shard=full,recompute=full,micro_batch=2", marks=pytest.mark.full),
        pytest.param("dense", "cp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("tied", "tp=2,pp=2,dp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("moe", "dp=2,ep=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("moe", "tp=2,etp=2,recompute=selective,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_blocks_captured_as_for_a_gpu_give_the_same_on_every_layout(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    folder, short = small_runs.new_folder(), ("train.steps=5",)
    assert set(rank_pool.run(train_compiled, folder, model, layout, short, ranks=world_size(layout))) == {0}
    assert_same_curve(small_runs.alone(model, *short), events(folder, "step"), loss=1e-9, grad_norm=1e-9)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        # Ten blocks: more than a compiler makes versions of one function.
        ("dense", "dp=2,recompute=selective,micro_batch=4"),
        pytest.param("moe", "tp=2,ep=2,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_captured_blocks_drop_what_others_drop(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    folder, dropping = small_runs.new_folder(), ("train.steps=3", "train.dropout=0.1", "model.config.layers=10")
    assert set(rank_pool.run(train_compiled, folder, model, layout, dropping, ranks=world_size(layout))) == {0}
    assert_same_curve(small_runs.alone(model, *dropping), events(folder, "step"), loss=1e-9, grad_norm=1e-9)


def test_ranks_with_uneven_parts_of_the_vocabulary_cut_the_loss_into_the_same_slices(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    # 61 words are 31 and 30 on two ranks. By twice its own part each, one would cut 64 tokens into 5, the other into 4.
    folder, short = small_runs.new_folder(), ("train.steps=3",)
    assert rank_pool.run(train_in_slices, folder, "dense", "tp=2,micro_batch=4", short, 960, ranks=2) == [0, 0]
    assert_same_curve(small_runs.alone("dense", *short), events(folder, "step"), loss=1e-9, grad_norm=1e-9)


@pytest.mark.parametrize("shard", ["zero2", "full"])
def test_what_a_zero_bubble_pipeline_cannot_shard_is_refused(
    small_runs: SmallRuns, rank_pool: RankPool, shard: str
) -> None:
    layout = f"pp=2,dp=2,shard={shard},schedule=zero_bubble,micro_batch=2"
    for end in rank_pool.ends(train_unchecked, small_runs.new_folder(), "dense", layout, (), ranks=4):
        assert end.error is not None
        assert f"shard: {shard} with schedule: zero_bubble: the gradients of a stage's weights come all" in end.error


def test_a_batch_that_grows_keeps_the_buffers_of_its_present_size_alone(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    folder, ramp = small_runs.new_folder(), "train.batch_ramp={start: 4, increment: 2, samples: 24}"
    growing = ("train.steps=6", ramp)
    stages = rank_pool.run(train_counting_stages, folder, "dense", "pp=2,micro_batch=2", growing, ranks=2)
    assert stages[0] == [1] * 6


def test_whatever_it_is_cut_into_one_process_gives_one_curve(small_runs: SmallRuns) -> None:
    for layout in ("micro_batch=1", "micro_batch=8", "micro_batch=4,recompute=full"):
        got = small_runs.fresh("moe", layout)
        assert_same_curve(small_runs.alone("moe"), got, loss=1e-9, grad_norm=1e-9)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "pp=2,micro_batch=2"),
        ("moe", "dp=2,ep=2,shard=full,micro_batch=2"),
        pytest.param("tied", "tp=2,pp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("dense", "cp=2,tp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("dense", "pp=2,schedule=zero_bubble,dp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("moe", "tp=2,etp=2,recompute=full,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_measuring_the_loss_on_other_samples_is_the_same_everywhere_and_changes_nothing(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    alone, spread = small_runs.new_folder(), small_runs.new_folder()
    short = ("train.steps=7",)
    for folder, each in ((alone, ALONE), (spread, layout)):
        assert set(rank_pool.run(train_validating, folder, model, each, short, ranks=world_size(each))) == {0}
    expected, got = events(alone, "validation"), events(spread, "validation")
    assert [event["step"] for event in got] == [event["step"] for event in expected] == [3, 6, 7]
    assert difference(expected, got, "loss") <= 1e-9
    assert figures(events(alone, "step")) == figures(small_runs.alone(model, *short))
    assert_same_curve(small_runs.alone(model, *short), events(spread, "step"), loss=1e-9, grad_norm=1e-9)

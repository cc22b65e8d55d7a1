"""A shrunk model on a layout: legal wherever the whole one is, small, and as awkward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.models.tiny_models import tiny_config
from trainshed.catalog import model_preset, preset_names
from trainshed.errors import InputError
from trainshed.models.parameters import parameter_count
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.shrink import ShrunkRun, shrink
from trainshed.recipe import Layout, ModelConfig

NO_SIZE = (
    "family", "norm", "norm_eps", "activation", "gated", "positions", "rope", "tied_embeddings", "qkv_bias",
    "output_bias", "mlp_bias", "qk_norm",
)  # fmt: skip


LONGROPE = {
    "base": 10000.0,
    "fraction": 0.75,
    "scaling": {
        "kind": "longrope",
        "factor": 4.0,
        "original_positions": 1024,
        "short_factors": [1.0 + pair / 10 for pair in range(12)],
        "long_factors": [2.0] * 12,
    },
}


def sizes(number: int, most: int) -> list[int]:
    return [size for size in range(1, most + 1) if number % size == 0]


def place(config: ModelConfig, **keys: Any) -> RankLayout:
    return resolve_layout(Layout.model_validate(keys), config)


@st.composite
def whole_runs(draw: st.DrawFn) -> tuple[ModelConfig, RankLayout, int, list[int]]:
    """A preset on a legal layout, with a sequence and one or two batch sizes that come out even."""
    config = model_preset(draw(st.sampled_from(preset_names())))
    tp = draw(st.sampled_from([size for size in sizes(config.kv_heads, 8) if (config.ffn or 0) % size == 0]))
    cp, copies, shares = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    pp = draw(st.integers(1, min(8, config.layers)))
    vp = draw(st.integers(1, min(3, config.layers // pp))) if pp > 1 else 1
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "full"]))
    keys: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "vp": vp, "dp": copies * shares, "shard": shard}
    keys["replicate"] = 1 if shard == "none" else copies
    if config.moe is not None:
        ranks = (copies * shares if shard == "none" else shares) * cp * tp
        keys["etp"] = draw(st.sampled_from(sizes(tp, 8)))
        keys["ep"] = draw(
            st.sampled_from([ep for ep in sizes(config.moe.experts, 64) if ranks % (ep * keys["etp"]) == 0])
        )
    if pp > 1 and vp == 1:
        keys["schedule"] = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
    keys["micro_batch"] = draw(st.integers(1, 4))
    layout = place(config, **keys)
    length = 2 * cp * tp * draw(st.integers(1, max(1, config.max_positions // (2 * cp * tp))))
    counts = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True))
    batches = [count * layout.dp * layout.micro_batch for count in sorted(counts)]
    assume(not layout_problems(layout, config, sequence_length=length, batch_sizes=batches))
    return config, layout, length, batches


def kept_keys(config: ModelConfig) -> dict[str, Any]:
    """What is not a size; LongRoPE's divisors and its context before the stretch are sizes."""
    kept = {key: getattr(config, key) for key in NO_SIZE}
    if config.rope is not None and (scaling := config.rope.scaling) is not None and scaling.kind == "longrope":
        sizes = {"original_positions": 1, "short_factors": (1.0,), "long_factors": (1.0,)}
        kept["rope"] = config.rope.model_copy(update={"scaling": scaling.model_copy(update=sizes)})
    return kept


def shrunk_problems(small: ShrunkRun) -> list[Any]:
    asked = {"sequence_length": small.sequence_length, "batch_sizes": small.batch_sizes}
    return layout_problems(small.layout, small.config, **asked)


@settings(max_examples=200)
@given(whole_runs())
def test_a_shrunk_model_is_legal_on_its_layout_and_keeps_all_that_is_no_size(
    run: tuple[ModelConfig, RankLayout, int, list[int]],
) -> None:
    config, layout, length, batches = run
    small = shrink(config, layout, sequence_length=length, batch_sizes=batches)
    assert shrunk_problems(small) == []
    assert small.layout.dense_shape == layout.dense_shape
    assert small.layout.expert_shape == layout.expert_shape
    assert kept_keys(small.config) == kept_keys(config)
    assert parameter_count(small.config) <= min(
        parameter_count(config), 8_000_000
    )  # 64 experts of 12 layers are the most there is
    assert small.sequence_length <= min(length, small.config.max_positions)
    assert len(small.batch_sizes) == min(len(batches), 2)
    assert list(small.batch_sizes) == sorted(set(small.batch_sizes))
    for name in ("vocab_size", "ffn", "kv_heads"):
        whole, part = getattr(config, name), getattr(small.config, name)
        assert (whole is None) == (part is None)
        assert whole is None or (whole % layout.tp == 0) == (part % layout.tp == 0)
    gain, small_gain = (each.init_std * each.hidden**0.5 for each in (config, small.config))
    assert small_gain == pytest.approx(gain)
    assert (small.config.heads > small.config.kv_heads) == (config.heads > config.kv_heads)
    if config.moe is not None and small.config.moe is not None:
        assert small.config.moe.top_k == config.moe.top_k
        assert small.config.moe.normalize_top_k == config.moe.normalize_top_k


@settings(max_examples=100)
@given(whole_runs(), st.integers(1, 32))
def test_more_ranks_than_there_is_room_for_lose_copies_or_are_refused(
    run: tuple[ModelConfig, RankLayout, int, list[int]], room: int
) -> None:
    config, layout, length, batches = run
    try:
        small = shrink(config, layout, sequence_length=length, batch_sizes=batches, max_ranks=room)
    except InputError:
        assert layout.world_size > room
        return
    assert shrunk_problems(small) == []
    assert small.layout.world_size <= max(room, 1)
    for key in ("tp", "pp", "vp", "cp", "ep", "etp", "shard"):
        assert getattr(small.layout, key) == getattr(layout, key)
    assert (small.layout.replicas > 1, small.layout.dp_shard > 1) == (layout.replicas > 1, layout.dp_shard > 1)


def shrunk(preset: str, *, length: int = 8192, batches: tuple[int, ...] = (64,), **keys: Any) -> ShrunkRun:
    config = model_preset(preset)
    return shrink(config, place(config, **keys), sequence_length=length, batch_sizes=batches)


def test_llama_3_8b_becomes_a_llama_that_a_cpu_steps_in_milliseconds() -> None:
    small = shrunk("llama3.1-8b", tp=2, pp=2, batches=(1024,))
    config = small.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (2, 32, 8, 4, 8)
    assert (config.ffn, config.vocab_size, small.sequence_length, small.batch_sizes) == (32, 96, 32, (4,))
    assert config.rope == model_preset("llama3.1-8b").rope


def test_an_odd_vocabulary_stays_odd() -> None:
    assert shrunk("gpt2", length=1024, tp=4).config.vocab_size == 97


def test_layers_that_do_not_divide_by_the_chunks_still_do_not() -> None:
    small = shrunk("llama3.1-405b", pp=8)
    assert small.layout.stages == (1, 2, 2, 2, 2, 2, 2, 1)
    assert small.config.layers == 14
    written = shrunk("tiny", length=256, pp=2, stages=[3, 1])
    assert written.layout.stages == (3, 1)


def test_a_window_cuts_the_shrunk_sequence_where_it_cut_the_whole_one() -> None:
    assert shrunk("mistral-7b-v0.1", length=16384).config.sliding_window == 8
    assert shrunk("mistral-7b-v0.1", length=2048).config.sliding_window == 64


def test_divisors_of_frequencies_are_those_of_the_narrower_heads_and_rows_stay_long() -> None:
    config = tiny_config("phi3-longrope", head_dim=32, hidden=128, rope=LONGROPE, max_positions=4096)
    small = shrink(config, place(config), sequence_length=2048, batch_sizes=[8], max_ranks=4)
    assert small.config.rope is not None
    scaling = small.config.rope.scaling
    assert scaling is not None
    assert scaling.original_positions == small.sequence_length // 2
    assert scaling.short_factors == (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)[: small.config.rotary_dim // 2]


def test_tensors_that_dp_ranks_share_out_evenly_or_not_still_are() -> None:
    assert shrunk("gpt2", length=1024, dp=64, shard="full", batches=(64,)).config.hidden == 64
    assert shrunk("gpt2", length=1024, dp=7, shard="full", batches=(7,)).config.hidden % 7 != 0


@pytest.mark.parametrize(
    ("keys", "batches", "small"),
    [
        ({"micro_batch": 4}, (64,), (4,)),
        ({"pp": 4}, (4,), (4,)),
        ({"pp": 4}, (64,), (8,)),
        ({"pp": 4}, (66,), (5,)),
        ({"pp": 4, "schedule": "gpipe"}, (3,), (2,)),
        ({"pp": 4, "vp": 2}, (64,), (8,)),
        ({"dp": 2}, (8, 16, 32), (4, 6)),
    ],
)
def test_micro_batches_fill_the_pipeline_as_before(
    keys: dict[str, Any], batches: tuple[int, ...], small: tuple[int, ...]
) -> None:
    assert shrunk("llama3.1-8b", batches=batches, **keys).batch_sizes == small


def test_a_model_no_machine_has_room_for_says_what_to_check_instead() -> None:
    config = model_preset("llama3.1-405b")
    layout = place(config, tp=8, pp=8, dp=16)
    with pytest.raises(InputError, match="is 1024 ranks, there is room for 16 here") as error:
        shrink(config, layout, sequence_length=8192, batch_sizes=[128], max_ranks=16)
    assert "--layout" in (error.value.hint or "")

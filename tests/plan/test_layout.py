"""Which rank does what: two meshes over the same ranks, chunks of layers, rows of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.tiny_models import tiny_config
from trainshed.errors import InputError
from trainshed.plan.layout import (
    MeshCoordinates,
    RankLayout,
    distinct_names,
    even_stages,
    parse_layout,
    resolve_layout,
)
from trainshed.recipe import Layout

CONFIG = tiny_config("llama", layers=8)
SMALL = st.integers(1, 3)


def resolved(world_size: int | None = None, **keys: object) -> RankLayout:
    return resolve_layout(Layout.model_validate(keys), CONFIG, world_size=world_size)


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Legal meshes: experts lie inside one copy, and etp inside tp."""
    tp, cp, replicate, shards = draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL)
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "full"]))
    dp = replicate * shards
    copy = (dp if shard == "none" else shards) * cp * tp
    etp = draw(st.sampled_from([size for size in range(1, tp + 1) if tp % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, copy + 1) if copy % (size * etp) == 0]))
    return resolved(
        tp=tp, cp=cp, dp=dp, pp=draw(SMALL), ep=ep, etp=etp, shard=shard, replicate=1 if shard == "none" else replicate
    )


@given(layouts())
def test_every_rank_has_one_place_in_each_mesh(layout: RankLayout) -> None:
    ranks = range(layout.world_size)
    places = [layout.coordinates(rank) for rank in ranks]
    dense = [(at.pp, at.replicate, at.shard, at.cp, at.tp) for at in places]
    expert = [(at.pp, at.edp, at.ep, at.etp) for at in places]
    # Sorted by place means: the last axis varies fastest.
    assert dense == sorted(set(dense))
    assert expert == sorted(set(expert))
    assert [layout.rank_of(*place) for place in dense] == list(ranks)
    assert tuple(length + 1 for length in dense[-1]) == layout.dense_shape
    assert tuple(length + 1 for length in expert[-1]) == layout.expert_shape


@given(layouts())
def test_the_data_parallel_index_counts_copies_and_shards(layout: RankLayout) -> None:
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert at.dp == at.replicate * (layout.dp // layout.replicas) + at.shard
    assert {layout.coordinates(rank).dp for rank in range(layout.world_size)} == set(range(layout.dp))


@given(layouts())
def test_experts_lie_inside_one_stage_and_one_copy(layout: RankLayout) -> None:
    assert layout.edp * layout.ep * layout.etp == layout.stage_ranks
    holders: dict[tuple[int, int], list[MeshCoordinates]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        holders.setdefault((at.pp, at.edp), []).append(at)
    for group in holders.values():
        assert len({(at.ep, at.etp) for at in group}) == len(group) == layout.ep * layout.etp
        assert layout.shard == "none" or len({at.replicate for at in group}) == 1
        for ep in range(layout.ep):
            # The ranks of one expert's slices are neighbours within a tensor-parallel group: they gather its tokens.
            sharers = [at for at in group if at.ep == ep]
            assert len({(at.dp, at.cp, at.tp // layout.etp) for at in sharers}) == 1


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 3))
def test_chunks_cover_every_layer_once_and_in_order(layers: int, pp: int, vp: int) -> None:
    layout = replace(resolved(), pp=pp, vp=vp, stages=even_stages(layers, pp * vp))
    chunks = [layout.chunks(rank) for rank in range(pp)]
    assert sorted(chunk for own in chunks for chunk in own) == list(range(pp * vp))
    assert all(chunk % pp == rank for rank, own in enumerate(chunks) for chunk in own)
    assert [layer for chunk in range(pp * vp) for layer in layout.chunk_layers(chunk)] == list(range(layers))
    assert max(layout.stages) - min(layout.stages) <= 1


@pytest.mark.parametrize(
    ("layers", "chunks", "stages"),
    [(32, 4, (8, 8, 8, 8)), (30, 4, (7, 8, 8, 7)), (29, 4, (7, 7, 8, 7)), (31, 4, (8, 8, 8, 7)), (5, 1, (5,))],
)
def test_the_last_chunk_never_gets_an_extra_layer(layers: int, chunks: int, stages: tuple[int, ...]) -> None:
    assert even_stages(layers, chunks) == stages


def test_stages_written_out_are_kept() -> None:
    layout = resolved(pp=2, stages=[3, 5])
    assert [list(layout.chunk_layers(chunk)) for chunk in (0, 1)] == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_interleaved_chunks_go_round_the_pipeline() -> None:
    layout = resolved(pp=2, vp=2)
    assert [layout.chunks(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]


def test_each_data_parallel_index_reads_its_own_consecutive_rows() -> None:
    layout = resolved(dp=4, micro_batch=2)
    assert [list(layout.sample_range(16, index)) for index in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert layout.micro_batches(16) == 2
    assert layout.padding(16, 3) == 0


@given(batch=st.integers(1, 60), dp=st.integers(1, 9), micro_batch=st.integers(1, 5))
def test_uneven_shares_cover_the_batch_once_and_are_made_up_to_equal_micro_batches(
    batch: int, dp: int, micro_batch: int
) -> None:
    layout = replace(resolved(dp=dp, micro_batch=micro_batch), uneven=True)
    shares = [layout.sample_range(batch, index) for index in range(dp)]
    assert [row for share in shares for row in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    whole = {len(share) + layout.padding(batch, index) for index, share in enumerate(shares)}
    assert whole == {layout.micro_batches(batch) * micro_batch}
    assert min(layout.padding(batch, index) for index in range(dp)) < micro_batch


@pytest.mark.parametrize(
    ("keys", "copies", "dp_shard"),
    [
        ({"shard": "none"}, 4, 1),
        ({"shard": "zero1"}, 1, 4),
        ({"shard": "full", "replicate": 2}, 2, 2),
    ],
)
def test_sharding_says_how_many_copies_there_are(keys: dict[str, object], copies: int, dp_shard: int) -> None:
    layout = resolved(dp=4, **keys)
    assert (layout.replicas, layout.dp_shard) == (copies, dp_shard)


@pytest.mark.parametrize(
    ("keys", "schedule"),
    [
        ({}, None),
        ({"pp": 2}, "1f1b"),
        ({"pp": 2, "vp": 2}, "interleaved"),
        ({"pp": 2, "schedule": "gpipe"}, "gpipe"),
        ({"pp": 2, "vp": 2, "schedule": "zero_bubble"}, "zero_bubble"),
    ],
)
def test_a_pipeline_gets_a_schedule(keys: dict[str, object], schedule: str | None) -> None:
    assert resolved(**keys).schedule == schedule


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({}, "one process"),
        ({"tp": 2, "pp": 2, "vp": 2, "dp": 2}, "tp2 pp2 vp2 dp2 zero1"),
        ({"cp": 2}, "cp2 zero1"),
        ({"cp": 2, "shard": "full"}, "cp2 full"),
        ({"tp": 2}, "tp2"),
        ({"dp": 4, "replicate": 2, "shard": "full"}, "dp4 replicate2 full"),
        ({"tp": 2, "ep": 2, "etp": 1}, "tp2 ep2"),
    ],
)
def test_a_layout_shows_only_what_is_not_one(keys: dict[str, object], shown: str) -> None:
    assert str(resolved(**keys)) == shown


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"tp": 2}, {"pp": 2}, ["tp2", "pp2"]),
        ({"tp": 2}, {"tp": 2, "shard": "full"}, ["tp2 with shard zero1", "tp2 with shard full"]),
        ({}, {"micro_batch": 2}, ["one process with micro_batch 1", "one process with micro_batch 2"]),
        (
            {"cp": 16},
            {"cp": 16, "recompute": "full"},
            ["cp16 zero1 with recompute none", "cp16 zero1 with recompute full"],
        ),
        ({"pp": 2}, {"pp": 2, "stages": [3, 5]}, ["pp2 with stages 4+4", "pp2 with stages 3+5"]),
        ({"tp": 2}, {"tp": 2}, ["tp2", "tp2"]),
    ],
)
def test_names_say_what_differs(first: dict[str, object], second: dict[str, object], names: list[str]) -> None:
    assert distinct_names(resolved(**first), resolved(**second)) == names


@given(layouts(), st.data())
def test_no_two_different_layouts_have_the_same_name(layout: RankLayout, data: st.DataObject) -> None:
    change = {
        "shard": data.draw(st.sampled_from(["none", "zero1", "zero2", "full"])),
        "micro_batch": data.draw(SMALL),
        "recompute": data.draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": data.draw(st.sampled_from([None, "gpipe", "1f1b"])),
        "stages": data.draw(st.sampled_from([layout.stages, (*layout.stages[:-1], layout.stages[-1] + 1)])),
    }
    other = replace(layout, **change)
    first, second = distinct_names(layout, other)
    assert (first == second) == (layout == other)


def test_dp_is_one_or_what_the_world_leaves() -> None:
    assert resolved(tp=2).world_size == 2
    assert resolved(world_size=8, tp=2).dp == 4
    assert resolved(world_size=8, tp=2, dp=4).dp == 4


@pytest.mark.parametrize(
    ("world_size", "keys", "where", "what", "hint"),
    [
        (
            6,
            {"tp": 2, "pp": 2},
            "layout",
            "6 ranks are not a multiple of tp 2 · pp 2 · cp 1 = 4",
            "start 8 ranks, or write a smaller layout",
        ),
        (
            8,
            {"tp": 2, "dp": 2},
            "layout.dp",
            "tp 2 · pp 1 · cp 1 · dp 2 = 4, and there are 8 ranks",
            "delete dp: it takes the ranks that are left",
        ),
        (
            3,
            {"tp": 2, "dp": 2},
            "layout.dp",
            "tp 2 · pp 1 · cp 1 · dp 2 = 4, and there are 3 ranks",
            "start 4 ranks, or write a layout of 3",
        ),
        (
            4,
            {"replicate": 3},
            "layout.replicate",
            "replicate: 3 does not divide the dp of 4",
            "write a divisor of 4",
        ),
    ],
)
def test_ranks_that_do_not_come_out_even_are_refused_with_the_numbers(
    world_size: int, keys: dict[str, object], where: str, what: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolved(world_size=world_size, **keys)
    assert (caught.value.where, caught.value.what, caught.value.hint) == (where, what, hint)


def test_a_layout_on_the_command_line_is_read_as_the_recipe_would() -> None:
    values = parse_layout(" tp=2, pp=2,shard=full,stages=3+5,schedule=1f1b,")
    assert values == {"tp": 2, "pp": 2, "shard": "full", "stages": [3, 5], "schedule": "1f1b"}
    assert Layout.model_validate(values).stages == (3, 5)
    assert parse_layout("") == {}


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("tpp=2", "unknown key `tpp`", "did you mean tp?"),
        ("tensor_model_parallel_size=2", "unknown key `tensor_model_parallel_size`", "did you mean tp?"),
        ("lr=1", "unknown key `lr`", "did you mean train.optimizer.lr?"),
        (
            "zz=1",
            "unknown key `zz`",
            "known here: tp, pp, vp, cp, ep, etp, dp, replicate, shard, micro_batch, recompute, offload, overlap, "
            "schedule, stages",
        ),
        ("tp=2,tp=4", "`tp` is there twice", "keep one of them"),
        ("tp", "`tp` is not a key of a layout with its value", "write for example tp=2,pp=2"),
        ("tp=", "`tp=` is not a key of a layout with its value", "write for example tp=2,pp=2"),
    ],
)
def test_a_layout_nobody_can_read_is_refused_by_its_key(text: str, what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layout(text)
    assert (caught.value.where, caught.value.what, caught.value.hint) == ("--layout", what, hint)

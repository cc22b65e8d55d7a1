"""Process groups by the ranks in them, counted on one process with PyTorch's fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainshed.catalog import model_preset
from trainshed.engines.torch.parallel import build_mesh
from trainshed.models.collectives import AxisGroup
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig

DENSE, TIED, EXPERTS = (model_preset(name) for name in ("llama3.1-405b", "llama3.2-1b", "mixtral-8x7b"))


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """Makes this process a rank of a world that does not exist."""

    def start(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    dist.destroy_process_group()


def made_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("config", "layout", "ranks", "groups"),
    [
        pytest.param(DENSE, {"tp": 8, "pp": 16}, 4096, 4, id="world, tp, pp, dp"),
        pytest.param(DENSE, {"tp": 8, "pp": 16, "replicate": 4}, 4096, 5, id="and copies"),
        pytest.param(DENSE, {"tp": 8, "cp": 4, "pp": 4}, 4096, 6, id="and cp, and the ranks of a sequence"),
        pytest.param(TIED, {"pp": 4, "tp": 2}, 64, 5, id="and the two ends of a tied embedding"),
        pytest.param(EXPERTS, {"pp": 4, "ep": 8, "tp": 2}, 512, 6, id="and ep, and the copies of an expert"),
        pytest.param(DENSE, {}, 512, 1, id="the world alone is its dp group"),
    ],
)
def test_a_rank_makes_each_group_once(
    as_rank: Callable[[int, int], None], config: ModelConfig, layout: dict[str, int], ranks: int, groups: int
) -> None:
    as_rank(ranks // 2 + 1, ranks)
    mesh = build_mesh(resolve_layout(Layout(**layout), config, world_size=ranks), torch.device("cpu"), config)
    first_stage = layout.get("pp", 1) == 1 or mesh.coordinates.pp in (0, layout["pp"] - 1)
    wanted = groups - (config is TIED and not first_stage)
    assert mesh.group_count == wanted
    assert made_groups() == wanted


def test_groups_hold_the_ranks_that_the_layout_says(as_rank: Callable[[int, int], None]) -> None:
    layout = resolve_layout(Layout(tp=2, cp=2, pp=2, replicate=2), DENSE, world_size=32)
    as_rank(13, 32)
    mesh = build_mesh(layout, torch.device("cpu"), DENSE)
    at = mesh.coordinates
    assert (at.pp, at.replicate, at.shard, at.cp, at.tp) == (0, 1, 1, 0, 1)

    def ranks(axis: AxisGroup) -> list[int]:
        return dist.get_process_group_ranks(axis.ranks)

    assert ranks(mesh.axes.tp) == [12, 13]
    assert ranks(mesh.axes.cp) == [13, 15]
    assert ranks(mesh.axes.sequence) == [12, 13, 14, 15]
    assert ranks(mesh.pp) == [13, 29]
    assert mesh.fsdp_mesh is not None
    assert mesh.fsdp_mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.fsdp_mesh.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert mesh.fsdp_mesh.get_local_rank("replicate") == 1
    assert mesh.fsdp_mesh.get_local_rank("shard") == 2

"""A layout for fewer nodes than planned: whole replicas of the model are given up, everything else stays.

The global batch and the order of the data do not change, so the run goes on with the same samples: each of the replicas
that are left takes more of them, and where they do not come out even, some take one more than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import layout_problems
from trainshed.recipe import ModelConfig


def layout_for_nodes(
    layout: RankLayout,
    config: ModelConfig,
    *,
    nodes: int,
    min_nodes: int,
    ranks_per_node: int,
    sequence_length: int,
    batch_sizes: Sequence[int],
) -> tuple[RankLayout, int] | str:
    """Return the largest legal layout on at most `nodes` nodes and how many it takes, or the reason why there is none.

    The size of a replica is kept: what fits into the memory of a GPU depends on it.
    """
    replica = layout.tp * layout.pp * layout.cp
    reason = f"a replica is {replica} ranks, and {nodes} nodes have {nodes * ranks_per_node}"
    for count in range(nodes, min_nodes - 1, -1):
        ranks = count * ranks_per_node
        if ranks % replica:
            continue
        for smaller in _with_replicas(layout, ranks // replica):
            problems = layout_problems(
                smaller, config, sequence_length=sequence_length, batch_sizes=batch_sizes, stages_written=True
            )
            if not problems:
                return smaller, count
            reason = problems[0].what
    return f"no layout of {min_nodes} to {nodes} nodes is legal: {reason}"


def _with_replicas(layout: RankLayout, dp: int) -> list[RankLayout]:
    """The layout with another dp: equal shares first, then uneven ones; each with the micro-batch it has, then smaller.

    An uneven share costs at most one micro-batch a step, giving up a replica always more.
    """
    replicate = layout.replicate if dp % layout.replicate == 0 else 1
    sizes = [size for size in range(layout.micro_batch, 0, -1) if layout.micro_batch % size == 0]
    fewer = replace(layout, dp=dp, replicate=replicate)
    return [replace(fewer, micro_batch=size, uneven=uneven) for uneven in (False, True) for size in sizes]

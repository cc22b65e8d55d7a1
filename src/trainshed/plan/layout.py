"""The arithmetic of layouts: which rank does what, for the engine, the planner, `verify` and the launcher alike.

There are two meshes over the same ranks; the last axis varies fastest:

    dense   pp, dp_replicate, dp_shard, cp, tp      attention, dense MLPs, embeddings
    expert  pp, edp, ep, etp                        experts; edp · ep · etp = dp · cp · tp

What a layout may not do is in `plan/legality/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe import Layout, ModelConfig, Recipe, yaml_io
from trainshed.recipe.layout import Offload, Overlap, PipelineSchedule, Recompute, Shard
from trainshed.recipe.validation import nearest_key, sibling_keys
from trainshed.recipe.yaml_io import dotted_key

_AXES_SHOWN = ("tp", "pp", "vp", "cp", "ep", "etp", "dp", "replicate")


@dataclass(frozen=True)
class MeshCoordinates:
    """Coordinates of a rank in both meshes; `dp` counts its replica and its shard as one data-parallel index."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int
    dp: int

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that stores what every rank has."""
        return not any((self.pp, self.dp, self.cp, self.tp))


@dataclass(frozen=True)
class RankLayout:
    """A layout with every key filled in, for one model and one number of ranks.

    `schedule` is None without a pipeline; `stages` are the layers of each of the pp · vp chunks.
    """

    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp: int
    replicate: int
    shard: Shard
    micro_batch: int
    recompute: Recompute
    schedule: PipelineSchedule | None
    stages: tuple[int, ...]
    offload: Offload | None = None
    overlap: Overlap | None = None
    uneven: bool = False
    """Some dp ranks have one sample more than others, which get padding without a loss: a run that lost nodes."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage; both meshes divide them."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts: the data-parallel axis of the expert mesh."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def replicas(self) -> int:
        """How many full copies of the model states the dp ranks hold."""
        return self.dp if self.shard == "none" else self.replicate

    @property
    def dp_shard(self) -> int:
        """Among how many dp ranks one copy is sharded."""
        return self.dp // self.replicas

    @property
    def dense_shards(self) -> int:
        """Among how many ranks the states of a dense weight are sharded."""
        return 1 if self.shard == "none" else self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Among how many ranks the states of an expert's weight are sharded."""
        return 1 if self.shard == "none" else max(1, self.edp // self.replicas)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Lengths of the dense mesh: pp, dp_replicate, dp_shard, cp, tp."""
        return (self.pp, self.replicas, self.dp_shard, self.cp, self.tp)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Lengths of the expert mesh: pp, edp, ep, etp."""
        return (self.pp, self.edp, self.ep, self.etp)

    def coordinates(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of a rank."""
        pp, replicate, shard, cp, tp = _unravel(rank, self.dense_shape)
        _, edp, ep, etp = _unravel(rank, self.expert_shape)
        return MeshCoordinates(pp, replicate, shard, cp, tp, edp, ep, etp, dp=replicate * self.dp_shard + shard)

    def rank_of(self, pp: int = 0, replicate: int = 0, shard: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates of the dense mesh."""
        return (((pp * self.replicas + replicate) * self.dp_shard + shard) * self.cp + cp) * self.tp + tp

    def chunks(self, pp_rank: int) -> tuple[int, ...]:
        """Return the model chunks of a pipeline rank, first to last: chunk i is on rank i % pp."""
        return tuple(range(pp_rank, self.pp * self.vp, self.pp))

    def chunk_layers(self, chunk: int) -> range:
        """Return the layers of a chunk."""
        start = self._chunk_starts[chunk]
        return range(start, start + self.stages[chunk])

    @cached_property
    def _chunk_starts(self) -> tuple[int, ...]:
        """The first layer of each chunk; a search asks very often."""
        return (0, *accumulate(self.stages))

    def micro_batches(self, global_batch: int) -> int:
        """Return how many forward passes each rank makes per step."""
        whole = self.dp * self.micro_batch
        return -(-global_batch // whole) if self.uneven else global_batch // whole

    def sample_range(self, global_batch: int, dp_index: int) -> range:
        """Return which consecutive samples of the global batch a data-parallel index reads."""
        share, left = divmod(global_batch, self.dp) if self.uneven else (global_batch // self.dp, 0)
        start = dp_index * share + min(dp_index, left)
        return range(start, start + share + (dp_index < left))

    def padding(self, global_batch: int, dp_index: int) -> int:
        """Return how many samples without a loss this index needs to have as many as all others."""
        return self.micro_batches(global_batch) * self.micro_batch - len(self.sample_range(global_batch, dp_index))

    def recipe_keys(self) -> dict[str, Any]:
        """Return every key of a recipe's `layout` with its value."""
        return {key: getattr(self, key) for key in Layout.model_fields}

    def __str__(self) -> str:
        if self.world_size == 1:
            return "one process"
        parts = [f"{key}{value}" for key in _AXES_SHOWN if (value := getattr(self, key)) != 1]
        # Context-parallel ranks shard the same states as dp ranks do.
        if self.dp * self.cp > 1:
            parts.append(self.shard)
        return " ".join([*parts, "uneven"] if self.uneven else parts)


def _unravel(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    places: list[int] = []
    for length in reversed(shape):
        rank, place = divmod(rank, length)
        places.append(place)
    return tuple(reversed(places))


def parse_layout(text: str) -> dict[str, object]:
    """Read `tp=2,pp=2,shard=full,stages=3+5` as values for the recipe's `layout`, which checks them."""
    values: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, sign, written = (piece.strip() for piece in part.partition("="))
        if not (key and sign and written):
            raise InputError(
                f"`{part}` is not a key of a layout with its value",
                where="--layout",
                hint="write for example tp=2,pp=2",
            )
        if key not in Layout.model_fields:
            raise InputError(f"unknown key `{key}`", where="--layout", hint=_did_you_mean(key))
        if key in values:
            raise InputError(f"`{key}` is there twice", where="--layout", hint="keep one of them")
        values[key] = (
            [yaml_io.parse_scalar(piece) for piece in written.split("+")]
            if key == "stages"
            else (yaml_io.parse_scalar(written))
        )
    return values


def _did_you_mean(key: str) -> str:
    near = nearest_key(Recipe, ("layout", key))
    if near is None:
        return f"known here: {', '.join(sibling_keys(Recipe, ('layout',)))}"
    return f"did you mean {near[-1] if near[0] == 'layout' else dotted_key(near)}?"


def resolve_layout(layout: Layout, config: ModelConfig, *, world_size: int | None = None) -> RankLayout:
    """Fill in every key that was left out.

    `dp` takes the ranks that the other axes leave of `world_size`, or is 1. Raises `InputError` where the axes do not
    divide the ranks; the rules of the model and the batch are in `layout_problems`.
    """
    dp = _data_parallel(layout, world_size)
    if dp % layout.replicate:
        raise InputError(
            f"replicate: {layout.replicate} does not divide the dp of {dp}",
            where="layout.replicate",
            hint=f"write a divisor of {dp}",
        )
    schedule: PipelineSchedule | None = None
    if layout.pp > 1:
        schedule = layout.schedule or ("interleaved" if layout.vp > 1 else "1f1b")
    return RankLayout(
        tp=layout.tp,
        pp=layout.pp,
        vp=layout.vp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        dp=dp,
        replicate=layout.replicate,
        shard=layout.shard,
        micro_batch=layout.micro_batch,
        recompute=layout.recompute,
        schedule=schedule,
        stages=layout.stages or even_stages(config.layers, layout.pp * layout.vp),
        offload=layout.offload,
        overlap=layout.overlap,
    )


def _data_parallel(layout: Layout, world_size: int | None) -> int:
    ranks = layout.tp * layout.pp * layout.cp
    product = f"tp {layout.tp} · pp {layout.pp} · cp {layout.cp}"
    if world_size is None:
        return layout.dp or 1
    if layout.dp is None:
        if world_size % ranks:
            raise InputError(
                f"{world_size} ranks are not a multiple of {product} = {ranks}",
                where="layout",
                hint=f"start {-(-world_size // ranks) * ranks} ranks, or write a smaller layout",
            )
        return world_size // ranks
    if ranks * layout.dp != world_size:
        raise InputError(
            f"{product} · dp {layout.dp} = {ranks * layout.dp}, and there are {world_size} ranks",
            where="layout.dp",
            hint="delete dp: it takes the ranks that are left"
            if world_size % ranks == 0
            else f"start {ranks * layout.dp} ranks, or write a layout of {world_size}",
        )
    return layout.dp


def even_stages(layers: int, chunks: int) -> tuple[int, ...]:
    """Divide layers into chunks as evenly as possible.

    Extra layers go to the late chunks, since the early ranks of a pipeline keep the most activations. They never go to
    the last chunk, which also has the head and the loss.
    """
    share, extra = divmod(layers, chunks)
    last = chunks - 1
    return tuple(share + (last - extra <= chunk < last) for chunk in range(chunks))


def layout_plain(layout: RankLayout) -> dict[str, Any]:
    """Return every key of a layout."""
    return layout.recipe_keys() | {"stages": list(layout.stages)}


def describe_layout(layout: RankLayout) -> str:
    """Write a layout with its micro-batch and recomputation: `tp4 pp4 dp8 zero1, micro_batch 1`."""
    parts = [str(layout), f"micro_batch {layout.micro_batch}", f"recompute {layout.recompute}"]
    if layout.offload is not None:
        parts.append(f"offload {layout.offload}")
    if layout.overlap is not None:
        parts.append(f"overlap {layout.overlap}")
    if layout.schedule not in (None, "1f1b", "interleaved"):
        parts.append(f"schedule {layout.schedule}")
    return ", ".join(parts)


def distinct_names(*layouts: RankLayout, describe: Callable[[RankLayout], str] = str) -> list[str]:
    """Name layouts so that no two different ones have the same name.

    A key that `describe` leaves out is added where the names are equal and the key differs:
    `cp16 full with micro_batch 2`.
    """
    names = [describe(layout) for layout in layouts]
    for key in ("shard", "micro_batch", "recompute", "offload", "overlap", "schedule", "stages"):
        if len(set(names)) == len(set(layouts)):
            break
        values = [_format_value(getattr(layout, key)) for layout in layouts]
        if len(set(values)) > 1:
            names = [f"{name} with {key} {value}" for name, value in zip(names, values, strict=True)]
    return names


def _format_value(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def format_layout(layout: RankLayout) -> str:
    """Write a layout as `--layout` takes it: `tp=4,pp=4,micro_batch=2`, without keys at their default.

    Unequal chunks are written out, since Megatron requires it.
    """
    keys = Layout.model_fields
    axes = ("tp", "pp", "vp", "cp", "ep", "etp", "replicate")
    names = (*axes, "shard", "micro_batch", "recompute", "offload", "overlap")
    parts = [f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) != keys[name].default]
    if layout.schedule not in (None, "interleaved" if layout.vp > 1 else "1f1b"):
        parts.append(f"schedule={layout.schedule}")
    if len(set(layout.stages)) > 1:
        parts.append(f"stages={_format_value(layout.stages)}")
    # At least one key: an empty text would mean that the layout is searched.
    return ",".join(parts or [f"tp={layout.tp}"])

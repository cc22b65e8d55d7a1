"""`layout`: how a training is shared out over ranks, written out.

The arithmetic lives in `plan/layout.py`; only what is wrong for any model and cluster is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from trainshed.recipe.section import PositiveInt, Problem, Section, by_shape

Shard = Literal["none", "zero1", "zero2", "full"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["activations"]
Overlap = Literal["tp"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


MOST_CHUNKS = 10_000
"""Chunks of a pipeline that are counted out before the model's layers are known; a slip of the finger is not."""


class Layout(Section):
    """A layout written out. Every key left out is 1, except `dp`: it takes the ranks that are left."""

    tp: PositiveInt = Field(1, description="Tensor parallel, with sequence parallel")
    pp: PositiveInt = Field(1, description="Pipeline stages")
    vp: PositiveInt = Field(1, description="Model chunks per pipeline rank (interleaving)")
    cp: PositiveInt = Field(1, description="Context parallel")
    ep: PositiveInt = Field(1, description="Expert parallel, inside dp · cp · tp")
    etp: PositiveInt = Field(1, description="Tensor parallel within experts")
    dp: PositiveInt | None = Field(None, description="Data parallel; left out: what the other keys leave of the ranks")
    replicate: PositiveInt = Field(1, description="Hybrid sharding: copies of the model among the dp ranks")
    shard: Shard = Field(
        "zero1",
        description="What dp ranks share out: nothing, optimiser states, gradients too, weights too; "
        "with `schedule: zero_bubble` of the engine torch the first two alone",
    )
    micro_batch: PositiveInt = Field(1, description="Sequences per forward pass on one rank")
    recompute: Recompute = Field("none", description="Activations computed again in backward")
    offload: Offload | None = Field(
        None, description="What waits in the host's memory between forward and backward; left out: nothing"
    )
    overlap: Overlap | None = Field(
        None,
        description="What is hidden by cutting products into parts: the communication of tp, "
        "between GPUs that read each other's memory; left out: nothing",
    )
    schedule: PipelineSchedule | None = Field(
        None, description="Pipeline schedule; left out: 1f1b, or interleaved where vp > 1"
    )
    stages: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = Field(
        None,
        description="Layers of each of the pp · vp chunks, where they are uneven",
        examples=[[7, 8, 8, 7]],
    )

    def problems(self) -> Iterator[Problem]:
        """Pipeline and sharding keys that contradict each other."""
        if self.vp > 1 and self.pp == 1:
            yield Problem(
                ("vp",),
                f"vp: {self.vp} interleaves a pipeline, and pp is 1",
                "write pp: 2 or more, or delete vp",
            )
        if self.pp * self.vp > MOST_CHUNKS:
            what = f"pp · vp = {self.pp * self.vp:,} chunks: no model has so many layers"
            yield Problem(("vp",) if self.vp > 1 else ("pp",), what, "write smaller ones")
        if self.schedule is not None and self.pp == 1:
            yield Problem(("schedule",), "is not read without a pipeline", "write pp: 2 or more, or delete it")
        elif self.schedule == "interleaved" and self.vp == 1:
            yield Problem(("schedule",), "interleaved needs vp of 2 or more", "write vp: 2, or `schedule: 1f1b`")
        elif self.schedule in ("1f1b", "gpipe") and self.vp > 1:
            yield Problem(
                ("schedule",),
                f"{self.schedule} has one chunk per rank, and vp is {self.vp}",
                "write `schedule: interleaved`, or delete vp",
            )
        if self.overlap == "tp" and self.tp == 1:
            yield Problem(("overlap",), "there is no communication of tp to hide: tp is 1", "write tp: 2, or delete it")
        if self.stages is not None and len(self.stages) != self.pp * self.vp:
            yield Problem(
                ("stages",),
                f"{len(self.stages)} numbers for pp · vp = {self.pp * self.vp} chunks",
                "write the layers of every chunk",
            )
        if self.dp is not None and self.dp % self.replicate:
            yield Problem(
                ("replicate",), f"{self.replicate} does not divide dp: {self.dp}", f"write a divisor of {self.dp}"
            )


LayoutSection = Annotated[
    Annotated[Literal["auto"], Tag("(text)")] | Annotated[Layout, Tag("(a mapping)")],
    by_shape,
]
"""`auto` (the planner chooses) or a `Layout`."""

"""The planner: which rank does what, which layouts are legal, how fast they are and what a run costs; no torch."""

from trainshed.plan.flops import TokenFlops, token_flops, training_flops_per_token
from trainshed.plan.layout import MeshCoordinates, RankLayout, parse_layout, resolve_layout
from trainshed.plan.legality import layout_problems, layout_warnings, pipeline_bubble

__all__ = [
    "MeshCoordinates",
    "RankLayout",
    "TokenFlops",
    "layout_problems",
    "layout_warnings",
    "parse_layout",
    "pipeline_bubble",
    "resolve_layout",
    "token_flops",
    "training_flops_per_token",
]

"""The planner: which rank does what, which layouts are legal, how fast they are and what a run costs; no torch.

The package can be called: `trainshed.plan(recipe, on=…)` is `trainshed.api.plan`, which has the same name.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

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


class _CallablePackage(ModuleType):
    """A package that is also the function of its name: Python keeps both as one attribute of `trainshed`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # By its name: `api` is above this room.
        return import_module("trainshed.api").plan(*arguments, **options)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(import_module("trainshed.api").plan)


sys.modules[__name__].__class__ = _CallablePackage

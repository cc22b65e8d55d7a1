"""Which layouts are illegal and which are unwise: `check.py` is the entrance, `rules.py` has the rules."""

from trainshed.plan.legality.check import layout_notes, layout_problems, layout_warnings, pipeline_bubble

__all__ = ["layout_notes", "layout_problems", "layout_warnings", "pipeline_bubble"]

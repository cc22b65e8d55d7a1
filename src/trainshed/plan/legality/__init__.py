"""What a layout may not do, and what it had better not do.

A layout is *illegal* where its engine cannot run it: all such problems are found at once, each with the numbers that
clash and what to write. It is *unwise* where it merely costs; costs that hang on hardware are the planner's.
"""

from trainshed.plan.legality.check import layout_notes, layout_problems, layout_warnings, pipeline_bubble

__all__ = ["layout_notes", "layout_problems", "layout_warnings", "pipeline_bubble"]

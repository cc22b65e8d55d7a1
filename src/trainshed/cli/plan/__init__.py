"""`trainshed plan` and the verbs below it. A word that is one of these verbs is never taken for a recipe's name."""

from __future__ import annotations

from cyclopts import App

from trainshed.cli.plan.plan import plan

PLAN_VERBS = {
    "validate": ("trainshed.cli.plan.validate:validate", "Hold the planner against published measurements."),
    "calibrate": ("trainshed.cli.plan.calibrate:calibrate", "Learn from a measured run how far off the plan was."),
    "probe": ("trainshed.cli.plan.probe:probe", "Measure this machine and write a file that describes it."),
}

app = App(name="plan", help="The layout of a training: chosen, predicted, explained.")
app.default(plan)
for _name, (_target, _summary) in PLAN_VERBS.items():
    app.command(_target, name=_name, help=_summary)

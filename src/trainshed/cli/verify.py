"""`trainshed verify`: a layout against one process, on a shrunk model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.workflow.verify import RunComparison, Verification


def verify(
    recipe: RecipeName,
    *overrides: str,
    layout: str | None = None,
    steps: int = 10,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Train a shrunk model on one process and on the layout, and compare every step; then resume in the middle.

    Needs no prepared data and no weights, runs here, and leaves nothing behind where all is equal. Exit code 1 if
    losses or gradient norms differ by more than the bound.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.global_batch=64, model.preset=tiny).
    layout
        Keys of the layout to change, as tp=2,pp=2,dp=2.
    steps
        How many steps to compare.
    on
        The cluster file that says how to reach stores.
    output
        Report as text or json.
    """
    from trainshed import api
    from trainshed.cli.console import print_report, reporter

    verification = api.verify(recipe, *overrides, layout=layout, steps=steps, on=on, reporter=reporter())
    print_report(verification.to_plain(), output, verification_text(verification))
    return 0 if verification.equal else 1


def verification_text(verification: Verification) -> str:
    """Write what a check found for people."""
    from trainshed.models.parameters import parameter_count

    small, config, ranks = verification.small, verification.small.config, verification.small.layout.world_size
    batches = " then ".join(f"{size:,}" for size in small.batch_sizes)
    asked = f" in place of {verification.asked}" if verification.asked.world_size != ranks else ""
    against = f", {ranks} processes against one" if ranks > 1 else ""
    lines = [
        f"{verification.name} on {small.layout}{asked}{against}: float64 on {verification.device}",
        f"  shrunk to a {config.family} of {config.layers} layers, hidden {config.hidden}, {config.heads} heads "
        f"({config.kv_heads} for keys and values), vocabulary {config.vocab_size}: "
        f"{parameter_count(config):,} parameters",
        f"  synthetic data, batches of {batches} × {small.sequence_length} tokens",
        "",
        *_table(verification.straight, "one process", _layout_name(verification)),
        "",
        f"  against one process: {_distance(verification.straight)}",
        f"  resumed after step {verification.resumed_after}: {_distance(verification.resumed)}",
    ]
    return "\n".join([*lines, _verdict(verification)])


def _layout_name(verification: Verification) -> str:
    layout = verification.small.layout
    return str(layout) if layout.world_size > 1 else "the layout"


def _table(compared: RunComparison, one: str, other: str) -> list[str]:
    width = max(17, len(one), len(other))
    heads = [f"{title:>{width}}" for title in (one, other)]
    lines = [
        f"  {'':>5}  {'loss':>{width}}  {'':>{width}}  {'':>10}  {'grad norm':>{width}}",
        f"  {'step':>5}  {heads[0]}  {heads[1]}  {'difference':>10}  {heads[0]}  {heads[1]}  {'difference':>10}",
    ]
    for step in compared.steps:
        pairs = (
            (step.loss, step.other_loss, step.loss_difference),
            (step.grad_norm, step.other_grad_norm, step.grad_norm_difference),
        )
        figures = [f"{_figure(a):>{width}}  {_figure(b):>{width}}  {_share(d):>10}" for a, b, d in pairs]
        mark = "" if step.same_batch else "  other tokens"
        lines.append(f"  {step.step + 1:>5}  {'  '.join(figures)}{mark}")
    return lines


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.13f}"


def _share(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _distance(compared: RunComparison) -> str:
    """How far apart two trainings are, beside how far they may be."""
    bound = compared.tolerance
    if compared.loss_difference == compared.grad_norm_difference == 0 and compared.same_batches:
        return "bitwise equal"
    tokens = "" if compared.same_batches else "; the batches are not the same"
    return (
        f"losses differ by {_share(compared.loss_difference)} at most (allowed: {_share(bound.loss)}), "
        f"gradient norms by {_share(compared.grad_norm_difference)} (allowed: {_share(bound.grad_norm)}){tokens}"
    )


def _verdict(verification: Verification) -> str:
    if verification.equal:
        return f"equal: {_layout_name(verification)} trains as one process does, and resumes as if it had not stopped"
    wrong = []
    if not verification.straight.equal:
        wrong.append(f"{_layout_name(verification)} does not train as one process does")
    if not verification.resumed.equal:
        wrong.append("a resumed run is not the straight one")
    return f"DIFFERENT: {', and '.join(wrong)}"

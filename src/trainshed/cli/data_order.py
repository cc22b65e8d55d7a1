"""`trainshed data blend` and `trainshed data batch`: what a run reads, and what one step of it sees."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.data.order import DataOrder
    from trainshed.data.tokenize.tokenizer import Tokenizer


def blend(
    recipe: RecipeName,
    *overrides: str,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show how many samples, tokens and epochs of each source a recipe's run will see.

    The recipe's data must be prepared (`trainshed run RECIPE`); nothing is made or changed.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one.
    overrides
        Keys to change, as key.sub=value (train.steps=100).
    on
        The cluster file that says where the store is.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import open_run

    for_recipe, for_cluster = split_overrides(overrides)
    run = open_run(load_recipe(recipe, for_recipe), load_cluster(on, for_cluster))
    if not run.phases:
        data = _blend_report(run.order, 0, run.steps)
        print_report({"schema": "trainshed.data.blend/1"} | data, output, _blend_table(data))
        return 0
    phases: list[dict[str, Any]] = [
        {"name": phase.span.name} | _blend_report(phase.train, phase.span.start, phase.span.end) for phase in run.phases
    ]
    report = {
        "schema": "trainshed.data.blend/1",
        "steps": run.steps,
        "samples": sum(phase["samples"] for phase in phases),
        "phases": phases,
    }
    tables = [
        f"{phase['name']}, samples of {phase['sequence_length']:,} tokens\n{_blend_table(phase)}" for phase in phases
    ]
    print_report(report, output, "\n\n".join(tables))
    return 0


def _blend_report(order: DataOrder, start: int, end: int) -> dict[str, Any]:
    """What the steps from `start` to `end` of a run draw; epochs count from the start of the data."""
    before, budgets = order.budget(start), order.budget(end)
    sizes = [source.tokens for source in order.sources]
    sources: list[dict[str, Any]] = [
        asdict(budget)
        | {"samples": budget.samples - earlier.samples, "tokens": budget.tokens - earlier.tokens, "source_tokens": size}
        for budget, earlier, size in zip(budgets, before, sizes, strict=True)
    ]
    return {
        "steps": end - start,
        "samples": sum(source["samples"] for source in sources),
        "sequence_length": order.sequence_length,
        "sources": sources,
    }


def _blend_table(report: dict[str, Any]) -> str:
    rows = [("source", "tokens", "weight", "samples", "tokens drawn", "epochs")]
    for source in report["sources"]:
        rows.append(
            (
                source["name"],
                "endless" if source["source_tokens"] is None else f"{source['source_tokens']:,}",
                f"{source['weight']:.2%}",
                f"{source['samples']:,}",
                f"{source['tokens']:,}",
                "none" if source["epochs"] is None else f"{source['epochs']:.2f}",
            )
        )
    samples, tokens = report["samples"], sum(source["tokens"] for source in report["sources"])
    rows.append((f"{report['steps']:,} steps", "", "", f"{samples:,}", f"{tokens:,}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def batch(
    recipe: RecipeName,
    *overrides: str,
    step: int,
    rows: int = 2,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show what one step trains on: for its first rows the source, epoch, documents and text.

    The recipe's data must be prepared (`trainshed run RECIPE`); nothing is made or changed.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one.
    overrides
        Keys to change, as key.sub=value (data.skip=[[4096,8192]]).
    step
        The step, counted from 1 as on the screen.
    rows
        How many rows of the batch to show.
    on
        The cluster file that says where the store is.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.errors import InputError
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import open_run

    if step < 1:
        raise InputError(
            f"there is no step {step}: steps count from 1", where="--step", hint="write --step 1 for the first"
        )
    if rows < 0:
        raise InputError(f"there are no {rows} rows", where="--rows", hint="write --rows 0 or more")
    for_recipe, for_cluster = split_overrides(overrides)
    run = open_run(load_recipe(recipe, for_recipe), load_cluster(on, for_cluster))
    if step > run.steps:
        raise InputError(
            f"the run has {run.steps:,} steps; step {step} is not one of them",
            where="--step",
            hint=f"write --step {run.steps} for the last",
        )
    index = step - 1
    order, phase = run.order_at(index), next((part.span.name for part in run.phases if step <= part.span.end), None)
    samples = order.sample_indices(index)
    shown = _batch_rows(order, index, min(rows, len(samples)), run.tokenizer)
    data = {
        "schema": "trainshed.data.batch/1",
        "step": step,
        **({} if phase is None else {"phase": phase, "run_samples": order.run_samples(index)}),
        "consumed": order.consumed(index),
        "batch": len(samples),
        "first_sample": int(samples[0]),
        "last_sample": int(samples[-1]),
        "hash": order.batch_hash(index),
        "rows": shown,
    }
    of_phase = "" if phase is None else f" of phase {phase}"
    head = (
        f"step {step:,}{of_phase}: {len(samples):,} samples ({samples[0]:,} to {samples[-1]:,}) of "
        f"{order.sequence_length + 1:,} tokens, hash {data['hash']}"
    )
    print_report(data, output, "\n".join([head, *(_batch_row_text(row) for row in shown)]))
    return 0


def _batch_rows(order: DataOrder, index: int, rows: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    samples = order.sample_indices(index, 0, rows)
    place = order.locate(samples)
    batch_rows = order.rows(index, 0, rows)
    shown_rows: list[dict[str, Any]] = []
    for row in range(rows):
        source = order.sources[place.source[row]]
        epoch, window = int(place.epoch[row]), int(place.window[row])
        spans = source.document_spans(epoch, window)
        # Packed rows end with padding, which belongs to no document.
        end = spans[-1].column + spans[-1].tokens if spans else order.sequence_length + 1
        tokens = batch_rows.tokens[row, :end].tolist()
        shown: dict[str, Any] = {
            "row": row,
            "sample": int(samples[row]),
            "source": source.name,
            "epoch": epoch,
            "window": window,
            "documents": [asdict(span) for span in spans],
            "text": tokenizer.decode(tokens) if tokenizer else None,
            "tokens": tokens,
        }
        if batch_rows.document_starts is not None:
            shown["document_starts"] = batch_rows.document_starts[row, :end].tolist()
        if batch_rows.learned is not None:
            shown["learned"] = batch_rows.learned[row, :end].astype(int).tolist()
            shown["padding"] = order.sequence_length + 1 - end
        shown_rows.append(shown)
    return shown_rows


def _batch_row_text(row: dict[str, Any]) -> str:
    unit = "row" if "learned" in row else "window"
    place = f"{row['source']}, epoch {row['epoch']}, {unit} {row['window']:,}"
    lines = [f"\nrow {row['row']}: sample {row['sample']:,} = {place}"]
    for piece in row["documents"]:
        first, end = piece["column"], piece["column"] + piece["tokens"]
        learned = f", {sum(row['learned'][first:end]):,} of {end - first:,} learned" if "learned" in row else ""
        lines.append(
            f"  tokens {first:,} to {end - 1:,}: {piece['file']} document {piece['document']:,} "
            f"from token {piece['offset']:,}{learned}"
        )
    if row.get("padding"):
        lines.append(f"  {row['padding']:,} columns of padding")
    content = row["text"] if row["text"] is not None else " ".join(map(str, row["tokens"]))
    lines += [f"  | {line}" for line in content.splitlines()]
    return "\n".join(lines)

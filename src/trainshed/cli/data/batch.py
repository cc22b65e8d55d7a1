"""`trainshed data batch`: what one training step sees."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.data.encode.tokenizer import Tokenizer
    from trainshed.data.order import DataOrder


def batch(
    recipe: str,
    *overrides: str,
    step: int,
    rows: int = 2,
    on: str = "local",
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
    samples = run.order.sample_indices(index)
    shown = _rows(run.order, index, min(rows, len(samples)), run.tokenizer)
    data = {
        "schema": "trainshed.data.batch/1",
        "step": step,
        "consumed": run.order.consumed(index),
        "batch": len(samples),
        "first_sample": int(samples[0]),
        "last_sample": int(samples[-1]),
        "hash": run.order.batch_hash(index),
        "rows": shown,
    }
    head = (
        f"step {step:,}: {len(samples):,} samples ({samples[0]:,} to {samples[-1]:,}) of "
        f"{run.order.sequence_length + 1:,} tokens, hash {data['hash']}"
    )
    print_report(data, output, "\n".join([head, *(_text(row) for row in shown)]))
    return 0


def _rows(order: DataOrder, index: int, rows: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    samples = order.sample_indices(index, 0, rows)
    place = order.locate(samples)
    tokens = order.rows(index, 0, rows)
    found: list[dict[str, Any]] = []
    for row in range(rows):
        source = order.sources[place.source[row]]
        epoch, window = int(place.epoch[row]), int(place.window[row])
        found.append(
            {
                "row": row,
                "sample": int(samples[row]),
                "source": source.name,
                "epoch": epoch,
                "window": window,
                "documents": [asdict(piece) for piece in source.pieces(epoch, window)],
                "text": tokenizer.decode(tokens[row].tolist()) if tokenizer else None,
                "tokens": tokens[row].tolist(),
            }
        )
    return found


def _text(row: dict[str, Any]) -> str:
    place = f"{row['source']}, epoch {row['epoch']}, window {row['window']:,}"
    lines = [f"\nrow {row['row']}: sample {row['sample']:,} = {place}"]
    for piece in row["documents"]:
        lines.append(
            f"  tokens {piece['column']:,} to {piece['column'] + piece['tokens'] - 1:,}: "
            f"{piece['file']} document {piece['document']:,} from token {piece['offset']:,}"
        )
    content = row["text"] if row["text"] is not None else " ".join(map(str, row["tokens"]))
    lines += [f"  | {line}" for line in content.splitlines()]
    return "\n".join(lines)

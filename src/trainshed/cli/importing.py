"""`trainshed import`: another engine's configuration turned into a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output, print_report

if TYPE_CHECKING:
    from trainshed.engines.imported import Imported, Mapped


def import_file(
    file: Path,
    /,
    *,
    out: Path | None = None,
    cluster_out: Path | None = None,
    gpus: int | None = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Turn a NeMo or torchtune YAML file, or a Megatron-LM argument list or script, into a recipe.

    Parameters
    ----------
    file
        The foreign file. It is read, never run.
    out
        Where the recipe is written; left out: to standard output, and the account of it to standard error. Nothing is
        overwritten.
    cluster_out
        Where what the file says about the cluster is written; left out: a comment at the end of the recipe.
    gpus
        How many GPUs the run had: torchtune's files don't say, and the global batch hangs on it.
    output
        `json` for programs.
    """
    from trainshed.engines.adapters import import_file as read
    from trainshed.engines.imported_recipe import cluster_text, load_problem, recipe_text

    for written in (out, cluster_out):
        if written is not None:
            _check_free(written)
    imported = read(file, gpus=gpus)
    text = recipe_text(imported, file.name)
    problem = load_problem(text)
    if out is not None:
        _write(out, text)
    if cluster_out is not None:
        _write(cluster_out, cluster_text(imported, file.name))
    account = _account(imported, file.name, out, problem)
    data = {"schema": "trainshed.import/1", **asdict(imported), "recipe_text": text, "problem": problem}
    if out is None and output == "text":
        from trainshed.cli.console import reporter

        reporter().note(account)
        print_report(data, output, text)
    else:
        print_report(data, output, account)


def _check_free(path: Path) -> None:
    from trainshed.errors import InputError

    if path.exists():
        raise InputError("is already there, and nothing is overwritten", where=str(path), hint="write another name")


def _write(path: Path, text: str) -> None:
    from trainshed.errors import InputError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _account(imported: Imported, source: str, out: Path | None, problem: str | None) -> str:
    same = sum(each.ours.startswith("written by Trainshed") for each in imported.mapped)
    shown = [each for each in imported.mapped if not each.ours.startswith("written by Trainshed")]
    lines = [
        f"{source}: a {imported.kind} configuration; {len(imported.mapped)} settings mapped, "
        f"{len(imported.dropped)} dropped, {len(imported.mistakes)} mistakes"
    ]
    if shown:
        lines += ["", f"mapped (and {same} that Trainshed writes in any case)" if same else "mapped"]
        lines += _mapped(shown)
    if imported.dropped:
        width = min(60, max(len(each.theirs) for each in imported.dropped))
        lines += ["", "dropped", *(f"  {each.theirs:<{width}}  {each.why}" for each in imported.dropped)]
    if imported.mistakes:
        lines += ["", "mistakes in the file"]
        for each in imported.mistakes:
            lines += [f"  {each.where}: {each.what}", f"    better: {each.instead}"]
    if imported.open_questions:
        lines += ["", "open", *(f"  {question}" for question in imported.open_questions)]
    if problem is not None:
        lines += ["", f"the recipe does not load yet: {problem}"]
    if out is not None:
        lines += ["", f"wrote {out}"]
    return "\n".join(lines)


def _mapped(shown: Sequence[Mapped]) -> list[str]:
    """A line for each setting; several that became one key stand together above it."""
    together: dict[str, list[str]] = {}
    for each in shown:
        together.setdefault(each.ours, []).append(each.theirs)
    single = [theirs[0] for theirs in together.values() if len(theirs) == 1]
    width = min(60, max(map(len, single), default=0))
    lines = []
    for ours, theirs in together.items():
        if len(theirs) == 1:
            lines.append(f"  {theirs[0]:<{width}}  {ours}")
        else:
            lines += [*(f"  {line}" for line in wrap(", ".join(theirs), 110, break_on_hyphens=False)), f"      {ours}"]
    return lines

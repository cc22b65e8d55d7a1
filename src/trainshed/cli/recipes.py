"""Recipe files: `trainshed recipes` lists and copies the shipped ones, `import` makes one of another engine's
configuration, `schema` prints the JSON schema for editors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import dropwhile, takewhile
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Flag, Output, described_names, print_report
from trainshed.cli.examples import examples_text

if TYPE_CHECKING:
    from trainshed.engines.importing import ImportedConfig, MappedSetting


app = App(name="recipes", help="List the shipped recipes, copy one, check one.", help_epilogue=examples_text("recipes"))


@app.default
def list_recipes(*, output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text") -> None:
    """List the shipped recipes.

    Parameters
    ----------
    output
        `json` for programs.
    """
    from trainshed.recipe import shipped_recipes

    rows = [{"name": name, "description": first_comment(file)} for name, file in shipped_recipes().items()]
    lines = described_names([(row["name"], row["description"]) for row in rows])
    text = "\n".join([*lines, "", "copy one to change it: trainshed recipes copy NAME"])
    print_report({"schema": "trainshed.recipes/1", "recipes": rows}, output, text)


app.command(list_recipes, name="list")


@app.command
def check(
    recipe: RecipeName,
    /,
    *overrides: str,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Check a recipe against a cluster without fetching, planning or running anything.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.steps=100, cluster.store=/data).
    on
        The cluster file that says where it would run.
    output
        `json` for programs.
    """
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import check_runnable

    for_recipe, for_cluster = split_overrides(overrides)
    loaded, cluster = load_recipe(recipe, for_recipe), load_cluster(on, for_cluster)
    check_runnable(loaded, cluster)
    report = {"schema": "trainshed.recipes.check/1", "name": loaded.name, "on": cluster.name}
    print_report(report, output, f"{loaded.name}: every key is known, and {cluster.name} would run it")


@app.command
def copy(
    name: RecipeName,
    destination: Path = Path(),
    /,
    *,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Copy a shipped recipe, and the scripts it uses, to your folder or file.

    Parameters
    ----------
    name
        The recipe, as `trainshed recipes` lists it.
    destination
        A folder, or a new file's name; the current directory if left out. Nothing is overwritten.
    output
        `json` for programs.
    """
    from trainshed.recipe.load import copy_shipped_recipe

    written = copy_shipped_recipe(name, destination)
    text = "\n".join([*(f"wrote {file}" for file in written), f"run it: trainshed run {written[0]}"])
    print_report({"schema": "trainshed.recipes.copy/1", "files": [str(file) for file in written]}, output, text)


def first_comment(file: Path) -> str:
    """Return the first sentence of a file's first comment, which says what it is."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), dropwhile(lambda line: not line.startswith("#"), lines))
    return " ".join(line.lstrip("# ").strip() for line in comment).partition(". ")[0].rstrip(".")


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
        Where the recipe is written; left out: to standard output, and the report to standard error. Nothing is
        overwritten.
    cluster_out
        Where what the file says about the cluster is written; left out: a comment at the end of the recipe.
    gpus
        How many GPUs the run had: torchtune's files don't say, and the global batch depends on it.
    output
        `json` for programs.
    """
    from trainshed.engines.importing import cluster_text, load_problem, recipe_text
    from trainshed.engines.importing import import_file as read

    for written in (out, cluster_out):
        if written is not None:
            check_new_file(written)
    imported = read(file, gpus=gpus)
    text = recipe_text(imported, file.name)
    problem = load_problem(text)
    if out is not None:
        write_new_file(out, text)
    if cluster_out is not None:
        write_new_file(cluster_out, cluster_text(imported, file.name))
    account = _import_text(imported, file.name, out, problem)
    data = {"schema": "trainshed.import/1", **asdict(imported), "recipe_text": text, "problem": problem}
    if out is None and output == "text":
        from trainshed.cli.console import reporter

        reporter().note(account)
        print_report(data, output, text)
    else:
        print_report(data, output, account)


def check_new_file(path: Path) -> None:
    """Refuse a file that exists."""
    from trainshed.errors import InputError

    if path.exists():
        raise InputError("is already there, and nothing is overwritten", where=str(path), hint="write another name")


def write_new_file(path: Path, text: str) -> None:
    """Write a file that does not exist yet, in a folder that is made for it."""
    from trainshed.errors import InputError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _import_text(imported: ImportedConfig, source: str, out: Path | None, problem: str | None) -> str:
    same = sum(key.ours.startswith("written by Trainshed") for key in imported.mapped)
    shown = [key for key in imported.mapped if not key.ours.startswith("written by Trainshed")]
    mistakes = "1 mistake" if len(imported.mistakes) == 1 else f"{len(imported.mistakes)} mistakes"
    lines = [
        f"{source}: a {imported.kind} configuration; {len(imported.mapped)} settings mapped, "
        f"{len(imported.dropped)} dropped, {mistakes}"
    ]
    if shown:
        lines += ["", f"mapped (and {same} that Trainshed writes in any case)" if same else "mapped"]
        lines += _mapped_lines(shown)
    if imported.dropped:
        width = min(60, max(len(key.theirs) for key in imported.dropped))
        lines += ["", "dropped", *(f"  {key.theirs:<{width}}  {key.why}" for key in imported.dropped)]
    if imported.mistakes:
        lines += ["", "mistakes in the file"]
        for mistake in imported.mistakes:
            lines += [f"  {mistake.where}: {mistake.what}", f"    better: {mistake.instead}"]
    if imported.open_questions:
        lines += ["", "open", *(f"  {question}" for question in imported.open_questions)]
    if problem is not None:
        lines += ["", f"the recipe does not load yet: {problem}"]
    if out is not None:
        lines += ["", f"wrote {out}"]
    return "\n".join(lines)


def _mapped_lines(shown: Sequence[MappedSetting]) -> list[str]:
    """A line for each setting; several that became one key are listed together above it."""
    together: dict[str, list[str]] = {}
    for key in shown:
        together.setdefault(key.ours, []).append(key.theirs)
    single = [theirs[0] for theirs in together.values() if len(theirs) == 1]
    width = min(60, max(map(len, single), default=0))
    lines = []
    for ours, theirs in together.items():
        if len(theirs) == 1:
            lines.append(f"  {theirs[0]:<{width}}  {ours}")
        else:
            lines += [*(f"  {line}" for line in wrap(", ".join(theirs), 110, break_on_hyphens=False)), f"      {ours}"]
    return lines


def schema(*, cluster: Flag = False) -> None:
    """Print the JSON schema of a recipe, for editors.

    Save it and point your editor at it: a first line of
    `# yaml-language-server: $schema=recipe.schema.json` gives completion and checks while typing.

    Parameters
    ----------
    cluster
        The schema of a cluster file instead.
    """
    from trainshed.catalog import preset_names
    from trainshed.cli.console import print_report
    from trainshed.recipe import cluster_json_schema, recipe_json_schema

    print_report(cluster_json_schema() if cluster else recipe_json_schema(preset_names()), "json", "")

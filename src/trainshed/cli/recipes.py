"""`trainshed recipes`: list the shipped recipes, copy one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from trainshed.cli.console import Output, print_report

app = App(name="recipes", help="List the shipped recipes and copy one.")


@app.default
def list_recipes(*, output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text") -> None:
    """List the shipped recipes.

    Parameters
    ----------
    output
        `json` for programs.
    """
    from trainshed.recipe import shipped_recipes

    rows = [{"name": name, "description": _first_comment(file)} for name, file in shipped_recipes().items()]
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{row['name']:<{width}}  {row['description']}" for row in rows]
    text = "\n".join([*lines, "", "copy one to change it: trainshed recipes copy NAME"])
    print_report({"schema": "trainshed.recipes/1", "recipes": rows}, output, text)


@app.command
def copy(
    name: str,
    destination: Path = Path(),
    /,
    *,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Copy a shipped recipe, and the scripts it uses, to a folder or file of yours.

    Parameters
    ----------
    name
        The recipe, as `trainshed recipes` lists it.
    destination
        A folder, or a new file's name; the current directory if left out. Nothing is overwritten.
    output
        `json` for programs.
    """
    from trainshed.recipe.copying import copy_shipped_recipe

    written = copy_shipped_recipe(name, destination)
    text = "\n".join([*(f"wrote {file}" for file in written), f"run it: trainshed run {written[0]}"])
    print_report({"schema": "trainshed.recipes.copy/1", "files": [str(file) for file in written]}, output, text)


def _first_comment(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""

"""The pages "coming from": their tables are those of the engines, their examples run, our keys in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.docs_pages import run_page
from trainshed.engines.key_reference import fill_key_tables
from trainshed.recipe import Recipe
from trainshed.recipe.schema_export import key_list

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("from-*.md"))
SECTIONS = "model|tokenizer|data|train|layout|checkpoint|observe|export|resources"
OUR_KEY = re.compile(rf"`((?:{SECTIONS})(?:\.[a-z_]+)+)(?=[`:\[])")


def test_there_is_a_page_for_each_of_them() -> None:
    assert [page.stem for page in PAGES] == ["from-axolotl", "from-megatron", "from-nemo", "from-torchtune"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == fill_key_tables(text), "run: python docs/write_reference.py"
    assert page.stem == "from-axolotl" or text.count("| theirs | recipe | |") >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_recipe_key_that_is_named_exists(page: Path) -> None:
    known = key_list(Recipe)
    ours = "\n".join(line.rsplit(" | ", 1)[-1] for line in page.read_text().splitlines() if line.startswith("| "))
    named = set(OUR_KEY.findall(ours))
    starts = {".".join(key.replace(".*", "").split(".")[:depth]) for key in known for depth in range(1, 6)}
    assert named - starts == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_is_imported_and_planned(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) >= 1

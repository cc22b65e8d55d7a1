"""Finding recipes, naming them in errors, and what loading must not cost."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainshed.errors import InputError, RecipeError
from trainshed.recipe import find_recipe, load_cluster, load_recipe, parse_recipe, run_id, shipped_recipes
from trainshed.recipe.load import chosen_run_id, copy_shipped_recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name


def test_a_file_is_loaded_by_path_and_errors_name_it_as_typed(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(base + "  stpes: 5\n")
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", tmp_path / "mine.yaml"):
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert str(caught.value.where).startswith("mine.yaml:")


def test_a_shipped_recipe_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart", ["train.steps=50"])
    assert recipe.train.steps == 50
    assert recipe.folder == shipped_recipes()["quickstart"].parent


def test_a_misspelt_recipe_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.yaml").write_text("")
    for wrong, near in (("quikstart", "quickstart"), ("trainng.yaml", "training.yaml")):
        with pytest.raises(RecipeError) as caught:
            find_recipe(wrong)
        assert (caught.value.where, caught.value.what) == (wrong, "there is no such recipe")
        assert caught.value.hint == f"did you mean {near}?"
    with pytest.raises(RecipeError) as caught:
        find_recipe("zzz")
    assert caught.value.hint == f"shipped recipes: {', '.join(shipped_recipes())}"


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        find_recipe(tmp_path)


def test_what_was_copied_is_found_beside_the_folder_of_its_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_shipped_recipe("quickstart", tmp_path)
    with pytest.raises(RecipeError, match="is a folder, not a recipe") as caught:
        find_recipe("quickstart")
    assert caught.value.hint == "write the file: quickstart.yaml"


def test_an_empty_name_is_neither_a_folder_nor_the_usual_cluster() -> None:
    with pytest.raises(RecipeError, match="the name of the recipe is empty"):
        find_recipe("")
    with pytest.raises(RecipeError, match="the name of the cluster is empty"):
        load_cluster("")


@pytest.mark.parametrize("written", ["", "a b", "../elsewhere", "a/b", ".hidden", "-a"])
def test_an_id_that_is_no_folder_s_name_is_refused(base: str, written: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen_run_id(parse_recipe(base), written)
    assert caught.value.where == "--id"


def test_an_id_is_the_one_written_or_the_recipe_s_own(base: str) -> None:
    recipe = parse_recipe(base)
    assert chosen_run_id(recipe, None) == run_id(recipe)
    assert chosen_run_id(recipe, "lr-1e4_v2.1") == "lr-1e4_v2.1"


def test_a_newer_format_is_refused_before_its_keys_are_called_unknown(base: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"trainshed: 2\n{base}brand_new: 1\n")
    assert caught.value.what == "the file has format 2, and this Trainshed reads up to 1"
    assert caught.value.where == "recipe.yaml:1 (trainshed)"
    assert caught.value.hint == "pip install --upgrade trainshed"


def test_where_names_the_line_of_any_key(base: str) -> None:
    recipe = parse_recipe(base, source="r.yaml")
    assert recipe.where("data.train.0.path") == "r.yaml:9 (data.train.0.path)"
    assert recipe.where("train.optimizer.clip") == "r.yaml:13 (train.optimizer.clip)"
    assert recipe.where("checkpoint.every") == "r.yaml (checkpoint.every)"


def test_a_copied_recipe_brings_its_scripts_and_overwrites_nothing(tmp_path: Path) -> None:
    written = copy_shipped_recipe("quickstart", tmp_path / "mine")
    assert written[0] == tmp_path / "mine" / "quickstart.yaml"
    recipe = load_recipe(written[0])
    script = recipe.data.train[0].script
    assert script is not None
    assert (recipe.folder / script).is_file()
    with pytest.raises(InputError, match="is there already, and nothing is overwritten"):
        copy_shipped_recipe("quickstart", tmp_path / "mine")
    assert copy_shipped_recipe("quickstart", tmp_path / "other" / "my.yaml")[0].name == "my.yaml"


def test_importing_the_recipe_brings_no_heavy_library() -> None:
    heavy = ("numpy", "torch", "obstore", "httpx2", "rich", "huggingface_hub", "transformers")
    code = f"import sys, trainshed.recipe, trainshed.catalog; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

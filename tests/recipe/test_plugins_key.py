"""`plugins` of a recipe: what a module must be, what is said where it is not, and what it does to the run id."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import InputError
from trainshed.plugins import Registry, find_plugin, load_plugins, plugins_not_run, registered_names
from trainshed.recipe import Recipe, load_recipe, parse_recipe, run_id, to_yaml

TOYS: Registry[type] = Registry("toy", {"yoyo": dict})
RECIPE = """
name: toys
model: {preset: llama3-8b, init: random}
data: synthetic
train: {steps: 1, global_batch: 1, optimizer: {lr: 1.0e-4}}
"""
PLUGIN = """
from trainshed.plugins import registry


@registry("toy").register("%s")
class Toy:
    size = %d
"""


def recipe(folder: Path, plugins: str) -> Recipe:
    (folder / "recipe.yaml").write_text(f"{RECIPE}plugins: {plugins}\n")
    return load_recipe(folder / "recipe.yaml")


def plugin(folder: Path, name: str, toy: str, size: int = 1) -> Path:
    file = folder / f"{name}.py"
    file.write_text(PLUGIN % (toy, size))
    return file


def test_a_module_beside_the_recipe_registers_its_classes(tmp_path: Path) -> None:
    plugin(tmp_path, "plugin_beside", "kite")
    (source,) = recipe(tmp_path, "plugin_beside").plugin_sources
    assert source.files == ("plugin_beside.py",)
    assert "kite" in TOYS
    assert TOYS.owner("kite") == "plugin_beside"
    assert TOYS.owner("yoyo") is None


def test_a_package_brings_all_its_modules(tmp_path: Path) -> None:
    package = tmp_path / "plugin_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("NAME = 'drum'\n")
    (package / "toys.py").write_text(
        "from plugin_package.inner import NAME\nfrom trainshed.plugins import registry\n"
        "registry('toy').register(NAME, 3)\n"
    )
    (source,) = recipe(tmp_path, "[plugin_package.toys]").plugin_sources
    assert source.files == (
        "plugin_package/__init__.py",
        "plugin_package/inner/__init__.py",
        "plugin_package/toys.py",
    )
    assert TOYS["drum"] == 3
    before = source.sha256
    (package / "inner" / "__init__.py").write_text("NAME = 'flute'\n")
    (source,) = recipe(tmp_path, "[plugin_package.toys]").plugin_sources
    assert source.sha256 != before
    assert "flute" in TOYS
    assert "drum" not in TOYS, "what an older version of the plugin registered is gone"


def test_an_installed_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    plugin(tmp_path / "site", "plugin_installed", "top")
    monkeypatch.syspath_prepend(tmp_path / "site")
    (source,) = recipe(tmp_path, "[plugin_installed]").plugin_sources
    assert source.root == tmp_path / "site"
    assert "top" in TOYS


def test_the_source_of_plugins_counts_in_the_run_id_and_their_place_does_not(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        plugin(folder, "plugin_hashed", "ball")
    first = recipe(one, "[plugin_hashed]")
    assert run_id(first) == run_id(recipe(other, "[plugin_hashed]"))
    assert run_id(first) != run_id(parse_recipe(RECIPE))
    plugin(other, "plugin_hashed", "ball", size=2)
    assert run_id(first) != run_id(recipe(other, "[plugin_hashed]"))
    assert TOYS["ball"].size == 2


def test_a_recipe_without_plugins_keeps_its_id_and_its_text() -> None:
    assert run_id(parse_recipe(RECIPE)) == "614ff88c"
    assert "plugins" not in to_yaml(parse_recipe(RECIPE))


def test_a_recipe_is_written_and_read_back_with_its_plugins(tmp_path: Path) -> None:
    plugin(tmp_path, "plugin_written", "doll")
    made = recipe(tmp_path, "plugin_written")
    assert "plugins: [plugin_written]" in to_yaml(made)
    assert parse_recipe(to_yaml(made), folder=tmp_path) == made


@pytest.mark.parametrize(
    ("source", "what", "place"),
    [
        ("x = 1\n", "registers nothing", "plugin_bad_0.py"),
        (
            "x = 1\nimport no_such_module\n",
            "ModuleNotFoundError: No module named 'no_such_module'",
            "plugin_bad_1.py:2",
        ),
        ("x = (\n", "SyntaxError", "plugin_bad_2.py:1"),
        ("def f():\n    raise ValueError('broken')\nf()\n", "ValueError: broken", "plugin_bad_3.py:2"),
        (PLUGIN % ("yoyo", 1), "the name `yoyo` of a toy is taken: it is built in", "plugin_bad_4.py:5"),
        (PLUGIN % ("Yo Yo", 1), "`Yo Yo` is not a name of a toy", "plugin_bad_5.py:5"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said_with_file_and_line(
    tmp_path: Path, source: str, what: str, place: str
) -> None:
    (tmp_path / place.partition(":")[0]).write_text(source)
    with pytest.raises(InputError) as error:
        recipe(tmp_path, f"[{place.partition('.')[0]}]")
    assert what in error.value.what
    assert (error.value.where or "").endswith(place)
    assert error.value.exit_code == 2


def test_two_plugins_cannot_share_a_name(tmp_path: Path) -> None:
    plugin(tmp_path, "plugin_first", "robot")
    plugin(tmp_path, "plugin_second", "robot")
    with pytest.raises(InputError, match=r"the name `robot` of a toy is taken: .*plugin_first.py:5 has registered it"):
        recipe(tmp_path, "[plugin_first, plugin_second]")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ("[plugin_missing]", "there is no module `plugin_missing`"),
        ("[json]", "`json` is not a plugin's own name"),
        ("[my_plugin.py/x]", "`my_plugin.py/x` is not the name of a module"),
        ("3", "expected a list, got 3"),
    ],
)
def test_what_is_not_a_module_is_refused_at_its_line(tmp_path: Path, names: str, what: str) -> None:
    with pytest.raises(InputError) as error:
        recipe(tmp_path, names)
    assert what in str(error.value)
    assert "recipe.yaml:6 (plugins" in str(error.value)


def test_a_helper_beside_a_plugin_does_not_travel_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin_help.py").write_text("x = 1\n")
    (tmp_path / "plugin_lone.py").write_text("import plugin_help\n")
    with pytest.raises(InputError) as error:
        recipe(tmp_path, "[plugin_lone]")
    assert "plugin_help.py does not travel with it: make both modules of one package" in (error.value.hint or "")


def test_a_recipe_can_be_looked_at_without_running_its_plugins(tmp_path: Path) -> None:
    (tmp_path / "plugin_unrun.py").write_text("raise SystemExit\n")
    with plugins_not_run():
        made = recipe(tmp_path, "[plugin_unrun]")
    assert len(made.plugin_sources) == 1


def test_an_unknown_name_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no toy `yoyu`; known are yoyo") as error:
        TOYS.find("yoyu")
    assert error.value.hint == "did you mean yoyo?"
    load_plugins([], tmp_path)
    assert registered_names("no such kind") == ()


def test_a_plugin_too_large_to_travel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin_large.py").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(InputError, match="it travels with every job"):
        find_plugin("plugin_large", tmp_path)

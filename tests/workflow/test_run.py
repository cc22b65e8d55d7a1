"""A recipe is run from Python as from the command line: the same function, and nothing is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed import workflow
from trainshed.cli import run_cli
from trainshed.errors import NotFound
from trainshed.recipe import load_cluster, load_recipe


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    write_script(folder)
    write_small_recipe(folder)
    return folder


def test_a_recipe_goes_from_text_to_exported_weights_and_says_nothing(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(str(here / "recipe.yaml"), ["export={dtype: fp32}"])
    cluster = load_cluster("local", [f"store={here}/store"])
    seen: list[str] = []

    @workflow.watching
    def watch(event: dict[str, object]) -> None:
        seen.append(str(event["kind"]))

    finished = workflow.run(recipe, cluster, watch=watch)
    assert (finished.steps_done, finished.is_complete, finished.exit_code, finished.attempt) == (3, True, 0, 1)
    assert finished.export is not None
    assert (Path(finished.export) / "verdict.json").is_file()
    assert seen.count("step") == 3
    page = (finished.prepared.folder / "report.html").read_text()
    assert '"state":"done","phase":null,"step":3.0,"steps":3' in page
    assert capfd.readouterr() == ("", "")
    # The command line is the same run: it finds all of it made.
    again = [str(here / "recipe.yaml"), "export={dtype: fp32}", f"cluster.store={here}/store"]
    assert run_cli(["run", *again, "-o", "json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["id"], report["training"]["step"]) == (finished.prepared.id, 3)
    assert report["training"]["loss"] == (finished.last_step or {})["loss"]
    assert report["training"]["report"] == str(finished.prepared.folder / "report.html")


def test_the_train_stage_alone_asks_for_what_was_prepared(here: Path) -> None:
    cluster = load_cluster("local", [f"store={here}/elsewhere"])
    with pytest.raises(NotFound, match="is not made yet"):
        workflow.train(load_recipe(str(here / "recipe.yaml")), cluster)

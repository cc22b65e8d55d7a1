"""Trainshed from Python: the page that describes it runs, notebooks show it, and it is the command line's own code."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import trainshed as ts
from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.errors import RecipeError
from trainshed.observe.notebook import NotebookProgress

ROOT = Path(__file__).resolve().parents[1]
NEEDS_A_CLUSTER = "# where `sbatch` is\n"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("api")
    write_script(folder)
    write_small_recipe(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield folder


@pytest.fixture(scope="module")
def page(here: Path) -> dict[str, object]:
    """What is defined after every example of docs/python.md was run, from top to bottom."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) > 6
    names: dict[str, object] = {}
    for number, example in enumerate(examples):
        code = compile(example, f"docs/python.md, example {number}", "exec")
        if not example.startswith(NEEDS_A_CLUSTER):
            exec(code, names)
    return names


def test_importing_costs_little() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'cyclopts', 'orjson', 'yaml', 'httpx2', 'obstore'}"
    code = f"import sys, trainshed; assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_of_the_page_run(page: dict[str, object]) -> None:
    run, plan, rows = page["run"], page["plan"], page["rows"]
    assert isinstance(run, ts.Run)
    assert run.state == "done"
    assert page["losses"] == [row["loss"] for row in rows]  # type: ignore[union-attr]
    assert (plan.layout.tp, plan.fits) == (4, True)  # type: ignore[attr-defined]
    assert "step" in page["kinds"]  # type: ignore[operator]


def test_a_run_says_what_the_command_line_says(page: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    run = page["run"]
    assert isinstance(run, ts.Run)

    def command(*words: str) -> dict[str, object]:
        assert run_cli([*words, "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert command("status", str(run)) == run.status()
    listed = command("checkpoints", str(run))["checkpoints"]
    assert [entry["step"] for entry in listed] == [entry.step for entry in run.checkpoints] == [3, 2]  # type: ignore[union-attr]
    measured = command("metrics", str(run))["runs"][0]  # type: ignore[index]
    assert measured["last_step"] == run.measure().to_plain()["last_step"] == 3
    assert {str(other) for other in ts.runs()} == {str(run), f"{run.name}/watched"}
    assert run_cli(["logs", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [line.rstrip() for line in run.logs()]
    assert run.wait()["state"] == "done"
    assert run.cancel() == []


def test_rows_have_the_same_keys_and_validations_stand_with_their_step(page: dict[str, object]) -> None:
    rows = page["run"].metrics()  # type: ignore[attr-defined]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len({tuple(row) for row in rows}) == 1
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_greedy_generation_takes_the_highest_logit(page: dict[str, object]) -> None:
    model = page["model"]
    answer = model.generate("one two", max_tokens=3, ignore_eos=True)  # type: ignore[attr-defined]
    prompt = model.encode("one two")  # type: ignore[attr-defined]
    logits = model.logits([*prompt, *answer.tokens])  # type: ignore[attr-defined]
    assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == answer.tokens
    assert str(answer) == answer.text


def test_a_change_is_checked_as_an_override_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ts.Recipe.load("recipe.yaml")
    changed = recipe.with_("train.optimizer.lr", 5e-4).with_({"train.global_batch": 4, "layout.dp": 2})
    assert (changed.train.optimizer.lr, changed.train.global_batch) == (5e-4, 4)
    assert changed == ts.Recipe.load("recipe.yaml", "train.optimizer.lr=5e-4", "train.global_batch=4", "layout.dp=2")
    assert recipe == ts.Recipe.load("recipe.yaml")
    for key, value in {"train.stpes": 3, "train.steps": "many", "train.optimizer.lr": -1.0}.items():
        with pytest.raises(RecipeError) as caught:
            recipe.with_(key, value)
        assert run_cli(["plan", "recipe.yaml", f"{key}={value}", "--gpu", "h100", "-o", "json"]) == 2
        written = json.loads(capsys.readouterr().out)
        assert (caught.value.what, caught.value.hint) == (written["what"], written["hint"])
        assert (caught.value.where or "").startswith("with_: ")


def test_a_recipe_that_was_changed_in_python_keeps_the_change(here: Path) -> None:
    renamed = ts.Recipe.load("recipe.yaml").model_copy(update={"name": "renamed"})
    again = renamed.with_("train.optimizer.lr", 2e-3)
    assert (again.name, again.train.optimizer.lr) == ("renamed", 2e-3)


def test_what_a_cluster_locks_stays_locked_in_python(here: Path) -> None:
    (here / "locked.yaml").write_text("name: locked\ntarget: local\nlocked: [store]\n")
    with pytest.raises(RecipeError, match="is locked by whoever runs this cluster"):
        ts.Cluster.load("locked.yaml").with_("store", "/elsewhere")


def test_one_task_or_set_may_be_a_text(here: Path, page: dict[str, object]) -> None:
    run = page["run"]
    assert isinstance(run, ts.Run)
    with pytest.raises(ts.TrainshedError, match="no token files with this prefix") as caught:
        ts.evaluate(run, perplexity="held-out")
    assert caught.value.where == "held-out"


def test_a_failed_wait_says_why(here: Path, page: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    run = page["run"]
    assert isinstance(run, ts.Run)
    failed = run.status() | {"state": "failed", "why": "out of luck"}
    monkeypatch.setattr("trainshed.workflow.run_state.run_status", lambda known: failed)
    with pytest.raises(ts.TrainshedError, match="has failed: out of luck"):
        run.wait()
    assert run.wait(check=False)["state"] == "failed"


def test_a_cell_shows_a_recipe_and_a_cluster_as_they_are_written() -> None:
    shown = ts.Recipe.load("quickstart").with_("name", "shown")._repr_html_()
    assert "<pre>name: shown\n" in shown
    assert "script: quickstart/docstrings.py" in shown
    assert "dropout" not in shown, "keys with their default stay out"
    assert "target: kubernetes" in ts.Cluster.load("gke-a3-mega")._repr_html_()


def test_live_progress_keeps_the_lines_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    display = ModuleType("IPython.display")
    monkeypatch.setattr(display, "display", lambda *_, **__: None, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    progress = NotebookProgress()
    progress.note("two runs\n  lr=<1e-3>")
    assert "pre-wrap" in progress._repr_html_()
    assert "two runs\n  lr=&lt;1e-3&gt;</div>" in progress._repr_html_()


def test_cells_show_plans_and_runs_and_live_progress(here: Path, page: dict[str, object]) -> None:
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    from IPython.utils.capture import capture_output

    shell = shell_module.InteractiveShell.instance()
    try:
        shell.kernel = object()  # what tells a notebook's shell from a terminal's
        with capture_output() as shown:
            result = shell.run_cell("import trainshed as ts\nrun = ts.run('recipe.yaml', id='cell')")
        result.raise_error()
        pictures = [output.data.get("text/html", "") for output in shown.outputs]
        assert pictures, shown.stderr
        result = shell.run_cell("run")
        formats, _ = shell.display_formatter.format(result.result)
        assert "done" in formats["text/html"]
        assert "<polyline" in formats["text/html"]
        formats, _ = shell.display_formatter.format(page["plan"])
        assert "<table>" in formats["text/html"]
        assert "data:image/svg+xml;base64," in formats["text/html"]
    finally:
        shell_module.InteractiveShell.clear_instance()

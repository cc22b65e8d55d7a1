"""A recipe in phases through the command line: prepared ahead, trained, looked at, with several validation sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes.text_recipes import SCRIPT, write_script
from trainshed.cli import run_cli
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore

SIZES = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn: 24, vocab_size: 280, max_positions: 64"
RECIPE = f"""
name: phased
model: {{config: {{family: llama, {SIZES}, rope: {{base: 10000.0}}}}, init: random}}
tokenizer: {{train: {{vocab_size: 280}}}}
data:
  sequence_length: 16
  train: [{{script: numbers.py, name: numbers, weight: 3}}, {{script: letters.py, name: letters, weight: 1}}]
  validation:
    numbers: {{script: numbers.py, every: 2, batches: 1}}
    letters: {{script: letters.py, every: 4, batches: 1}}
train:
  global_batch: 4
  precision: fp32
  optimizer: {{lr: 1.0e-3}}
  phases:
    - {{name: main, steps: 3, shape: linear}}
    - name: long
      tokens: 320
      sequence_length: 32
      global_batch: 2
      data: {{train: [{{script: letters.py, name: letters}}]}}
      lr: 0.0
      shape: cosine
layout: {{dp: 1, micro_batch: 2}}
checkpoint: {{every: null}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two phases that the command line has made: its folder."""
    folder = tmp_path_factory.mktemp("phased")
    write_script(folder)
    write_script(folder, SCRIPT.replace("one two three", "a b c").replace("(i * k)", "(i + k)"), "letters.py")
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_cli(["run", "recipe.yaml"]) == 0
    return next((folder / "store/runs/phased").iterdir())


def ask(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    recipe = str(run.parents[3] / "recipe.yaml")
    assert run_cli([*words[:2], recipe, *words[2:], f"cluster.store={run.parents[2]}", "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_phases_are_trained_one_after_the_other(run: Path) -> None:
    events = list(read_events(LocalStore(run), ""))
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["train_phase"] for event in steps] == ["main"] * 3 + ["long"] * 5
    assert [event["tokens"] for event in steps] == [64, 128, 192, 256, 320, 384, 448, 512]
    assert [event["name"] for event in events if event["kind"] == "train_phase"] == ["main", "long"]
    assert {event["attempt"] for event in steps} == {1}
    assert all(set(event["source_losses"]) <= {"numbers", "letters"} for event in steps[:3])
    assert "source_losses" not in steps[-1], "the second phase has one source"


def test_validation_sets_have_losses_of_their_own_and_the_first_decides(run: Path) -> None:
    events = [event for event in read_events(LocalStore(run), "") if event["kind"] == "validation"]
    assert [(event["step"], sorted(event["set_losses"])) for event in events] == [
        (2, ["numbers"]),
        (4, ["letters", "numbers"]),
        (6, ["numbers"]),
        (8, ["letters", "numbers"]),
    ]
    assert all(event["loss"] == event["set_losses"]["numbers"] for event in events)


def test_a_batch_and_the_blend_are_those_of_the_phase(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [event for event in read_events(LocalStore(run), "") if event["kind"] == "step"]
    for step, phase, consumed, run_samples in ((3, "main", 8, 8), (4, "long", 0, 12), (8, "long", 8, 20)):
        shown = ask(run, capsys, "data", "batch", "--step", str(step))
        assert (shown["phase"], shown["consumed"], shown["run_samples"]) == (phase, consumed, run_samples)
        assert shown["hash"] == events[step - 1]["batch_hash"]
    blend = ask(run, capsys, "data", "blend")
    assert [(phase["name"], phase["steps"], phase["samples"]) for phase in blend["phases"]] == [
        ("main", 3, 12),
        ("long", 5, 10),
    ]
    assert [source["samples"] for source in blend["phases"][0]["sources"]] == [9, 3]


def test_the_status_names_the_phase(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[3])
    assert run_cli(["status", f"phased/{run.name}"]) == 0
    assert "phase long" in capsys.readouterr().out


def test_all_data_is_prepared_before_training(run: Path) -> None:
    body = json.loads((run / "prepared.json").read_bytes())
    assert set(body["data"]["others"]) == {"validation/numbers", "validation/letters", "phase-2/source-0"}
    assert body["steps"] == 8

"""The shipped fine-tuning quickstart: its two commands, as its heading says them."""

from __future__ import annotations

import hashlib
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
PARTS = runpy.run_path(str(RECIPES / "quickstart" / "literals.py"))


def trainshed(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainshed", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def quickstart(folder: Path, *overrides: str) -> Path:
    """Run the quickstart; return what it exported."""
    trainshed(folder, "run", str(RECIPES / "quickstart.yaml"), "--id", "base", "export.format=hf", *overrides)
    return folder / "store/runs/quickstart/base/export"


def chat(folder: Path, *words: str) -> Path:
    """Fine-tune it; return the run's folder."""
    return (
        folder
        / json.loads(trainshed(folder, "run", str(RECIPES / "quickstart-chat.yaml"), "-o", "json", *words))["folder"]
    )


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def answers(run: Path) -> list[str]:
    """What the model answers to the recipe's prompts at the last measurement."""
    last = max((run / "answers").glob("step-*.json"))
    return [answer["answer"].strip() for answer in json.loads(last.read_text())["answers"]]


def test_no_held_out_question_is_learned_from() -> None:
    """Neither a question nor its value, and all types are in both."""
    asked = {part: list(PARTS["conversations"](part)) for part in ("train", "held-out")}
    questions = {part: {talk["messages"][0]["content"] for talk in talks} for part, talks in asked.items()}
    kinds = {part: {talk["messages"][1]["content"] for talk in talks} for part, talks in asked.items()}
    assert not questions["train"] & questions["held-out"]
    assert len(questions["held-out"]) > 40
    assert kinds["train"] == kinds["held-out"] == {f"{kind}." for kind in PARTS["VALUES"]}


def test_the_chat_trains_adapters_on_what_the_quickstart_exported(tmp_path: Path) -> None:
    """Scaled down: a few steps of each."""
    few = ("train.steps=3", "train.schedule.warmup=1", "data.validation.every=3")
    base = quickstart(tmp_path, *few, "data.sequence_length=64")
    before = hashes(base)
    run = chat(tmp_path, *few, "checkpoint.every=3")
    exported = {path.name for path in (run / "export").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= exported
    assert not any(name.startswith("model") for name in exported), "the base is not exported again"
    assert hashes(base) == before
    assert len(answers(run)) == 3


@pytest.mark.full
def test_the_chat_answers_questions_about_values_that_it_has_not_seen(tmp_path: Path) -> None:
    """The quickstart itself knows none of the answers."""
    talks = list(PARTS["conversations"]("held-out"))
    questions, expected = zip(
        *((talk["messages"][0]["content"], talk["messages"][1]["content"]) for talk in talks), strict=True
    )
    prompts = f"data.validation.prompts={json.dumps(questions)}"
    quickstart(tmp_path)
    untrained = chat(
        tmp_path,
        prompts,
        "--id",
        "before",
        *("train.steps=1", "train.schedule.warmup=0"),
        "train.optimizer.lr=1e-12",
        "data.validation.every=1",
    )
    trained = chat(tmp_path, prompts, "data.validation.every=150")
    assert right(untrained, expected) == 0
    assert right(trained, expected) >= 0.9


def right(run: Path, expected: Sequence[str]) -> float:
    """The share of answers that are as expected."""
    return sum(given == wanted for given, wanted in zip(answers(run), expected, strict=True)) / len(expected)

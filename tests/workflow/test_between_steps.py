"""A real run that measures, answers, keeps its best checkpoint, ends early and exports the best: each is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.recipes.text_recipes import write_script, write_small_recipe
from support.runs.small_runs import events
from trainshed import workflow
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.cli import run_cli
from trainshed.data.prompts import encode_prompts, read_answers
from trainshed.errors import InputError
from trainshed.launch.local import LocalRun
from trainshed.recipe import load_cluster, load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import TrainedRun
from trainshed.workflow.remove import plan_removal

PROMPTS = ["one two", "seven eight nine"]
OVERRIDES = (
    "data.split={train: 0.9, validation: 0.1}",
    f"data.validation={{every: 2, batches: 1, answer_tokens: 8, prompts: {json.dumps(PROMPTS)}}}",
    "train.steps=40",
    "train.optimizer.lr=0.3",  # far too fast: the loss falls for some steps, then it does not
    "train.early_stop={patience: 2}",
    "checkpoint={best: {}, keep: 1}",
    "export={dtype: fp32}",
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("between")
    write_script(folder)
    write_small_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def stopped(here: Path) -> TrainedRun:
    """The run after it has ended early."""
    recipe = load_recipe(str(here / "recipe.yaml"), OVERRIDES)
    return workflow.run(recipe, load_cluster("local", [f"store={here}/store"]))


def validation_losses(run: TrainedRun) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run.prepared.folder, "validation")}


def test_the_run_ends_early_like_a_finished_one_and_exports_its_best(stopped: TrainedRun) -> None:
    losses = validation_losses(stopped)
    best = min(losses, key=losses.__getitem__)
    assert (stopped.is_complete, stopped.exit_code) == (True, 0)
    assert stopped.best == {"step": best, "loss": losses[best]}
    assert stopped.steps_done == best + 4 < 40, "two measurements after the best"
    assert stopped.early_stop is not None
    assert stopped.early_stop.endswith(f"the lowest was {losses[best]:.4f} after step {best}")
    assert stopped.export is not None
    assert find_checkpoint(LocalStore(stopped.prepared.folder), "").step == best
    manifest = json.loads((Path(stopped.export) / "manifest.json").read_text())
    assert manifest["spec"]["from"] == str(stopped.prepared.folder)
    removal = plan_removal(LocalRun.from_folder(stopped.prepared.folder), stopped.prepared.folder.parents[2])
    assert removal.parts[0].why == f"with its best checkpoint: step {best}, validation loss {losses[best]:.4f}"


def test_answers_are_those_of_transformers_with_the_exported_weights(stopped: TrainedRun) -> None:
    assert stopped.export is not None
    assert stopped.best is not None
    model = AutoModelForCausalLM.from_pretrained(stopped.export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stopped.export)
    stored = {step.step: step.answers for step in read_answers(LocalStore(stopped.prepared.folder), "")}
    assert list(stored) == list(validation_losses(stopped))
    for prompt, answer in zip(PROMPTS, stored[stopped.best["step"]], strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=8,
            pad_token_id=0,
        )
        tokens = output[0, length:].tolist()
        ended = model.generation_config.eos_token_id in tokens
        expected = tokens[: tokens.index(model.generation_config.eos_token_id)] if ended else tokens
        assert (answer["prompt"], answer["tokens"], answer["ended"]) == (prompt, expected, ended)
        assert answer["answer"] == tokenizer.decode(expected)
    assert len({str(answers) for answers in stored.values()}) > 1, "a model that learns says other things"


def test_a_rerun_says_that_it_has_stopped_early_and_does_nothing(
    stopped: TrainedRun, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(here / "recipe.yaml"), *OVERRIDES, f"cluster.store={here}/store"]
    assert run_cli([*command, "-o", "json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert f"stopped early after step {stopped.steps_done}: the validation loss has not fallen" in captured.err
    training = report["training"]
    assert (training["step"], training["steps"], training["stopped_early"]) == (
        stopped.steps_done,
        40,
        stopped.early_stop,
    )
    assert training["best"] == stopped.best
    assert report["export"] == stopped.export
    assert len(events(stopped.prepared.folder, "step")) == stopped.steps_done
    assert run_cli(["status", str(stopped.prepared.folder)]) == 0
    shown = capsys.readouterr().out
    assert "done, step " in shown
    assert f"stopped early: {stopped.early_stop}" in shown


def shown_answers(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    assert run_cli(["status", str(folder), "--answers", *options]) == 0
    return capsys.readouterr().out


def test_answers_of_several_steps_are_shown_side_by_side(
    stopped: TrainedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = stopped.prepared.folder
    steps = list(validation_losses(stopped))
    data = json.loads(shown_answers(capsys, folder, "-o", "json"))
    assert (data["schema"], [step["step"] for step in data["steps"]]) == ("trainshed.answers/1", steps)
    table = shown_answers(capsys, folder)
    assert f"2 prompts, answered at {len(steps)} steps" in table
    columns = [steps[0], *steps[-3:]]
    head = next(line for line in table.splitlines() if "prompt" in line and "after step" in line)
    assert [part.strip() for part in head.strip("┃").split("┃")] == [
        "prompt",
        *(f"after step {step}" for step in columns),
    ]
    for prompt, answer in zip(PROMPTS, data["steps"][-1]["answers"], strict=True):
        row = next(line for line in table.splitlines() if f"│ {prompt} " in line)
        assert f" {answer['answer'].strip()}" in row
    assert f"{len(steps) - 4} more in {folder}/answers" in table


def test_answers_that_no_rank_could_decode_are_decoded_by_whoever_reads_them(
    stopped: TrainedRun, tmp_path: Path
) -> None:
    folder = stopped.prepared.folder
    expected = read_answers(LocalStore(folder), "")
    store = LocalStore(tmp_path)
    for info in LocalStore(folder).list("answers"):
        body: Any = LocalStore(folder).read(info.path)
        if "step-" in info.path:
            plain = json.loads(body)
            for answer in plain["answers"]:
                answer["answer"] = None
            body = json.dumps(plain).encode()
        store.put(info.path, body)
    store.put("prepared.json", (folder / "prepared.json").read_bytes())
    assert read_answers(store, "") == expected


def test_a_prompt_without_room_for_its_answer_is_refused_at_its_key(stopped: TrainedRun, here: Path) -> None:
    longer = load_recipe(str(here / "recipe.yaml"), [*OVERRIDES, "data.validation.answer_tokens=40"])
    with pytest.raises(InputError) as error:
        encode_prompts(longer, stopped.prepared.tokenizer)
    length = len(stopped.prepared.prompts.tokens[0]) if stopped.prepared.prompts else 0
    assert error.value.where is not None
    assert "data.validation.prompts.0" in error.value.where
    assert error.value.what == (
        f"this prompt has {length} tokens and its answer up to 40: that is more than `sequence_length`, 32"
    )
    assert error.value.hint == f"write `answer_tokens: {33 - length}` or less, or a shorter prompt"


def test_a_run_without_answers_says_how_to_ask_for_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attempts").mkdir()
    assert run_cli(["status", str(tmp_path), "--answers"]) == 1
    assert "write `data: {validation: {prompts: [...]}}`" in capsys.readouterr().err


@pytest.mark.full
def test_the_best_checkpoint_is_exported_from_where_checkpoints_are_kept_apart(here: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        str(here / "recipe.yaml"),
        [*OVERRIDES, "train.early_stop=null", "train.steps=4", f"checkpoint.to={tmp_path}/apart"],
    )
    trained = workflow.run(recipe, load_cluster("local", [f"store={tmp_path}/store"]))
    assert trained.best is not None
    assert trained.export is not None
    assert not (trained.prepared.folder / "checkpoints").exists()
    assert (Path(trained.export) / "verdict.json").is_file()

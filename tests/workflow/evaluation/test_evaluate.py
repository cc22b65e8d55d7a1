"""Checkpoints are measured beside the training and after it: the engine's own loss, computed once, kept in the run."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed import workflow
from trainshed.checkpoints.native.hold import hold_checkpoint
from trainshed.cli import run_cli
from trainshed.cli.eval import report_text
from trainshed.errors import RecipeError, TrainshedError
from trainshed.observe.evaluations import EvaluationRecord, list_evaluations
from trainshed.observe.event_log import read_events
from trainshed.recipe import load_cluster, load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow.evaluation.evaluate import EvaluationReport, evaluate
from trainshed.workflow.evaluation.measures import EvaluationRequest, ModelLoading
from trainshed.workflow.evaluation.stage import EvaluationBesideTraining, due_checkpoints, evaluate_run
from trainshed.workflow.run import check_trainable

PATIENCE_SECONDS = 240
QUESTIONS = """\
- ask: one two three
  expect: [o, e]
- ask: four five six
  expect: [notinanyanswer]
"""
OVERRIDES = (
    "data.split={train: 0.9, validation: 0.1}",
    "data.validation={every: 2, batches: 2}",
    "data.document_mask=true",
    "train.steps=6",
    "checkpoint={every: 2, keep: 1}",
    "eval={every: 2, perplexity: validation, questions: questions.yaml, answer_tokens: 4}",
)


class Trained:
    """A run of six steps whose checkpoints of steps 2, 4 and 6 were evaluated, though only one is kept."""

    def __init__(self, folder: Path) -> None:
        write_script(folder)
        (folder / "questions.yaml").write_text(QUESTIONS)
        self.path = write_small_recipe(folder, name="evaluated")
        self.cluster = load_cluster("local", [f"store={folder}/store"])
        self.recipe = load_recipe(str(self.path), OVERRIDES)
        self.result = workflow.run(self.recipe, self.cluster)
        self.folder = self.result.prepared.folder
        self.store = LocalStore(self.folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("evaluated"))


def test_every_checkpoint_has_the_loss_that_the_engine_measured_at_its_step(trained: Trained) -> None:
    events = list(read_events(trained.store, ""))
    validations = {event["step"]: event["loss"] for event in events if event["kind"] == "validation"}
    records = [record for record in list_evaluations(trained.store) if record.kind == "perplexity"]
    assert sorted(validations) == [record.step for record in records] == [2, 4, 6]
    for record in records:
        assert record.scores["loss"] == pytest.approx(validations[record.step or 0], rel=1e-6)
        assert record.scores["perplexity"] == pytest.approx(math.exp(record.scores["loss"] or 0))
        assert 0 < (record.scores["bits_per_byte"] or 0) < (record.scores["loss"] or 0) / math.log(2)
    assert not (trained.folder / "evaluating").exists(), "nothing is held once it is evaluated"
    assert [path.name for path in (trained.folder / "checkpoints").glob("step-*")] == ["step-00000006"]
    emitted = [(event["step"], event["name"]) for event in events if event["kind"] == "evaluation"]
    assert sorted(emitted) == [(step, name) for step in (2, 4, 6) for name in ("perplexity validation", "questions")]


def test_the_run_reports_its_scores_and_its_page_has_them(trained: Trained) -> None:
    report = trained.result.evaluation
    assert report is not None
    assert (report.step, report.passed, report.question_score) == (6, True, 0.5)
    page = (trained.folder / "report.html").read_text()
    assert '"evaluations"' in page
    assert "perplexity validation" in page


def test_the_same_evaluation_is_not_computed_twice(trained: Trained, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["eval", str(trained.folder), "-o", "json"]
    assert run_cli(asked) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["computed"] == 0
    assert [one["kind"] for one in report["evaluations"]] == ["perplexity", "questions"]
    assert run_cli([*asked, "--perplexity", "validation", "--dtype", "bf16"]) == 0
    assert json.loads(capfd.readouterr().out)["computed"] == 1, "in another dtype it is another one"


def test_a_gate_that_is_not_passed_exits_with_1(trained: Trained, capfd: pytest.CaptureFixture[str]) -> None:
    asked = [
        "eval",
        str(trained.folder),
        "--questions",
        str(trained.path.with_name("questions.yaml")),
        "--answer-tokens",
        "4",
    ]
    assert run_cli([*asked, "--at-least", "0.5"]) == 0
    assert "gate passed: 0.50" in capfd.readouterr().out
    assert run_cli([*asked, "--at-least", "0.67"]) == 1
    assert "gate NOT passed: 0.50 of the questions, at least 0.67 are wanted" in capfd.readouterr().out


def test_an_answer_of_white_space_alone_is_shown_as_python_writes_it() -> None:
    answers = (
        {"ask": "Where?", "answer": "\n\n", "contains": None},
        {"ask": "Who?", "answer": "a\nb", "contains": "b"},
    )
    record = EvaluationRecord("questions", "hard", {"score": 0.5}, {}, "run", details={"questions": answers})
    text = report_text(EvaluationReport("run", None, (record,), 1))
    assert text.splitlines()[2:] == [r"    - Where? -> '\n\n'", "    + Who? -> a b"]


def test_the_stage_fails_where_the_gate_is_not_passed(trained: Trained) -> None:
    recipe = load_recipe(str(trained.path), [*OVERRIDES, "eval.at_least=0.9"])
    with pytest.raises(TrainshedError, match="gate NOT passed"):
        evaluate_run(recipe, trained.folder)


@pytest.mark.full
def test_prepared_tokens_have_the_loss_of_transformers(trained: Trained, tmp_path: Path) -> None:
    tokens = next((trained.folder.parents[2] / "artefacts" / "tokens").glob("*"))
    exported = tmp_path / "hf"
    assert run_cli(["model", "convert", str(trained.folder), str(exported), "--to", "hf", "--dtype", "fp32"]) == 0
    request = EvaluationRequest(perplexity=(str(tokens),), sequence_length=16, document_mask=False)
    (record,) = evaluate(str(exported), request).records
    assert (exported / "evaluations").is_dir(), "beside the verdict"

    from transformers import AutoModelForCausalLM

    from trainshed.data.tokens.indexed_dataset import IndexedDataset

    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prefix = next(tokens.glob("**/*.idx")).with_suffix("")
    with IndexedDataset(str(prefix)) as dataset:
        counted = dataset.tokens
    # Rows of 16 labels each, whatever their order: the mean over all of them is what transformers gives row by row.
    assert record.details["tokens"] == (counted - 1) // 16 * 16
    loss = _loss_of(theirs, str(prefix), 16)
    assert record.scores["loss"] == pytest.approx(loss, rel=1e-5)


def _loss_of(model: torch.nn.Module, prefix: str, length: int) -> float:
    """The mean loss over all rows of a prefix, read by the order that our own evaluation uses, computed by theirs."""
    import tempfile

    import numpy as np

    from trainshed.data.order import build_order
    from trainshed.data.sampling.schedule import BatchSchedule
    from trainshed.data.tokens.token_source import TokenSource

    source = TokenSource.open("evaluated", [prefix])
    rows = (source.tokens - 1) // length
    with tempfile.TemporaryDirectory() as indexes, torch.no_grad():
        order = build_order(
            [source], indexes=Path(indexes), seed=0, sequence_length=length, schedule=BatchSchedule(1), steps=rows
        )
        losses = []
        for start in range(0, rows, 64):
            tokens = torch.from_numpy(order.read(np.arange(start, min(start + 64, rows))).tokens.astype(np.int64))
            logits = model(tokens[:, :-1]).logits
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            )
        return float(sum(losses)) / (rows * length)


def test_a_held_checkpoint_outlives_its_pruning_and_a_killed_start_leaves_it_to_the_next(
    trained: Trained,
) -> None:
    run = trained.folder.with_name("copy")
    shutil.copytree(trained.folder, run)
    shutil.rmtree(run / "evaluations")
    assert hold_checkpoint(run, 6)
    assert not hold_checkpoint(run, 4), "it was pruned"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert list(due_checkpoints(trained.recipe, run)) == [6]
    # The process beside the training is killed with whoever started it; the next start finds the checkpoint.
    process = subprocess.Popen(
        [sys.executable, "-m", "trainshed", "worker", "eval", "--run", str(run)], stdin=subprocess.PIPE
    )
    process.communicate(b"6\n")
    assert process.returncode != 0
    assert list(due_checkpoints(trained.recipe, run)) == [6]
    with EvaluationBesideTraining(trained.recipe, run) as beside:
        beside.on_event({"kind": "checkpoint", "phase": "committed", "step": 3})
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (run / "evaluating").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert [record.step for record in list_evaluations(LocalStore(run))] == [6, 6]
    assert trained.result.evaluation is not None
    assert list_evaluations(LocalStore(run)) == [
        replace(record, checkpoint="evaluated/copy") for record in trained.result.evaluation.records
    ]


def test_half_an_evaluation_does_not_exist(trained: Trained) -> None:
    run = trained.folder.with_name("half")
    shutil.copytree(trained.folder, run)
    shutil.rmtree(run / "evaluations")
    request, loading = EvaluationRequest(perplexity=("validation",)), ModelLoading(device="cpu")
    (record,) = evaluate(str(run), request, loading=loading).records
    manifest = next((run / "evaluations" / "step-00000006").glob("perplexity-*")) / "manifest.json"
    before = manifest.with_name("evaluation.json").read_bytes()
    assert list_evaluations(LocalStore(run)) == [record]
    manifest.unlink()
    assert list_evaluations(LocalStore(run)) == []
    assert evaluate(str(run), request, loading=loading).computed == 1
    assert manifest.with_name("evaluation.json").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["eval={}"], "says nothing to measure"),
        (["eval={perplexity: validation, every: 3}"], "checkpoints are written every 2 steps, and 3 is not a multiple"),
        (["eval={perplexity: validation, at_least: 0.5}"], "eval.at_least.*is about questions"),
        (["eval={perplexity: validation, limit: 5}"], "eval.limit.*is about tasks"),
        (["eval={perplexity: validation, gpus: 2}"], "one process on one GPU evaluates"),
        (["checkpoint=off", "eval={perplexity: validation}"], "no checkpoint is written"),
        (["data.validation=null", "data.split=null", "eval={perplexity: validation}"], "there is no validation set"),
    ],
)
def test_what_cannot_be_measured_is_refused_where_it_is_written(
    trained: Trained, overrides: list[str], what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        load_recipe(str(trained.path), [*OVERRIDES[:-1], *overrides])


@pytest.mark.parametrize(
    ("section", "key", "what"),
    [
        ("{perplexity: [validation, nowhere/tokens]}", "eval.perplexity", "no token files with this prefix"),
        ("{tasks: [no_such_task]}", "eval.tasks", "there is no task `no_such_task` in lm-eval"),
        ("{tasks: [mine], include_path: nowhere}", "eval.tasks", "there is no such folder of tasks"),
    ],
)
def test_what_is_not_there_to_measure_is_said_before_anything_is_trained(
    trained: Trained, section: str, key: str, what: str, tmp_path: Path
) -> None:
    recipe = load_recipe(str(trained.path), [*OVERRIDES, f"eval={section}"])
    with pytest.raises(RecipeError, match=what) as raised:
        check_trainable(recipe, load_cluster("local", [f"store={tmp_path}/store"]))
    assert key in str(raised.value)
    assert "--" not in (raised.value.hint or "")
    assert not (tmp_path / "store").exists()


def test_nothing_to_measure_says_what_to_write(
    capfd: pytest.CaptureFixture[str], trained: Trained, tmp_path: Path
) -> None:
    assert run_cli(["eval", str(trained.folder), "--perplexity", str(tmp_path / "none")]) == 2
    assert "none" in capfd.readouterr().err
    assert run_cli(["eval", str(trained.folder), "--at-least", "2", "--perplexity", "validation"]) == 2
    assert "--at-least 2.0 is not a share" in capfd.readouterr().err

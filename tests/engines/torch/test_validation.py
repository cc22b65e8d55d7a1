"""Validation during training: the best checkpoint is kept, a run that does not improve ends, no stop changes either."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.recipes.small_recipes import ALONE, MODELS, world_size
from support.runs.conversations import write_conversations
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_measuring
from support.runs.small_runs import events, figures
from trainshed.checkpoints.native.best import ValidationRecord
from trainshed.checkpoints.native.folder import CheckpointListing, find_checkpoint, list_checkpoints
from trainshed.data.order import run_orders
from trainshed.data.tokens.token_source import RunTokens, TokenSource, fingerprint_shard
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import EvaluationResult, StepRunner
from trainshed.engines.torch.validation import early_stop_reason, evaluate_batches
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import DecoderStage, Regularization
from trainshed.observe.event_log import read_steps
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig, parse_recipe
from trainshed.recipe.train import EarlyStop, Optimizer
from trainshed.storage import LocalStore

FAST = (
    "train.steps=12",
    "train.optimizer.lr=3e-2",
    "checkpoint.every=4",
    "checkpoint.keep=1",
    "checkpoint.async=false",
)
"""So fast that the validation loss falls until step 4 and rises from then on."""
BEST_STEP = 4
PATIENCE = EarlyStop(patience=2)
CONVERSATIONS = """
name: chat
model: {from: base}
tokenizer: base
data: {sequence_length: 16, train: [{tokens: a}]}
train: {mode: finetune, epochs: 1, global_batch: 4, precision: fp64, optimizer: {lr: 1.0e-3}}
"""


class Measured:
    """A small run that measures its loss every second step."""

    def __init__(self, pool: RankPool, folder: Path, layout: str = ALONE, *overrides: str) -> None:
        self.pool, self.folder, self.layout = pool, folder, layout
        self.overrides = (*FAST, *overrides)

    def train(
        self, *, best: bool = True, early_stop: EarlyStop | None = None, more: tuple[str, ...] = (), **how: Any
    ) -> int:
        """Train, or train on; returns the exit code of all ranks."""
        arguments = (2, best, early_stop, how.get("killed_before"), how.get("stop_after"), None, False)
        arguments += (how.get("stop_in_validation"),)
        overrides = (*self.overrides, *more)
        run = (self.folder, "dense", self.layout, overrides, *arguments)
        (code,) = set(self.pool.run(train_measuring, *run, ranks=world_size(self.layout)))
        return code

    def train_until_killed(self, killed_before: tuple[str, str]) -> None:
        arguments = (self.folder, "dense", self.layout, self.overrides, 2, True, None, killed_before)
        ends = self.pool.ends(train_measuring, *arguments, ranks=world_size(self.layout))
        assert ends[0].signal == "SIGKILL"

    @property
    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in events(self.folder, "validation")}

    @property
    def listing(self) -> CheckpointListing:
        return list_checkpoints(LocalStore(self.folder), "apart/checkpoints")

    @property
    def best(self) -> tuple[int | None, float | None]:
        best = self.listing.best
        assert best is not None
        return best.step, best.loss


@pytest.fixture(scope="module")
def straight(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A run that nothing ever stopped."""
    run = Measured(rank_pool, tmp_path_factory.mktemp("straight"))
    assert run.train() == 0
    return run


def test_the_best_checkpoint_is_saved_when_it_is_measured_and_kept_while_others_go(straight: Measured) -> None:
    losses = straight.losses
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    assert min(losses, key=losses.__getitem__) == BEST_STEP
    assert losses[2] > losses[4] < losses[6] < losses[8], "it must get worse, or nothing is proven"
    assert straight.best == (BEST_STEP, losses[BEST_STEP])
    assert [checkpoint.step for checkpoint in straight.listing.complete] == [12, BEST_STEP]
    marked = [
        (event["step"], event["loss"]) for event in events(straight.folder, "checkpoint") if event["phase"] == "best"
    ]
    assert marked == [(2, losses[2]), (4, losses[4])]
    found = find_checkpoint(LocalStore(straight.folder), "apart")
    assert found.step == BEST_STEP, "whoever asks for the run's weights gets the best"


def test_without_best_nothing_is_kept_besides_and_the_newest_counts(rank_pool: RankPool, tmp_path: Path) -> None:
    run = Measured(rank_pool, tmp_path)
    assert run.train(best=False) == 0
    assert [checkpoint.step for checkpoint in run.listing.complete] == [12]
    assert run.listing.best is None
    assert find_checkpoint(LocalStore(tmp_path), "apart").step == 12


@pytest.mark.parametrize(
    ("killed_before", "goes_on_from"),
    [
        (("put", "checkpoints/best"), 2),
        (("put", "step-00000004/manifest.json"), 2),
        (("delete", "step-00000002/manifest.json"), 4),
        pytest.param(("put", "step-00000008/manifest.json"), 4, marks=pytest.mark.full),
        pytest.param(("put", "step-00000012/manifest.json"), 8, marks=pytest.mark.full),
    ],
)
def test_killed_around_the_pointer_a_run_goes_on_with_the_same_best(
    rank_pool: RankPool, tmp_path: Path, straight: Measured, killed_before: tuple[str, str], goes_on_from: int
) -> None:
    run = Measured(rank_pool, tmp_path)
    run.train_until_killed(killed_before)
    if killed_before[1].endswith("best"):
        assert run.listing.best is None, "the first best was stored and not yet pointed to"
    assert run.train() == 0
    assert [event["step"] for event in events(tmp_path, "resume")] == [goes_on_from]
    assert (run.losses, run.best) == (straight.losses, straight.best)
    assert [checkpoint.step for checkpoint in run.listing.complete] == [12, BEST_STEP]


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_run_that_is_stopped_where_the_loss_is_due_measures_it_when_it_goes_on(
    rank_pool: RankPool, tmp_path: Path, straight: Measured, step: int
) -> None:
    run = Measured(rank_pool, tmp_path)
    assert run.train(stop_after=step) == 143
    assert max(run.losses, default=0) < step
    assert run.train() == 0
    assert (run.losses, run.best) == (straight.losses, straight.best)
    assert figures(read_steps(LocalStore(tmp_path), "")) == figures(read_steps(LocalStore(straight.folder), ""))


@pytest.mark.parametrize("step", [4, 12])
def test_a_request_to_stop_is_not_kept_waiting_by_a_validation_that_is_measured_later(
    rank_pool: RankPool, tmp_path: Path, straight: Measured, step: int
) -> None:
    run = Measured(rank_pool, tmp_path)
    assert run.train(stop_in_validation=step) == 143
    assert max(run.losses, default=0) < step
    assert run.listing.complete[0].step == step
    assert run.train() == 0
    assert (run.losses, run.best) == (straight.losses, straight.best)
    assert figures(read_steps(LocalStore(tmp_path), "")) == figures(read_steps(LocalStore(straight.folder), ""))


PHASES = ("train.steps=null", "train.schedule={}", "checkpoint.every=null")
OTHER_MODEL = "[{steps: 4}, {steps: 4, sequence_length: 32, global_batch: 4, rope_base: 40000.0}]"
OTHER_BATCH = "[{steps: 4}, {steps: 4, global_batch: 4}]"
OTHER_LAYOUT = "[{steps: 4}, {steps: 4, global_batch: 4, layout: {cp: 2, micro_batch: 4}}]"


@pytest.mark.parametrize("how", [{"stop_after": 4}, {"stop_in_validation": 4}], ids=str)
@pytest.mark.parametrize(
    ("phases", "layout", "best"),
    [
        (OTHER_MODEL, ALONE, False),
        (OTHER_MODEL, ALONE, True),
        (OTHER_BATCH, ALONE, False),
        pytest.param(OTHER_LAYOUT, "tp=2,micro_batch=4", True, marks=pytest.mark.full),
    ],
)
def test_a_phase_measures_the_loss_at_its_end_itself_also_where_the_run_was_stopped_there(
    rank_pool: RankPool, tmp_path: Path, phases: str, layout: str, best: bool, how: dict[str, int]
) -> None:
    straight, stopped = (
        Measured(rank_pool, tmp_path / name, layout, *PHASES, f"train.phases={phases}")
        for name in ("straight", "stopped")
    )
    assert straight.train(best=best) == 0
    assert stopped.train(best=best, **how) == 143
    assert max(stopped.losses) == 2
    assert stopped.train(best=best) == 0
    assert stopped.losses == straight.losses
    assert len(events(stopped.folder, "validation")) == 4, "each is measured once"
    assert [event["step"] for event in events(stopped.folder, "train_phase")] == [0, 4]
    assert figures(read_steps(LocalStore(stopped.folder), "")) == figures(read_steps(LocalStore(straight.folder), ""))
    assert [checkpoint.step for checkpoint in stopped.listing.complete] == [
        checkpoint.step for checkpoint in straight.listing.complete
    ]
    assert not best or stopped.best == straight.best


def test_a_run_that_ends_early_leaves_the_profile_of_its_last_steps(rank_pool: RankPool, tmp_path: Path) -> None:
    run = Measured(rank_pool, tmp_path, ALONE, "observe.profile={start: 7, steps: 4}")
    assert run.train(early_stop=PATIENCE) == 0
    assert [(event["step"], event["steps"]) for event in events(tmp_path, "profile")] == [(8, 2)]


def test_a_run_ends_early_is_done_then_and_goes_on_with_more_patience(rank_pool: RankPool, tmp_path: Path) -> None:
    run = Measured(rank_pool, tmp_path)
    assert run.train(early_stop=PATIENCE) == 0
    (stopped,) = events(tmp_path, "early_stop")
    assert (stopped["step"], stopped["best_step"]) == (8, BEST_STEP)
    assert stopped["reason"].startswith("the validation loss has not fallen in 2 measurements; the lowest was 4.09")
    assert [checkpoint.step for checkpoint in run.listing.complete] == [8, BEST_STEP], "it saves like a finished run"
    assert [event["reason"] for event in events(tmp_path, "end")] == ["finished"]
    assert run.train(early_stop=PATIENCE) == 0
    assert [event["step"] for event in events(tmp_path, "early_stop")] == [8, 8]
    assert len(events(tmp_path, "step")) == 8, "nothing was trained"
    assert run.train(early_stop=EarlyStop(patience=3)) == 0
    assert events(tmp_path, "early_stop")[-1]["step"] == 10
    assert run.train(early_stop=EarlyStop(patience=5)) == 0
    assert len(events(tmp_path, "step")) == 12
    assert len(events(tmp_path, "early_stop")) == 3, "a run that has done its steps did not stop early"


@pytest.mark.parametrize(
    "layout", ["dp=2,shard=full,micro_batch=2", pytest.param("tp=2,pp=2,micro_batch=4", marks=pytest.mark.full)]
)
def test_all_ranks_stop_at_the_same_step_and_another_layout_goes_on_with_the_record(
    rank_pool: RankPool, tmp_path: Path, straight: Measured, layout: str
) -> None:
    run = Measured(rank_pool, tmp_path, layout)
    assert run.train(early_stop=PATIENCE) == 0
    assert [event["step"] for event in events(tmp_path, "early_stop")] == [8]
    assert run.best[0] == BEST_STEP
    run.layout = ALONE
    assert run.train(early_stop=EarlyStop(patience=3)) == 0
    assert [event["step"] for event in events(tmp_path, "early_stop")] == [8, 10]
    assert max(abs(run.losses[step] - straight.losses[step]) for step in run.losses) <= 1e-9
    assert run.best[0] == BEST_STEP


def test_best_that_is_asked_for_later_is_sought_among_what_is_kept(rank_pool: RankPool, tmp_path: Path) -> None:
    run = Measured(rank_pool, tmp_path)
    assert run.train(best=False, more=("train.steps=8",)) == 0
    assert run.train() == 0
    (warning,) = [event["text"] for event in events(tmp_path, "warning")]
    assert warning.startswith("the lowest validation loss was 4.09")
    assert "after step 4, which was not kept: of what is kept, step 8 is the best" in warning
    losses = run.losses
    kept = min((8, 10, 12), key=losses.__getitem__)
    assert run.best == (kept, losses[kept])
    assert run.train(best=False) == 0
    assert run.best == (None, None), "a recipe that asks for none protects none"


def test_the_loss_of_several_batches_counts_each_labelled_token_once() -> None:
    batches = [EvaluationResult(2.0, 10), EvaluationResult(5.0, 30), EvaluationResult(math.nan, 0)]
    whole = EvaluationResult.mean(batches)
    assert (whole.loss, whole.labelled) == (pytest.approx((2.0 * 10 + 5.0 * 30) / 40), 40)
    equal = [0.1, 0.7, 1.3]
    assert EvaluationResult.mean([EvaluationResult(loss, 77) for loss in equal]).loss == sum(equal) / 3, "bitwise"
    assert math.isnan(EvaluationResult.mean([EvaluationResult(0.0, 0)]).loss)
    assert EvaluationResult.mean([EvaluationResult(math.nan, 0), EvaluationResult(3.0, 4)]).loss == 3.0


def test_a_loss_must_fall_by_more_than_min_delta_to_count_and_by_anything_to_be_the_best() -> None:
    record = ValidationRecord()
    for step, loss in enumerate([3.0, 2.95, 2.93, 2.91, 2.85], start=1):
        record = record.after(step, loss, min_delta=0.1)
    assert (record.best_step, record.best_loss) == (5, 2.85)
    assert (record.reference_loss, record.without_better) == (2.85, 0)
    assert record == ValidationRecord.from_facts(json.loads(json.dumps(record.to_facts())))
    worse = record.after(6, None, min_delta=0.1).after(7, 2.84, min_delta=0.1)
    assert (worse.best_step, worse.without_better) == (7, 2)
    assert early_stop_reason(worse, EarlyStop(patience=3, min_delta=0.1)) is None
    reason = early_stop_reason(worse, EarlyStop(patience=2, min_delta=0.1))
    assert (
        reason
        == "the validation loss has not fallen by more than 0.1 in 2 measurements; the lowest was 2.8400 after step 7"
    )
    assert early_stop_reason(worse, None) is None


def test_the_loss_of_conversations_is_the_mean_over_their_learned_tokens(tmp_path: Path) -> None:
    """Batches with different numbers of learned tokens, against every conversation by itself."""
    random = np.random.default_rng(5)
    documents = [random.integers(1, 61, random.integers(2, 16)) for _ in range(60)]
    learned = [random.random(len(tokens)) < random.choice([0.1, 0.9]) for tokens in documents]
    prefix = write_conversations(tmp_path / "tokens", documents, learned)
    source = TokenSource.open("source-0", [prefix], files=fingerprint_shard(prefix))
    recipe = parse_recipe(CONVERSATIONS)
    order = run_orders(recipe, RunTokens((source,)), tmp_path / "index", build=True).train
    config = ModelConfig.model_validate(MODELS["dense"])
    mesh = single_rank_mesh(resolve_layout(Layout.model_validate({"micro_batch": 2}), config), torch.device("cpu"))
    model = build_model(config, mesh, sequence_length=16, precision="fp64", regularization=Regularization())
    init_model(model, seed=1)
    runner = StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), mesh.device))
    result = evaluate_batches(runner, order, 4)
    losses: list[float] = []
    per_batch = []
    for step in range(4):
        rows = order.rows(step, 0, 4)
        assert rows.document_starts is not None
        assert rows.learned is not None
        batch = [
            loss
            for tokens, starts, wanted in zip(rows.tokens, rows.document_starts, rows.learned, strict=True)
            for loss in document_losses(model.stages[0], tokens, starts, wanted)
        ]
        per_batch.append(sum(batch) / len(batch))
        losses += batch
    assert result.labelled == len(losses)
    assert result.loss == pytest.approx(sum(losses) / len(losses), abs=1e-12)
    assert abs(result.loss - sum(per_batch) / 4) > 1e-6, "the mean of the batches' means would be another number"


def document_losses(stage: DecoderStage, tokens: np.ndarray, starts: np.ndarray, learned: np.ndarray) -> list[float]:
    """The losses of the learned tokens of a row, each document run by itself from the first column on."""
    losses = []
    for start in np.unique(starts):
        document, wanted = tokens[starts == start], learned[starts == start]
        if not wanted[1:].any():
            continue
        row = torch.zeros(1, stage.spec.sequence_length, dtype=torch.int64)
        row[0, : len(document)] = torch.from_numpy(document[: row.shape[1]].astype(np.int64))
        with torch.no_grad():
            scores = stage.logits(stage(row))[:, 0].log_softmax(-1)
        losses += [-float(scores[column, token]) for column, token in enumerate(document[1:]) if wanted[column + 1]]
    return losses

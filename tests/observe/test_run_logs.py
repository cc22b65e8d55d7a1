"""The events of a run whose engine writes none: read from its logs when somebody asks, or followed while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainshed.catalog import gpu, model_preset
from trainshed.launch.attempt import log_file
from trainshed.launch.engine_events import EngineEvents
from trainshed.observe.engine_logs.run_logs import StepCompleter, read_run_events, with_times
from trainshed.observe.event_log import read_events
from trainshed.observe.events import EventWriter
from trainshed.observe.metrics import TrainingFacts
from trainshed.observe.run_facts import EngineRun, run_facts
from trainshed.observe.run_status import read_run_status
from trainshed.run_folder import ENGINE_RUN_FILE
from trainshed.storage import LocalStore

DATA = Path(__file__).parent / "data"
PLACED = EngineRun("megatron", "dp2", nodes=2, ranks_per_node=8, losses_rank=15, gpu="h100-sxm")
RECIPE = """
name: big
model: {preset: llama3-8b, init: random}
tokenizer: hf://org/name
data: {sequence_length: 32, train: [{path: a.jsonl}]}
train: {steps: 24, global_batch: 4, precision: bf16, optimizer: {lr: 1.0e-3}}
layout: {tp: 2}
engine: megatron
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of Megatron on two nodes: the first node has the arguments, the second the losses."""
    folder = tmp_path / "store" / "runs" / "big" / "0a1b2c3d"
    logs = folder / "logs" / "attempt-0001"
    logs.mkdir(parents=True)
    lines = (DATA / "megatron-0.16.1.log").read_text().splitlines(keepends=True)
    by_last_rank = [line for line in lines if "elapsed time" in line or "validation loss" in line]
    (logs / "node-00000.log").write_text("".join(line for line in lines if line not in by_last_rank))
    (logs / "node-00001.log").write_text("".join(by_last_rank))
    (folder / "recipe.yaml").write_text(RECIPE)
    LocalStore(folder).put(ENGINE_RUN_FILE, PLACED.to_bytes())
    return folder


def test_both_nodes_logs_together_are_the_events_of_an_attempt(run: Path) -> None:
    events = read_run_events(LocalStore(run), "")
    kinds = [(event["kind"], event["step"]) for event in events]
    assert kinds[0] == ("start", None)
    assert kinds.index(("step", 5)) < kinds.index(("checkpoint", 6)) < kinds.index(("step", 7))
    assert ("validation", 6) in kinds
    start = events[0]
    assert (start["run"], start["engine"], start["world_size"]) == ("big/0a1b2c3d", "megatron", 16)
    assert (start["device"], start["layout"]) == ("h100-sxm", "dp2")
    assert {event["attempt"] for event in events} == {1}
    steps = [event for event in events if event["kind"] == "step"]
    assert steps[-1]["tokens"] == 48 * 32
    assert steps[-1]["tokens_per_second_per_gpu"] == pytest.approx(4 * 32 / steps[-1]["step_seconds"] / 16)
    assert 0 < steps[-1]["mfu"] < steps[-1]["mfu_full_attention"] < 1


def test_status_says_step_loss_and_mfu_of_a_foreign_engine(run: Path) -> None:
    status = read_run_status(LocalStore(run), "", steps=24)
    assert (status.step, status.steps, status.loss) == (12, 24, 4.655629)
    assert status.eta_seconds is not None
    assert status.mfu is not None
    assert status.summary().startswith("step 12 of 24, ")


def test_events_that_are_stored_are_not_read_from_the_log_again(run: Path) -> None:
    with EventWriter(LocalStore(run), "", attempt=1, rank=None) as events:
        empty = dict.fromkeys(("grad_norm", "lr", "tokens", "tokens_per_second_per_gpu", "mfu", "mfu_full_attention"))
        events.emit("step", 0, loss=1.0, step_seconds=1.0, skipped=False, **empty)
    assert [event["kind"] for event in read_run_events(LocalStore(run), "")] == ["step"]


def test_a_run_of_our_own_engine_is_never_read_from_logs(run: Path) -> None:
    with EventWriter(LocalStore(run), "", attempt=1, rank=0) as events:
        events.emit("start", run="a/b", layout="dp1", world_size=1, versions={}, device="cpu", parameters=1)
    assert [event["kind"] for event in read_run_events(LocalStore(run), "")] == ["start"]


def test_each_attempt_has_its_own_logs_and_a_later_one_goes_back(run: Path) -> None:
    second = run / "logs" / "attempt-0002"
    second.mkdir()
    lines = (DATA / "megatron-0.16.1.log").read_text().splitlines(keepends=True)
    loaded = "  successfully loaded checkpoint from /run/ckpt [ t 1/1, p 1/1 ] at iteration 6\n"
    (second / "node-00000.log").write_text(loaded)
    (second / "node-00001.log").write_text("".join(line for line in lines if "iteration        8/" in line))
    status = read_run_status(LocalStore(run), "", steps=24)
    assert (status.attempt, status.step) == (2, 8)


def test_what_a_run_was_is_in_its_folder(run: Path) -> None:
    facts = run_facts(LocalStore(run), "", read_run_events(LocalStore(run), ""))
    assert (facts.model, facts.gpus, facts.global_batch, facts.precision) == ("llama3-8b", 16, 4, "bf16")
    assert facts.gpu is not None
    assert facts.gpu.name == "h100-sxm"


def test_torchtunes_bar_is_completed_by_its_own_file(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "attempt-0001"
    logs.mkdir(parents=True)
    (logs / "node-00000.log").write_text((DATA / "torchtune-0.6.1-bar.log").read_text())
    (tmp_path / "torchtune").mkdir()
    (tmp_path / "torchtune" / "log_1.txt").write_text((DATA / "torchtune-0.6.1-metrics.txt").read_text())
    steps = [event for event in read_run_events(LocalStore(tmp_path), "") if event["kind"] == "step"]
    assert len(steps) == 8
    assert (steps[0]["lr"], steps[0]["step_seconds"]) == (0.001, 2.38)
    assert all(step["time_estimated"] for step in steps), "neither says when"


def test_unknown_times_go_back_from_the_end_of_the_log() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "step", "step": 0, "step_seconds": 5.0},
        {"kind": "step", "step": 1, "step_seconds": 3.0},
    ]
    assert [event["time"] for event in with_times(events, 100.0)] == [97.0, 100.0]


def test_a_rate_that_would_be_above_the_peak_has_no_mfu() -> None:
    facts = TrainingFacts(
        config=model_preset("llama3-8b"),
        sequence_length=8192,
        global_batch=1024,
        gpus=1,
        gpu=gpu("h100"),
        precision="bf16",
    )
    empty = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_gpu", "mfu"))
    event = {"kind": "step", "step": 0, "step_seconds": 0.1, "mfu_full_attention": None, **empty}
    assert StepCompleter(facts).complete(event)["mfu"] is None


def test_logs_shows_the_node_of_the_rank_that_prints_losses(run: Path) -> None:
    shown = log_file(run, "train")
    assert shown is not None
    assert shown.name == "node-00001.log"
    other = log_file(run, "train", rank=3)
    assert other is not None
    assert other.name == "node-00000.log"
    with pytest.raises(Exception, match="16 ranks, and no rank 16"):
        log_file(run, "train", rank=16)
    os.unlink(shown)
    shown = log_file(run, "train")
    assert shown is not None
    assert shown.name == "node-00000.log", "rather than nothing"


def test_what_runs_beside_an_engine_writes_its_events_as_they_come(run: Path) -> None:
    logs = run / "logs" / "attempt-0007"
    logs.mkdir()
    arguments = (run / "logs" / "attempt-0001" / "node-00000.log").read_text()
    losses = (run / "logs" / "attempt-0001" / "node-00001.log").read_text()
    with EngineEvents(run, 7) as events:
        events.poll(at_once=True)
        (logs / "node-00000.log").write_text(arguments)
        (logs / "node-00001.log").write_text(losses[:900])
        events.poll(at_once=True)
        (logs / "node-00001.log").write_text(losses)
        events.end(0)
    written = list(read_events(LocalStore(run), "", attempt=7))
    assert [event["step"] for event in written if event["kind"] == "step"] == [0, 1, 3, 5, 7, 9, 11]
    assert (written[0]["kind"], written[0]["engine"]) == ("start", "megatron")
    assert (written[-1]["kind"], written[-1]["reason"]) == ("end", "finished")
    assert read_run_status(LocalStore(run), "", 12).ended == "finished"


def test_an_engine_that_fails_leaves_why(run: Path) -> None:
    with EngineEvents(run, 8) as events:
        events.fail("train failed: node 1 exited with 1")
    status = read_run_status(LocalStore(run), "")
    assert (status.attempt, status.last_error) == (8, "train failed: node 1 exited with 1")

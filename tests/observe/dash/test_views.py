"""What the page is told about a run, by its folder alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.runs.observed_runs import TOKENS_PER_STEP, ObservedRun, rank_layout, whole_run
from support.servers.dashboard import local_source
from trainshed.catalog import model_preset
from trainshed.errors import InputError, NoSuchName
from trainshed.observe.dash.run_files import RunSource
from trainshed.observe.dash.run_reader import RunReader
from trainshed.observe.dash.views import Dashboard, source_key, to_json
from trainshed.observe.events import EventWriter
from trainshed.plan.flops import training_flops_per_token
from trainshed.storage import open_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    return whole_run(tmp_path_factory.mktemp("store"), steps=400)


def view(run: ObservedRun, name: str, **parameters: str) -> dict[str, Any]:
    source = local_source(run.folder, steps=400)
    dashboard = Dashboard(lambda: [source])
    return orjson.loads(to_json(dashboard.view(source_key(source), name, parameters)))


def test_the_list_says_how_each_run_stands(run: ObservedRun) -> None:
    source = local_source(run.folder, steps=400)
    row = orjson.loads(to_json(Dashboard(lambda: [source]).runs()))["runs"][0]
    assert (row["run"], row["state"], row["step"], row["steps"]) == ("llama-tech/0a1b2c3d", "done", 400, 400)
    assert (row["attempt"], row["alarms"], row["error"]) == (2, 2, None)
    assert len(row["sparkline"]) <= 48
    assert row["eta_seconds"] is None


def test_a_run_that_begins_later_joins_the_list(
    run: ObservedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainshed.observe.dash.views._SOURCES_SECONDS", -1.0)
    sources = [local_source(run.folder)]
    dashboard = Dashboard(lambda: list(sources))
    reader = next(iter(dashboard.readers().values()))
    later = ObservedRun(tmp_path)
    later.begin()
    sources.insert(0, local_source(later.folder))
    assert [row["state"] for row in dashboard.runs()["runs"]] == ["failed", "done"]
    assert reader in dashboard.readers().values()  # and is not read anew
    del sources[1]
    assert len(dashboard.runs()["runs"]) == 1


def test_steps_of_the_later_attempt_win(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    for step in range(10):
        run.step(step, loss=5.0)
    run.attempt = 2
    run.begin()
    run.emit("resume", 4, from_attempt=1, checkpoint="checkpoints/step-00000004")
    run.step(4, loss=1.0)
    series = view(run, "series")["tables"]["steps"]
    assert series["x"] == [1, 2, 3, 4, 5]
    assert series["values"]["loss"] == [5.0] * 4 + [1.0]


def test_a_zombie_attempt_changes_no_curve(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.step(0, loss=5.0)
    run.attempt = 2
    run.begin()
    run.step(0, loss=1.0)
    reader = RunReader(local_source(run.folder))
    reader.read_all()
    run.attempt, run._segment = 1, 2
    run.step(1, loss=7.0)
    reader.read_all()
    assert (reader.steps.last_step, reader.steps.last("loss")) == (1, 1.0)


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    reader = RunReader(local_source(run.folder, running=True, steps=10))
    reader.read_all()
    assert reader.state() == "running"
    run.begin()
    run.step(0)
    reader.read_all()
    version = reader.version
    assert reader.steps.last_step == 1
    run.append(b'{"v": 1, "time": 1.0, "attempt": 1, "rank": 0, "kind": "st')  # half a line
    reader.read_all()
    assert (reader.version, reader.problem) == (version, None)
    run.append(b'ep", "step": 1, "loss": 2.5}\n')
    reader.read_all()
    assert (reader.steps.last_step, reader.steps.last("loss")) == (2, 2.5)
    assert reader.version > version


def test_a_long_run_is_read_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    for step in range(6):
        run._segment = step + 1
        run.step(step)
    reader = RunReader(local_source(run.folder))
    reader.refresh(portion_seconds=0.0)
    assert not reader.is_complete
    assert 0 < reader.bytes_read < reader.bytes_known
    while not reader.is_complete:
        reader.refresh(portion_seconds=0.0)
    assert reader.steps.last_step == 6
    assert reader.bytes_read == reader.bytes_known


def test_a_broken_line_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.step(0)
    run._segment = 2
    run.append(b"not an event\n")
    reader = RunReader(local_source(run.folder))
    reader.read_all()
    assert reader.steps.last_step == 1
    assert reader.problem is not None
    assert "000002.jsonl:1" in reader.problem


@pytest.mark.parametrize(
    ("running", "reason", "state"),
    [(True, None, "running"), (False, "finished", "done"), (False, "signal", "stopped"), (False, None, "failed")],
)
def test_the_state_is_what_the_events_and_the_lock_say(
    tmp_path: Path, running: bool, reason: str | None, state: str
) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.step(0)
    if reason is not None:
        run.emit("end", reason=reason, exit_code=0)
    reader = RunReader(local_source(run.folder, running=running))
    reader.read_all()
    assert reader.state() == state


def test_a_job_that_falls_silent_is_not_called_running_for_ever(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.step(0)
    reader = RunReader(local_source(run.folder, running=None))
    reader.read_all()
    assert reader.state() == "silent"


def test_losses_of_sources_are_curves_of_their_own(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    event = {"v": 1, "time": 1.0, "attempt": 1, "rank": 0, "kind": "step", "step": 0, "loss": 2.0}
    run.append(orjson.dumps(event | {"losses": {"articles": 1.5, "code": 2.5}}) + b"\n")
    values = view(run, "series")["tables"]["steps"]["values"]
    assert (values["losses.articles"], values["losses.code"]) == ([1.5], [2.5])


def test_ranks_have_their_place_in_the_layout_their_host_and_their_health(run: ObservedRun) -> None:
    ranks = view(run, "ranks", rank="77")
    layout = rank_layout(tp=4, pp=4, dp=8)
    assert ranks["world_size"] == 128
    assert set(ranks["axes"]) == {"pp", "dp", "tp"}
    for rank in (0, 77, 127):
        place = layout.coordinates(rank)
        assert [ranks["axes"][axis][rank] for axis in ("pp", "dp", "tp")] == [place.pp, place.dp, place.tp]
    assert ranks["hosts"][77 // 8] == "gpu-09"
    assert ranks["health"]["77"]["state"] == "alarm"
    assert max(range(128), key=ranks["columns"]["compute_seconds"].__getitem__) == 77
    assert len(ranks["history"]["compute_seconds"]["77"]) == len(ranks["history"]["steps"]) > 1
    assert ranks["stages"] == ["4 layers"] * 4


def test_the_timeline_has_stages_attempts_and_marks(run: ObservedRun) -> None:
    timeline = view(run, "timeline")
    assert [(stage["name"], stage["state"]) for stage in timeline["stages"]] == [
        ("fetch", "skipped"),
        ("prepare", "done"),
    ]
    assert timeline["stages"][1]["to"] - timeline["stages"][1]["from"] == 410.0
    first, second = timeline["attempts"]
    assert (first["ended"], second["ended"], second["resumed_step"]) == ("failed", "finished", 200)
    assert [phase["name"] for phase in first["phases"]] == ["rendezvous", "process_groups", "load", "compile"]
    assert first["last"] < second["first"]
    assert {mark["row"] for mark in timeline["marks"]} == {"checkpoints", "validations", "events"}


def test_checkpoints_are_those_of_the_events_and_of_the_disk(run: ObservedRun) -> None:
    view_of_all = view(run, "checkpoints")
    assert [row["step"] for row in view_of_all["checkpoints"]] == [400, 300, 200, 100]
    assert all(row["stored"] and row["state"] == "committed" for row in view_of_all["checkpoints"])
    losses = [1.98 + 8.9 * math.exp(-(step - 1) / 260) for step in (400, 300, 200, 100)]
    assert [row["validation_loss"] for row in view_of_all["checkpoints"]] == pytest.approx(losses)
    assert view_of_all["latest"] == 400
    assert [(verdict["path"], verdict["passed"]) for verdict in view_of_all["verdicts"]] == [
        ("export/verdict.json", True)
    ]


def test_a_plan_stands_beside_what_was_measured(run: ObservedRun) -> None:
    plan = view(run, "plan")
    assert plan["predicted"]["step_seconds"] == 1.94
    assert plan["measured"]["step_seconds"] == pytest.approx(2.0, rel=0.03)
    assert plan["measured"]["mfu"] == pytest.approx(0.426, rel=0.03)
    flops = TOKENS_PER_STEP / 2.0 / 128 * training_flops_per_token(model_preset("llama3.1-8b"), 8192)
    assert flops / 989e12 == pytest.approx(0.426, rel=0.01), "the made-up figures are possible ones"
    low, high = plan["measured"]["step_seconds_range"]
    assert low < plan["measured"]["step_seconds"] < high


def test_answers_stand_side_by_side(run: ObservedRun) -> None:
    answers = view(run, "answers")
    assert answers["steps"] == [100, 200, 300, 400]
    assert [row["prompt"] for row in answers["prompts"]] == ["What is a pipeline bubble?", "Say hello in French."]
    assert answers["prompts"][0]["answers"][-1] == {"text": "A stage waits for the others.", "ended": True}


def test_answers_of_tokens_alone_are_decoded_by_who_can(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.emit("answers", 1, answers=[{"prompt": "Hi", "answer": None, "tokens": [7], "ended": True}])
    assert view(run, "answers")["prompts"][0]["answers"][0]["text"] == "tokens [7]"


def test_events_are_searched_by_text_kind_and_rank(run: ObservedRun) -> None:
    assert view(run, "events", search="SIGKILL")["matches"] == 1
    assert {event["kind"] for event in view(run, "events", kinds="alarm,end")["events"]} == {"alarm", "end"}
    assert [event["kind"] for event in view(run, "events", rank="77")["events"]] == ["alarm"]
    everything = view(run, "events")
    assert everything["events"][0]["kind"] == "end"
    assert everything["matches"] == sum(everything["kinds"].values())


def test_logs_are_searched_and_begin_with_the_newest_attempt(run: ObservedRun) -> None:
    logs = view(run, "logs")
    assert logs["log"]["file"] == "attempt-0002/rank-00000.log"
    assert logs["log"]["lines"][0] == {"number": 1, "text": "loading weights"}
    assert {log["file"] for log in logs["logs"]} >= {"prepare/part-0000.log", "attempt-0001/rank-00037.log"}
    hits = view(run, "logs", file="attempt-0001/rank-00037.log", search="WARNING")["log"]
    assert [line["text"] for line in hits["lines"]] == ["warning: clock is held down"]


def test_what_makes_no_sense_is_refused_by_name(run: ObservedRun) -> None:
    with pytest.raises(InputError, match="there is no axis `sideways`"):
        view(run, "series", axis="sideways")
    with pytest.raises(InputError, match="`many` is not a number"):
        view(run, "series", points="many")
    with pytest.raises(InputError, match="there is no view `secrets`"):
        view(run, "secrets")
    with pytest.raises(NoSuchName, match="there is no such run"):
        Dashboard(list).view("0" * 12, "summary", {})


@pytest.mark.parametrize("name", ["summary", "series", "ranks", "timeline", "checkpoints", "plan", "answers", "logs"])
def test_a_run_that_has_not_begun_has_every_view(tmp_path: Path, name: str) -> None:
    run = ObservedRun(tmp_path)
    run.write("recipe.yaml", "trainshed: 1\n")
    assert view(run, name)["version"] == 0


@pytest.mark.s3
def test_a_run_in_a_bucket_is_followed_while_it_trains(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshed.observe.dash.run_reader.BUCKET_SECONDS", 0.0)
    store = open_folder(f"s3://{s3_bucket}/runs/far/00000001")
    source = RunSource("far", "00000001", store.url, store)
    dashboard, key = Dashboard(lambda: [source]), source_key(source)
    with EventWriter(store, "", attempt=1, rank=0, segment_seconds=600) as events:
        for number in (1, 2):
            events.emit("validation", number, loss=3.0 / number, batches=1)
            events.flush()
            assert dashboard.view(key, "summary", {})["validation_loss"] == 3.0 / number
    store.put("logs/attempt-0001/rank-00000.log", b"from afar\n")
    store.put("checkpoints/step-00000002/manifest.json", b"{}")
    store.put("checkpoints/latest", b'{"step": 2}')
    assert dashboard.view(key, "logs", {})["log"]["lines"] == [{"number": 1, "text": "from afar"}]
    checkpoints = dashboard.view(key, "checkpoints", {})
    assert (checkpoints["latest"], checkpoints["checkpoints"][0]["state"]) == (2, "committed")
    assert dashboard.view(key, "recipe", {})["recipe"] is None

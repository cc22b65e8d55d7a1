"""What people are told of a run: which events become messages, how often, and that no address is ever said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.servers.webhook_server import PATH, Webhook, webhook_server
from trainshed.observe import notify
from trainshed.observe.event_log import read_events
from trainshed.observe.events import EventWriter
from trainshed.observe.notify import GoodputWindow, Notifier, Recipient, notify_of_run, send
from trainshed.recipe.notify import NOTIFICATION_KINDS, Notification
from trainshed.storage import LocalStore

START = {"kind": "start", "layout": "dp2", "world_size": 2, "device": "cpu", "attempt": 1}


def step_event(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": 2.5, "step_seconds": 1.0, "attempt": 1} | more


def failure(what: str, attempt: int = 1) -> dict[str, Any]:
    return {"kind": "failure", "ranks": [1], "collective": None, "what": what, "attempt": attempt}


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with webhook_server() as server:
        yield server


def notifier(folder: Path, webhook: Webhook, **keys: Any) -> tuple[Notifier, list[str]]:
    warnings: list[str] = []
    body = {"webhook": {"secret": "HOOK"}, "on": NOTIFICATION_KINDS} | keys
    told = (Recipient("notify.0", Notification.model_validate(body)),)
    environment = {"HOOK": webhook.address}
    return Notifier(folder, told, run="r/1", steps=20, environment=environment, warn=warnings.append), warnings


def test_the_life_of_a_run_in_messages(tmp_path: Path, webhook: Webhook) -> None:
    teller, warnings = notifier(tmp_path, webhook)
    second = {"attempt": 2}
    for event in (
        START,
        step_event(0),
        step_event(1),
        {"kind": "stall", "ranks": [1], "collective": None, "what": "rank 1 is stopped", "attempt": 1},
        {"kind": "alarm", "name": "loss_spike", "what": "3.1 after 2.5", "attempt": 1},
        failure("rank 1 was killed"),
        START | second,
        {"kind": "resume", "step": 1, "from_attempt": 1, "checkpoint": "step-00000001"} | second,
        step_event(1) | second,
        {"kind": "end", "reason": "finished", "exit_code": 0} | second,
    ):
        teller.take(event)
    assert webhook.kinds == ["start", "first_step", "stall", "alarm", "failure", "restart", "end"]
    assert [message["text"] for message in webhook.messages][:6:5] == [
        "r/1 training begins: dp2, 2 ranks on cpu",
        "r/1 attempt 2 goes on after step 1 (step 2 of 20, loss 2.5000)",
    ]
    assert webhook.messages[4]["text"] == "r/1 failed: rank 1 was killed (step 2 of 20, loss 2.5000)"
    assert webhook.messages[4] | {"time": "", "host": "", "text": ""} == {
        "text": "",
        "time": "",
        "host": "",
        "kind": "failure",
        "run": "r/1",
        "attempt": 1,
        "step": 2,
        "steps": 20,
        "loss": 2.5,
    }
    assert warnings == []


def test_nobody_is_told_what_they_did_not_ask_for(tmp_path: Path, webhook: Webhook) -> None:
    teller, _ = notifier(tmp_path, webhook, on=["end"])
    for event in (START, failure("x"), {"kind": "end", "reason": "signal", "exit_code": 143}):
        teller.take(event)
    assert webhook.kinds == ["end"]
    assert Notification(command=("x",)).kinds == tuple(kind for kind in NOTIFICATION_KINDS if kind != "first_step")


def test_a_run_that_fails_again_and_again_is_told_once_and_counted(tmp_path: Path, webhook: Webhook) -> None:
    for attempt in range(1, 5):  # each start is a process of its own
        teller, _ = notifier(tmp_path, webhook, on=["failure", "end"])
        teller.take(START | {"attempt": attempt})
        teller.take(failure("out of memory", attempt))
    assert webhook.kinds == ["failure"]
    teller.take({"kind": "end", "reason": "finished", "exit_code": 0})
    assert webhook.messages[-1]["text"].endswith("; since the last message not sent: 3 failure")


def test_after_the_pause_the_next_message_counts_what_was_left_out(
    tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(notify.time, "time", lambda: now)
    teller, _ = notifier(tmp_path, webhook, every_minutes=10.0)
    for what in ("a", "b", "c"):
        teller.take(failure(what))
    now += 601
    teller.take(failure("d"))
    assert [message["text"] for message in webhook.messages] == [
        "r/1 failed: a",
        "r/1 failed: d; since the last message not sent: 2 failure",
    ]


def test_the_same_failure_is_told_once_by_its_event_and_by_its_error(tmp_path: Path, webhook: Webhook) -> None:
    teller, _ = notifier(tmp_path, webhook, every_minutes=1e-9)
    teller.take(failure("no such tokens"))
    teller.fail("no such tokens")
    teller.fail("node 3 did not start within 60 s")
    assert webhook.kinds == ["failure", "failure"]


def test_a_webhook_that_answers_no_is_said_once_without_its_address(tmp_path: Path, webhook: Webhook) -> None:
    webhook.status = 404
    teller, warnings = notifier(tmp_path, webhook, every_minutes=1e-9)
    for what in ("a", "b"):
        teller.take(failure(what))
    assert warnings == ["notify.0: the webhook answered 404; the run goes on, and this is said once"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (None, "the secret HOOK is not in the environment"),
        (f"slack{PATH}", "the secret HOOK is not the address of a webhook"),
        (f"http://127.0.0.1:1{PATH}", "the webhook cannot be reached: Connection refused"),
        (f"http://127.0.0.1:1{PATH} with blanks\n", "the webhook cannot be reached: InvalidURL"),
        (f"http://[half{PATH}", "the webhook cannot be reached: ValueError"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_without_it(address: str | None, said: str) -> None:
    body = Notification.model_validate({"webhook": {"secret": "HOOK"}})
    problem = send(body, {"text": "x"}, {"HOOK": address} if address is not None else {})
    assert problem == said


def test_a_command_reads_the_message_from_its_input(tmp_path: Path) -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"
    entry = Notification(command=(sys.executable, "-S", "-c", code, str(tmp_path / "message")))
    assert send(entry, {"text": "it ends", "kind": "end"}, {}) is None
    assert orjson.loads((tmp_path / "message").read_bytes()) == {"text": "it ends", "kind": "end"}
    assert send(Notification(command=("false",)), {}, {"PATH": "/bin:/usr/bin"}) == "false ended with exit code 1"
    assert send(Notification(command=("/no/such",)), {}, {}) == "/no/such cannot be started: No such file or directory"


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.1)
    assert send(Notification(command=("sleep", "60")), {}, {"PATH": "/bin:/usr/bin"}) == (
        "sleep has not ended within 0 s"
    )


def test_goodput_counts_the_last_hour_and_no_step_twice() -> None:
    window = GoodputWindow()
    window.take(START | {"time": 0.0})
    for step in range(60):
        window.take(step_event(step, time=60.0 * (step + 1), step_seconds=30.0))
    assert window.share(3599.0) is None
    assert window.share(3600.0) == 0.5
    for step in range(30, 60):  # done again after a restart
        window.take(step_event(step, time=3600.0 + 60.0 * (step - 29), step_seconds=30.0))
    assert window.share(5400.0) == pytest.approx(0.25, abs=0.01)
    window.take({"kind": "end", "time": 5400.0})
    assert window.share(5400.0) is None


def test_an_hour_in_which_little_was_done_is_told_by_the_recipients_threshold(tmp_path: Path, webhook: Webhook) -> None:
    for threshold, told in ((0.3, []), (0.6, ["low_goodput"])):
        teller, _ = notifier(tmp_path, webhook, on=["low_goodput"], low_goodput=threshold)
        teller.take(START | {"time": 0.0})
        for step in range(60):
            teller.take(step_event(step, time=60.0 * (step + 1), step_seconds=30.0))
        teller.check_goodput(3600.0)
        teller.check_goodput(3700.0)
        assert webhook.kinds == told
    assert webhook.messages[0]["text"].startswith("r/1 only 5")


def test_a_thread_tells_of_events_as_they_are_written_and_of_none_before(tmp_path: Path, webhook: Webhook) -> None:
    store = LocalStore(tmp_path)
    said = {"layout": "dp2", "world_size": 2, "device": "cpu", "run": "r/1", "versions": {}, "parameters": 9}
    with EventWriter(store, "", attempt=1, rank=0) as events:
        events.emit("start", **said)
    told = (Recipient("notify.0", Notification.model_validate({"webhook": {"secret": "HOOK"}})),)
    with (
        notify_of_run(tmp_path, told, run="r/1", environment={"HOOK": webhook.address}, poll_seconds=0.01),
        EventWriter(store, "", attempt=2, rank=0) as events,
    ):
        events.emit("start", **said)
        events.emit("end", reason="finished", exit_code=0)
    assert webhook.kinds == ["restart", "end"]


def test_what_could_not_be_told_is_an_event_of_the_run_without_the_address(tmp_path: Path) -> None:
    told = (Recipient("notify.0", Notification.model_validate({"webhook": {"secret": "HOOK"}})),)
    teller = Notifier(tmp_path, told, run="r/1", environment={"HOOK": f"http://127.0.0.1:1{PATH}"})
    teller.take(failure("x", attempt=3))
    (event,) = read_events(LocalStore(tmp_path), "")
    assert (event["kind"], event["attempt"]) == ("warning", 3)
    assert event["text"].startswith("notify.0: the webhook cannot be reached: Connection refused")
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert PATH.encode() not in left

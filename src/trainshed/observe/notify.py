"""`notify`: tells people what happens to a run, by a webhook or a command.

A thread follows the run's events, as `trainshed status` reads them, and sends a message for those that somebody asked
to be told of. Training never waits for it: a webhook that does not answer is given up after some seconds, and what
goes wrong is said once, as a warning event. The address of a webhook is never shown: whoever knows it can post there.

The same kind of message is sent at most every `every_minutes`, also across restarts (`notified.json` in the run's
folder). What is left out is counted in the next message.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import StorageError
from trainshed.observe.event_log import EventFollower
from trainshed.observe.event_text import format_duration
from trainshed.observe.events import EventWriter
from trainshed.recipe import Cluster, Recipe
from trainshed.recipe.notify import Notification, NotificationKind, WebhookSecret
from trainshed.redaction import redacted
from trainshed.run_folder import NOTIFIED_FILE
from trainshed.storage import LocalStore

WEBHOOK_SECONDS = 10.0
COMMAND_SECONDS = 30.0
"""How long one message may take."""
POLL_SECONDS = 2.0
END_SECONDS = 20.0
"""How long the end of a run waits for its last messages."""
GOODPUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Recipient:
    """Where messages are sent, and the key that says so."""

    where: str
    """`notify.0`, or `notify.0 of the cluster gke-a3-mega`."""
    notification: Notification


def recipients_of(recipe: Recipe | None, cluster: Cluster | None) -> tuple[Recipient, ...]:
    """Return the recipients of a run's messages: those of the cluster file, then those of the recipe."""
    recipients: list[Recipient] = []
    if cluster is not None:
        place = f"of the cluster {cluster.name}"
        recipients += [
            Recipient(f"notify.{number} {place}", entry) for number, entry in enumerate(cluster.notify or ())
        ]
    if recipe is not None:
        recipients += [Recipient(f"notify.{number}", entry) for number, entry in enumerate(recipe.notify or ())]
    return tuple(recipients)


@dataclass(frozen=True)
class RunMessage:
    """One thing that has happened."""

    kind: NotificationKind
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class RunMessages:
    """Turns the events of a run into messages."""

    def __init__(self, run: str, steps: int | None = None) -> None:
        self._run, self._steps = run, steps
        self._attempt: int | None = None
        self._step: int | None = None
        self._loss: float | None = None
        self._first_step_of: int | None = None
        self._restarted: int | None = None
        self._early_stop: str | None = None
        self._failure: str | None = None
        self.goodput = GoodputWindow()

    @property
    def attempt(self) -> int | None:
        """The latest attempt."""
        return self._attempt

    def take(self, event: Mapping[str, Any]) -> Iterator[RunMessage]:
        """Yield the messages that an event gives rise to."""
        kind = event["kind"]
        self._attempt = event.get("attempt") or self._attempt
        self.goodput.take(event)
        # Where a restart goes on is known a little later than that it has begun.
        if self._restarted is not None and kind in ("resume", "step", "failure", "end", "stall"):
            attempt, self._restarted = self._restarted, None
            after = f"after step {event['step']:,}" if kind == "resume" else "from the beginning"
            yield self.message("restart", f"attempt {attempt} goes on {after}")
        match kind:
            case "start":
                self._failure = self._early_stop = None
                if (self._attempt or 1) > 1:
                    self._restarted = self._attempt
                else:
                    what = f"training begins: {event['layout']}, {event['world_size']} ranks on {event['device']}"
                    yield self.message("start", what)
            case "step":
                self._step, self._loss = event["step"] + 1, event["loss"]
                if self._first_step_of != self._attempt:
                    self._first_step_of = self._attempt
                    took = format_duration(event["step_seconds"])
                    yield self.message("first_step", f"the first step of attempt {self._attempt} is done in {took}")
            case "resume":
                self._step = event["step"]
            case "stall":
                yield self.message("stall", f"stalls: {event['what']}")
            case "non_finite" if event["policy"] == "skip":
                yield self.message(
                    "alarm", f"step {event['step'] + 1:,} was not finite and is skipped: {event['what']}"
                )
            case "spike":
                yield self.message("alarm", f"step {event['step'] + 1:,} is a spike and is skipped: {event['what']}")
            case "alarm":
                is_slow = event["name"] == "low_goodput"
                yield self.message("low_goodput" if is_slow else "alarm", f"{event['name']}: {event['what']}")
            case "failure":
                yield from self.fail(event["what"])
            case "stage" if event["state"] == "failed":
                yield from self.fail(f"the stage {event['name']} failed: {event.get('what') or 'its log says why'}")
            case "early_stop":
                self._early_stop = event["reason"]
            case "end" if event["reason"] == "finished":
                why = f", before its last step: {self._early_stop}" if self._early_stop else ""
                yield self.message("end", f"training has finished{why}")
            case "end" if event["reason"] == "signal":
                yield self.message("end", "training was stopped on request")

    def fail(self, what: str) -> Iterator[RunMessage]:
        """Yield the message of a failure, unless it was just sent."""
        if what != self._failure:
            self._failure = what
            yield self.message("failure", f"failed: {what}")

    def low_goodput(self, share: float) -> RunMessage:
        """Return that too little of the last hour was spent in steps that count."""
        return self.message("low_goodput", f"only {share:.0%} of the last hour went into steps that count")

    def message(self, kind: NotificationKind, what: str) -> RunMessage:
        """Return a message with what is known of the run."""
        at = ""
        if self._step is not None:
            of = f" of {self._steps:,}" if self._steps else ""
            loss = f", loss {self._loss:.4f}" if self._loss is not None else ""
            at = f" (step {self._step:,}{of}{loss})"
        text = redacted(f"{self._run} {what}{at}")
        fields = {"run": self._run, "attempt": self._attempt, "step": self._step, "steps": self._steps}
        return RunMessage(kind, text, fields | {"loss": self._loss})


class GoodputWindow:
    """The share of the last hour that went into steps which count: not into steps that are done a second time."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._began: float | None = None
        self._ended = False
        self._highest = -1

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        if "time" not in event:
            return
        self._ended = event["kind"] == "end" or (self._ended and event["kind"] != "start")
        if self._began is None and event["kind"] in ("start", "step"):
            self._began = event["time"]
        if event["kind"] == "step" and event["step"] > self._highest:
            self._highest = event["step"]
            self._steps.append((event["time"], event["step_seconds"]))

    def share(self, now: float) -> float | None:
        """Return the share, None before an hour has passed and after the end."""
        while self._steps and self._steps[0][0] < now - GOODPUT_SECONDS:
            self._steps.popleft()
        if self._began is None or self._ended or now - self._began < GOODPUT_SECONDS:
            return None
        return min(1.0, sum(seconds for _, seconds in self._steps) / GOODPUT_SECONDS)


class SentMessages:
    """When each recipient was last sent each kind, kept in the run's folder: a restart must not send it all again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._sent: dict[str, dict[str, Any]] = {}
        with suppress(OSError, orjson.JSONDecodeError):
            self._sent = orjson.loads(file.read_bytes())

    def may_send(self, recipient: Recipient, kind: str, now: float) -> bool:
        """Whether it is time for another message of a kind; if not, the message is counted."""
        entry, pause_seconds = self._sent.get(f"{recipient.where} {kind}"), 60 * recipient.notification.every_minutes
        if entry is None or now - entry["at"] >= pause_seconds:
            return True
        entry["left_out"] += 1
        self._write()
        return False

    def mark_sent(self, recipient: Recipient, kind: str, now: float) -> dict[str, int]:
        """Note a message that is sent, and return what was left out before it; at the end, of all kinds."""
        left_out = {}
        for name in [kind] if kind != "end" else [key.rpartition(" ")[2] for key in self._sent]:
            entry = self._sent.get(f"{recipient.where} {name}")
            if entry is not None and entry["left_out"]:
                left_out[name], entry["left_out"] = entry["left_out"], 0
        self._sent[f"{recipient.where} {kind}"] = {"at": now, "left_out": 0}
        self._write()
        return left_out

    def _write(self) -> None:
        with suppress(OSError):  # then only this process remembers
            self._file.write_bytes(orjson.dumps(self._sent))


class Notifier:
    """Sends the messages of a run to its recipients. Its methods never raise."""

    def __init__(
        self,
        run_folder: Path,
        recipients: tuple[Recipient, ...],
        *,
        run: str,
        steps: int | None = None,
        environment: Mapping[str, str] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._recipients = run_folder, recipients
        self._environment = os.environ if environment is None else environment
        self._messages = RunMessages(run, steps)
        self._sent = SentMessages(run_folder / NOTIFIED_FILE)
        self._warn = warn or self._warn_by_event
        self._warned: set[str] = set()
        self._low_goodput = {recipient.where: recipient.notification.low_goodput for recipient in recipients}
        self._goodput_told: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, event: Mapping[str, Any]) -> None:
        """Send the messages of an event to the recipients that asked for them."""
        for message in self._messages.take(event):
            for recipient in self._recipients:
                self._tell(recipient, message)

    def fail(self, what: str) -> None:
        """Send that the run has failed, where no event has said so."""
        with self._lock:
            for message in self._messages.fail(what):
                for recipient in self._recipients:
                    self._tell(recipient, message)

    def check_goodput(self, now: float) -> None:
        """Send that little was done in the last hour, and again after each further hour."""
        share = self._messages.goodput.share(now)
        if share is None:
            return
        for recipient in self._recipients:
            told_at = self._goodput_told.get(recipient.where, float("-inf"))
            if share < self._low_goodput[recipient.where] and now - told_at >= GOODPUT_SECONDS:
                self._goodput_told[recipient.where] = now
                self._tell(recipient, self._messages.low_goodput(share))

    def follow(self, follower: EventFollower) -> None:
        """Send the messages of all events since the last call."""
        with self._lock:
            try:
                events = follower.poll()
            except Exception as error:  # a disk that is gone, a broken file: the next call tries again
                self._warn_once("notify", f"notify: events cannot be read: {type(error).__name__}")
                return
            for event in events:
                try:
                    self.take(event)
                except Exception as error:
                    self._warn_once("notify", f"notify: an event could not be told: {type(error).__name__}")
            self.check_goodput(time.time())

    def _tell(self, recipient: Recipient, message: RunMessage) -> None:
        if message.kind not in recipient.notification.kinds:
            return
        now = time.time()
        if not self._sent.may_send(recipient, message.kind, now):
            return
        left_out = self._sent.mark_sent(recipient, message.kind, now)
        problem = send(recipient.notification, message_body(message, left_out), self._environment)
        if problem is not None:
            self._warn_once(recipient.where, f"{recipient.where}: {problem}; the run goes on, and this is said once")

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)

    def _warn_by_event(self, text: str) -> None:
        with (
            suppress(StorageError),
            EventWriter(LocalStore(self._folder), "", attempt=self._messages.attempt or 0, rank=None) as events,
        ):
            events.emit("warning", text=text)


@contextmanager
def notify_of_run(
    run_folder: Path,
    recipients: tuple[Recipient, ...],
    *,
    run: str,
    steps: int | None = None,
    environment: Mapping[str, str] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[Notifier]:
    """Follow a run's events in a thread and send their messages; events written before are left out."""
    notifier = Notifier(run_folder, recipients, run=run, steps=steps, environment=environment)
    if not recipients:
        yield notifier
        return
    follower = EventFollower(run_folder)
    follower.poll()
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(poll_seconds):
            notifier.follow(follower)
        notifier.follow(follower)

    thread = threading.Thread(target=follow, name="notify", daemon=True)
    thread.start()
    try:
        yield notifier
    finally:
        ended.set()
        thread.join(END_SECONDS)


def message_body(message: RunMessage, left_out: Mapping[str, int]) -> dict[str, Any]:
    """Return a message as it is sent: `text` as Slack and others show it, and what programs read beside it."""
    text = message.text
    if left_out:
        counted = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
        text += f"; since the last message not sent: {counted}"
    at = datetime.now(UTC).isoformat(timespec="seconds")
    body: dict[str, Any] = {"text": text, "kind": message.kind, "time": at, "host": socket.gethostname()}
    return body | {key: value for key, value in message.fields.items() if value is not None}


def trial_message(run: str) -> dict[str, Any]:
    """Return a test message, which shows whether `notify` reaches its recipients."""
    return message_body(RunMessage("start", f"{run}: a test of `notify`; no run has begun", {"run": run}), {})


def send(notification: Notification, body: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Send a message; returns what went wrong, without the address, or None."""
    data = orjson.dumps(body)
    if notification.command is not None:
        return _run_command(notification.command, data, environment)
    address = notification.webhook
    if isinstance(address, WebhookSecret):
        secret = environment.get(address.secret, "").strip()
        if not secret:
            return f"the secret {address.secret} is not in the environment"
        if not secret.startswith(("http://", "https://")):
            return f"the secret {address.secret} is not the address of a webhook"
        address = secret
    assert address is not None
    return _post(address, data)


def _run_command(command: tuple[str, ...], data: bytes, environment: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not ended within {COMMAND_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        return f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"
    return f"{command[0]} ended with exit code {done.returncode}" if done.returncode else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the message into a GET; it is an error of the address."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def _post(address: str, data: bytes) -> str | None:
    """Post JSON. Texts of errors are not repeated: some of them hold the address."""
    headers = {"Content-Type": "application/json", "User-Agent": "trainshed"}
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        request = urllib.request.Request(address, data=data, headers=headers, method="POST")
        with opener.open(request, timeout=WEBHOOK_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return f"the webhook cannot be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}"
    except Exception as error:
        return f"the webhook cannot be reached: {type(error).__name__}"

"""`trainshed watch`: a run as it goes, in a terminal, in a pipe or as JSON; from its folder on a disk or in a bucket.

A thread reads the events and asks the scheduler, so that neither a slow bucket nor a slow login node stops the view.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output
from trainshed.cli.watch_frame import Frame, RunAccount, glyphs_for

if TYPE_CHECKING:
    from trainshed.launch.target import StageState
    from trainshed.observe.live_view import EventLine, LiveSnapshot
    from trainshed.workflow.known_runs import KnownRun

_SCHEDULER_SECONDS = 15.0
_BUCKET_RECORD_SECONDS = 30.0
_BUCKET_SEGMENTS = 2048
"""Segments of events in a bucket that are read first: 17 hours of them."""
_FIRST_LINES = 20
"""Lines of the past that are printed into a pipe."""
_ENDED = ("done", "failed", "cancelled", "stopped")


def watch(
    run: RunName,
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    every: float = 1.0,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show a run as it goes: progress, loss, speed, memory, ranks, devices, checkpoints and the last events.

    Ends with the run; Ctrl-C ends the view only. In a pipe it prints a line for what happens. Exits with 1 where the
    run has failed.

    Parameters
    ----------
    run
        A run: its name, name/id, folder (a path or a URL) or recipe file (`trainshed ls`).
    once
        Show it as it is now, and end.
    every
        Seconds between two frames.
    on
        The cluster whose store is searched for the run.
    output
        text, or json: one object per line each time something has changed (with --once, one object).
    """
    from trainshed.errors import InputError
    from trainshed.workflow.known_runs import find_run

    if not 0.1 <= every <= 3600:
        raise InputError(f"{every:g} seconds between two frames", where="--every", hint="write 0.1 to 3600 seconds")
    watcher = RunWatcher(find_run(run, on=on))
    if once:
        watcher.refresh()
        account, snapshot = watcher.view()
        if output == "json":
            _print_json(account, snapshot, indent=True)
        else:
            _print_frame(account, snapshot)
        return _exit_code(account)
    with watcher:
        try:
            if output == "json":
                account = _watch_as_json(watcher, every)
            elif sys.stdout.isatty():
                account = _watch_in_terminal(watcher, every)
            else:
                account = _watch_in_lines(watcher, every)
        except KeyboardInterrupt:
            sys.stderr.write(f"\nleft the view; the run goes on as it did (`trainshed status {watcher.known.run}`)\n")
            return 0
    return _exit_code(account)


def _exit_code(account: RunAccount) -> int:
    return 1 if account.state in ("failed", "cancelled") else 0


class RunWatcher:
    """Reads what there is to know of a run; as a context it goes on reading in a thread."""

    def __init__(self, known: KnownRun) -> None:
        from trainshed.errors import NoSuchName
        from trainshed.launch.stored_run import exists, planned_steps
        from trainshed.observe.event_log import follow_events
        from trainshed.observe.live_view import LiveView

        self.known = known
        self._store = known.store() if known.home is not None or known.submission is None else None
        if self._store is not None and known.submission is None and not exists(self._store):
            raise NoSuchName(
                "there is no run here: no recipe.yaml, no attempts, no events",
                where=known.home,
                hint="a run is STORE/runs/NAME/ID; `trainshed ls --on CLUSTER` lists those of a store",
            )
        steps = known.submission.steps if known.submission is not None else None
        if self._store is not None:
            self._follower = follow_events(self._store, "", newest_segments=_BUCKET_SEGMENTS)
            steps = steps or planned_steps(self._store)
        self._view = LiveView(steps)
        self._lines: list[EventLine] = []
        self._newest: dict[str, Any] | None = None
        self._newest_at = self._scheduler_at = -float("inf")
        self._scheduler: tuple[str | None, str | None] = (None, None)
        self._account = RunAccount(known.run, self._place(), "unknown", "reading its events")
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._error: BaseException | None = None
        self._judged = False
        self._thread = threading.Thread(target=self._read_on, name="watch", daemon=True)

    def __enter__(self) -> RunWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def view(self) -> tuple[RunAccount, LiveSnapshot]:
        """Return what is known now; raises what has ended the reading."""
        with self._lock:
            if self._error is not None:
                raise self._error
            account, snapshot = self._account, self._view.snapshot()
        if account.state != "running":
            snapshot = replace(snapshot, status=replace(snapshot.status, eta_seconds=None))
        return account, snapshot

    def new_lines(self) -> list[EventLine]:
        """Return the events that came since the last call, as lines."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def wait(self, seconds: float) -> None:
        """Wait until something is new, at most `seconds`."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _read_on(self) -> None:
        # A disk is cheap to look at; a bucket's follower itself asks at most once a second.
        while not self._stopping.wait(0.25):
            try:
                self.refresh()
            except BaseException as error:
                with self._lock:
                    self._error = error
                self._changed.set()
                return

    def refresh(self) -> None:
        """Read what is new, and judge how the run stands."""
        from trainshed.errors import TrainshedError

        events: list[dict[str, Any]] = []
        problem = None
        if self._store is not None:
            try:
                events = self._follower.poll()
            except TrainshedError as error:
                problem = f"its events cannot be read now: {error.what}"
        with self._lock:
            self._lines += self._view.add(events)
            progress = self._view.status()
        try:
            account = self._judge(progress)
        except TrainshedError as error:
            if self._store is None and not self._judged:
                raise
            account, problem = self._account, problem or f"{error.what} (asked again soon)"
        else:
            self._judged = True
        account = replace(account, problem=problem)
        with self._lock:
            is_new = bool(events) or account.state != self._account.state
            self._account = account
        if is_new:
            self._changed.set()

    def _judge(self, progress: Any) -> RunAccount:
        from trainshed.launch.stored_run import judge_run

        account = RunAccount(self.known.run, self._place(), "unknown")
        state, scheduler_text = self._ask_scheduler()
        if self._store is not None:
            status = judge_run(self._store, progress, self._newest_attempt())
            account = replace(account, state=status.state, reason="" if state else status.reason)
            if status.holder is not None:  # it is worked on here, whatever was submitted
                return replace(account, reason=status.reason)
        return replace(account, state=state or account.state, scheduler=scheduler_text)

    def _newest_attempt(self) -> dict[str, Any] | None:
        """Who took the newest attempt; a bucket is asked from time to time."""
        from trainshed.storage.attempts import newest_attempt_record

        assert self._store is not None
        seconds = 0.0 if self.known.folder is not None else _BUCKET_RECORD_SECONDS
        if time.monotonic() - self._newest_at >= seconds:
            self._newest = newest_attempt_record(self._store, "")
            self._newest_at = time.monotonic()
        return self._newest

    def _ask_scheduler(self) -> tuple[str | None, str | None]:
        """The state that a scheduler gives the run, and a line about it; it is asked from time to time."""
        from trainshed.errors import TrainshedError
        from trainshed.launch.target import target_of
        from trainshed.workflow.run_state import overall_state

        submission = self.known.submission
        if submission is None or time.monotonic() - self._scheduler_at < _SCHEDULER_SECONDS:
            return self._scheduler
        target = submission.cluster.target
        try:
            states = target_of(submission.cluster).status(submission.submitted)
        except TrainshedError as error:
            if self._store is None:
                raise
            self._scheduler = (None, f"{target} cannot be asked: {error.what}; this is what the run's folder says")
        else:
            state = overall_state(states)
            self._scheduler = (None if state == "unknown" else state, f"{target}: {_stages_text(states)}")
            self._take_log(states)
        self._scheduler_at = time.monotonic()
        return self._scheduler

    def _take_log(self, states: tuple[StageState, ...]) -> None:
        """Where the folder is not seen here, take the progress from the log that the scheduler has."""
        from trainshed.workflow.run_state import submission_progress

        assert self.known.submission is not None
        if self._store is None and (progress := submission_progress(self.known.submission, states)) is not None:
            with self._lock:
                self._view.take_status(progress)

    def _place(self) -> str:
        from trainshed.workflow.run_state import run_place

        place = run_place(self.known)
        return "here" if place == "local" else f"{'in' if '://' in place else 'on'} {place}"


def _stages_text(states: tuple[StageState, ...]) -> str:
    parts = [f"{state.stage} {state.state}" + (f" ({state.reason})" if state.reason else "") for state in states]
    return ", ".join(parts) or "no stages"


def _is_over(watcher: RunWatcher, account: RunAccount) -> bool:
    """Whether there is nothing more to come; a job that was stopped may be queued again by its scheduler."""
    return account.state in _ENDED and not (account.state == "stopped" and watcher.known.submission is not None)


def _print_frame(account: RunAccount, snapshot: LiveSnapshot) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in Frame(account, snapshot, glyphs_for(console.encoding), height=None).lines(console.width):
        console.print(line, soft_wrap=True)


def _watch_in_terminal(watcher: RunWatcher, every: float) -> RunAccount:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    glyphs = glyphs_for(console.encoding)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            account, snapshot = watcher.view()
            live.update(Frame(account, snapshot, glyphs, height=console.height), refresh=True)
            if _is_over(watcher, account):
                break
            # Drawn again also where nothing is new: the terminal may have another size, and times go on.
            time.sleep(every)
    # The other screen of the terminal is gone with the view: the last frame stays on the usual one.
    _print_frame(account, snapshot)
    return account


def _watch_in_lines(watcher: RunWatcher, every: float) -> RunAccount:
    """Print the events as they come, and how far the run is: at most one line of steps in `every` seconds."""
    printed = None
    glyphs = glyphs_for(sys.stdout.encoding)
    while True:
        account, snapshot = watcher.view()
        new = watcher.new_lines() if printed is not None else watcher.new_lines()[-_FIRST_LINES:]
        lines = [f"{time.strftime('%H:%M:%S', time.localtime(line.time))}  {line.text}" for line in new]
        summary = snapshot.status.summary()
        line = f"{account.run} {account.place}: {account.state}" + (f", {summary}" if summary else "")
        if (account.state, snapshot.status.step, snapshot.status.stage) != printed:
            printed = (account.state, snapshot.status.step, snapshot.status.stage)
            lines.append(line)
        over = _is_over(watcher, account)
        if over:
            lines += [f"  {text}" for text in (account.reason, account.scheduler) if text]
            lines += [f"  last error: {snapshot.status.last_error}"] if snapshot.status.last_error else []
        for text in lines:
            sys.stdout.write(glyphs.safe(text) + "\n")
        sys.stdout.flush()
        if over:
            return account
        watcher.wait(every)
        time.sleep(0 if not lines else min(every, 1.0))


def _watch_as_json(watcher: RunWatcher, every: float) -> RunAccount:
    while True:
        account, snapshot = watcher.view()
        _print_json(account, snapshot)
        if _is_over(watcher, account):
            return account
        watcher.wait(3600.0)
        time.sleep(every)


def _print_json(account: RunAccount, snapshot: LiveSnapshot, *, indent: bool = False) -> None:
    from dataclasses import asdict

    import orjson

    data = {"schema": "trainshed.watch/1", "time": time.time(), **asdict(account), **snapshot.to_plain()}
    option = orjson.OPT_INDENT_2 if indent else 0
    sys.stdout.write(orjson.dumps(data, option=option | orjson.OPT_NON_STR_KEYS).decode() + "\n")
    sys.stdout.flush()

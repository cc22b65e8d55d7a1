"""`trainshed dash`: the runs as a web page, or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainshed.observe.dash.run_files import RunSource
    from trainshed.workflow.known_runs import KnownRun


def dash(
    *runs: RunName,
    on: ClusterName = "local",
    host: str = "127.0.0.1",
    port: int = 6007,
    token: Annotated[str | None, Parameter(env_var="TRAINSHED_DASH_TOKEN")] = None,
    allow_host: tuple[str, ...] = (),
    browser: bool = True,
    save: Path | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show runs as a web page: curves, ranks, timeline, checkpoints, events, logs, plan and answers, while they train.

    It only reads, and ends with Ctrl-C. With --save it writes the same page with its data into one file instead.

    Parameters
    ----------
    runs
        Runs: names, name/id, folders or recipe files (default: all in the store, and those submitted from here).
    on
        The cluster whose store is searched for runs.
    host
        The address to listen at; 0.0.0.0 for everybody who can reach this machine. Others need the token.
    port
        The port to listen at; 0 for any that is free.
    token
        What a browser must bring (default: made and printed where others can reach the port, none on 127.0.0.1).
        In TRAINSHED_DASH_TOKEN nobody who lists processes sees it.
    allow_host
        A name under which the page may be asked for, besides those of this machine; may be written several times.
    browser
        Open it in a browser, where this machine has a screen.
    save
        Write the page of the runs into this file, and serve nothing.
    output
        Report as text or json.
    """
    from trainshed.cli.console import reporter

    list_sources = _list_sources(runs, on)
    if save is not None:
        return _save(list_sources, save, output)
    from trainshed.errors import MissingExtra
    from trainshed.observe.dash.views import Dashboard

    try:
        from trainshed.observe.dash.server import DashSettings, serve_dash
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise MissingExtra.named("dash", "the dashboard") from None
    settings = DashSettings(host, port, token, frozenset(allow_host)).with_token()

    def on_ready(address: str) -> None:
        _report_address(address, settings.token, output)
        reporter().note("Ctrl-C ends it")
        if browser:
            _open_browser(address, settings.token)

    serve_dash(Dashboard(list_sources), settings, on_ready)
    return 0


def _report_address(address: str, token: str | None, output: Output) -> None:
    from trainshed.cli.console import print_report

    # After a # it stays in the browser, and out of the logs of whatever is between.
    link = address if token is None else f"{address}#token={token}"
    text = link if token is None else f"{link}\ntoken {token}"
    print_report({"schema": "trainshed.dash/1", "url": address, "token": token, "link": link}, output, text)


def _open_browser(address: str, token: str | None) -> None:
    """Open the page where there is a screen; a browser of the terminal would only be in the way."""
    import os
    import sys
    import webbrowser

    has_screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if (has_screen or sys.platform in ("darwin", "win32")) and sys.stdout.isatty():
        webbrowser.open(address if token is None else f"{address}#token={token}")


def _save(list_sources: Callable[[], list[RunSource]], path: Path, output: Output) -> int:
    from trainshed.cli.console import format_amount, print_report
    from trainshed.errors import InputError
    from trainshed.observe.dash.report import build_report

    if path.is_dir():
        raise InputError("this is a folder", where=str(path), hint=f"write --save {path / 'report.html'}")
    if not path.absolute().parent.is_dir():
        raise InputError("there is no such folder", where=str(path.parent), hint="make it first, or write elsewhere")
    sources = list_sources()
    if not sources:
        raise InputError("there is no run to report", hint="name one: `trainshed ls` lists them")
    content = build_report(sources).encode()
    path.write_bytes(content)
    names = [source.run for source in sources]
    text = f"{path}  {', '.join(names)}, {format_amount(len(content), 'B')}"
    report = {"schema": "trainshed.dash/1", "report": str(path), "runs": names, "bytes": len(content)}
    print_report(report, output, text)
    return 0


def _list_sources(runs: Sequence[str], on: str) -> Callable[[], list[RunSource]]:
    """Return what looks the runs up, each time anew: runs begin while the page is open."""
    from trainshed.recipe import load_cluster
    from trainshed.workflow.known_runs import find_run, known_runs

    cluster = load_cluster(on)
    sources: dict[str, RunSource] = {}

    named = [find_run(run, on=on) for run in runs]

    def list_sources() -> list[RunSource]:
        known, problem = (named, None) if named else known_runs(cluster)
        if problem is not None and not known:
            raise problem
        for run in known:
            if run.address not in sources:
                sources[run.address] = run_source(run)
        return [sources[address] for address in dict.fromkeys(run.address for run in known)]

    return list_sources


def run_source(known: KnownRun) -> RunSource:
    """Return a run as the dashboard reads it."""
    from trainshed.data.prompts import read_answers
    from trainshed.launch.stored_run import planned_steps
    from trainshed.observe.dash.run_files import RunSource
    from trainshed.storage import LocalStore
    from trainshed.workflow.run_state import run_place

    # A run whose folder is not seen from here has a page too: an empty one, beside those that are seen.
    store = known.store() if known.home is not None else LocalStore(Path(known.address).expanduser())
    submitted_steps = known.submission.steps if known.submission is not None else None

    def answers() -> list[dict[str, Any]]:
        return [{"step": step.step, "answers": step.answers} for step in read_answers(store, "")]

    return RunSource(
        name=known.name,
        id=known.id,
        address=known.address,
        store=store,
        cluster=run_place(known),
        is_running=lambda: _is_running(known),
        steps=lambda: submitted_steps or planned_steps(store),
        answers=answers,
    )


def _is_running(known: KnownRun) -> bool | None:
    """Whether a process here works on a run; None for a job, whose events say by themselves whether they go on."""
    import socket

    from trainshed.launch.local import run_holder
    from trainshed.storage import LocalStore
    from trainshed.storage.attempts import newest_attempt_record

    folder = known.folder
    if folder is None:
        return None
    if run_holder(folder) is not None:
        return True
    newest = newest_attempt_record(LocalStore(folder), "")
    is_elsewhere = newest is not None and newest["host"] != socket.gethostname()
    return None if known.submission is not None or is_elsewhere else False

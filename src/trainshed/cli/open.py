"""`trainshed open` and `exec`: ways into a run, by the user's own ssh, srun or kubectl where it is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Flag
from trainshed.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainshed.launch.job import Job
    from trainshed.launch.pages import Page
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import RemoteCommand, StageState
    from trainshed.workflow.known_runs import KnownRun

_ANSWER_SECONDS = 120.0
"""TensorBoard takes many seconds to start on a busy disk."""


def open_page(
    run: RunName,
    page: Literal["serve", "dash", "tensorboard"],
    *,
    on: ClusterName = "local",
    port: int | None = None,
    keep: Flag = False,
    dry_run: Flag = False,
) -> int:
    """Open the page of a run at a port of this machine, wherever its files are; ends with Ctrl-C.

    The dashboard and TensorBoard are started beside the run's files and ended afterwards: here where this machine sees
    them, on the login node of Slurm, in a pod of Kubernetes. The server of a recipe with `serve:` is running already.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    page
        What to open.
    on
        The cluster whose store is searched for runs.
    port
        The port here (default: 8000 for serve, 6007 for dash, 6006 for tensorboard).
    keep
        On Kubernetes: leave the page there for all runs of the store, as a Deployment and a Service of its name.
    dry_run
        Print the command, and the objects that would be made, and do nothing.
    """
    from trainshed.launch.pages import PAGE_PORTS
    from trainshed.workflow.known_runs import find_run

    known = find_run(run, on=on)
    if page == "serve":
        if keep:
            raise InputError("a server stays until it is cancelled", where="--keep", hint="leave it out")
        return _open_server(known, port, dry_run)
    chosen = port or PAGE_PORTS[page]
    if keep:
        return _keep_page(known, page, chosen, dry_run)
    submission = known.submission if known.home is None else None
    if submission is not None and submission.cluster.target == "slurm":
        return _open_on_slurm(submission, page, chosen, dry_run)
    if submission is not None and submission.cluster.target == "kubernetes":
        return _open_in_pod(submission, page, chosen, dry_run)
    return _open_here(known, page, chosen, dry_run, on)


def _open_server(known: KnownRun, port: int | None, dry_run: bool) -> int:
    from trainshed.launch.target import tunnel_command

    submission, state = _submitted_stage(known, "serve")
    return _execute(tunnel_command(submission.cluster, submission.submitted, state, port), dry_run)


def _open_here(known: KnownRun, page: Page, port: int, dry_run: bool, on: str) -> int:
    import sys
    import tempfile
    from contextlib import ExitStack

    from trainshed.launch.pages import FiguresCopy, check_figures, local_tensorboard
    from trainshed.run_folder import TENSORBOARD

    store = known.store()  # raises where nothing here sees the run's files
    if page == "dash":
        from trainshed.cli.dash import dash

        if dry_run:
            sys.stdout.write(f"trainshed dash {known.home} --port {port}\n")
            return 0
        return dash(str(known.home), on=on, port=port)
    check_figures(store, known.run)
    with ExitStack() as stack:
        if known.folder is not None or dry_run:
            folder = (known.folder or Path("COPY")) / TENSORBOARD
        else:
            copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainshed-tensorboard-")))
            stack.enter_context(FiguresCopy(store, copies))
            folder = copies / TENSORBOARD
        return _show(local_tensorboard(folder, port), port, dry_run)


def _open_on_slurm(submission: Submission, page: Page, port: int, dry_run: bool) -> int:
    import secrets

    from trainshed.launch.pages import slurm_page

    # Whoever has an account on the login node reaches its loopback; TensorBoard has no password.
    token = secrets.token_urlsafe(24) if page == "dash" else None
    command = slurm_page(submission.cluster, page, submission.submitted.run, port)
    return _show(command, port, dry_run, token=token)


def _open_in_pod(submission: Submission, page: Page, port: int, dry_run: bool) -> int:
    from trainshed.cli.console import reporter
    from trainshed.launch.kubernetes.pages import forward_command, page_job, page_text, start_page, stop_page

    job = page_job(submission.cluster, page, submission.submitted.run, submission.submitted.job, port)
    command = forward_command(job, keep=False)
    if dry_run:
        return _print_objects(page_text(job, keep=False), command)
    _check_program(command)
    try:
        reporter().note(f"a pod for {page} is started: job/{job.name}")
        start_page(job, reporter(), keep=False)
        return _show(command, port, dry_run=False)
    finally:
        stop_page(job)
        reporter().note(f"the pod of {page} is removed")


def _keep_page(known: KnownRun, page: Page, port: int, dry_run: bool) -> int:
    from trainshed.cli.console import reporter
    from trainshed.launch.kubernetes.pages import forward_command, page_job, page_text, start_page

    cluster = known.submitted("a page that is kept").cluster
    if cluster.target != "kubernetes":
        raise InputError(
            f"nothing keeps a page on a {cluster.target} cluster",
            where="--keep",
            hint="leave it out: the page is there until Ctrl-C",
        )
    job = page_job(cluster, page, known.address, None, port)
    command = forward_command(job, keep=True)
    if dry_run:
        return _print_objects(page_text(job, keep=True), command)
    start_page(job, reporter(), keep=True)
    reporter().note(
        f"deployment/{page} and service/{page} show all runs in {cluster.store_root}; look at them with\n"
        f"  {command.text()}\nand end them with\n  {_removal(job)}"
    )
    return 0


def _removal(job: Job) -> str:
    from trainshed.launch.kubernetes.kinds import INSTANCE_LABEL
    from trainshed.launch.target import kubectl_command

    kubectl = " ".join(kubectl_command(job.cluster))
    return f"{kubectl} delete deployment,service,configmap --selector {INSTANCE_LABEL}={job.name}"


def _print_objects(text: str, command: RemoteCommand) -> int:
    import sys

    sys.stdout.write(f"{text}# then: {command.text()}\n")
    return 0


def _show(command: RemoteCommand, port: int, dry_run: bool, *, token: str | None = None) -> int:
    """Run the command of a page until Ctrl-C; says where it is once it answers."""
    import subprocess
    import sys

    from trainshed.cli.console import reporter

    if dry_run:
        return _execute(command, dry_run=True)
    _check_program(command)
    reporter().note(f"{command.description}\n  {command.text()}" if len(command.text()) < 400 else command.description)
    process = subprocess.Popen(command.command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        if token is not None:
            process.stdin.write(f"{token}\n".encode())
            process.stdin.flush()
        _await_answer(port, process.poll)
        address = f"http://127.0.0.1:{port}/"
        sys.stdout.write((address if token is None else f"{address}#token={token}") + "\n")
        sys.stdout.flush()
        reporter().note("Ctrl-C ends it")
        return 1 if process.wait() else 0
    except KeyboardInterrupt:
        return 0
    finally:
        process.stdin.close()  # the other end of an ssh connection waits for this
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_answer(port: int, ended: Callable[[], int | None]) -> None:
    """Wait until a page answers; an error if its command ends first."""
    import time

    import httpx2

    from trainshed.errors import TrainshedError

    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        code = ended()
        if code is not None:
            raise TrainshedError(
                f"the page has ended before it answered, with exit code {code}",
                where=f"port {port}",
                hint="its last lines say why; if the port is taken, write --port with another one",
            )
        try:
            httpx2.get(f"http://127.0.0.1:{port}/", timeout=5.0)
            return
        except httpx2.HTTPError:
            time.sleep(0.3)
    raise TrainshedError(f"the page does not answer after {_ANSWER_SECONDS:.0f} s", where=f"port {port}")


def exec_in(
    run: RunName, *command: str, rank: int = 0, stage: Literal["train", "serve"] = "train", dry_run: Flag = False
) -> int:
    """Run a command on the node of a rank, inside its job; without one, a shell.

    Parameters
    ----------
    run
        A run that was submitted from here: its name, name/id, folder or recipe file (`trainshed ls`).
    command
        What to run there (default: bash); after `--` where it has dashes of its own.
    rank
        The rank to join; of a server, the replica.
    stage
        The training, or the server.
    dry_run
        Print the command and do nothing.
    """
    from trainshed.launch.target import shell_command
    from trainshed.workflow.known_runs import find_run

    submission, state = _submitted_stage(find_run(run), stage)
    return _execute(shell_command(submission.cluster, submission.submitted, state, rank, command or ("bash",)), dry_run)


def _submitted_stage(known: KnownRun, stage: str) -> tuple[Submission, StageState]:
    from trainshed.launch.target import target_of

    submission = known.submitted("a way into it")
    for state in target_of(submission.cluster).status(submission.submitted):
        if state.stage == stage:
            return submission, state
    what = "is not served" if stage == "serve" else "has no training"
    hint = "write `serve: {}` into its recipe and submit it again" if stage == "serve" else None
    raise InputError(f"this run {what}", where=known.run, hint=hint)


def _execute(way: RemoteCommand, dry_run: bool) -> int:
    import subprocess
    import sys

    from trainshed.cli.console import reporter

    if dry_run:
        sys.stdout.write(way.text() + "\n")
        return 0
    _check_program(way)
    reporter().note(f"{way.description}\n  {way.text()}")
    return subprocess.run(way.command, check=False).returncode


def _check_program(way: RemoteCommand) -> None:
    import shutil

    if shutil.which(way.command[0]) is None:
        raise InputError(f"there is no `{way.command[0]}` on this machine", hint=f"run it elsewhere: {way.text()}")

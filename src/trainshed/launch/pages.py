"""The web page of a run beside its files: TensorBoard or the dashboard, for as long as somebody looks at it.

Where this machine sees the run's folder, on a disk or in a bucket, the page is a process here. On Slurm it is a process
of the login node, at the other end of an ssh tunnel; on Kubernetes a pod that mounts the run's volume
(`kubernetes/pages.py`). In all cases it listens at 127.0.0.1 only.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trainshed.errors import InputError, MissingExtra, NoSuchName, TrainshedError
from trainshed.launch.job import setup_script
from trainshed.launch.target import RemoteCommand
from trainshed.recipe import Cluster
from trainshed.run_folder import TENSORBOARD
from trainshed.storage import Store, join

Page = Literal["dash", "tensorboard"]
PAGE_PORTS: Mapping[str, int] = {"dash": 6007, "tensorboard": 6006}
LOOPBACK = "127.0.0.1"
_COPY_SECONDS = 15.0
TOKEN_VARIABLE = "TRAINSHED_DASH_TOKEN"


def tensorboard_words(python: str, folder: str, port: int) -> list[str]:
    """Return the command that shows all figures below a folder; it opens no port to others."""
    return [python, "-P", "-m", "tensorboard.main", "--logdir", folder, "--host", LOOPBACK, "--port", str(port)]


def local_tensorboard(folder: Path, port: int) -> RemoteCommand:
    """Return the command that shows the figures of a folder of this machine."""
    if find_spec("tensorboard") is None:
        raise MissingExtra.named("tensorboard", "TensorBoard's page")
    return RemoteCommand(tuple(tensorboard_words(sys.executable, str(folder), port)), f"TensorBoard of {folder}")


def check_figures(store: Store, run: str) -> None:
    """Refuse a run that has no files of TensorBoard."""
    if next(iter(store.list(TENSORBOARD)), None) is None:
        raise NoSuchName(
            f"the run {run} has no files of TensorBoard",
            where=join(store.url, TENSORBOARD),
            hint=f"`trainshed export-figures {run} --to tensorboard` makes them from its events",
        )


class FiguresCopy:
    """The TensorBoard files of a run in a bucket, copied to a folder here and kept up to date.

    TensorBoard reads on where it stopped, so what a file has gained is appended to its copy.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="figures-copy", daemon=True)

    def __enter__(self) -> FiguresCopy:
        self.update()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def update(self) -> int:
        """Copy what is new; returns how many bytes."""
        copied = 0
        for info in self._store.list(TENSORBOARD):
            copy = self._folder / info.path
            has = copy.stat().st_size if copy.exists() else 0
            if info.size > has:
                data = self._store.read(info.path, has, info.size)
                copy.parent.mkdir(parents=True, exist_ok=True)
                with copy.open("ab") as file:
                    file.write(data)
                copied += len(data)
        return copied

    def _go_on(self) -> None:
        while not self._ended.wait(_COPY_SECONDS):
            try:
                self.update()
            except TrainshedError:  # a bucket that does not answer may answer next time
                continue


def slurm_page(cluster: Cluster, page: Page, run: str, port: int) -> RemoteCommand:
    """Return the ssh command that starts a page on the login node and forwards a port of this machine to it.

    The dashboard reads its token from the first line of its input: whoever lists processes does not see it.

    It is not a step of a job: the files are on a disk that the login node sees, so that the page needs no allocation
    and opens when the job has ended, too. The server ends with the connection: it waits for the end of its input.
    """
    login = cluster.on_slurm.login
    if login is None:
        raise InputError(
            f"the folder of this run is not mounted here, and no login node is known on which {page} could run",
            where=cluster.where("slurm.login"),
            hint="write `login: user@host`, or write this command where the folder is mounted",
        )
    venv = cluster.on_slurm.venv
    python = cluster.python if venv is None else f"{venv}/bin/python"
    if page == "tensorboard":
        words = tensorboard_words(python, f"{run}/{TENSORBOARD}", port)
    else:
        words = [python, "-P", "-m", "trainshed", "dash", run, "--host", LOOPBACK, "--port", str(port), "--no-browser"]
    setup = setup_script(cluster)
    lines = [
        "set -u",
        *([setup] if setup else []),
        # The jobs' own code, as it was sent with the newest of them.
        f"code=$(ls -td {shlex.quote(cluster.store_root)}/code/*/unpacked 2>/dev/null | head -n 1)",
        '[ -z "$code" ] || export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"',
        *([f"IFS= read -r {TOKEN_VARIABLE}", f"export {TOKEN_VARIABLE}"] if page == "dash" else []),
        # Bash gives what it starts in the background an empty input: the real one goes by another number.
        "exec 3<&0",
        f"{shlex.join(words)} </dev/null >/dev/null 3<&- &",
        "server=$!",
        "trap 'kill \"$server\" 2>/dev/null' EXIT HUP TERM INT",
        '{ cat <&3; kill "$server"; } >/dev/null 2>&1 &',
        'wait "$server"',
    ]
    forward = ("-o", "ExitOnForwardFailure=yes", "-L", f"{port}:{LOOPBACK}:{port}")
    script = "\n".join(line.rstrip("\n") for line in lines)
    command = ("ssh", "-T", *forward, "--", login, f"bash -c {shlex.quote(script)}")
    return RemoteCommand(command, f"{page} of {run} on {login}")

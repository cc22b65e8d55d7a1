"""Slurm's own programs, on this machine or on a login node through the user's own ssh, and what `scontrol` prints."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from trainshed.errors import InputError, TrainshedError
from trainshed.recipe import Cluster

_COMMAND_SECONDS = 120.0
# What sbatch is told lies in the script alone: SBATCH_* of whoever submits would win over its lines (SBATCH_EXPORT=ALL
# hands the whole environment on), and a job inherits every SLURM_*, which are another job's where one submits from it.
_WITHOUT_SLURM_VARIABLES = (
    'for name in $(env | sed -n "s/^\\(SBATCH_[A-Za-z0-9_]*\\|SLURM_[A-Za-z0-9_]*\\)=.*/\\1/p"); do '
    'case "$name" in SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SLURM_JWT) ;; *) unset "$name" ;; esac; done; '
    'exec "$0" "$@"'
)


class SlurmClient:
    """Runs commands where Slurm is; arguments are quoted for the shell that ssh starts there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._login = cluster.on_slurm.login
        if self._login is not None and self._login.startswith("-"):
            raise InputError(
                f"`{self._login}` is no host", where=cluster.where("slurm.login"), hint="write user@login.example"
            )

    @property
    def is_remote(self) -> bool:
        """Whether every command is a connection."""
        return self._login is not None

    def run(self, *command: str, input: bytes | None = None) -> str:
        """Run a command and return what it prints; raises what it says where it fails."""
        return self._printed(command, self.attempt(*command, input=input))

    def submit(self, script: str) -> str:
        """Give a script to sbatch, which sees nothing of Slurm's variables here; returns what it prints."""
        command = ("sbatch", "--parsable")
        return self._printed(command, self._attempt(command, script.encode(), ("sh", "-c", _WITHOUT_SLURM_VARIABLES)))

    def _printed(self, command: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> str:
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise TrainshedError(f"{command[0]}: {_last_line(said)}", where=self._where)
        return done.stdout.decode(errors="replace")

    def attempt(self, *command: str, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a command and return how it went."""
        return self._attempt(command, input)

    def _attempt(
        self, command: Sequence[str], input: bytes | None, inside: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[bytes]:
        line = self._line(command, inside)
        try:
            done = subprocess.run(line, input=input or b"", capture_output=True, timeout=_COMMAND_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TrainshedError(
                f"{command[0]} did not answer for {_COMMAND_SECONDS:.0f} s", where=self._where
            ) from None
        if self._login is not None and done.returncode == 255:
            said = _last_line(done.stderr.decode(errors="replace")) or "the connection failed"
            raise TrainshedError(
                f"ssh: {said}", where=self._cluster.where("slurm.login"), hint=f"try `ssh {self._login} true`"
            )
        return done

    def put(self, path: str, data: bytes) -> None:
        """Write a file of the shared disk, complete or not at all; one that is there already is left alone."""
        script = (
            'set -e; [ ! -e "$1" ] || exit 0; mkdir -p "$(dirname "$1")"; new="$(mktemp "$1.XXXXXXXX")"; '
            'cat >"$new"; chmod 644 "$new"; mv "$new" "$1"'
        )
        self.run("sh", "-c", script, "sh", path, input=data)

    def make_folder(self, path: str) -> None:
        """Make a folder of the shared disk."""
        self.run("mkdir", "-p", "--", path)

    def read(self, path: str, start: int = 0) -> bytes | None:
        """Return a file of the shared disk from a byte on; None where there is none."""
        done = self.attempt("tail", "-c", f"+{start + 1}", "--", path)
        return None if done.returncode else done.stdout

    def files(self, folder: str, pattern: str) -> list[str]:
        """Return the files below a folder whose path there fits a pattern of find, sorted."""
        done = self.attempt("find", folder, "-maxdepth", "3", "-path", f"{_escape_find_pattern(folder)}/{pattern}")
        return sorted(done.stdout.decode(errors="replace").splitlines())

    @property
    def _where(self) -> str | None:
        return None if self._login is None else self._login

    def _line(self, command: Sequence[str], inside: Sequence[str]) -> list[str]:
        if self._login is not None:
            if shutil.which("ssh") is None:
                raise InputError("there is no ssh on this machine", where=self._cluster.where("slurm.login"))
            return ["ssh", "-o", "BatchMode=yes", "--", self._login, shlex.join([*inside, *command])]
        if shutil.which(command[0]) is None:
            raise InputError(
                f"there is no `{command[0]}` on this machine",
                where=self._cluster.where("slurm.login"),
                hint="write `login: HOST` under `slurm`, where Slurm's programs are",
            )
        return [*inside, *command]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _escape_find_pattern(folder: str) -> str:
    """A folder as part of a pattern that stands for itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in folder)


_SCONTROL_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=(\S*)")


def parse_scontrol(line: str) -> dict[str, str]:
    """Read one line; of a key that is there twice the first counts (later ones may be part of a person's text)."""
    found: dict[str, str] = {}
    for match in _SCONTROL_FIELD.finditer(line):
        found.setdefault(match[1], match[2])
    return found

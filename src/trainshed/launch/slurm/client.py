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
# Only the script may say what sbatch does. SBATCH_* variables of the submitting shell would win over its lines
# (SBATCH_EXPORT=ALL passes on the whole environment). A job inherits every SLURM_* variable; a shell inside another
# job has that job's.
_WITHOUT_SLURM_VARIABLES = (
    'for name in $(env | sed -n "s/^\\(SBATCH_[A-Za-z0-9_]*\\|SLURM_[A-Za-z0-9_]*\\)=.*/\\1/p"); do '
    'case "$name" in SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SLURM_JWT) ;; *) unset "$name" ;; esac; done; '
    'exec "$0" "$@"'
)


class SlurmClient:
    """Runs commands on the machine that has Slurm; arguments are quoted for the shell that ssh starts there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._login = cluster.on_slurm.login
        if self._login is not None and self._login.startswith("-"):
            raise InputError(
                f"`{self._login}` is not a host", where=cluster.where("slurm.login"), hint="write user@login.example"
            )

    @property
    def is_remote(self) -> bool:
        """Whether every command needs an ssh connection."""
        return self._login is not None

    def run(self, *command: str, input: bytes | None = None) -> str:
        """Run a command and return what it prints; raises an error with its last line if it fails."""
        return self._checked_output(command, self.run_unchecked(*command, input=input))

    def submit(self, script: str) -> str:
        """Give a script to sbatch, without Slurm's variables of this shell; returns what it prints."""
        command = ("sbatch", "--parsable")
        return self._checked_output(
            command, self._execute(command, script.encode(), ("sh", "-c", _WITHOUT_SLURM_VARIABLES))
        )

    def _checked_output(self, command: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> str:
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise TrainshedError(f"{command[0]}: {_last_line(message)}", where=self._where)
        return done.stdout.decode(errors="replace")

    def run_unchecked(self, *command: str, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a command and return its result, whatever the exit code."""
        return self._execute(command, input)

    def _execute(
        self, command: Sequence[str], input: bytes | None, wrapper: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[bytes]:
        line = self._command_line(command, wrapper)
        try:
            done = subprocess.run(line, input=input or b"", capture_output=True, timeout=_COMMAND_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TrainshedError(
                f"{command[0]} did not answer for {_COMMAND_SECONDS:.0f} s", where=self._where
            ) from None
        if self._login is not None and done.returncode == 255:
            message = _last_line(done.stderr.decode(errors="replace")) or "the connection failed"
            raise TrainshedError(
                f"ssh: {message}", where=self._cluster.where("slurm.login"), hint=f"try `ssh {self._login} true`"
            )
        return done

    def upload_file(self, path: str, data: bytes) -> None:
        """Write a file on the shared disk, completely or not at all; an existing file is not changed."""
        script = (
            'set -e; [ ! -e "$1" ] || exit 0; mkdir -p "$(dirname "$1")"; new="$(mktemp "$1.XXXXXXXX")"; '
            'cat >"$new"; chmod 644 "$new"; mv "$new" "$1"'
        )
        self.run("sh", "-c", script, "sh", path, input=data)

    def read(self, path: str, start: int = 0) -> bytes | None:
        """Return a file on the shared disk from a byte offset on; None if it does not exist."""
        done = self.run_unchecked("tail", "-c", f"+{start + 1}", "--", path)
        return None if done.returncode else done.stdout

    def find_files(self, folder: str, pattern: str) -> list[str]:
        """Return the files below a folder whose relative path matches a pattern of `find -path`, sorted."""
        done = self.run_unchecked(
            "find", folder, "-maxdepth", "3", "-path", f"{_escape_find_pattern(folder)}/{pattern}"
        )
        return sorted(done.stdout.decode(errors="replace").splitlines())

    @property
    def _where(self) -> str | None:
        return None if self._login is None else self._login

    def _command_line(self, command: Sequence[str], wrapper: Sequence[str]) -> list[str]:
        if self._login is not None:
            if shutil.which("ssh") is None:
                raise InputError("there is no ssh on this machine", where=self._cluster.where("slurm.login"))
            return ["ssh", "-o", "BatchMode=yes", "--", self._login, shlex.join([*wrapper, *command])]
        if shutil.which(command[0]) is None:
            raise InputError(
                f"there is no `{command[0]}` on this machine",
                where=self._cluster.where("slurm.login"),
                hint="write `login: HOST` under `slurm`, where Slurm's programs are",
            )
        return [*wrapper, *command]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _escape_find_pattern(folder: str) -> str:
    """Escape a folder for a pattern of `find`."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in folder)


_SCONTROL_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=(\S*)")


def parse_scontrol(line: str) -> dict[str, str]:
    """Read the fields of one line; of a repeated key the first counts, since later ones may be part of a comment."""
    fields: dict[str, str] = {}
    for match in _SCONTROL_FIELD.finditer(line):
        fields.setdefault(match[1], match[2])
    return fields

"""A user's own program as a source: it is run once as `SCRIPT --target-dir DIR ARGS…` and leaves text files there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainshed.errors import InputError, TrainshedError
from trainshed.storage import sha256_of

LAST_LINES = 12


def script_spec(script: Path, arguments: Sequence[str]) -> dict[str, object]:
    """What decides a script's output as far as we can know it: its bytes, its arguments, the Python it runs under."""
    if not script.is_file():
        raise InputError("there is no such script", where=str(script), hint="its path is relative to the recipe file")
    python = ".".join(map(str, sys.version_info[:3])) if script.suffix == ".py" else None
    return {"script": sha256_of(script.read_bytes()), "arguments": list(arguments), "python": python}


def run_script(script: Path, arguments: Sequence[str], target: Path) -> None:
    """Run the program until it ends; its output is kept in DIR/script.log, and quoted if it fails."""
    target.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, str(script)] if script.suffix == ".py" else [str(script.absolute())]
    log = target / "script.log"
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                [*launcher, "--target-dir", str(target), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
    except OSError as error:
        raise InputError(
            f"cannot be run: {error.strerror}", where=str(script), hint="make it executable, or write it in Python"
        ) from None
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise TrainshedError(
            f"the script ended with exit code {code}\n" + "\n".join(f"  | {line}" for line in lines),
            where=str(script),
            hint=f"it was run as: {' '.join([Path(launcher[0]).name, *launcher[1:], '--target-dir DIR', *arguments])}",
        )

"""Text that is safe inside an sbatch script: words of bash, options on #SBATCH lines, whole files.

Whatever a person wrote (names, paths, values) goes through one of these; nothing is pasted into a script otherwise.
"""

from __future__ import annotations

import posixpath
import re
from shlex import quote

from trainshed.errors import InputError

_PLAIN_OPTION = re.compile(r"[A-Za-z0-9_@%+=:,./\-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def assign(name: str, value: str) -> str:
    """Return a line that sets a variable and exports it."""
    refuse_nul(value, name)
    return f"export {name}={quote(value)}"


def option(name: str, value: str | int | None = None, *, where: str | None = None) -> str:
    """Return an #SBATCH line.

    Slurm reads these lines itself: it takes quotes and backslashes much like a shell, knows no variables, and ends the
    option at the line's end, so that no line break can be written at all.
    """
    text = name if value is None else f"{name}={value}"
    if _CONTROL.search(text):
        raise InputError(
            f"{text!r} has a line break or another control character, which no option of Slurm can have",
            where=where,
            hint="take it out",
        )
    if _PLAIN_OPTION.fullmatch(text):
        return f"#SBATCH {text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH "{escaped}"'


def file_pattern(path: str) -> str:
    """Return a path for --output, where Slurm replaces what begins with % and takes a backslash for a switch."""
    if "\\" in path:
        raise InputError(
            f"{path!r} has a backslash, with which Slurm names no log", where="store", hint="choose another folder"
        )
    return path.replace("%", "%%")


def write_file(folder: str, name: str, text: str) -> list[str]:
    """Return the lines that write a file of any text, byte for byte; `folder` is a variable's name."""
    check_file_name(name)
    refuse_nul(text, name)
    path = f'"${folder}"/{quote(name)}'
    lines = [f'mkdir -p "${folder}"/{quote(posixpath.dirname(name))}'] if "/" in name else []
    word = _end_word(text)
    if text.endswith("\n"):
        return [*lines, f"cat >{path} <<'{word}'", text[:-1], word]
    # A heredoc always ends with a line break.
    return [*lines, f"head -c -1 >{path} <<'{word}'", text, word]


def check_file_name(name: str) -> None:
    """Refuse a file of a job that would lie outside its folder."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "" in parts or "\x00" in name or "\n" in name:
        raise InputError(f"{name!r} is no name for a file of a job", hint="write a path inside the job's folder")


def refuse_nul(text: str, what: str) -> None:
    """Refuse the one character that no script can hold."""
    if "\x00" in text:
        raise InputError(f"{what} holds a NUL character, which no script can", hint="take it out")


def _end_word(text: str) -> str:
    """Return a word that is no line of the text; the same text gives the same word."""
    lines = set(text.split("\n"))
    number = 0
    while (word := f"END_OF_FILE{number or ''}") in lines:
        number += 1
    return word

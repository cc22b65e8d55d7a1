"""The commands of a page of `docs/seeds/`, and the files that it has a reader write."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# file: (\S+)\n")
_NEEDS = re.compile(r"# needs (.+)")


@dataclass(frozen=True)
class PageCommand:
    """A command that a page shows; `needs` is what it says that no test has, None where it can be run here."""

    words: tuple[str, ...]
    needs: str | None

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass
class Page:
    """A page, read."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)
    commands: list[PageCommand] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)
    """Lines of its console blocks that are neither a command nor a reason."""


def read_page(path: Path) -> Page:
    """Read a page. A reason holds for the commands after it, up to the next blank line or the end of the block."""
    page = Page(path)
    for language, body in _FENCED.findall(path.read_text(encoding="utf-8")):
        if named := _FILE.match(body):
            page.files[named[1]] = body[named.end() :]
        elif language == "console":
            _read_console(body, page)
    return page


def _read_console(body: str, page: Page) -> None:
    needs: str | None = None
    for line in body.replace("\\\n", " ").splitlines():
        if not line.strip():
            needs = None
        elif reason := _NEEDS.fullmatch(line):
            needs = reason[1]
        elif line.startswith("$ "):
            page.commands.append(PageCommand(tuple(shlex.split(line[2:], comments=True)), needs))
        else:
            page.stray.append(line)

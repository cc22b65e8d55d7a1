"""Pages of the documentation as programs: their files are written, their console blocks are run and compared.

A block that begins with `# NAME.yaml` (or .sh, .jsonl, .py) is that file. Every `$ command` of a `console` block is run
in the page's folder; the lines below it, if any, must appear in what it prints, in this order (`…` is anything).
Blocks of another language are for reading: a command that needs a cluster stands in an `sh` block.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:yaml|sh|jsonl|py))\n")


@dataclass(frozen=True)
class ShownCommand:
    command: str
    printed: tuple[str, ...]


def shown_commands(block: str) -> list[ShownCommand]:
    """The commands of a console block, each with what the page says that it prints."""
    parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    texts = [(command, rest.splitlines()) for command, _, rest in (part.partition("\n") for part in parts)]
    return [ShownCommand(command, tuple(line for line in lines if line.strip())) for command, lines in texts]


def run_page(page: Path, folder: Path, part: str | None = None, environment: dict[str, str] | None = None) -> int:
    """Run a page, or the part of it below the heading `part`, in a folder; return how many commands were run."""
    text = page.read_text(encoding="utf-8")
    if part is not None:
        text = re.split(rf"^## {re.escape(part)}$", text, flags=re.MULTILINE)[1]
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    count = 0
    for language, block in FENCED.findall(text):
        if name := FILE_NAME.match(block):
            (folder / name[1]).write_text(block, encoding="utf-8")
        if language == "console":
            for shown in shown_commands(block):
                run_shown(shown, folder, environment or {})
                count += 1
    return count


def run_shown(shown: ShownCommand, folder: Path, environment: dict[str, str]) -> None:
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "118",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shown.command],
        cwd=folder,
        env=variables | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    printed = done.stdout
    assert done.returncode == 0, f"{shown.command}\n{printed[-4000:]}"
    rest = printed.splitlines()
    for line in shown.printed:
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("…"))))
        at = next((number for number, text in enumerate(rest) if pattern.search(text)), None)
        assert at is not None, f"`{shown.command}` does not print (in this order)\n{line}\nbut\n{printed[-4000:]}"
        rest = rest[at + 1 :]

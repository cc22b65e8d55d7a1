"""`trainshed open` as a person has it: a command in a terminal that ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class OpenedPage:
    """A page under way."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    link: str = ""

    def ask(self, path: str, headers: dict[str, str] | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers or {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def ask_json(self, path: str, headers: dict[str, str] | None = None) -> Any:
        return json.loads(self.ask(path, headers))

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextmanager
def opened_page(
    *words: str, port: int, folder: Path, meanwhile: Callable[[], None] = lambda: None, **environment: str
) -> Iterator[OpenedPage]:
    """Run `trainshed open` until it has said where the page is; `meanwhile` is called while waiting."""
    log, out = folder / "open.log", folder / "open.out"
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainshed", "open", *words, "--port", str(port)],
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=os.environ | environment,
        )
    page = OpenedPage(process, port, log)
    try:
        end = time.monotonic() + 300
        while "http://" not in out.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            meanwhile()
            time.sleep(0.05)
        page.link = out.read_text().strip().splitlines()[-1]
        yield page
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()

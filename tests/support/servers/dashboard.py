"""A real dashboard over the runs of a folder, and the real browser that looks at it."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from support.missing_parts import missing_part
from trainshed.observe.dash.run_files import RunSource
from trainshed.observe.dash.server import DashSettings, running_server
from trainshed.observe.dash.views import Dashboard, source_key
from trainshed.run_folder import runs_in
from trainshed.storage import LocalStore

BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def local_source(folder: Path, *, running: bool | None = False, steps: int | None = None) -> RunSource:
    return RunSource(
        folder.parent.name,
        folder.name,
        str(folder),
        LocalStore(folder),
        is_running=lambda: running,
        steps=lambda: steps,
    )


@dataclass(frozen=True)
class ServedDash:
    """A dashboard that is being served."""

    url: str
    dashboard: Dashboard

    def key(self, folder: Path) -> str:
        return source_key(local_source(folder))

    def request(
        self, path: str, *, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask for a path exactly as it is written; no client tidies it up."""
        host = urlsplit(self.url)
        connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, _, body = self.request(path)
        assert status == 200, body
        return orjson.loads(body)


@contextmanager
def served(store: Path, settings: DashSettings | None = None, **source: Any) -> Iterator[ServedDash]:
    dashboard = Dashboard(lambda: [local_source(folder, **source) for folder in runs_in(store)])
    with running_server(dashboard, settings or DashSettings(port=0)) as url:
        yield ServedDash(url, dashboard)


@contextmanager
def real_browser() -> Iterator[Any]:
    """Chromium of the system, driven by playwright."""
    program = shutil.which("chromium")
    if program is None:
        missing_part("no browser: chromium is not installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER_FLAGS)
        try:
            yield browser
        finally:
            browser.close()

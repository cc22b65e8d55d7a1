"""The documentation site: built strictly, every page in its navigation, nothing fetched from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//[^"'> ]+""")


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from pages_of(inner)
    else:
        for inner in entry:
            yield from pages_of(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages), "add the page to `nav` in zensical.toml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds: a link or an anchor that leads nowhere ends it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_it_has_every_page_and_a_search_index(site: Path) -> None:
    assert {page.stem for page in site.glob("*.html")} >= {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert (site / "search.json").is_file() or list(site.rglob("search*.json"))


def test_a_reader_s_browser_asks_nobody_else(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    styles = [
        style for style in site.rglob("*.css") if re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text())
    ]
    assert styles == []

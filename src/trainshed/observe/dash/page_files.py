"""The files of the page, by name and in the order in which the page loads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "elements.js",
    "figures.js",
    "data.js",
    "charts.js",
    "ranks.js",
    "timeline.js",
    "views.js",
    "main.js",
)
STYLES = ("uplot/uPlot.min.css", "dash.css")
CONTENT_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@cache
def page_file(name: str) -> str:
    """Return the text of a script, a style or the page itself."""
    return (PAGES / name).read_text(encoding="utf-8")


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return everything that the page may load, with its content type, by the name in its address."""
    return {
        name.rpartition("/")[2]: (page_file(name).encode(), CONTENT_TYPES[Path(name).suffix])
        for name in (*SCRIPTS, *STYLES, "icon.svg")
    }

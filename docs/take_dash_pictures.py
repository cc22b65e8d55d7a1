"""Take the pictures of the dashboard with a real browser, of a run whose events are made up (128 GPUs, 1,200 steps).

apt-get install chromium && pip install 'trainshed[test]' && python docs/take_dash_pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.runs.observed_runs import whole_run  # noqa: E402
from support.servers.dashboard import real_browser, served  # noqa: E402

WIDTH, HEIGHT = 1280, 860


def main(folder: Path) -> None:
    """Write `dash-light.png` (curves) and `dash-dark.png` (ranks)."""
    with tempfile.TemporaryDirectory() as scratch:
        run = whole_run(Path(scratch))
        with served(Path(scratch), steps=1200) as dash, real_browser() as browser:
            for theme, view, ready in (
                ("light", "curves", ".chart canvas"),
                ("dark", "ranks", "canvas[data-cells='128']"),
            ):
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
                page.goto(f"{dash.url}#/run/{dash.key(run.folder)}/{view}")
                page.wait_for_selector(ready)
                if view == "ranks":
                    page.get_by_role("radio", name="Compute time").click()
                    page.locator(".side tr").first.click()
                    page.get_by_role("heading", name="Rank 77").wait_for()
                page.screenshot(path=folder / f"dash-{theme}.png")
                page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")

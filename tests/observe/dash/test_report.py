"""One file holds the page of a run: it needs no server and no extra, and never stands in a run's way."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from support.runs.observed_runs import ObservedRun, whole_run
from support.runs.small_generators import Notes
from support.servers.dashboard import local_source
from trainshed.observe.dash.page_files import PAGES, SCRIPTS, STYLES, page_file
from trainshed.observe.dash.report import build_report, write_report

WITHOUT_EXTRA = """
import sys
sys.modules["starlette"] = sys.modules["uvicorn"] = sys.modules["torch"] = None
from pathlib import Path
from trainshed.observe.dash.report import write_report
print(write_report(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    return whole_run(tmp_path_factory.mktemp("store"), steps=60)


def embedded(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return orjson.loads(match[1])


def test_it_is_written_without_the_extra_of_the_server(run: ObservedRun) -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_EXTRA, str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run.folder / "report.html"), done.stderr
    data = embedded((run.folder / "report.html").read_text())
    assert data["schema"] == "trainshed.report/1"
    (row,) = data["runs"]["runs"]
    assert (row["state"], row["step"]) == ("done", 60)
    views = data["views"][row["key"]]
    assert set(views["series"]) == {"step", "tokens", "time"}
    assert views["series"]["step"]["tables"]["steps"]["rows"] == 60
    # The log of the rank that failed is among those that are kept.
    assert set(views["logs"]["files"]) == {"attempt-0002/rank-00000.log", "attempt-0001/rank-00037.log"}


def test_its_policy_allows_its_own_script_and_no_other(run: ObservedRun) -> None:
    page = build_report([local_source(run.folder)])
    policy = re.search(r'content-security-policy" content="([^"]+)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]


def test_nothing_in_the_data_ends_its_element(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.emit("note", text="</script><script>alert(1)</script><!--")
    page = build_report([local_source(run.folder)])
    assert page.count("<script") == 2
    assert "alert(1)" in page
    assert "<!--" not in page
    texts = [event["text"] for event in next(iter(embedded(page)["views"].values()))["events"]["events"]]
    assert "</script><script>alert(1)</script><!--" in texts


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    broken = ObservedRun(tmp_path)
    broken.begin()
    (broken.folder / "report.html").mkdir()
    notes = Notes()
    assert write_report(broken.folder, reporter=notes) is None
    assert [text for text in notes.said if text.startswith("report.html could not be written: ")]


def test_a_long_run_has_a_small_report(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    for step in range(4000):
        run.step(step)
    page = build_report([local_source(run.folder)])
    table = next(iter(embedded(page)["views"].values()))["series"]["step"]["tables"]["steps"]
    assert (table["rows"], len(table["x"])) == (4000, 1500)
    assert sum(table["counts"]) == 4000
    assert len(page) < 4_000_000


def test_the_page_loads_nothing_from_outside_and_its_parts_are_the_reports() -> None:
    index = page_file("index.html")
    own = [name.rpartition("/")[2] for name in (*SCRIPTS, *STYLES)]
    assert re.findall(r'(?:src|href)="/static/([^"]+)"', index) == ["icon.svg", *own[-2:], *own[:-2]]
    for name in (*SCRIPTS[1:], *STYLES, "index.html"):
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page_file(name)), name
        assert "innerHTML" not in page_file(name)
    assert "MIT" in (PAGES / "uplot" / "LICENSE").read_text()

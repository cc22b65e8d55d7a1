"""Every view of the page in a real browser: live, zoomed, overlaid, on a phone, dark and light, and from a file."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.runs.observed_runs import ObservedRun, rank_layout, whole_run
from support.servers.dashboard import ServedDash, local_source, real_browser, served
from trainshed.observe.dash.report import build_report
from trainshed.observe.dash.server import DashSettings

TABS = ("curves", "ranks", "timeline", "checkpoints", "plan", "answers", "scores", "events", "logs", "recipe")
ATTACK = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
LONG_MILLISECONDS = 60_000

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with real_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Open pages; whatever a page complains about fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(url: str, *, width: int = 1280, height: int = 900, theme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LONG_MILLISECONDS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    whole_run(store, steps=300)
    whole_run(store, id="ff00aa11", steps=200, lift=0.3)
    return store


@pytest.fixture(scope="module")
def dash(store: Path) -> Iterator[ServedDash]:
    with served(store, steps=300) as dash:
        yield dash


def wait_until(page: Any, expression: str) -> None:
    """Wait until an expression holds; playwright's own way needs `eval`, which the page's policy forbids."""
    for _ in range(LONG_MILLISECONDS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"this never came true: {expression}")


def key(dash: ServedDash, store: Path, id: str = "0a1b2c3d", name: str = "llama-tech") -> str:
    return dash.key(ObservedRun(store, name, id).folder)


def test_runs_are_filtered_and_opened_by_keys(dash: ServedDash, open_page: OpenPage) -> None:
    page = open_page(dash.url)
    page.wait_for_selector("table.runs tbody tr")
    assert page.locator("table.runs tbody tr").count() == 2
    assert page.locator("table.runs .spark path").count() == 2
    page.keyboard.press("/")
    page.keyboard.type("ff00")
    wait_until(page, "document.querySelectorAll('table.runs tbody tr').length === 1")
    page.keyboard.press("Escape")
    page.locator("input[type=search]").fill("")
    page.locator("main").click(position={"x": 5, "y": 5})
    page.keyboard.press("j")
    assert "ff00aa11" in page.locator("tr[aria-selected=true]").inner_text()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart canvas")
    assert "0a1b2c3d" in page.locator("h1").inner_text()
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_curves_zoom_go_logarithmic_and_are_smoothed(dash: ServedDash, store: Path, open_page: OpenPage) -> None:
    page = open_page(f"{dash.url}#/run/{key(dash, store)}")
    page.wait_for_selector(".chart canvas")
    titles = page.locator(".chart h3").all_inner_texts()
    assert titles[:7] == ["Loss", "Gradient norm", "Learning rate", "Throughput", "MFU", "Step time", "Memory"]
    assert {"Compute time of ranks", "Temperature", "Power", "Utilisation"} <= set(titles)
    loss = page.locator(".chart").first
    assert "validation" in loss.locator(".legend").inner_text()
    box = loss.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    assert "step 150" in loss.locator(".legend").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_selector("button.reset")
    limits = "(() => { const c = document.querySelector('.chart').card.chart.scales.x; return [c.min, c.max]; })()"
    low, high = page.evaluate(limits)
    assert 140 < low < 160
    assert 215 < high < 235
    page.keyboard.press("0")
    page.wait_for_selector("button.reset", state="detached")
    page.keyboard.press("l")
    assert page.evaluate("document.querySelector('.chart').card.chart.scales.y.distr") == 3
    assert page.get_by_role("button", name="Log", exact=True).get_attribute("aria-pressed") == "true"
    page.keyboard.press("s")
    assert page.evaluate("document.querySelector('.chart').card.lines.map(l => l.part)") == ["raw", "line", "line"]
    page.keyboard.press("l")
    page.get_by_role("radio", name="Time").click()
    wait_until(page, "document.querySelector('.chart').card.chart.data[0].at(-1) > 600")


def test_runs_are_laid_over_each_other(dash: ServedDash, store: Path, open_page: OpenPage) -> None:
    page = open_page(f"{dash.url}#/run/{key(dash, store)}")
    page.wait_for_selector(".chart canvas")
    page.get_by_label("Lay another run over this one").select_option(label="llama-tech/ff00aa11")
    page.wait_for_selector(".chip")
    assert page.locator(".chart").first.locator(".legend").inner_text().count("ff00aa11") == 2
    assert "with=" in page.url
    page.locator(".chip").nth(1).click()
    page.wait_for_selector(".chip", state="detached")


def test_every_view_tells_what_the_run_left(dash: ServedDash, store: Path, open_page: OpenPage) -> None:
    page = open_page(f"{dash.url}#/run/{key(dash, store)}/timeline")
    page.wait_for_selector(".timeline rect.fill-train")
    assert page.locator(".timeline rect.fill-stage").count() == 1
    assert page.locator(".timeline rect.fill-failed").count() >= 1
    page.locator(".timeline rect.fill-stage").hover()
    assert "1.2B tokens in 8 shards" in page.locator(".tip").inner_text()
    for number, text in (
        (4, "291 of 291 equal"),
        (5, "1.94 s"),
        (6, "A stage waits for the others."),
        ("r", "global_batch: 1024"),
    ):
        page.keyboard.press(str(number))
        page.get_by_text(text).first.wait_for()
    page.keyboard.press("8")
    page.get_by_placeholder("Search events").fill("sigkill")
    wait_until(page, "document.querySelectorAll('.lines tbody tr').length === 1")
    assert "rank 37 on gpu-04 died of SIGKILL" in page.locator(".lines").inner_text()
    assert page.locator(".lines mark").inner_text() == "SIGKILL"
    page.locator("main h1").click()
    page.keyboard.press("9")
    page.get_by_placeholder("Search this log").fill("clock")
    wait_until(page, "document.querySelectorAll('.log .t').length === 1")
    page.get_by_label("Rank or part").fill("37")
    page.get_by_label("Rank or part").press("Enter")
    wait_until(page, "document.querySelector('[aria-label=\"Rank or part\"]').value === 'rank-00037'")


def test_figures_of_a_run_are_not_cut(dash: ServedDash, store: Path, open_page: OpenPage) -> None:
    page = open_page(f"{dash.url}#/run/{key(dash, store)}", width=1200)
    page.wait_for_selector(".headline")
    cut = "[...document.querySelectorAll('.headline .value')].some((tile) => tile.scrollWidth > tile.clientWidth)"
    longest = "document.querySelectorAll('.headline .value')[1].textContent = '47 h 59 min'"
    assert not page.evaluate(f"{longest}, {cut}")


def test_an_answer_of_white_space_alone_is_seen(tmp_path: Path, open_page: OpenPage) -> None:
    run = ObservedRun(tmp_path / "store", "llama-tech", "0a1b2c3d")
    run.begin()
    run.step(0)
    answer = {"prompt": "What is a stage?", "answer": "\n\n", "tokens": [1, 2], "ended": True}
    run.emit("answers", 1, answers=[answer])
    file = tmp_path / "report.html"
    file.write_text(build_report([local_source(run.folder, steps=1)]))
    page = open_page(file.as_uri())
    page.wait_for_selector(".headline")
    page.keyboard.press("6")
    page.get_by_text('"\\n\\n"').wait_for()


def test_an_answer_that_comes_after_a_later_one_is_not_shown(
    dash: ServedDash, store: Path, open_page: OpenPage
) -> None:
    page = open_page(f"{dash.url}#/run/{key(dash, store)}/recipe")
    page.get_by_text("global_batch: 1024").first.wait_for()
    page.evaluate("""() => {
        const plain = window.fetch;
        window.began = window.late = 0;
        window.fetch = async (address, options) => {
            const empty = String(address).includes("/events") && !String(address).includes("sigkill");
            if (!empty) return plain(address, options);
            window.began += 1;
            const answer = await plain(address, options);
            await new Promise((go) => setTimeout(go, 1000));
            window.late += 1;
            return answer;
        };
    }""")
    page.keyboard.press("8")
    wait_until(page, "window.began > 0")
    page.get_by_placeholder("Search events").fill("sigkill")
    wait_until(page, "window.late > 0")
    wait_until(page, "document.querySelectorAll('.lines tbody tr').length > 0")
    page.wait_for_timeout(200)
    assert page.locator(".lines tbody tr").count() == 1


def test_the_page_follows_a_run_while_it_trains(tmp_path: Path, open_page: OpenPage) -> None:
    run = ObservedRun(tmp_path)
    run.write("recipe.yaml", "trainshed: 1\n")
    with served(tmp_path, running=True, steps=50) as dash:
        page = open_page(dash.url)
        page.get_by_text("No step yet").wait_for()
        run.begin()
        for step in range(5):
            run.step(step, loss=3.0)
        page.wait_for_selector(".chart canvas")
        assert page.locator(".headline .value").first.inner_text().startswith("5")
        run.step(5, loss=1.2345)
        page.get_by_text("1.2345").first.wait_for()
        assert page.locator(".state").inner_text() == "running"
        run.emit("alarm", 5, name="loss_spike", what="loss jumped")
        page.get_by_text("1 alarm").wait_for()


def test_a_thousand_ranks_are_drawn_and_the_slow_one_is_named(tmp_path: Path, open_page: OpenPage) -> None:
    run = ObservedRun(tmp_path)
    layout = rank_layout(tp=8, pp=8, dp=16)
    run.begin(layout, hosts=[f"node-{number:03d}" for number in range(128)])
    run.step(0)
    run.ranks(49, 1024, slow={513: 1.6})
    run.emit("stall", ranks=[600], collective="all_reduce", what="rank 600 does not enter all_reduce")
    with served(tmp_path, running=True) as dash:
        page = open_page(f"{dash.url}#/run/{dash.key(run.folder)}/ranks")
        page.wait_for_selector("canvas[data-cells='1024']")
        assert "rank 513" in page.locator(".side").inner_text()
        assert "rank 600 does not enter all_reduce" in page.locator(".side").inner_text()
        page.get_by_role("radio", name="Compute time").click()
        place = page.evaluate(
            "(() => { const r = document.querySelector('canvas'); const b = r.getBoundingClientRect();"
            " const v = page.view.placed; const c = v.cells.find(c => c.rank === 513);"
            " return [b.left + c.x + v.cell / 2, b.top + c.y + v.cell / 2]; })()"
        )
        page.mouse.move(*place)
        assert page.locator(".tip").inner_text().startswith("rank 513 on node-064")
        page.mouse.click(*place)
        page.get_by_role("heading", name="Rank 513").wait_for()
        assert page.locator(".facts").inner_text().split()[:2] == ["host", "node-064"]
        page.locator("canvas").press("ArrowRight")
        page.get_by_role("heading", name="Rank 514").wait_for()
        page.get_by_role("radio", name="By node").click()
        assert page.locator("canvas").get_attribute("data-cells") == "1024"


def test_a_million_steps_are_drawn_with_the_points_of_a_chart(tmp_path: Path, open_page: OpenPage) -> None:
    run = ObservedRun(tmp_path)
    run.begin()
    run.step(0)
    with served(tmp_path) as dash:
        reader = dash.dashboard.readers()[dash.key(run.folder)]
        reader.read_all()
        count = 1_000_000
        columns = reader.steps._columns
        for name in list(columns):
            columns[name] = array("d", np.linspace(1.0, 2.0, count))
        columns["step"], columns["loss"] = array("d", np.arange(1.0, count + 1)), array("d", np.full(count, 2.0))
        columns["loss"][777_777] = 50.0
        reader.steps._rows = count
        reader.steps._windows.clear()
        page = open_page(f"{dash.url}#/run/{dash.key(run.folder)}")
        page.wait_for_selector(".chart canvas")
        chart = "document.querySelector('.chart').card.chart"
        assert page.evaluate(f"{chart}.data[0].length") <= 700
        assert page.evaluate(f"Math.max(...{chart}.data[1])") == 50
        page.evaluate("page.view.setZoom([777700, 777800])")
        wait_until(page, f"{chart}.data[0].length < 110 && {chart}.data[0].includes(777778)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_every_view_without_scrolling_sideways(
    dash: ServedDash, store: Path, open_page: OpenPage, theme: str
) -> None:
    page = open_page(dash.url, width=390, height=844, theme=theme)
    page.wait_for_selector("table.runs tbody tr")
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not page.evaluate(wide)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (theme == "dark")
    for tab in TABS:
        page.goto(f"{dash.url}#/run/{key(dash, store)}/{tab}")
        page.wait_for_selector(".chart, .card")
        page.wait_for_selector(".headline")
        assert not page.evaluate(wide), tab
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
    page.reload()
    page.wait_for_selector(".headline")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


def attacked_run(store: Path) -> ObservedRun:
    """A run that says in every place where a person or a program can write: run this."""
    run = ObservedRun(store, f"run{ATTACK.replace('/', '∕')}", "<script>1")
    run.write("recipe.yaml", f"name: {ATTACK}\n</script><script>window.hacked=1</script>\n")
    run.begin(hosts=[ATTACK], reasons=[ATTACK])
    run.step(0)
    run.emit("validation", 1, loss=2.0, batches=1)
    run.emit("answers", 1, answers=[{"prompt": ATTACK, "answer": ATTACK, "tokens": [], "ended": False}])
    run.emit("alarm", 0, name="straggler", what=ATTACK, ranks=[0], hosts=[ATTACK])
    run.emit("checkpoint", 1, phase="failed", what=ATTACK)
    run.emit("failure", ranks=[0], collective=None, what=ATTACK)
    run.write("logs/attempt-0001/rank-00000.log", f"{ATTACK}\n</script><script>window.hacked=1</script>\n")
    run.write("export/verdict.json", b'{"passed": false, "versions": {"<script>window.hacked=1</script>": "1"}}')
    run.attempt = 0
    run.emit("stage", rank=None, name=ATTACK, state="failed", what=ATTACK)
    return run


def visit_all(page: Any, url: str, key: str) -> None:
    for tab in TABS:
        page.goto(f"{url}#/run/{key}/{tab}")
        page.wait_for_selector(".headline")
        page.wait_for_selector(".chart canvas, .card")
        page.wait_for_timeout(50)
        assert page.evaluate("window.hacked") is None, tab
        assert page.locator("main img, main script").count() == 0


def test_nothing_that_a_run_wrote_is_run_by_the_page(tmp_path: Path, open_page: OpenPage) -> None:
    run = attacked_run(tmp_path)
    with served(tmp_path) as dash:
        page = open_page(dash.url)
        page.wait_for_selector(".headline")
        visit_all(page, dash.url, dash.key(run.folder))
        assert ATTACK in page.goto(f"{dash.url}api/runs/{dash.key(run.folder)}/recipe").json()["recipe"]


def test_the_report_holds_every_view_in_one_file(store: Path, tmp_path: Path, open_page: OpenPage) -> None:
    folders = [ObservedRun(store, id=id).folder for id in ("0a1b2c3d", "ff00aa11")]
    sources = [local_source(folder, steps=300) for folder in folders]
    file = tmp_path / "report.html"
    file.write_text(build_report(sources))
    requests: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("table.runs tbody tr")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart canvas")
    page.get_by_label("Lay another run over this one").select_option(index=1)
    page.wait_for_selector(".chip")
    page.get_by_role("radio", name="Tokens").click()
    page.keyboard.press("2")
    page.wait_for_selector("canvas[data-cells='128']")
    page.keyboard.press("8")
    page.get_by_placeholder("Search events").fill("sigkill")
    wait_until(page, "document.querySelectorAll('.lines tbody tr').length === 1")
    page.locator("main h1").click()
    for number, text in ((4, "291 of 291 equal"), (5, "1.94 s"), (6, "A stage waits"), (9, "loading weights")):
        page.keyboard.press(str(number))
        page.get_by_text(text).first.wait_for()
    assert page.locator(".live").inner_text() == "saved report"
    assert [url for url in requests if not url.startswith("file:")] == []


def test_the_report_of_a_run_that_means_harm_does_none(tmp_path: Path, open_page: OpenPage) -> None:
    run = attacked_run(tmp_path / "store")
    file = tmp_path / "report.html"
    file.write_text(build_report([local_source(run.folder)]))
    page = open_page(file.as_uri())
    page.wait_for_selector(".headline")
    visit_all(page, file.as_uri(), page.evaluate("page.key"))


def test_the_token_comes_by_the_link_or_is_asked_for(store: Path, browser: Any) -> None:
    with served(store, DashSettings(port=0, token="correct-horse")) as dash:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{dash.url}#token=correct-horse")
        page.wait_for_selector("table.runs tbody tr", timeout=LONG_MILLISECONDS)
        assert "correct-horse" not in page.url
        assert "correct-horse" not in page.evaluate("document.cookie")
        context.close()
        context = browser.new_context()
        page = context.new_page()
        page.goto(dash.url)
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_text("This is not the token.").wait_for()
        page.get_by_label("Token").fill("correct-horse")
        page.get_by_role("button", name="Open").click()
        page.wait_for_selector("table.runs tbody tr", timeout=LONG_MILLISECONDS)
        context.close()

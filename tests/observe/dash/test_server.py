"""The dashboard answers only whom it should, and only with what is in its runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from support.runs.observed_runs import ObservedRun, whole_run
from support.servers.dashboard import ServedDash, served
from trainshed.errors import InputError
from trainshed.observe.dash.access import AccessRules, is_loopback
from trainshed.observe.dash.server import DashSettings

TOKEN = "correct-horse"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    return whole_run(tmp_path_factory.mktemp("store"), steps=60)


@pytest.fixture(scope="module")
def dash(run: ObservedRun) -> Iterator[ServedDash]:
    with served(run.store) as dash:
        yield dash


@pytest.fixture(scope="module")
def guarded(run: ObservedRun) -> Iterator[ServedDash]:
    with served(run.store, DashSettings(port=0, token=TOKEN)) as dash:
        yield dash


def test_the_page_and_its_data_are_served(dash: ServedDash, run: ObservedRun) -> None:
    assert [row["run"] for row in dash.get("/api/runs")["runs"]] == ["llama-tech/0a1b2c3d"]
    assert dash.get(f"/api/runs/{dash.key(run.folder)}/summary")["step"] == 60
    status, headers, body = dash.request("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<script>" not in body  # a policy that forbids inline scripts needs none
    for name in ("main.js", "uPlot.iife.min.js", "dash.css", "icon.svg"):
        assert dash.request(f"/static/{name}")[0] == 200


def test_every_answer_has_the_headers_that_keep_others_out(dash: ServedDash) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing", "/api/runs/000000000000/summary"):
        _, headers, _ = dash.request(path)
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
    assert dash.request("/api/runs")[1]["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(dash: ServedDash, method: str) -> None:
    assert dash.request("/api/runs", method=method, body=b"x")[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:6007", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1"]
)
def test_a_name_that_was_made_to_point_here_is_refused(dash: ServedDash, host: str) -> None:
    assert dash.request("/api/runs", headers={"Host": host})[0] == 421
    assert dash.request("/", headers={"Host": host})[0] == 421


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:6007", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(dash: ServedDash, host: str) -> None:
    assert dash.request("/api/runs", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost", "Origin": "https://evil.example"},
        {"Host": "localhost", "Origin": "null"},
        {"Host": "localhost:6007", "Origin": "http://localhost:8000"},
        {"Host": "localhost", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_the_page_of_another_site_reads_nothing(dash: ServedDash, headers: dict[str, str]) -> None:
    assert dash.request("/api/runs", headers=headers)[0] == 403


def test_two_hosts_in_one_request_are_none() -> None:
    rules = AccessRules("127.0.0.1")
    assert rules.refusal("/", {"host": ""}) is not None
    assert rules.refusal("/", {}) is not None


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/views.py",
        "/static//etc/passwd",
        "/../../../../etc/passwd",
        "/static/uplot/LICENSE",
        "/api/runs/../../etc/passwd/summary",
        "/pages/index.html",
        "/api",
        "/static/",
    ],
)
def test_no_path_leads_out_of_the_page(dash: ServedDash, path: str) -> None:
    assert dash.request(path)[0] == 404


@pytest.mark.parametrize(
    "file",
    [
        "../recipe.yaml",
        "attempt-0001/../../recipe.yaml",
        "/etc/passwd",
        "..%2f..%2frecipe.yaml",
        "attempt-0001/..%2f..%2frecipe.log",
        "attempt-0001%00/rank-00000.log",
        "attempt-0001/missing.log",
        "....//recipe.log",
    ],
)
def test_no_name_of_a_log_leads_out_of_the_logs(dash: ServedDash, run: ObservedRun, file: str) -> None:
    status, _, body = dash.request(f"/api/runs/{dash.key(run.folder)}/logs?file={file}")
    assert status == 400
    assert orjson.loads(body)["what"] == "there is no such log in this run"


def test_a_link_that_leads_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("top secret\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rank-00000.log").write_text("top secret\n")
    run = ObservedRun(tmp_path / "store")
    run.begin()
    run.write("logs/attempt-0001/rank-00001.log", "in the open\n")
    os.symlink(secret, run.folder / "logs" / "attempt-0001" / "rank-00000.log")
    os.symlink(tmp_path / "folder", run.folder / "logs" / "attempt-0002")
    os.symlink(secret, run.folder / "recipe.yaml")
    os.symlink(run.folder / "logs" / "attempt-0001", run.folder / "logs" / "again")  # inside the run: fine
    with served(run.store) as dash:
        key = dash.key(run.folder)
        files = [log["file"] for log in dash.get(f"/api/runs/{key}/logs")["logs"]]
        assert files == ["again/rank-00001.log", "attempt-0001/rank-00001.log"]
        for file in ("attempt-0001/rank-00000.log", "attempt-0002/rank-00000.log"):
            assert dash.request(f"/api/runs/{key}/logs?file={file}")[0] == 400
        assert dash.get(f"/api/runs/{key}/recipe")["recipe"] is None


def test_data_needs_the_token_and_the_page_does_not(guarded: ServedDash) -> None:
    assert guarded.request("/")[0] == 200
    assert guarded.request("/static/main.js")[0] == 200
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Cookie": "trainshed_dash=wrong"},
        {"Cookie": f"other={TOKEN}"},
    ):
        assert guarded.request("/api/runs", headers=headers)[0] == 401, headers
    assert guarded.request(f"/api/runs?token={TOKEN}")[0] == 401  # an address ends in logs
    assert guarded.request("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_the_token_is_changed_for_a_cookie_that_scripts_do_not_see(guarded: ServedDash) -> None:
    assert guarded.request("/login", method="POST", body=b"wrong")[0] == 401
    assert guarded.request("/login", method="POST", body=b"x" * 5000)[0] == 413
    status, headers, _ = guarded.request("/login", method="POST", body=TOKEN.encode())
    assert status == 204
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert guarded.request("/api/runs", headers={"Cookie": cookie.partition(";")[0]})[0] == 200


def test_whoever_listens_to_others_gets_a_token() -> None:
    assert DashSettings().with_token().token is None
    assert DashSettings("::1").with_token().token is None
    made = DashSettings("0.0.0.0").with_token().token
    assert made is not None
    assert len(made) >= 32
    assert DashSettings("0.0.0.0").with_token().token != made
    assert DashSettings("0.0.0.0", token="own").with_token().token == "own"
    for token in ("", "schlüssel"):
        with pytest.raises(InputError):
            DashSettings("0.0.0.0", token=token).with_token()


def test_names_of_a_machine_that_others_reach() -> None:
    rules = AccessRules("0.0.0.0", TOKEN, frozenset({"dash.example"}))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert rules.refusal("/api/runs", {"host": "192.0.2.7:6007", **bearer}) is None
    assert rules.refusal("/api/runs", {"host": "dash.example", **bearer}) is None
    assert rules.refusal("/api/runs", {"host": "evil.example", **bearer}) is not None
    assert [is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.7", "example.org")] == [False] * 4


def test_a_port_that_is_taken_is_named(dash: ServedDash) -> None:
    port = int(dash.url.rstrip("/").rpartition(":")[2])
    with (
        pytest.raises(InputError, match=f"port {port}: Address already in use"),
        served(Path("nowhere"), DashSettings(port=port)),
    ):
        pass


def test_a_run_that_cannot_be_read_does_not_hide_the_others(run: ObservedRun, tmp_path: Path) -> None:
    good, bad = ObservedRun(tmp_path, "good"), ObservedRun(tmp_path, "bad")
    good.begin()
    good.step(0)
    bad.append(b"\xff\xfe\n")
    bad.write("plans/attempt-0001.json", b"{")
    with served(tmp_path) as dash:
        rows = {row["name"]: row for row in dash.get("/api/runs")["runs"]}
        assert rows["good"]["step"] == 1
        assert "holds no event" in rows["bad"]["problem"]
        for view in ("ranks", "plan", "timeline"):
            assert dash.request(f"/api/runs/{dash.key(bad.folder)}/{view}")[0] == 200

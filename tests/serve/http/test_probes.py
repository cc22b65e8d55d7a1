"""What orchestrators ask: alive, ready, and in numbers."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.models.served_letters import Served, serve_letters, wait_until
from trainshed.reporting import SILENT
from trainshed.serve.http.metrics import Histogram
from trainshed.serve.http.server_state import LoadProgress, ServedModel


def probe(served: Served, path: str) -> tuple[int, dict]:
    response = served.http.get(path)
    return response.status_code, response.json()


def metrics(served: Served) -> dict[tuple[str, frozenset], float]:
    """Every sample as Prometheus' own parser reads it."""
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }


def test_a_server_that_loads_is_alive_and_not_ready_and_says_how_far_it_is() -> None:
    with serve_letters(loaded=False) as served:
        assert probe(served, "/health") == (200, {"status": "loading"})
        with LoadProgress(SILENT, served.state).task("reading weights", total=100, unit="B") as task:
            task.advance(40)
            status, report = probe(served, "/ready")
            assert (status, report["status"]) == (503, "loading")
            assert report["step"] == {"label": "reading weights", "done": 40, "total": 100, "unit": "B"}
            assert metrics(served)["trainshed_ready", frozenset()] == 0
        served.state.loaded(ServedModel("letters", served.generator, served.tokenizer))
        assert probe(served, "/ready") == (200, {"status": "ready", "model": "letters", "chat": True})
        assert probe(served, "/health") == (200, {"status": "ready"})


def test_a_model_that_failed_is_neither_alive_nor_ready(served: Served) -> None:
    served.generator.broken = "out of memory"
    for path in ("/health", "/ready"):
        assert probe(served, path) == (503, {"status": "failed", "reason": "out of memory"})


def test_a_draining_server_is_alive_not_ready_and_lets_go_of_connections(served: Served) -> None:
    served.state.draining = True
    assert probe(served, "/health") == (200, {"status": "draining"})
    assert probe(served, "/ready")[0] == 503
    # Whoever has not heard of it yet is still answered; the next question goes elsewhere.
    response = served.http.post("/v1/completions", json={"model": "letters", "prompt": "say"})
    assert response.status_code == 200
    assert response.headers["connection"] == "close"
    served.state.closed = True
    refused = served.http.post("/v1/completions", json={"model": "letters", "prompt": "say"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_requests_tokens_and_times_are_counted(served: Served) -> None:
    for _ in range(2):
        served.openai.completions.create(model="letters", prompt="say", max_tokens=5)
    served.http.post("/v1/completions", json={})
    served.http.get("/somewhere/else")
    found = metrics(served)
    name = "trainshed_http_requests_total"
    completions = {("method", "POST"), ("route", "/v1/completions")}
    assert found[name, frozenset({*completions, ("status", "200")})] == 2
    assert found[name, frozenset({*completions, ("status", "400")})] == 1
    assert found[name, frozenset({("method", "GET"), ("route", "(none)"), ("status", "404")})] == 1
    assert found["trainshed_prompt_tokens_total", frozenset()] == 6
    assert found["trainshed_generated_tokens_total", frozenset()] == 10
    assert found["trainshed_time_to_first_token_seconds_count", frozenset()] == 2
    assert found["trainshed_time_per_token_seconds_count", frozenset()] == 8
    assert found["trainshed_ready", frozenset()] == 1


def test_running_answers_are_seen_while_they_run(served: Served) -> None:
    served.generator.hold.clear()
    with served.openai.completions.create(model="letters", prompt="say", n=3, stream=True):
        assert metrics(served)["trainshed_questions_running", frozenset()] == 3
    wait_until(lambda: metrics(served)["trainshed_questions_running", frozenset()] == 0)


@pytest.mark.parametrize(("value", "below"), [(0.05, {"0.1", "1", "+Inf"}), (0.1, {"0.1", "1", "+Inf"}), (5, {"+Inf"})])
def test_a_histogram_counts_a_value_under_every_bound_it_fits(value: float, below: set[str]) -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(value)
    lines = list(histogram.lines("t"))
    assert {line.split('"')[1] for line in lines if line.endswith("} 1")} == below
    assert lines[-2:] == [f"t_sum {value!r}" if value != 5 else "t_sum 5.0", "t_count 1"]


def test_the_page_brings_all_it_needs(served: Served) -> None:
    response = served.http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<textarea" in response.text
    assert "/v1/chat/completions" in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text

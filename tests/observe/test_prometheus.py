"""The figures that Prometheus reads: served by rank 0, named as the dashboard shows them."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from trainshed.launch.ranks import free_port
from trainshed.observe.exporters import ExportedRun
from trainshed.observe.exporters.prometheus import COUNTERS, GAUGES, INFO, PrometheusExporter, grafana_dashboard
from trainshed.recipe.exporters import PrometheusServer

START = {"kind": "start", "step": None, "layout": "dp2", "world_size": 2, "device": "cpu", "parameters": 9}
STEP = {
    "kind": "step",
    "step": 4,
    "loss": 2.5,
    "grad_norm": None,
    "lr": 1e-3,
    "tokens": 320,
    "step_seconds": 0.5,
    "tokens_per_second_per_gpu": 128.0,
    "mfu": None,
    "memory_gib": 2.0,
    "skipped": False,
}
LABELS = {"run": "tracked/1", "attempt": "2"}


def exporter(folder: Path, port: int, warnings: list[str]) -> PrometheusExporter:
    run = ExportedRun("tracked", "1", folder, sequence_length=16, attempt=2, steps=20)
    return PrometheusExporter(run, PrometheusServer(port=port), warn=warnings.append)


def scraped(port: int) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation for family in families)
    return {
        sample.name: (sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_figure_that_is_no_number_is_not_that_of_the_step_before(tmp_path: Path) -> None:
    port, warnings = free_port(), []
    with exporter(tmp_path, port, warnings) as listener:
        listener(STEP | {"grad_norm": 1.5})
        assert {"trainshed_loss", "trainshed_grad_norm"} <= scraped(port).keys()
        listener(STEP | {"step": 5, "loss": None, "grad_norm": None, "skipped": True})
        found = scraped(port)
        assert not {"trainshed_loss", "trainshed_grad_norm"} & found.keys()
        assert found["trainshed_step"] == (LABELS, 6)
        listener(STEP | {"step": 6, "loss": 2.0})
        assert scraped(port)["trainshed_loss"] == (LABELS, 2.0)


def test_a_scrape_gives_the_last_figures_with_run_and_attempt(tmp_path: Path) -> None:
    port, warnings = free_port(), []
    events: list[dict[str, Any]] = [
        START,
        STEP,
        STEP | {"step": 5, "loss": 2.25, "skipped": True},
        {"kind": "validation", "step": 6, "loss": 3.0, "batches": 1},
        {"kind": "checkpoint", "step": 6, "phase": "staged", "stall_seconds": 0.25},
        {"kind": "checkpoint", "step": 6, "phase": "committed", "seconds": 1.5},
        {"kind": "ranks", "step": 6, "steps": 2, "compute_seconds": [0.5, None, 0.75, 0.25]},
        {"kind": "alarm", "name": "loss_spike", "what": "x"},
        {"kind": "warning", "text": "y"},
    ]
    with exporter(tmp_path, port, warnings) as listener:
        for event in events:
            listener(event)
        found = scraped(port)
    assert warnings == []
    assert found.pop("trainshed_step_timestamp_seconds")[0] == LABELS
    assert found.pop(INFO)[0] == LABELS | {"layout": "dp2", "device": "cpu", "ranks": "2", "parameters": "9"}
    assert {name: value for name, (labels, value) in found.items() if labels == LABELS} == {
        "trainshed_step": 6,
        "trainshed_steps_planned": 20,
        "trainshed_step_seconds": 0.5,
        "trainshed_loss": 2.25,
        "trainshed_validation_loss": 3,
        "trainshed_learning_rate": 1e-3,
        "trainshed_tokens": 320,
        "trainshed_tokens_per_second_per_gpu": 128,
        "trainshed_memory_bytes": 2 * 2**30,
        "trainshed_checkpoint_step": 6,
        "trainshed_checkpoint_seconds": 1.5,
        "trainshed_checkpoint_stall_seconds": 0.25,
        "trainshed_compute_seconds_max": 0.75,
        "trainshed_compute_seconds_median": 0.5,
        "trainshed_step_duration_seconds_total": 1,
        "trainshed_steps_done_total": 2,
        "trainshed_steps_skipped_total": 1,
        "trainshed_alarms_total": 1,
        "trainshed_warnings_total": 1,
    }
    assert "trainshed_mfu_ratio" not in found  # an unknown GPU has none


def test_a_port_that_is_taken_is_said_and_training_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with exporter(tmp_path, port, warnings) as listener:
            listener(STEP)
    assert warnings == [f"observe.prometheus: nothing is served at 127.0.0.1:{port}: Address already in use"]


def test_the_port_is_free_for_the_next_attempt(tmp_path: Path) -> None:
    port, warnings = free_port(), []
    for _ in range(2):
        with exporter(tmp_path, port, warnings):
            scraped(port)
    assert warnings == []


def test_the_dashboard_shows_every_figure_and_no_other() -> None:
    dashboard = orjson.loads(grafana_dashboard().read_bytes())
    texts = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    shown = set(re.findall(r"trainshed_\w+", texts))
    served = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
    assert shown - served == set()
    assert served - shown == {"trainshed_tokens"}
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)

"""A real Prometheus that reads one address every second, and answers queries."""

from __future__ import annotations

import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from support.clusters.small_agents import wait_for
from support.missing_parts import missing_part
from trainshed.launch.ranks import free_port

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
- job_name: training
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@dataclass(frozen=True)
class PrometheusQueries:
    """A Prometheus that runs."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now; one that Prometheus does not understand is an error."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{words}", timeout=30) as answer:
            body = orjson.loads(answer.read())
        assert body["status"] == "success"
        return body["data"]["result"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def prometheus_server(folder: Path, scraped_port: int) -> Iterator[PrometheusQueries]:
    """Run Prometheus until the block ends; where it is not installed the test is skipped, in CI it fails."""
    program = shutil.which("prometheus")
    if program is None:
        missing_part("prometheus is not installed (apt install prometheus)")
    folder.mkdir()
    (folder / "prometheus.yml").write_text(CONFIG.format(port=scraped_port))
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        queries = PrometheusQueries(port)
        wait_for(queries.is_ready, "Prometheus")
        yield queries
    finally:
        process.kill()
        process.wait()

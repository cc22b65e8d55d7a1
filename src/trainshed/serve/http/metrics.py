"""The server's metrics, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Requests and times are counted here, on the event loop; the load comes from the generator itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from trainshed.serve.request import GeneratorLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Histogram:
    """A Prometheus histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield the samples: cumulative buckets, their sum and their count."""
        total = 0
        for max_new_tokens, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            label = "+Inf" if max_new_tokens == float("inf") else f"{max_new_tokens:g}"
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """All counters since the server started."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self.first_token_seconds = Histogram(_FIRST_TOKEN_SECONDS)
        self.token_seconds = Histogram(_TOKEN_SECONDS)

    def count_request(self, method: str, route: str, status: int) -> None:
        """Count a finished HTTP request; `route` is the pattern, never the path that a client sent."""
        self._requests[method, route, status] += 1

    def text(self, *, ready: bool, load: GeneratorLoad | None) -> str:
        """Return all metrics; those of the generator only when there is one."""
        lines = [*_family("trainshed_ready", "gauge", "1 when questions are welcome.", [f"trainshed_ready {ready:d}"])]
        name = "trainshed_http_requests_total"
        counted = [
            f'{name}{{method="{method}",route="{route}",status="{status}"}} {count}'
            for (method, route, status), count in sorted(self._requests.items())
        ]
        lines += _family(name, "counter", "Requests answered.", counted)
        for name, histogram, summary in (
            ("trainshed_time_to_first_token_seconds", self.first_token_seconds, "From the question to its first token"),
            ("trainshed_time_per_token_seconds", self.token_seconds, "From one token of an answer to the next"),
        ):
            lines += _family(name, "histogram", f"{summary}.", histogram.lines(name))
        for name, kind, summary, value in _load_samples(load) if load else ():
            lines += _family(name, kind, summary, [f"{name} {value}"])
        return "\n".join(lines) + "\n"


def _load_samples(load: GeneratorLoad) -> tuple[tuple[str, str, str, int], ...]:
    return (
        ("trainshed_questions_running", "gauge", "Answers being written.", load.running),
        ("trainshed_questions_waiting", "gauge", "Questions not begun yet.", load.waiting),
        ("trainshed_cache_used_tokens", "gauge", "Tokens in the key/value cache.", load.cached_tokens),
        ("trainshed_cache_tokens", "gauge", "Room of the key/value cache, in tokens.", load.cache_tokens),
        ("trainshed_prompt_tokens_total", "counter", "Tokens of prompts read.", load.prompt_tokens_total),
        ("trainshed_generated_tokens_total", "counter", "Tokens generated.", load.generated_tokens_total),
    )


def _family(name: str, kind: str, summary: str, samples: Iterable[str]) -> Iterator[str]:
    yield f"# HELP {name} {summary}"
    yield f"# TYPE {name} {kind}"
    yield from samples

"""Devices sampled while ranks run: this node's in a thread, those of all nodes as events of the run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import TracebackType

import orjson

from trainshed.launch.rendezvous import repeat_in_thread
from trainshed.observe.devices import (
    SAMPLE_SECONDS,
    DeviceWatch,
    GpuReader,
    NodeSample,
    open_gpus,
    read_node,
    unread_gpus_problem,
)
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore


class DeviceSampler:
    """Samples the devices of this node in a thread of its own: a driver that hangs blocks nothing else."""

    def __init__(self, host: str, open_reader: Callable[[], GpuReader | None] = open_gpus) -> None:
        self._host, self._open_reader = host, open_reader
        self.latest: NodeSample | None = None
        """The last sample; None where this node has no GPU."""

    def latest_json(self) -> bytes:
        """Return the last sample as a heartbeat takes it."""
        return orjson.dumps(self.latest.to_plain()) if self.latest is not None else b""

    @contextmanager
    def sampling(self, seconds: float, on_sample: Callable[[NodeSample], None] = lambda _: None) -> Generator[None]:
        """Sample as long as the block runs."""
        reader: GpuReader | None = None
        is_open = False

        def sample() -> None:
            nonlocal reader, is_open
            if not is_open:
                reader, is_open = self._open_reader(), True
            problem = unread_gpus_problem() if reader is None else None
            if reader is None and problem is None:
                return
            self.latest = read_node(reader, self._host, problem)
            on_sample(self.latest)

        try:
            with repeat_in_thread(seconds, sample):
                yield
        finally:
            self.latest = None


class DeviceEvents:
    """Writes the samples of all nodes of an attempt as events; a context manager."""

    def __init__(self, store: LocalStore, attempt: int, *, nodes: int, ranks_per_node: int) -> None:
        self._store, self._attempt = store, attempt
        self._watch = DeviceWatch(nodes, ranks_per_node)
        self._events: EventWriter | None = None
        self._closed = False

    def __enter__(self) -> DeviceEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, samples: Mapping[int, NodeSample]) -> None:
        """Write what the samples, each by its node rank, say; one segment of the log serves the whole attempt."""
        for kind, values in self._watch.update(samples):
            if self._closed:  # a driver has answered only now
                return
            if self._events is None:
                self._events = EventWriter(self._store, "", attempt=self._attempt, rank=None)
            self._events.emit(kind, **values)

    def close(self) -> None:
        """Close the log."""
        self._closed = True
        if self._events is not None:
            self._events.close()
            self._events = None


@contextmanager
def watch_devices_here(store: LocalStore, attempt: int, ranks: int, host: str) -> Generator[None]:
    """Write the events of this machine's devices as long as the block runs; nothing where it has no GPU."""
    with (
        DeviceEvents(store, attempt, nodes=1, ranks_per_node=ranks) as events,
        DeviceSampler(host).sampling(SAMPLE_SECONDS, lambda sample: events.update({0: sample})),
    ):
        yield


def parse_samples(bodies: Mapping[int, bytes]) -> dict[int, NodeSample]:
    """Return the samples that came with heartbeats; one that another version wrote in another form is left out."""
    samples = {}
    for node, body in bodies.items():
        try:
            samples[node] = NodeSample.from_plain(orjson.loads(body))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
    return samples

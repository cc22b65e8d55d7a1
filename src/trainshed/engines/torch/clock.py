"""When the device, not the host, passed a point: the host runs ahead of a GPU and its own clock means nothing there."""

from __future__ import annotations

import time

import torch


class Mark:
    """A point in the device's work, made when it is queued; on a CPU simply now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.monotonic()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has passed it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two marks that have been passed."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._time - earlier._time

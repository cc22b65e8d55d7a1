"""Time as the device sees it: points in its queue of work, which the host reads later."""

from __future__ import annotations

import time

import torch


class DeviceTimestamp:
    """A point in the device's queue of work, recorded when it is made; on a CPU it is the current time."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.monotonic()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Return the seconds between two timestamps that the device has reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._time - earlier._time

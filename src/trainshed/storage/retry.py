"""How long to wait for a server, and how often to try again: exponential back-off with full jitter."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Retry:
    """The patience of a store.

    With the defaults a server that cannot be reached or says nothing is given up after about two minutes. One that is
    slow may take as long as it takes: each byte that arrives begins the time anew. A server's own Retry-After is
    followed up to `longest_wait_seconds`.
    """

    attempts: int = 8
    first_seconds: float = 0.25
    max_seconds: float = 20.0
    longest_wait_seconds: float = 600.0
    connect_seconds: float = 10.0
    """For one connection to be accepted."""
    answer_seconds: float = 60.0
    """For the first byte of an answer, and from each byte to the next."""
    silent_seconds: float = 120.0
    """Without a byte, all attempts together: after this no other is begun, however many are left."""

    def pause(self, attempt: int, asked_seconds: float | None = None) -> None:
        """Wait before the try after `attempt` (counted from 0), or as long as the server asked for."""
        time.sleep(self.delay(attempt, asked_seconds))

    def delay(self, attempt: int, asked_seconds: float | None = None) -> float:
        """How long `pause` waits."""
        if asked_seconds is not None:
            # A little later than asked, and not all at once: many workers were told the same number.
            return min(asked_seconds, self.longest_wait_seconds) * (1 + 0.1 * random.random())
        # Full jitter (aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter), never less than half.
        ceiling = min(self.max_seconds, self.first_seconds * 2**attempt)
        return ceiling * (0.5 + 0.5 * random.random())

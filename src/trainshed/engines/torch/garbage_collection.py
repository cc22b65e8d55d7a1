"""Python's cyclic garbage collector, run at the same steps on all ranks.

By itself it runs on each rank when that rank has made enough objects, and walks all of them: a model with its compiled
graphs has millions. Every such pause is another step for another rank, and all others wait for it.
"""

from __future__ import annotations

import gc

COLLECT_EVERY_STEPS = 100


def collect_frozen() -> None:
    """Collect what was built to stay too: some of it is replaced after all."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


class StepGarbageCollector:
    """Collects after steps that all ranks agree on; between `start` and `stop` nothing is collected by itself."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()

    def start(self) -> None:
        """Switch automatic collection off."""
        gc.disable()

    def stop(self) -> None:
        """Leave it to Python again."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int, *, first: bool = False) -> None:
        """Collect if it is time to. What exists after the `first` step was built to stay, and is never walked again."""
        if first or step % COLLECT_EVERY_STEPS == 0:
            gc.collect()
        if first:
            gc.freeze()

"""What a run of torchtune 0.6 can go on from: its state lies apart from the weights, and every save writes it anew.

    checkpoints/epoch_0/, epoch_1/               the weights after every pass
    checkpoints/recipe_state/recipe_state.pt     the state after the last pass but the run's last one
    checkpoints/finished.json                    written by our start program (`engines/torchtune/start.py`) at the end

A save writes weights first and the state last. So weights are whole from the state of their own pass on, and those of
the last pass, which has no state, when the run has ended.

No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainshed.checkpoints.torch_save_reader import read_torch_save
from trainshed.errors import TrainshedError

STATE_FOLDER = "recipe_state"
FINISHED = "finished.json"
_STATE = "recipe_state.pt"


@dataclass(frozen=True)
class TorchtuneState:
    """How far the files beside the weights say that a run has come."""

    passes: int
    """Passes that the state of the run counts; 0 where there is none, or where it is being written."""
    version: tuple[int, int] | None
    """Size and time of the state's file, which tell it from the next one."""
    ended: str | None
    """What says that the run has ended, None where it has not."""
    last: str | None
    """The weights that it ended with."""

    def has_committed(self, name: str) -> bool:
        """Whether some weights are whole, by what was written after them."""
        return name == self.last or self._number(name) < self.passes

    def resumes_from(self, name: str) -> bool:
        """Whether the state is that after some weights."""
        return self._number(name) + 1 == self.passes

    @staticmethod
    def _number(name: str) -> int:
        return int(name.removeprefix("epoch_"))


def read_torchtune_state(folder: Path) -> TorchtuneState:
    """Read what lies beside the weights in torchtune's folder of checkpoints."""
    file, passes, version = folder / STATE_FOLDER / _STATE, 0, None
    try:
        status = file.stat()
        passes = int(read_torch_save(file).document["epochs_run"])
        version = (status.st_size, status.st_mtime_ns)
    except (OSError, TrainshedError, KeyError, TypeError, ValueError):
        pass  # none yet, or it is being written
    try:
        ended = (folder / FINISHED).read_text(encoding="utf-8")
        last = json.loads(ended)["checkpoint"]
    except (OSError, KeyError, TypeError, ValueError):
        ended = last = None
    return TorchtuneState(passes, version, ended, last)

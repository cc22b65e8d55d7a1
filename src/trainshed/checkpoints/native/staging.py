"""The copy of a rank's pieces that is written while training goes on: one buffer, filled again for each save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainshed.checkpoints.native.plan import DTYPES, WritePlan
from trainshed.checkpoints.pieces import Piece


class Staging:
    """CPU memory for one plan, page-locked where tensors come from a GPU.

    `torch.empty(pin_memory=True)` would round its size up to a power of two; a buffer of a rank's whole state is
    registered with the driver instead, as it is.
    """

    def __init__(self) -> None:
        self._plan: WritePlan | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False
        self.pageable_because: str | None = None

    def fill(self, plan: WritePlan, tensors: Mapping[str, Piece]) -> list[torch.Tensor]:
        """Copy what the plan writes; return one tensor per item, each with a storage of just its own bytes.

        When this returns the originals may change. The caller has seen to it that nobody reads the last copy any more.
        """
        devices = {tensors[name].tensor.device for name in plan.starts if tensors[name].tensor.is_cuda}
        self._fit(plan, pinned=bool(devices))
        for name, start in plan.starts.items():
            tensor = tensors[name].tensor.detach()
            if tensor.numel():
                memory = self._buffer[start : start + tensor.nbytes]
                memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        # `torch.save` writes a tensor's whole storage: a view of the buffer would be stored as the whole buffer.
        whole = self._buffer.numpy()
        return [
            torch.frombuffer(
                whole, dtype=DTYPES[item.dtype], count=item.size // DTYPES[item.dtype].itemsize, offset=item.start
            ).view(item.box)
            if item.size
            else torch.empty(item.box, dtype=DTYPES[item.dtype])
            for item in plan.items
        ]

    def release(self) -> None:
        """Give the memory back."""
        if self._registered:
            _cuda().cudaHostUnregister(self._buffer.data_ptr())
            self._registered = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan = None

    def _fit(self, plan: WritePlan, *, pinned: bool) -> None:
        if self._plan is plan:
            return
        self.release()
        self._buffer = torch.empty(plan.size, dtype=torch.uint8)
        self._plan = plan
        if pinned and plan.size:
            error = int(_cuda().cudaHostRegister(self._buffer.data_ptr(), plan.size, 0))
            self._registered = error == 0
            self.pageable_because = None if self._registered else f"the driver refused to lock it (error {error})"


def _cuda() -> Any:
    return torch.cuda.cudart()

"""A pipeline stage whose weights and gradients are sharded as the layout says.

PyTorch's pipeline schedules gather a whole FSDP stage, keep its gradients unsharded, and reduce them after the last
micro-batch. Here the schedule sees a plain module. FSDP's own hooks gather each layer for its use and reduce gradients
during backward, as they do without a pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from trainshed.engines.torch.parallel import set_gradient_sync
from trainshed.models.decoder import DecoderStage
from trainshed.plan.layout import RankLayout


class _PlainModule(nn.Module):
    """A stage that the pipeline schedule does not recognise as an FSDP module."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self.stage(*arguments, **keywords)


class SyncedPipelineStage(PipelineStage):
    """A `PipelineStage` that sets before each backward pass which gradients are reduced and which weights freed."""

    def __init__(self, stage: DecoderStage, layout: RankLayout, *arguments: Any, **keywords: Any) -> None:
        super().__init__(_PlainModule(stage), *arguments, **keywords)
        self._stage, self._layout = stage, layout

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run backward of a micro-batch."""
        set_gradient_sync(self._stage, self._layout, last=last_backward)
        return super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )

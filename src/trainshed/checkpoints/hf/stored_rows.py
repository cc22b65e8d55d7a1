"""One tensor as transformers names it, put together from native weights: for writers that quantise whole tensors."""

from __future__ import annotations

import torch

from trainshed.checkpoints.weights import Weights
from trainshed.models.hf_tensors import HfTensor
from trainshed.models.parameters import Parameter


def read_hf_tensor(
    source: Weights, tensor: HfTensor, table: dict[str, Parameter], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a tensor that is neither transposed nor stacked; `table` has the native parameters by name."""
    values = torch.empty(tensor.shape, dtype=dtype)
    for mapping in tensor.row_mappings:
        parameter = table[mapping.native_name]
        assert not mapping.transposed, "the caller refuses such families"
        assert not mapping.stacked, "the caller refuses such families"
        if mapping.expert is None:
            native = source.read(parameter, (0,) * len(parameter.shape), parameter.shape, dtype)
        else:
            offset = (mapping.expert, *(0,) * (len(parameter.shape) - 1))
            native = source.read(parameter, offset, (1, *parameter.shape[1:]), dtype)[0]
        rows = mapping.native_rows(0, mapping.rows)
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        values[mapping.hf_start : mapping.hf_start + mapping.rows] = native[index]
    return values

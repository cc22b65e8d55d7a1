"""Where the values of a rank's weights come from: fresh ones, or base weights; box by box, on any layout.

Trained weights are filled in place. Frozen ones are read in the order of their use, or quantised on the way. DoRA's
magnitudes are the lengths of the rows of the frozen weights as they are used: whole rows are read for them, since a
rank may hold only some columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.engines.torch.model import ParameterShard, QuantizedShard, RankModel, model_parallel_box
from trainshed.models.hf_tensors import row_interleaving
from trainshed.models.init import init_parameter
from trainshed.models.parameters import Parameter, is_unused_mtp, parameters
from trainshed.models.quantization import dequantize_rows, quantize_rows
from trainshed.recipe import ModelConfig

BoxReader = Callable[[Parameter, Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Returns the box (offset, shape) of a tensor of the table in a dtype."""
_READ_ELEMENTS = 1 << 26
"""Whole rows are read in parts of about this size."""


def init_model(model: RankModel, seed: int) -> None:
    """Fill every tensor with fresh values."""
    if model.lora is None:
        for shard in (*model.shards, *model.frozen_shards):
            init_parameter(shard.local_tensor, shard.parameter, shard.offset, model.config, seed)
        return
    read = _fresh_boxes(model.config, seed)
    fill_frozen(model, read)
    init_adapters(model, read, seed)


@torch.no_grad()
def load_base_weights(model: RankModel, base: BaseWeights, seed: int) -> float | None:
    """Fill this rank's own weights of the model from base weights; adapters are left as they are.

    Layers for multi-token prediction that the base does not have are fresh, from the seed. Returns the relative error
    of quantised weights, None without any.
    """
    config = model.config
    if config.mtp_layers:
        config = config.with_mtp_layers(min(config.mtp_layers, base.mtp_layers))
    with base.open(config, model.added) as weights:
        if model.lora is None:
            for shard in (*model.shards, *model.frozen_shards):
                if is_unused_mtp(config, shard.name):
                    init_parameter(shard.local_tensor, shard.parameter, shard.offset, model.config, seed)
                else:
                    _fill_shard(shard, model, weights.read)
            return None
        return fill_frozen(model, weights.read)


def init_base_adapters(model: RankModel, base: BaseWeights, seed: int) -> None:
    """Fill the adapters as PEFT does, so that the adapted model is the base."""
    with base.open(model.config, model.added) as weights:
        init_adapters(model, weights.read, seed)


@torch.no_grad()
def fill_frozen(model: RankModel, read: BoxReader) -> float | None:
    """Fill the frozen weights; return the relative error of the quantised ones, over all ranks."""
    for shard in model.frozen_shards:
        _fill_shard(shard, model, read)
    if model.lora is None or model.lora.quantize is None:
        return None
    squares = torch.zeros(2, dtype=torch.float64, device=model.mesh.device)
    for quantized in model.quantized:
        squares += _quantize_shard(quantized, read, model.mesh.device)
    if model.mesh.layout.world_size > 1:
        dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


@torch.no_grad()
def init_adapters(model: RankModel, read: BoxReader, seed: int) -> None:
    """Fill the adapters as PEFT does: A as `nn.Linear` does, B with zeros, magnitudes with the rows' lengths.

    The rows of added tokens begin as those of the base.
    """
    table = {parameter.name: parameter for parameter in parameters(model.config)}
    for shard in model.shards:
        local = shard.local_tensor
        if shard.parameter.init not in ("row_norms", "base_rows"):
            init_parameter(local, shard.parameter, shard.offset, model.config, seed)
        elif local.numel() and shard.parameter.init == "row_norms":
            local.copy_(_row_norms(shard, model, table, read))
        elif local.numel():
            assert model.added is not None, "only added tokens have such rows"
            whole = table[shard.name.replace(".added.", ".")]
            offset = (model.added.start + shard.offset[0], *shard.offset[1:])
            local.copy_(read(whole, offset, tuple(local.shape), local.dtype))


def _fresh_boxes(config: ModelConfig, seed: int) -> BoxReader:
    def read(parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        box = torch.empty(tuple(shape), dtype=dtype)
        init_parameter(box, parameter, tuple(offset), config, seed)
        return box

    return read


def _fill_shard(shard: ParameterShard, model: RankModel, read: BoxReader) -> None:
    local = shard.local_tensor
    if not local.numel():
        return
    shape = tuple(local.shape)
    if shard.gates_first is None:
        local.copy_(read(shard.parameter, shard.offset, shape, local.dtype))
        return
    dim = shard.gates_first
    (start, rows) = (part[dim] for part in model_parallel_box(shard.parameter, model.mesh))
    wanted = _alternating_rows(torch.arange(shard.offset[dim] - start, shard.offset[dim] - start + shape[dim]), rows)
    first, last = int(wanted.min()), int(wanted.max())
    offset = (*shard.offset[:dim], start + first, *shard.offset[dim + 1 :])
    box = read(shard.parameter, offset, (*shape[:dim], last + 1 - first, *shape[dim + 1 :]), local.dtype)
    local.copy_(box.index_select(dim, wanted - first))


def _alternating_rows(row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return where rows of a box with all gates first are in the box whose gates and ups alternate."""
    half = rows // 2
    return torch.where(row < half, 2 * row, 2 * (row - half) + 1)


def _quantize_shard(shard: QuantizedShard, read: BoxReader, device: torch.device) -> torch.Tensor:
    """Quantise a projection; return |error|² and |weight|²."""
    weight, (first_row, first_column) = shard.weight, shard.offset
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    columns = shard.parameter.shape[1]
    for start, count in _row_parts(weight.rows, columns):
        rows = torch.arange(start, start + count)
        box = read(shard.parameter, (first_row + start, 0), (count, columns), torch.float32).to(device)
        if shard.gates_first:
            rows = torch.where(rows % 2 == 0, rows // 2, weight.rows // 2 + rows // 2)
        squares += torch.stack(weight.store(rows.to(device), box, first_column))
    return squares


def _row_norms(shard: ParameterShard, model: RankModel, table: dict[str, Parameter], read: BoxReader) -> torch.Tensor:
    """Return the lengths of the rows of a frozen weight that a magnitude's box is for."""
    assert model.lora is not None, "only adapters have magnitudes"
    module, _, projection = shard.name.removesuffix(".magnitude").partition(".lora.")
    parameter = table[f"{module}.weight"]
    kind = module.split(".", 2)[2]
    names = {"attention.qkv": ("q_proj", "k_proj", "v_proj")}.get(kind, ("gate_proj", "up_proj"))
    parts = row_interleaving(model.config, kind, parameter.shape[0])
    _, start, run, period = parts[names.index(projection) if len(parts) > 1 else 0]
    row = torch.arange(shard.offset[0], shard.offset[0] + shard.local_tensor.shape[0])
    native = start + row // run * period + row % run
    columns = parameter.shape[1]
    first, last = int(native.min()), int(native.max())
    norms = []
    quantize = model.lora.quantize
    for begin, count in _row_parts(last + 1 - first, columns):
        box = read(parameter, (first + begin, 0), (count, columns), model.dtype if quantize is None else torch.float32)
        if quantize is not None:
            box = dequantize_rows(*quantize_rows(box, quantize), model.dtype)
        norms.append(torch.linalg.vector_norm(box, dim=1, dtype=shard.local_tensor.dtype))
    return torch.cat(norms)[native - first]


def _row_parts(rows: int, columns: int) -> list[tuple[int, int]]:
    """Cut rows into parts (start, count) that are read at once."""
    share = max(2, _READ_ELEMENTS // columns)
    return [(start, min(share, rows - start)) for start in range(0, rows, share)]

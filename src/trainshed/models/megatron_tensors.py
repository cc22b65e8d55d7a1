"""Megatron's names of our tensors, which of our rows become Megatron's, and which of them each rank of a layout holds.

Megatron's tensors differ from ours in two ways. `linear_fc1` of a gated block has all gate rows first and then all up
rows, where ours alternate; and each expert is a tensor of its own. Because ours alternate, the share of a
tensor-parallel rank is a plain cut of ours, whose rows are then separated into gate and up. Megatron has the same cut.

Two specs build the same model under different names: `te` (TransformerEngine, which fuses norms into the linear layer
after them) and `local`. Both spell stacked `torch_dist` keys as `te` does, except the norm before experts and those of
latent attention.

Latent attention has the same rows in both: Megatron turns pairs of neighbours, as the published weights have them. Its
down projections are cut over tp by some versions and specs and whole in others, so only uncut ones are converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainshed.errors import InputError
from trainshed.models.hf_tensors import RowMapping
from trainshed.models.parameters import Parameter, layer_parameters, parameters
from trainshed.recipe import ModelConfig

LayerSpec = Literal["te", "local"]
ExpertNaming = Literal["sequential", "grouped"]
"""How a rank's files name experts: one module each, or one grouped module (`--moe-grouped-gemm`)."""
LAYER_PREFIX = "decoder.layers."
MTP_PREFIX = "mtp.layers."
"""Before the number of a layer for multi-token prediction, counted from 0."""
EMBEDDING_NAME = "embedding.word_embeddings.weight"
HEAD_NAME = "output_layer.weight"

_NON_LAYER_NAMES = {
    "embedding.weight": EMBEDDING_NAME,
    "positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": HEAD_NAME,
}
_MODULES = {
    "attention.qkv": "self_attention.linear_qkv",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "attention.q": "self_attention.linear_q_proj",
    "attention.q_down": "self_attention.linear_q_down_proj",
    "attention.q_up": "self_attention.linear_q_up_proj",
    "attention.kv_down": "self_attention.linear_kv_down_proj",
    "attention.kv_up": "self_attention.linear_kv_up_proj",
    "attention.out": "self_attention.linear_proj",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
    "mlp.shared.gate_up": "mlp.shared_experts.linear_fc1",
    "mlp.shared.up": "mlp.shared_experts.linear_fc1",
    "mlp.shared.down": "mlp.shared_experts.linear_fc2",
}
# Of a layer for multi-token prediction, beside the layer itself.
_MTP_MODULES = {
    "mtp.embedding_norm": "enorm",
    "mtp.hidden_norm": "hnorm",
    "mtp.projection": "eh_proj",
    "mtp.norm": "final_layernorm",
}
_ENDINGS = {"score_bias": "expert_bias"}
# A norm by itself, and fused into the linear layer after it.
_NORMS = {
    "attention.norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.q_norm": ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    "attention.kv_norm": ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
    "mlp.norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
}


@dataclass(frozen=True)
class MegatronTensor:
    """One tensor of Megatron: a box of a native one, with gate and up rows separated if it is `gated`.

    `rows` and `columns` are the native box, [from, to); a vector has no columns. `padding` rows of zeros follow (the
    vocabulary is padded), `expert` is the index on dim 0 of stacked experts.
    """

    name: str
    parameter: Parameter
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    gated: bool = False
    expert: int | None = None
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """As Megatron sees it."""
        rows = self.rows[1] - self.rows[0] + self.padding
        return (rows,) if self.columns is None else (rows, self.columns[1] - self.columns[0])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def whole_tensors(config: ModelConfig, parameter: Parameter, padded_vocab_size: int) -> Iterator[MegatronTensor]:
    """Yield what a native tensor is in Megatron, uncut and unnamed: itself, or its experts."""
    padding = padded_vocab_size - config.vocab_size if _in_vocabulary(parameter) else 0
    rows, *columns = parameter.shape[1 if parameter.expert else 0 :]
    for expert in range(parameter.shape[0]) if parameter.expert else (None,):
        yield MegatronTensor(
            "", parameter, (0, rows), (0, columns[0]) if columns else None, _gated(parameter), expert, padding
        )


def shard_tensor(whole: MegatronTensor, name: str, ranks: int, rank: int) -> MegatronTensor:
    """Return the share of one (expert-)tensor-parallel rank, under a name."""
    tp_dim = whole.parameter.tp_dim
    rows, columns, padding = whole.rows, whole.columns, whole.padding
    if tp_dim is not None and tp_dim == (2 if whole.expert is not None else 1):
        assert columns is not None, "only a matrix is cut by columns"
        columns = _share(columns[1], ranks, rank, whole.parameter)
    elif tp_dim is not None:
        first, last = _share(rows[1] + padding, ranks, rank, whole.parameter)
        real = rows[1]
        rows = (min(first, real), min(last, real))
        padding = last - first - (rows[1] - rows[0])
        if whole.gated and (last - first) % 2:
            raise _uneven_split_error(whole.parameter, ranks)
    return MegatronTensor(name, whole.parameter, rows, columns, whole.gated, whole.expert, padding)


def megatron_row_mappings(parameter: Parameter) -> tuple[RowMapping, ...]:
    """Return where the rows of Megatron's uncut tensor are in the native one."""
    rows = parameter.shape[1 if parameter.expert else 0]
    if not _gated(parameter):
        return (RowMapping("", parameter.name, 0, rows, 0, rows, rows),)
    half = rows // 2
    return RowMapping("", parameter.name, 0, half, 0, 1, 2), RowMapping("", parameter.name, half, half, 1, 1, 2)


def name_in_layer(parameter: Parameter) -> str:
    """The name of a layer's tensor without the layer."""
    return parameter.name.removeprefix(f"layers.{parameter.layer}.")


def non_layer_name(parameter: Parameter) -> str:
    """The name of a tensor that belongs to no layer: the same in all specs and formats."""
    return _NON_LAYER_NAMES[parameter.name]


def has_stacked_layers(config: ModelConfig) -> bool:
    """Whether Megatron's `torch_dist` keys are stacked over layers: where all of them are built alike."""
    return config.moe is None or not config.has_dense_layers


def layer_prefix(config: ModelConfig, parameter: Parameter) -> str:
    """What stands before the name of a layer's tensor in keys that are not stacked."""
    assert parameter.layer is not None, "a tensor of a layer"
    if parameter.layer < config.layers:
        return f"{LAYER_PREFIX}{parameter.layer}."
    own = name_in_layer(parameter).startswith("mtp.")
    return f"{MTP_PREFIX}{parameter.layer - config.layers}." + ("" if own else "transformer_layer.")


def layer_name(config: ModelConfig, parameter: Parameter, spec: LayerSpec, *, stacked: bool) -> str:
    """The name of a layer's tensor after `layer_prefix`; not that of an expert."""
    module, ending = name_in_layer(parameter).rsplit(".", 1)
    if module not in _NORMS:
        return _plain_name(module, ending)
    alone, fused = _NORMS[module]
    if spec == "local":
        return (fused if stacked and config.mla is None else alone) + ending
    assert parameter.layer is not None, "a tensor of a layer"
    before_experts = module == "mlp.norm" and config.has_experts(parameter.layer)
    # Two projections follow the norm before latent attention, so it is fused into neither.
    before_latents = module == "attention.norm" and config.mla is not None
    return (alone if before_experts or before_latents else fused) + ending


def layer_name_variants(parameter: Parameter) -> tuple[str, ...]:
    """All names a layer's tensor may have after `layer_prefix`; not those of an expert."""
    module, ending = name_in_layer(parameter).rsplit(".", 1)
    if module in _NORMS:
        return tuple(prefix + ending for prefix in _NORMS[module])
    return (_plain_name(module, ending),)


def _plain_name(module: str, ending: str) -> str:
    return f"{(_MODULES | _MTP_MODULES)[module]}.{_ENDINGS.get(ending, ending)}"


def expert_linear(parameter: Parameter) -> Literal["linear_fc1", "linear_fc2"]:
    """Which of an expert's two layers a native tensor of stacked experts holds."""
    return "linear_fc2" if parameter.name.endswith(".down") else "linear_fc1"


def expert_name(parameter: Parameter, local_expert: int, experts: ExpertNaming) -> str:
    """The name of one expert's tensor in a rank's file, after `decoder.layers.{i}.`."""
    linear = expert_linear(parameter)
    if experts == "grouped":
        return f"mlp.experts.{linear}.weight{local_expert}"
    return f"mlp.experts.local_experts.{local_expert}.{linear}.weight"


def is_norm_weight(parameter: Parameter) -> bool:
    """Whether `--apply-layernorm-1p` stores this tensor less one."""
    return parameter.name.endswith("norm.weight")


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The rows of the embedding: Megatron's `_vocab_size_with_padding`."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def extra_state_modules(config: ModelConfig, spec: LayerSpec, layer: int) -> list[str]:
    """Return a layer's modules, without experts, that have an `_extra_state` (empty except for fp8) in `torch_dist`."""
    names = {name_in_layer(parameter).rsplit(".", 1)[0] for parameter in layer_parameters(config, layer)}
    # Every linear layer but the router has one.
    modules = [theirs for ours, theirs in _MODULES.items() if ours in names and ".linear_" in theirs]
    if spec == "te":
        # What TransformerEngine adds; names that a version of it does not ask for are not read.
        modules += ["self_attention.core_attention"]
        modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"] if config.qk_norm else []
        modules += ["input_layernorm"] if config.mla is not None else []
        modules += ["pre_mlp_layernorm"] if config.has_experts(layer) else []
    return modules


def mtp_extra_state_modules(spec: LayerSpec) -> list[str]:
    """Return the same of what a layer for multi-token prediction has beside the layer itself."""
    return list(_MTP_MODULES.values()) if spec == "te" else [_MTP_MODULES["mtp.projection"]]


def parameters_by_layer(config: ModelConfig) -> dict[int | None, list[Parameter]]:
    """All tensors by layer; None holds those outside."""
    by_layer: dict[int | None, list[Parameter]] = {}
    for parameter in parameters(config):
        by_layer.setdefault(parameter.layer, []).append(parameter)
    return by_layer


def _gated(parameter: Parameter) -> bool:
    return ".gate_up" in parameter.name


def _in_vocabulary(parameter: Parameter) -> bool:
    return parameter.name in ("embedding.weight", "head.weight")


def _share(length: int, ranks: int, rank: int, parameter: Parameter) -> tuple[int, int]:
    if length % ranks:
        raise _uneven_split_error(parameter, ranks)
    share = length // ranks
    return rank * share, (rank + 1) * share


def _uneven_split_error(parameter: Parameter, ranks: int) -> InputError:
    return InputError(
        f"`{parameter.name}` of shape {list(parameter.shape)} cannot be cut for {ranks} ranks",
        hint="choose a tp (for experts: an etp) that divides heads and widths",
    )

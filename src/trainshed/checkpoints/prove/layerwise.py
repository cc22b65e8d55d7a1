"""Run models one layer at a time, so that a model of any size runs in the memory of one layer.

`layer_states` runs the decoder that trains (`models/decoder.py`) over weights in any format, in float32 on one
process; it computes what the engine will compute before step 0.

`TransformersOracle` runs transformers over Hugging Face weights. Its model is built on the meta device; each part is
loaded from the files just before it runs and freed after it. It reads the files by their own names, so its answer
depends on nothing of our reading, interleaving or decoding.

Shapes: S tokens, B sequences, H hidden, V vocabulary; the decoder works S-first, results are [B, S, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.checkpoints.hf.weights import (
    CONFIG,
    SAFETENSORS_DTYPES,
    Float8Entry,
    HfWeights,
    Mxfp4Entry,
    SafetensorsEntry,
)
from trainshed.checkpoints.prove.compare import boxes
from trainshed.checkpoints.prove.probe import PROBE_TOKENS, LossProbe, probe_batch
from trainshed.checkpoints.weights import Weights, stored_dtype
from trainshed.errors import CorruptData, InputError
from trainshed.models.attention import PositionTable, query_scales, rotary_table
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import DecoderLayer, Regularization, cap_logits, scale_embedding
from trainshed.models.families import HF_FAMILIES
from trainshed.models.layers import Norm
from trainshed.models.parameters import Parameter, layer_parameters, parameters
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter, quiet_loggers

LOGITS = "logits"
"""The name of the last state."""


@dataclass(frozen=True)
class LayerState:
    """The output of one part of a model: the residual stream [B, S, H], at the end the logits [B, S, V]."""

    name: str
    values: torch.Tensor


@torch.no_grad()
def layer_states(
    weights: Weights,
    tokens: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[LayerState]:
    """Run token ids [B, S] through a model; yield the state after the embedding and each layer, then the logits.

    With `dtype` the weights are rounded to it first. The state after the last layer is normed, as in transformers.
    `advance` is called after each layer.
    """
    config, length = weights.config, tokens.shape[1]
    if config.positions == "learned" and length > config.max_positions:
        raise InputError(
            f"{length} tokens are more than the {config.max_positions} positions this model has learned",
            hint="ask it something shorter",
        )
    reader = _LayerReader(weights, dtype)
    table = {parameter.name: parameter for parameter in parameters(config) if parameter.layer is None}
    positions = torch.arange(length)
    x = scale_embedding(reader.rows(table["embedding.weight"], tokens.t()), config)
    if config.positions == "learned":
        x = x + reader.rows(table["positions.weight"], positions)[:, None]
    yield LayerState("embedding", x.transpose(0, 1))
    for layer in range(config.layers):
        with torch.device("meta"):
            block = DecoderLayer(config, ParallelAxes(), Regularization(), layer, "none")
        layer_table = {parameter.name: parameter for parameter in layer_parameters(config, layer)}
        reader.fill(block, f"layers.{layer}.", layer_table)
        x, _ = block(x, _rotary(config, layer, positions), None, None, positions)
        advance(1)
        if layer < config.layers - 1:
            yield LayerState(f"layer {layer}", x.transpose(0, 1))
    with torch.device("meta"):
        norm = Norm(config.hidden, config)
    reader.fill(norm, "norm.", table)
    x = norm(x)
    yield LayerState(f"layer {config.layers - 1}", x.transpose(0, 1))
    head = table["embedding.weight" if config.tied_embeddings else "head.weight"]
    yield LayerState(LOGITS, cap_logits(reader.logits(head, x), config).transpose(0, 1))


def _rotary(config: ModelConfig, layer: int, positions: torch.Tensor) -> PositionTable:
    if not config.has_rope(layer):
        scales = query_scales(config, positions)
        return None if scales is None else scales[:, None, None, None]
    cosine, sine = rotary_table(config, positions, length=len(positions), local=config.has_local_rope(layer))
    return cosine[:, None, None], sine[:, None, None]


def probe_loss(logits: torch.Tensor, vocab_size: int) -> float:
    """Return the loss of logits [B, S, V] for the inputs of the probe batch, in nats per token."""
    labels = torch.from_numpy(probe_batch(vocab_size, PROBE_TOKENS)[:, 1:]).long()
    return float(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


def measure_probe(weights: Weights, reporter: Reporter = SILENT) -> LossProbe | None:
    """Measure the loss of weights on the probe batch; None where the batch is longer than the learned positions."""
    if weights.config.positions == "learned" and weights.config.max_positions < PROBE_TOKENS:
        return None
    vocab_size = weights.config.vocab_size
    tokens = torch.from_numpy(probe_batch(vocab_size, PROBE_TOKENS)[:, :-1]).long()
    values = tokens
    with reporter.task("running layers", total=weights.config.layers, unit="layers") as task:
        for state in layer_states(weights, tokens, advance=task.advance):
            values = state.values
    return to_probe(probe_loss(values, vocab_size), vocab_size)


def to_probe(loss: float, vocab_size: int) -> LossProbe:
    """Return the probe of a loss that was computed here."""
    return LossProbe.measured(loss, vocab_size=vocab_size, sequence_length=PROBE_TOKENS, precision="fp32")


class _LayerReader:
    """Reads the weights of a part, in the narrowest dtype that holds them: layers cast weights where they use them."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None) -> None:
        stored = torch.bfloat16 if weights.dtypes == ["bfloat16"] else torch.float32
        self._weights, self._dtype = weights, dtype or stored

    def fill(self, module: nn.Module, prefix: str, table: Mapping[str, Parameter]) -> None:
        """Load the weights of a module on the meta device."""
        state = {}
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            parameter = table[prefix + name]
            dtype = stored_dtype(parameter, self._dtype)
            state[name] = self._weights.read(parameter, (0,) * len(parameter.shape), parameter.shape, dtype)
        module.load_state_dict(state, assign=True)

    def rows(self, parameter: Parameter, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of an embedding by their ids, float32 [*ids, H]; the whole embedding is never in memory."""
        rows = torch.empty(*ids.shape, parameter.shape[1])
        for (start, _), (count, width) in boxes(parameter.shape):
            in_block = (ids >= start) & (ids < start + count)
            if in_block.any():
                block = self._weights.read(parameter, (start, 0), (count, width), self._dtype)
                rows[in_block] = block[ids[in_block] - start].float()
        return rows

    def logits(self, parameter: Parameter, x: torch.Tensor) -> torch.Tensor:
        """Multiply hidden states [S, B, H] with every row of a head: [S, B, V]."""
        logits = torch.empty(*x.shape[:-1], parameter.shape[0])
        for (start, _), (count, width) in boxes(parameter.shape):
            block = self._weights.read(parameter, (start, 0), (count, width), self._dtype).float()
            logits[..., start : start + count] = x @ block.t()
        return logits


OLDEST_TRANSFORMERS = 5
"""The first major version of transformers that keeps a layer's experts in two tensors."""
ParameterSource = Callable[[], torch.Tensor]
"""Reads one of transformers' parameters."""


class TransformersOracle:
    """transformers over a folder of weights; with `dtype` they are rounded to it first. Computes in float32."""

    def __init__(self, weights: HfWeights, dtype: torch.dtype | None = None) -> None:
        self._weights, self._dtype = weights, dtype
        self._model = _build_meta_model(weights)
        self._sources = {name: self._source(name) for name, _ in _stored_tensors(self._model)}

    @property
    def unknown(self) -> list[str]:
        """Parameters of this version of transformers that we do not know how to load."""
        return [name for name, source in self._sources.items() if source is None]

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, advance: Callable[[int], None] = lambda _: None) -> Iterator[LayerState]:
        """Run token ids [B, S] through the model; yield the state after the embedding and each layer, then the logits.

        `advance` is called after each layer.
        """
        for name, module in self._parts():
            module.register_forward_pre_hook(self._fill_hook(name))
            module.register_forward_hook(_emptying_hook(dict(_stored_tensors(module))))
            if self._is_layer(name):
                module.register_forward_hook(lambda *_: advance(1))
            if isinstance(module, nn.Embedding):
                # Llama 4 moves tokens to where its embedding is, before it calls it.
                self._fill_hook(name)(module, None)
        out = self._model(tokens, output_hidden_states=True, use_cache=False)
        # transformers returns the stream after the embedding and each layer, the last one normed.
        names = ["embedding", *(f"layer {layer}" for layer in range(len(out.hidden_states) - 1))]
        for name, values in zip(names, out.hidden_states, strict=True):
            yield LayerState(name, values)
        yield LayerState(LOGITS, out.logits)

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are loaded as one: the layers, and every module with weights outside of them."""
        layers = self._layers + "."
        for name, module in self._model.named_modules():
            has_weights = next(module.parameters(recurse=False), None) is not None
            if self._is_layer(name) or (has_weights and not name.startswith(layers)):
                yield name, module

    @property
    def _layers(self) -> str:
        return HF_FAMILIES[self._weights.config.family].names.layer.partition(".{layer}")[0]

    def _is_layer(self, name: str) -> bool:
        return name.rpartition(".")[0] == self._layers

    def _fill_hook(self, prefix: str) -> Callable[..., None]:
        def fill(module: nn.Module, _: Any) -> None:
            state = {}
            for name, held in _stored_tensors(module):
                source = self._sources[f"{prefix}.{name}"]
                assert source is not None, "the caller has checked `unknown`"
                tensor = source()
                rounded = self._dtype is not None and isinstance(held, nn.Parameter)
                state[name] = (tensor.to(self._dtype) if rounded else tensor).float()
            module.load_state_dict(state, strict=False, assign=True)

        return fill

    def _source(self, name: str) -> ParameterSource | None:
        """Return how to read a parameter: by its own name, by the tied one's, or stacked from the experts'."""
        config, names = self._weights.config, HF_FAMILIES[self._weights.config.family].names
        if name in self._weights.entries:
            return lambda: self._read(name)
        if name == "lm_head.weight" and config.tied_embeddings:
            return lambda: self._read(names.tensors["embedding"][0] + ".weight")
        if config.moe is None or ".mlp." not in name:
            return None
        layer, _, local = name.partition("mlp.")
        if local == "gate.weight":
            return lambda: self._read(f"{layer}{names.tensors['mlp.router'][0]}.weight")
        ours = {"experts.gate_up_proj": "mlp.experts.gate_up", "experts.down_proj": "mlp.experts.down"}.get(local)
        if ours is None:
            return None
        experts, parts = range(config.moe.experts), names.tensors[ours]

        def stacked() -> torch.Tensor:
            return torch.stack(
                [
                    torch.cat([self._read(f"{layer}{part.format(expert=expert)}.weight") for part in parts])
                    for expert in experts
                ]
            )

        return stacked

    def _read(self, name: str) -> torch.Tensor:
        """Read one tensor of the files by its name."""
        entry = self._weights.entries[name]
        if isinstance(entry, Mxfp4Entry):
            return _dequantized(entry)
        return _read_float8(entry) if isinstance(entry, Float8Entry) else _read_entry(entry)


def _read_entry(stored: SafetensorsEntry) -> torch.Tensor:
    """Read one tensor of the files; mapped pages would count as memory."""
    dtype = getattr(torch, SAFETENSORS_DTYPES[stored.dtype])
    return torch.frombuffer(_read_bytes(stored), dtype=dtype).view(stored.shape)


def _read_bytes(stored: SafetensorsEntry) -> bytearray:
    data = bytearray(stored.end - stored.start)
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        if file.readinto(data) != len(data):
            raise CorruptData(f"ends before `{stored.name}` does", where=str(stored.file), hint="fetch it again")
    return data


def _dequantized(stored: Mxfp4Entry) -> torch.Tensor:
    """Let transformers turn 4 bits into bfloat16: its own answer, as all else of the oracle."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.frombuffer(_read_bytes(stored.scales), dtype=torch.uint8).view(stored.scales.shape)
    blocks = torch.frombuffer(_read_bytes(stored), dtype=torch.uint8).view(*scales.shape, -1)
    return convert_moe_packed_tensors(blocks, scales)


def _read_float8(stored: Float8Entry) -> torch.Tensor:
    values = torch.frombuffer(_read_bytes(stored), dtype=torch.float8_e4m3fn).view(stored.shape).float()
    scales = _read_entry(stored.scales).float()
    if stored.block is not None:
        # transformers' way to write the blocks: each is repeated over its rows and columns.
        rows, columns = stored.block
        scales = torch.kron(scales, torch.ones(rows, columns))[: stored.shape[0], : stored.shape[1]]
    return values * scales


def transformers_name() -> str | None:
    """Return the oracle's name and version, None where it is not installed."""
    return f"transformers {version('transformers')}" if find_spec("transformers") else None


def is_transformers_supported() -> bool:
    """Whether the installed transformers has modules as this module loads them."""
    return int(version("transformers").partition(".")[0]) >= OLDEST_TRANSFORMERS


def is_transformers_family(family: str) -> bool:
    """Whether the installed oracle has a family; one that a plugin registers may be nobody else's."""
    if HF_FAMILIES.owner(family) is None:
        return True
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def _build_meta_model(weights: HfWeights) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers (rotary frequencies) in memory."""
    with quiet_loggers(*_LOUD_IMPORTS):
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            # Of a model that sees pictures too, the part that reads text.
            config = AutoConfig.from_pretrained(weights.folder, local_files_only=True).get_text_config()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        except Exception as error:  # whatever its classes make of values that they do not expect
            raise InputError(
                f"transformers cannot build this model: {type(error).__name__}: {error}",
                where=str(weights.folder / CONFIG),
                hint="mend config.json, or leave out the comparison with transformers (--no-logits)",
            ) from error
    model.eval()
    if hasattr(model, "set_experts_implementation"):  # transformers 5; its grouped products refuse odd widths
        model.set_experts_implementation("eager")
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=config))
        if hasattr(module, "scalar_embed_scale"):  # Gemma's embedding
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model


_LOUD_IMPORTS = ("torchao", "torch.utils._pytree")
"""Loggers that warn when transformers finds torchao: of kernels for other GPUs, and of what is deprecated in it."""


def _stored_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that transformers saves of a module: its weights, and buffers that cannot be computed."""
    yield from module.named_parameters(remove_duplicate=False)
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def _emptying_hook(nowhere: dict[str, torch.Tensor]) -> Callable[..., None]:
    def empty(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(nowhere, strict=False, assign=True)

    return empty

"""transformers as the oracle for Hugging Face weights, one layer at a time.

Its model is laid out without memory; each part is filled from the files just before it runs and emptied after it. So
the oracle can be asked about a model of any size in the memory of one layer, and reads the files by their own names:
nothing of our reading, weaving or decoding is in its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from trainshed.checkpoints.hf.folder import DTYPES
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.proving.streamed import LOGITS, State
from trainshed.errors import CorruptData
from trainshed.models.families import HF_FAMILIES

OLDEST = 5
"""The first major version of transformers that keeps a layer's experts in two tensors."""
Source = Callable[[], torch.Tensor]
"""Reads one of transformers' parameters."""


class Oracle:
    """transformers over a folder of weights; with `dtype` they are rounded to it first. Computes in float32."""

    def __init__(self, weights: HfWeights, dtype: torch.dtype | None = None) -> None:
        self._weights, self._dtype = weights, dtype
        self._model = _without_memory(weights)
        self._sources = {name: self._source(name) for name, _ in self._model.named_parameters(remove_duplicate=False)}

    @property
    def unknown(self) -> list[str]:
        """Parameters of this version of transformers that nobody here knows where to find."""
        return [name for name, source in self._sources.items() if source is None]

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, advance: Callable[[int], None] = lambda _: None) -> Iterator[State]:
        """Carry token ids [B, S] through the model: after the embedding, each layer, the last norm; then the logits.

        `advance` is called after each layer.
        """
        for name, module in self._parts():
            module.register_forward_pre_hook(self._filling(name))
            module.register_forward_hook(_emptying(dict(module.named_parameters())))
            if self._is_layer(name):
                module.register_forward_hook(lambda *_: advance(1))
        out = self._model(tokens, output_hidden_states=True, use_cache=False)
        # transformers gives the stream out after the embedding and each layer, the last one normed.
        names = ["embedding", *(f"layer {layer}" for layer in range(len(out.hidden_states) - 1))]
        for name, values in zip(names, out.hidden_states, strict=True):
            yield State(name, values)
        yield State(LOGITS, out.logits)

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """What is filled as one: the layers, and whatever has weights outside of them."""
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

    def _filling(self, prefix: str) -> Callable[..., None]:
        def fill(module: nn.Module, _: Any) -> None:
            state = {}
            for name, _ in module.named_parameters():
                source = self._sources[f"{prefix}.{name}"]
                assert source is not None, "asked with something unknown"
                tensor = source()
                state[name] = (tensor if self._dtype is None else tensor.to(self._dtype)).float()
            module.load_state_dict(state, strict=False, assign=True)

        return fill

    def _source(self, name: str) -> Source | None:
        """Where a parameter lies: under its own name, under the tied one's, or stacked from the experts'."""
        config, names = self._weights.config, HF_FAMILIES[self._weights.config.family].names
        if name in self._weights.stored:
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
        """One tensor of the files: read, not mapped, since mapped pages would count as memory."""
        stored = self._weights.stored[name]
        data = bytearray(stored.end - stored.start)
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            if file.readinto(data) != len(data):
                raise CorruptData(f"ends before `{stored.name}` does", where=str(stored.file), hint="fetch it again")
        return torch.frombuffer(data, dtype=getattr(torch, DTYPES[stored.dtype])).view(stored.shape)


def oracle_name() -> str | None:
    """The oracle and its version, None where it is not installed."""
    return f"transformers {version('transformers')}" if find_spec("transformers") else None


def is_understood() -> bool:
    """Whether the installed oracle lays its models out as this module fills them."""
    return int(version("transformers").partition(".")[0]) >= OLDEST


def _without_memory(weights: HfWeights) -> nn.Module:
    """The model with its parameters nowhere and its tables (rotary frequencies) here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(weights.folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=config))
    return model


def _emptying(nowhere: dict[str, nn.Parameter]) -> Callable[..., None]:
    def empty(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(nowhere, strict=False, assign=True)

    return empty

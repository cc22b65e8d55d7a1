"""The process in which megatron-core answers: a question on stdin, states on stdout. See `megatron_oracle.py`.

Its model is laid out without memory; each part is filled just before it runs and emptied after it. The files are read
with our reader, since Megatron's own would run whatever their pickles name. What is filled in is what lies in them: how
our reader weaves gate and up rows is undone, so that one woven wrongly is seen. The architecture is read, and all is
computed, by Megatron alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from trainshed.checkpoints.megatron.blocks import lent_rows
from trainshed.checkpoints.megatron.dist import MegatronDistWeights
from trainshed.checkpoints.megatron.legacy_reader import MegatronLegacyWeights
from trainshed.checkpoints.proving.megatron_model import Refused, alone, built_from, without_gpu
from trainshed.checkpoints.proving.streamed import LOGITS
from trainshed.checkpoints.scratch import bytes_of
from trainshed.checkpoints.weights import Weights
from trainshed.models.megatron_tensors import (
    LAYERS,
    MegatronTensor,
    expert_name,
    layer_name,
    outside_name,
    whole_tensors,
)
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig


class Voice:
    """Says states. They are held back until one layer has run: until then, whoever fails can still refuse."""

    def __init__(self, pipe: IO[bytes], version: str) -> None:
        self._pipe, self._version = pipe, version
        self._held: list[tuple[str, torch.Tensor]] | None = []

    @property
    def has_spoken(self) -> bool:
        """Whether anything was said."""
        return self._held is None

    def say(self, name: str, values: torch.Tensor) -> None:
        """Say what follows one part of the model: [B, S, …]."""
        if self._held is None:
            self._write(name, values)
            return
        self._held.append((name, values))
        if name.startswith("layer"):
            self._line({"version": self._version})
            held, self._held = self._held, None
            for each in held:
                self._write(*each)

    def refuse(self, why: str) -> None:
        """Say nothing but why."""
        self._line({"refusal": why, "version": self._version})

    def _write(self, name: str, values: torch.Tensor) -> None:
        data = bytes_of(values.float())
        self._line({"state": name, "shape": list(values.shape), "bytes": len(data)})
        self._pipe.write(data)
        self._pipe.flush()

    def _line(self, told: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(told).encode() + b"\n")
        self._pipe.flush()


class Filling:
    """megatron-core's model without memory, and where each of its weights is read."""

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self._model, self._weights, self._dtype = model, weights, dtype
        self._tensors = dict(_named(weights.config))
        wanted = {name: tuple(each.shape) for name, each in model.named_parameters()}
        stored = {name: each.shape for name, each in self._tensors.items()}
        for name in wanted.keys() ^ stored.keys():
            raise Refused(f"`{name}` is only in {'its model' if name in wanted else 'the files'}")
        for name, shape in wanted.items():
            if shape != stored[name]:
                raise Refused(f"`{name}` is {list(shape)} in its model, {list(stored[name])} in the files")

    def hook(self, voice: Voice) -> None:
        """Let every part be filled before it runs, emptied after it, and its result be said."""
        last = self._weights.config.layers - 1
        said = {"embedding": "embedding", "decoder.final_layernorm": f"layer {last}", "output_layer": ""}
        said |= {f"{LAYERS}{layer}": f"layer {layer}" if layer < last else "" for layer in range(last + 1)}
        for part, name in said.items():
            module = self._model.get_submodule(part)
            nowhere = dict(module.named_parameters())
            module.register_forward_pre_hook(self._filler(part))
            if name:
                module.register_forward_hook(_saying(voice, name))
            # A tied head takes the embedding's weights long after the embedding has run.
            if part != "embedding" or not self._weights.config.tied_embeddings:
                module.register_forward_hook(_emptier(nowhere))

    def _filler(self, part: str) -> Callable[..., None]:
        def fill(module: nn.Module, _: Any) -> None:
            state = {name: self._read(f"{part}.{name}") for name, _ in module.named_parameters()}
            module.load_state_dict(state, strict=False, assign=True)

        return fill

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        with lent_rows(tensor, self._weights, *tensor.rows, self._dtype) as rows:
            parts = (rows[0::2], rows[1::2]) if tensor.gated else (rows,)
            return torch.cat([part.float() for part in parts])


def _named(config: ModelConfig) -> Iterator[tuple[str, MegatronTensor]]:
    """All tensors as the `local` layers call them; rows that pad the vocabulary are left out, as nobody asks them."""
    for parameter in parameters(config):
        for tensor in whole_tensors(config, parameter, config.vocab_size):
            if parameter.layer is None:
                yield outside_name(parameter), tensor
            elif tensor.expert is None:
                yield f"{LAYERS}{parameter.layer}.{layer_name(config, parameter, 'local', stacked=False)}", tensor
            else:
                yield f"{LAYERS}{parameter.layer}.{expert_name(parameter, tensor.expert, 'sequential')}", tensor


def _saying(voice: Voice, name: str) -> Callable[..., None]:
    def say(_: nn.Module, __: Any, result: Any) -> None:
        # Megatron carries the stream as [S, B, H]; a layer gives a context out beside it.
        stream = result[0] if isinstance(result, tuple) else result
        voice.say(name, stream.transpose(0, 1))

    return say


def _emptier(nowhere: dict[str, nn.Parameter]) -> Callable[..., None]:
    def empty(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(nowhere, strict=False, assign=True)

    return empty


@torch.no_grad()
def answer(question: dict[str, Any], voice: Voice) -> None:
    """Carry the tokens of a question through the model it names."""
    kind = MegatronLegacyWeights if question["legacy"] else MegatronDistWeights
    config = ModelConfig.model_validate(question["config"])
    with kind(Path(question["folder"]), config=config) as weights:
        assert weights.args is not None, "who has none is not asked"
        without_gpu()
        alone()
        model = built_from(weights.args, config.vocab_size)
        dtype = getattr(torch, question["dtype"]) if question["dtype"] else torch.float32
        Filling(model, weights, dtype).hook(voice)
        tokens = torch.tensor(question["tokens"])
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        voice.say(LOGITS, model(tokens, positions, None))


def main() -> int:
    """Answer, or say why not."""
    # Whatever else is printed in this process goes where errors go.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    question = json.load(sys.stdin)
    from megatron.core import __version__

    voice = Voice(pipe, __version__)
    try:
        answer(question, voice)
    except Exception as error:
        if voice.has_spoken:
            raise
        told = str(error).strip().partition("\n")[0]
        refused = isinstance(error, Refused)
        voice.refuse(f"was not asked: {told}" if refused else f"failed: {type(error).__name__}: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The process in which megatron-core computes: a request on stdin, states on stdout. See `megatron_oracle.py`.

It builds megatron-core's GPTModel from the arguments in a checkpoint, on one process, without a GPU and without
memory. What it patches and initializes stays for as long as the process lives, so nothing else imports it.

Each part of the model is filled just before it runs and emptied after it. The files are read with our reader, since
Megatron's own would run whatever their pickles name. What is filled in is what lies in them: the interleaving of
gate and up rows by our reader is undone, so that a wrong one is seen. Megatron alone reads the architecture and
computes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.checkpoints.io import bytes_of
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights
from trainshed.checkpoints.megatron.weights import borrow_rows
from trainshed.checkpoints.prove.layerwise import LOGITS
from trainshed.checkpoints.torch_save_reader import PickledObject
from trainshed.checkpoints.weights import Weights
from trainshed.models.megatron_tensors import (
    LAYER_PREFIX,
    MegatronTensor,
    expert_name,
    layer_name,
    non_layer_name,
    whole_tensors,
)
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig

# Settings of how a job computes and not of what: one process, float32 and plain layers stand for them here.
_EXECUTION_KEYS = re.compile(
    r"parallel|pipeline|_comm|p2p|overlap|recompute|offload|cuda_graph|fp8|fp4|fp16|bf16|fus(ion|ed)|dtype|dispatcher"
    r"|deepep|hybridep|(^|_)te_|kitchen|inference|init|grouped_gemm|grad|_func$|backend|dropout|persist|memory|logg"
    r"|load_balancing|(aux|z)_loss|barrier|rng|deterministic|batch_invariant|autocast|cross_entropy|mempool|_sms$"
    r"|transformer_impl|quant|cache|test_mode|vp_stage|microbatch|saved_activations|_ar_type|seq_?len"
    r"|qk_clip|max_attention_logit|timers|amax|routing_replay|per_token_loss|jitter|bias_update|scatter_output"
)


class UnsupportedByMegatron(Exception):
    """Something for which megatron-core has no layers here."""


def patch_out_gpu() -> None:
    """Let Megatron run where there is no GPU: it asks for one in these few places."""
    cpu = torch.device("cpu")
    patches: dict[str, Any] = {
        "current_device": lambda: cpu,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
        "_lazy_call": lambda *_, **__: None,
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_: None,
    }
    for name, patch in patches.items():
        setattr(torch.cuda, name, patch)
        setattr(torch.cuda.random, name, patch)
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer import utils
    from megatron.core.transformer.moe import moe_utils

    def causal(length: int) -> torch.Tensor:
        return torch.triu(torch.ones(length, length), diagonal=1).bool()

    def windowed(queries: int, keys: int, window_size: tuple[int, int]) -> torch.Tensor:
        # Megatron's own, but for its device.
        seen = torch.triu(torch.ones(queries, keys, dtype=torch.bool), diagonal=keys - queries - window_size[0])
        return ~torch.tril(seen, diagonal=keys - queries + window_size[1])

    for module in (fused_softmax, utils):
        setattr(module, "get_default_causal_mask", causal)  # noqa: B010
        setattr(module, "get_sliding_window_causal_mask", windowed)  # noqa: B010
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 forgets to define it where Transformer Engine is missing.
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


def init_single_process() -> None:
    """Make the groups that Megatron wants, of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def build_meta_model(args: Namespace, vocab_size: int) -> nn.Module:
    """As Megatron-LM's core_transformer_config_from_args and gpt_builder do, on one process and without memory."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    said = vars(args)
    keys = {
        field.name: said[field.name]
        for field in dataclasses.fields(TransformerConfig)
        if said.get(field.name) is not None and not _EXECUTION_KEYS.search(field.name)
    }
    for name, value in keys.items():
        if isinstance(value, PickledObject):
            raise UnsupportedByMegatron(f"its args have a {value.kind} as `{name}`")
    if "moe_expert_capacity_factor" in keys:
        factor = keys["moe_expert_capacity_factor"]
        raise UnsupportedByMegatron(f"`moe_expert_capacity_factor: {factor}` drops tokens by what else is in a batch")
    gated, biases = bool(said.get("swiglu", False)), bool(said.get("add_bias_linear", True))
    keys |= {
        "layernorm_epsilon": said.get("layernorm_epsilon") or said["norm_epsilon"],
        "num_query_groups": said["num_query_groups"] if said.get("group_query_attention") else None,
        "num_moe_experts": said.get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": F.silu if gated else F.gelu,
        # Fused with its bias, Megatron's gelu is the tanh approximation; by itself it is the exact one.
        "bias_activation_fusion": not gated and biases and bool(said.get("bias_gelu_fusion", True)),
        "moe_router_load_balancing_type": "none",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    config = TransformerConfig(**keys)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    with torch.device("meta"):
        return GPTModel(
            config,
            spec,
            vocab_size=vocab_size,
            max_sequence_length=said["max_position_embeddings"],
            share_embeddings_and_output_weights=not said.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=said.get("position_embedding_type", "learned_absolute"),
            rotary_percent=said.get("rotary_percent", 1.0),
            rotary_base=said.get("rotary_base", 10000),
            rope_scaling=bool(said.get("use_rope_scaling", False)),
            rope_scaling_factor=said.get("rope_scaling_factor", 8.0),
            seq_len_interpolation_factor=said.get("rotary_seq_len_interpolation_factor"),
        ).eval()


class StateStream:
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


class LayerLoader:
    """megatron-core's model without memory, and where each of its weights is read."""

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self._model, self._weights, self._dtype = model, weights, dtype
        self._tensors = dict(_named_tensors(weights.config))
        wanted = {name: tuple(each.shape) for name, each in model.named_parameters()}
        stored = {name: each.shape for name, each in self._tensors.items()}
        for name in wanted.keys() ^ stored.keys():
            raise UnsupportedByMegatron(f"`{name}` is only in {'its model' if name in wanted else 'the files'}")
        for name, shape in wanted.items():
            if shape != stored[name]:
                raise UnsupportedByMegatron(
                    f"`{name}` is {list(shape)} in its model, {list(stored[name])} in the files"
                )

    def hook(self, voice: StateStream) -> None:
        """Let every part be filled before it runs, emptied after it, and its result be said."""
        last = self._weights.config.layers - 1
        said = {"embedding": "embedding", "decoder.final_layernorm": f"layer {last}", "output_layer": ""}
        said |= {f"{LAYER_PREFIX}{layer}": f"layer {layer}" if layer < last else "" for layer in range(last + 1)}
        for part, name in said.items():
            module = self._model.get_submodule(part)
            nowhere = dict(module.named_parameters())
            module.register_forward_pre_hook(self._filler(part))
            if name:
                module.register_forward_hook(_sending_hook(voice, name))
            # A tied head takes the embedding's weights long after the embedding has run.
            if part != "embedding" or not self._weights.config.tied_embeddings:
                module.register_forward_hook(_emptying_hook(nowhere))

    def _filler(self, part: str) -> Callable[..., None]:
        def fill(module: nn.Module, _: Any) -> None:
            state = {name: self._read(f"{part}.{name}") for name, _ in module.named_parameters()}
            module.load_state_dict(state, strict=False, assign=True)

        return fill

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        with borrow_rows(tensor, self._weights, *tensor.rows, self._dtype) as rows:
            parts = (rows[0::2], rows[1::2]) if tensor.gated else (rows,)
            return torch.cat([part.float() for part in parts])


def _named_tensors(config: ModelConfig) -> Iterator[tuple[str, MegatronTensor]]:
    """All tensors as the `local` layers call them; rows that pad the vocabulary are left out, as nobody asks them."""
    for parameter in parameters(config):
        for tensor in whole_tensors(config, parameter, config.vocab_size):
            if parameter.layer is None:
                yield non_layer_name(parameter), tensor
            elif tensor.expert is None:
                yield f"{LAYER_PREFIX}{parameter.layer}.{layer_name(config, parameter, 'local', stacked=False)}", tensor
            else:
                yield f"{LAYER_PREFIX}{parameter.layer}.{expert_name(parameter, tensor.expert, 'sequential')}", tensor


def _sending_hook(voice: StateStream, name: str) -> Callable[..., None]:
    def say(_: nn.Module, __: Any, result: Any) -> None:
        # Megatron carries the stream as [S, B, H]; a layer gives a context out beside it.
        stream = result[0] if isinstance(result, tuple) else result
        voice.say(name, stream.transpose(0, 1))

    return say


def _emptying_hook(nowhere: dict[str, nn.Parameter]) -> Callable[..., None]:
    def empty(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(nowhere, strict=False, assign=True)

    return empty


@torch.no_grad()
def answer_request(question: dict[str, Any], voice: StateStream) -> None:
    """Carry the tokens of a question through the model it names."""
    kind = MegatronLegacyWeights if question["legacy"] else MegatronDistWeights
    config = ModelConfig.model_validate(question["config"])
    with kind(Path(question["folder"]), config=config) as weights:
        assert weights.args is not None, "who has none is not asked"
        patch_out_gpu()
        init_single_process()
        model = build_meta_model(weights.args, config.vocab_size)
        dtype = getattr(torch, question["dtype"]) if question["dtype"] else torch.float32
        LayerLoader(model, weights, dtype).hook(voice)
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

    voice = StateStream(pipe, __version__)
    try:
        answer_request(question, voice)
    except Exception as error:
        if voice.has_spoken:
            raise
        told = str(error).strip().partition("\n")[0]
        refused = isinstance(error, UnsupportedByMegatron)
        voice.refuse(f"was not asked: {told}" if refused else f"failed: {type(error).__name__}: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The process in which megatron-core computes: a request on stdin, states on stdout. See `megatron_oracle.py`.

It builds megatron-core's GPTModel from the arguments in a checkpoint, on one process, without a GPU, on the meta
device. What it patches and initializes lasts as long as the process, so nothing else imports this module.

Each part of the model is loaded just before it runs and freed after it. The files are read with our reader, since
Megatron's own would run whatever their pickles name. The model gets the tensors as they are stored: our reader
interleaves gate and up rows, and this is undone here, so that a wrong interleaving is noticed. Megatron alone reads
the architecture and computes.
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
from trainshed.checkpoints.megatron.unsupported import LLAMA3_ROPE_SCALING
from trainshed.checkpoints.megatron.weights import borrow_rows
from trainshed.checkpoints.prove.layerwise import LOGITS
from trainshed.checkpoints.torch_save_reader import PickledObject
from trainshed.checkpoints.weights import Weights, stored_dtype
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

# Settings that change how a job computes and not what: here they are one process, float32 and plain layers.
_EXECUTION_KEYS = re.compile(
    r"parallel|pipeline|_comm|p2p|overlap|recompute|offload|cuda_graph|fp8|fp4|fp16|bf16|fus(ion|ed)|dtype|dispatcher"
    r"|deepep|hybridep|(^|_)te_|kitchen|inference|init|grouped_gemm|grad|_func$|backend|dropout|persist|memory|logg"
    r"|load_balancing|(aux|z)_loss|barrier|rng|deterministic|batch_invariant|autocast|cross_entropy|mempool|_sms$"
    r"|transformer_impl|quant|cache|test_mode|vp_stage|microbatch|saved_activations|_ar_type|seq_?len"
    r"|qk_clip|max_attention_logit|timers|amax|routing_replay|per_token_loss|jitter|bias_update|scatter_output"
)


class UnsupportedByMegatron(Exception):
    """A model for which megatron-core has no layers here."""


def patch_out_gpu() -> None:
    """Let Megatron run without a GPU: it needs one only in these few places."""
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
    _accept_latent_widths()
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 does not define it where Transformer Engine is missing.
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


def _accept_latent_widths() -> None:
    """Let Megatron's own attention stand for Transformer Engine's in latent attention, which alone is told the widths.

    Its scores take any width of keys, and what it gives has `kv_channels`, the width of values, for each head.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        # 0.16.1 takes it for there, and asks what is an instance of it.
        setattr(multi_latent_attention, "HAVE_TE", False)  # noqa: B010
    plain: Any = DotProductAttention.__init__

    def init(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **keys: Any) -> None:
        plain(self, *args, **keys)

    setattr(DotProductAttention, "__init__", init)  # noqa: B010


def init_single_process() -> None:
    """Create the process groups that Megatron needs, of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def build_meta_model(args: Namespace, vocab_size: int) -> nn.Module:
    """Build the model like Megatron-LM's core_transformer_config_from_args and gpt_builder, on the meta device."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    arguments = vars(args)
    latent = bool(arguments.get("multi_latent_attention"))
    config_class = MLATransformerConfig if latent else TransformerConfig
    keys = {
        field.name: arguments[field.name]
        for field in dataclasses.fields(config_class)
        if arguments.get(field.name) is not None and not _EXECUTION_KEYS.search(field.name)
    }
    for name, value in keys.items():
        if isinstance(value, PickledObject):
            raise UnsupportedByMegatron(f"its args have a {value.class_name} as `{name}`")
    if "moe_expert_capacity_factor" in keys:
        factor = keys["moe_expert_capacity_factor"]
        raise UnsupportedByMegatron(f"`moe_expert_capacity_factor: {factor}` drops tokens by what else is in a batch")
    gated, biases = bool(arguments.get("swiglu", False)), bool(arguments.get("add_bias_linear", True))
    keys |= {
        "layernorm_epsilon": arguments.get("layernorm_epsilon") or arguments["norm_epsilon"],
        "num_query_groups": arguments["num_query_groups"] if arguments.get("group_query_attention") else None,
        "num_moe_experts": arguments.get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": F.silu if gated else F.gelu,
        # Fused with its bias, Megatron's gelu is the tanh approximation; otherwise it is the exact one.
        "bias_activation_fusion": not gated and biases and bool(arguments.get("bias_gelu_fusion", True)),
        "moe_router_load_balancing_type": "none",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
        # Layers that predict further tokens take no part in the next one.
        "mtp_num_layers": None,
    }
    if latent:
        keys["q_lora_rank"] = arguments.get("q_lora_rank")  # None counts, and is not the default
    config = config_class(**keys)
    with torch.device("meta"):
        return GPTModel(
            config,
            _layer_spec(config),
            vocab_size=vocab_size,
            max_sequence_length=arguments["max_position_embeddings"],
            share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=arguments.get("position_embedding_type", "learned_absolute"),
            rotary_percent=arguments.get("rotary_percent", 1.0),
            rotary_base=arguments.get("rotary_base", 10000),
            rope_scaling=bool(arguments.get("use_rope_scaling", False)),
            # As gpt_builder: --rope-scaling-factor does not get here, and the verdict is about what training computes.
            rope_scaling_factor=LLAMA3_ROPE_SCALING["factor"],
            seq_len_interpolation_factor=arguments.get("rotary_seq_len_interpolation_factor"),
        ).eval()


def _layer_spec(config: Any) -> Any:
    """Return what the layers are built from: one spec for all, or one for each where only some have experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
        )
    return get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )


class StateStream:
    """Sends states. They are held back until one layer has run: a failure before that is sent as a refusal."""

    def __init__(self, pipe: IO[bytes], version: str) -> None:
        self._pipe, self._version = pipe, version
        self._held: list[tuple[str, torch.Tensor]] | None = []

    @property
    def has_sent(self) -> bool:
        """Whether anything was sent."""
        return self._held is None

    def send(self, name: str, values: torch.Tensor) -> None:
        """Send the output of one part of the model: [B, S, …]."""
        if self._held is None:
            self._write(name, values)
            return
        self._held.append((name, values))
        if name.startswith("layer"):
            self._line({"version": self._version})
            held, self._held = self._held, None
            for state in held:
                self._write(*state)

    def refuse(self, reason: str) -> None:
        """Send a reason instead of states."""
        self._line({"refusal": reason, "version": self._version})

    def _write(self, name: str, values: torch.Tensor) -> None:
        data = bytes_of(values.float())
        self._line({"state": name, "shape": list(values.shape), "bytes": len(data)})
        self._pipe.write(data)
        self._pipe.flush()

    def _line(self, message: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(message).encode() + b"\n")
        self._pipe.flush()


class LayerLoader:
    """Loads the weights of megatron-core's model, part by part."""

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self._model, self._weights, self._dtype = model, weights, dtype
        self._tensors = dict(_named_tensors(weights.config))
        wanted = {name: tuple(tensor.shape) for name, tensor in _stored_parts(model)}
        stored = {name: tensor.shape for name, tensor in self._tensors.items()}
        for name in wanted.keys() ^ stored.keys():
            raise UnsupportedByMegatron(f"`{name}` is only in {'its model' if name in wanted else 'the files'}")
        for name, shape in wanted.items():
            if shape != stored[name]:
                raise UnsupportedByMegatron(
                    f"`{name}` is {list(shape)} in its model, {list(stored[name])} in the files"
                )

    def hook(self, stream: StateStream) -> None:
        """Make every part load its weights before it runs, send its output and free its weights after it."""
        last = self._weights.config.layers - 1
        state_names = {"embedding": "embedding", "decoder.final_layernorm": f"layer {last}", "output_layer": ""}
        state_names |= {f"{LAYER_PREFIX}{layer}": f"layer {layer}" if layer < last else "" for layer in range(last + 1)}
        for part, name in state_names.items():
            module = self._model.get_submodule(part)
            nowhere = dict(module.named_parameters())
            module.register_forward_pre_hook(self._fill_hook(part))
            if name:
                module.register_forward_hook(_sending_hook(stream, name))
            # A tied head uses the embedding's weights long after the embedding has run.
            if part != "embedding" or not self._weights.config.tied_embeddings:
                module.register_forward_hook(_emptying_hook(nowhere))

    def _fill_hook(self, part: str) -> Callable[..., None]:
        def fill(module: nn.Module, _: Any) -> None:
            state = {name: self._read(f"{part}.{name}") for name, _ in _stored_parts(module)}
            module.load_state_dict(state, strict=False, assign=True)

        return fill

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        dtype = stored_dtype(tensor.parameter, self._dtype)
        with borrow_rows(tensor, self._weights, *tensor.rows, dtype) as rows:
            parts = (rows[0::2], rows[1::2]) if tensor.gated else (rows,)
            return torch.cat([part.float() for part in parts])


def _stored_parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module that a checkpoint has: its weights, and the biases of experts' scores."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".expert_bias"))


def _named_tensors(config: ModelConfig) -> Iterator[tuple[str, MegatronTensor]]:
    """Yield all tensors by their names in the `local` layers; rows that pad the vocabulary are left out."""
    for parameter in parameters(config.with_mtp_layers(0)):
        for tensor in whole_tensors(config, parameter, config.vocab_size):
            if parameter.layer is None:
                yield non_layer_name(parameter), tensor
            elif tensor.expert is None:
                yield f"{LAYER_PREFIX}{parameter.layer}.{layer_name(config, parameter, 'local', stacked=False)}", tensor
            else:
                yield f"{LAYER_PREFIX}{parameter.layer}.{expert_name(parameter, tensor.expert, 'sequential')}", tensor


def _sending_hook(stream: StateStream, name: str) -> Callable[..., None]:
    def send(_: nn.Module, __: Any, result: Any) -> None:
        # Megatron's hidden states are [S, B, H]; a layer returns a context beside them.
        hidden = result[0] if isinstance(result, tuple) else result
        stream.send(name, hidden.transpose(0, 1))

    return send


def _emptying_hook(nowhere: dict[str, nn.Parameter]) -> Callable[..., None]:
    def empty(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(nowhere, strict=False, assign=True)

    return empty


@torch.no_grad()
def answer_request(request: dict[str, Any], stream: StateStream) -> None:
    """Run the tokens of a request through its model."""
    kind = MegatronLegacyWeights if request["legacy"] else MegatronDistWeights
    config = ModelConfig.model_validate(request["config"])
    with kind(Path(request["folder"]), config=config) as weights:
        assert weights.args is not None, "the oracle refuses a checkpoint without args"
        patch_out_gpu()
        init_single_process()
        model = build_meta_model(weights.args, config.vocab_size)
        dtype = getattr(torch, request["dtype"]) if request["dtype"] else torch.float32
        LayerLoader(model, weights, dtype).hook(stream)
        tokens = torch.tensor(request["tokens"])
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        stream.send(LOGITS, model(tokens, positions, None))


def main() -> int:
    """Answer the request, or send why not."""
    # Whatever else this process prints goes to stderr.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    from megatron.core import __version__

    stream = StateStream(pipe, __version__)
    try:
        answer_request(request, stream)
    except Exception as error:
        if stream.has_sent:
            raise
        reason = str(error).strip().partition("\n")[0]
        refused = isinstance(error, UnsupportedByMegatron)
        stream.refuse(f"was not asked: {reason}" if refused else f"failed: {type(error).__name__}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

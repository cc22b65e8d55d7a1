"""Lets the installed torchtune run on CPUs, with the torchao that is installed here, and build a tiny Llama.

A folder on PYTHONPATH: what we render is run as it is. Only processes that import torchtune are changed: its quantizers
ask for two functions of an older torchao, its recipes for statistics of a GPU's memory and for NCCL.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 64}
OTHERS = {"max_seq_len": 128, "rope_base": 10000, "norm_eps": 1e-5, "attn_dropout": 0.0}


def before_torchtune() -> None:
    import torch.distributed
    import torchao.quantization

    for quantizer in ("int4_weight_only", "int8_dynamic_activation_int4_weight"):
        if not hasattr(torchao.quantization, quantizer):
            setattr(torchao.quantization, quantizer, None)
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *backend, **options: init_process_group("gloo")


def after_training(training: Any) -> None:
    training.get_memory_stats = lambda **options: {}
    training.log_memory_stats = lambda *statistics, **options: None
    training.cleanup_before_training = lambda: None


def after_llama3(llama3: Any) -> None:
    sizes: dict[str, Any] = SIZES | OTHERS | {"vocab_size": int(os.environ["TINY_VOCABULARY"])}
    llama3.llama3_tiny = lambda: llama3.llama3(**sizes)
    llama3.lora_llama3_tiny = lambda **lora: llama3.lora_llama3(**sizes, **lora)


AFTER = {"torchtune.training": after_training, "torchtune.models.llama3": after_llama3}


class ChangedLoader(Loader):
    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        AFTER[self._name](module)


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchtune" and path is None and "torchtune" not in sys.modules:
            before_torchtune()
        if name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = ChangedLoader(spec.loader, name)
        return spec


sys.meta_path.insert(0, Finder())

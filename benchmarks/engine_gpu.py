"""Training steps on one GPU: the torch engine beside torchtitan and transformers, in one run.

    python benchmarks/engine_gpu.py [--model llama3-8b] [--layers 16] [--micro-batch 1 2] [--micro-batches 1]
                                    [--precision bf16 fp8] [--peer torchtitan transformers] [--profile]
                                    [--documents 1000]

Bf16 products, fp32 master weights and Adam states, clipping, AdamW (fused on all sides). The peers have Llama-3-8B's
layers: torchtitan's model as it trains on one GPU (autocast, every block and the loss compiled, torchao's float8), and
LlamaForCausalLM under autocast with every layer compiled and cuDNN attention. With `--documents`, our engine is
measured a second time with rows of documents of this mean length, kept apart (the lengths change in every step).
Prints tokens/s, MFU, memory and where the device's time goes by kind of kernel; asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from measure import table
from trainshed.catalog import gpu_by_device_name, model_preset
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.models.parameters import parameter_count
from trainshed.observe.mfu import measure_mfu
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

LENGTH = 8192
EXPERTS_64 = ModelConfig.model_validate(
    {
        "family": "qwen3_moe",
        "layers": 8,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 16,
        "vocab_size": 50304,
        "max_positions": LENGTH,
        "rope": {"base": 10000.0},
        "moe": {"experts": 64, "top_k": 8, "ffn": 1024},
    }
)
"""OLMoE-1B-7B's shapes (Muennighoff et al. 2024, table 1) in half of its layers."""
OPTIONS = Optimizer(lr=1e-4)
DEVICE = torch.device("cuda", 0)
KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa", "flex"),
    "products": ("gemm", "nvjet", "cutlass", "wgmma", "cublas", "xmma"),
    "optimizer": ("adam", "rsub_sqrt"),
    "gradient norm": ("multi_tensor", "lpnorm", "norm_reduce"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
}
"""Kernels by what their names hold; the first that fits counts."""


def ours(
    config: ModelConfig, micro_batch: int, precision: str, mean_document: int | None = None, micro_batches: int = 1
) -> Callable[[], object]:
    """A function that makes one step with our engine and returns its loss."""
    batch_rows = micro_batch * micro_batches
    layout = resolve_layout(Layout.model_validate({"micro_batch": micro_batch}), config)
    model = build_model(
        config,
        single_rank_mesh(layout, DEVICE),
        sequence_length=LENGTH,
        precision=precision,
        regularization=Regularization(),
        compile_blocks=True,
    )
    init_model(model, seed=0)
    runner = StepRunner(model, AdamW(model.shards, OPTIONS, DEVICE))
    rows = tokens(config, batch_rows)
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    starts = itertools.cycle([None])
    if mean_document is not None:
        starts = itertools.cycle([document_starts(batch_rows, LENGTH, mean_document, seed) for seed in range(5)])

    def step() -> object:
        batch = LocalBatch(batch_rows, inputs, labels, document_starts=next(starts))
        return runner.step(batch, batch_rows, OPTIONS.lr)

    return step


def document_starts(rows: int, length: int, mean: int, seed: int) -> torch.Tensor:
    """Return where documents of lengths around a mean begin: int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(rows, length, dtype=torch.int64)
    for row in starts:
        column = 0
        while column < length:
            row[column:] = column
            column += int(torch.randint(mean // 2, 3 * mean // 2, (), generator=generator))
    return starts.to(DEVICE)


def transformers(config: ModelConfig, micro_batch: int, precision: str) -> Callable[[], object]:
    """The same with LlamaForCausalLM."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(DEVICE):
        shape: dict[str, object] = {
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": LENGTH,
            "rope_theta": 500000.0,
            "attn_implementation": "sdpa",
        }
        model = LlamaForCausalLM(LlamaConfig(**shape))  # pyrefly: ignore
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.lr, betas=OPTIONS.betas, weight_decay=0.1, fused=True)
    rows = tokens(config, micro_batch)
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            loss = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def torchtitan(config: ModelConfig, micro_batch: int, precision: str) -> Callable[[], object]:
    """The same with torchtitan's Llama 3, as its trainer runs it on a single GPU."""
    module = _torchtitan_llama3("model.model")
    arguments = _torchtitan_llama3("model.args").TransformerModelArgs(
        dim=config.hidden,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        vocab_size=config.vocab_size,
        ffn_dim_multiplier=1.3,
        multiple_of=1024,
        rope_theta=500000,
        max_seq_len=LENGTH,
    )
    with torch.device("meta"):
        model = module.Transformer(arguments)
    if precision == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model, config=Float8LinearConfig(), module_filter_fn=lambda _, name: "output" not in name
        )
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights(buffer_device=DEVICE)
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss_function = torch.compile(importlib.import_module("torchtitan.components.loss").cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.lr, betas=OPTIONS.betas, weight_decay=0.1, fused=True)
    rows = tokens(config, micro_batch)
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(inputs)
            loss = loss_function(logits, labels) / labels.numel()
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _torchtitan_llama3(name: str) -> Any:
    """Import a module of torchtitan's Llama 3 without its package, which imports what reads and tokenises text."""
    package = "torchtitan.models.llama3"
    if package not in sys.modules:
        found = importlib.util.find_spec("torchtitan")
        assert found is not None, "pip install torchtitan==0.2.2"
        assert found.submodule_search_locations is not None
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(Path(found.submodule_search_locations[0]) / "models" / "llama3")]
        sys.modules[package] = stand_in
    return importlib.import_module(f"{package}.{name}")


PEERS = {"torchtitan": torchtitan, "transformers": transformers}


def tokens(config: ModelConfig, micro_batch: int) -> torch.Tensor:
    """Random token ids [micro_batch, LENGTH + 1]."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randint(0, config.vocab_size, (micro_batch, LENGTH + 1), generator=generator, device=DEVICE)


def measured(step: Callable[[], object], steps: int) -> tuple[float, float, object]:
    """Seconds per step (median of steps by device events, after warming up), seconds to warm up, the last result."""
    began = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    last: object = None
    for event in events[1:]:
        last = step()
        event.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return times[len(times) // 2] / 1000, warm, last


def kernel_times(step: Callable[[], object]) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Milliseconds of device time of one step by kind of kernel, and the longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    longest = []
    for event in profiler.key_averages():
        name, milliseconds = event.key.lower(), event.device_time_total / 1000
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        kinds[kind] += milliseconds
        longest.append((event.key, milliseconds, event.count))
    return dict(kinds), sorted(longest, key=lambda each: -each[1])[:20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b", help="a preset, or `experts-64`; peers have Llama 3's layers")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro-batches", type=int, default=1, help="how many of them make a step of ours")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    parser.add_argument("--peer", nargs="+", default=[], choices=sorted(PEERS), help="also these, in the same run")
    parser.add_argument("--documents", type=int, help="also rows of documents of this mean length, kept apart")
    parser.add_argument("--profile", action="store_true", help="also kernels by kind")
    arguments = parser.parse_args()
    config = EXPERTS_64 if arguments.model == "experts-64" else model_preset(arguments.model)
    config = config.model_copy(update={"layers": arguments.layers})
    name = torch.cuda.get_device_name(DEVICE)
    print(f"{name}, torch {torch.__version__}, {parameter_count(config) / 1e9:.2f}B parameters, sequence {LENGTH}")
    rows: list[list[str]] = []
    for micro_batch in arguments.micro_batch:
        sides: list[tuple[str, str, Callable[[ModelConfig, int, str], Callable[[], object]]]] = []
        for precision in arguments.precision:
            sides.append(("trainshed", precision, partial(ours, micro_batches=arguments.micro_batches)))
            if arguments.documents:
                masked = partial(ours, mean_document=arguments.documents, micro_batches=arguments.micro_batches)
                sides.append((f"trainshed, documents of {arguments.documents},", precision, masked))
            peers = [peer for peer in arguments.peer if peer != "transformers" or precision == "bf16"]
            sides += [(peer, precision, PEERS[peer]) for peer in peers]
        for side, precision, build in sides:
            torch.cuda.reset_peak_memory_stats()
            step = build(config, micro_batch, precision)
            seconds, warm, last = measured(step, arguments.steps)
            rows_of_step = micro_batch * (arguments.micro_batches if side.startswith("trainshed") else 1)
            rate = rows_of_step * LENGTH / seconds
            known = gpu_by_device_name(name)
            mfu = measure_mfu(rate, config, LENGTH, precision=precision, gpu=known, device_name=name, engine="torch")
            memory = torch.cuda.max_memory_allocated() / 2**30
            loss = last.read().loss if hasattr(last, "read") else float(last)  # pyrefly: ignore
            rows.append(
                [
                    f"{side} {precision}",
                    str(micro_batch),
                    f"{rate:,.0f}",
                    f"{seconds * 1000:.1f} ms",
                    f"{mfu.mfu:.1%}" if mfu.mfu else "-",
                    f"{memory:.1f} GiB",
                    f"{warm:.0f} s",
                    f"{loss:.4f}",
                ]
            )
            print(rows[-1], flush=True)
            if arguments.profile:
                kinds, longest = kernel_times(step)
                print("  ".join(f"{kind} {time:.1f} ms" for kind, time in sorted(kinds.items(), key=lambda x: -x[1])))
                for kernel, milliseconds, count in longest:
                    print(f"   {milliseconds:8.2f} ms {count:5d}x  {kernel[:110]}", flush=True)
            del step, last
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    columns = ["side", "micro-batch", "tokens/s", "step", "MFU", "memory", "warm-up", "loss"]
    table(f"{config.layers} layers of {arguments.model}, sequence {LENGTH}", columns, rows)


if __name__ == "__main__":
    main()

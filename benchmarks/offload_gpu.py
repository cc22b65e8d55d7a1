"""Activations in host memory on one GPU: none, ours, and PyTorch's `save_on_cpu`, with and without recomputation.

    python benchmarks/offload_gpu.py [--layers 16] [--length 8192] [--micro-batch 1] [--steps 6]

Trains layers of Llama-3-8B's shape on random tokens. Prints the seconds of a step, peak memory and host memory.
`save_on_cpu` copies on the computing stream, weights too, and loses strides that compiled blocks count on: it runs
without compilation.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer


def run(
    options: argparse.Namespace, recompute: str, offload: str | None, around: Callable[[], Any], *, compiled: bool
) -> str:
    """Train a few steps; returns one line of the table."""
    config = ModelConfig.model_validate(
        {
            "family": "llama",
            "layers": options.layers,
            "hidden": options.hidden,
            "heads": options.hidden // 128,
            "kv_heads": max(1, options.hidden // 512),
            "ffn": options.hidden * 7 // 2,
            "vocab_size": options.vocabulary,
            "max_positions": options.length,
            "rope": {"base": 500000.0},
        }
    )
    device = torch.device(options.device)
    rows = options.micro_batch
    layout = resolve_layout(
        Layout.model_validate({"micro_batch": rows, "recompute": recompute, "offload": offload}), config
    )
    model = build_model(
        config,
        single_rank_mesh(layout, device),
        sequence_length=options.length,
        precision=options.precision,
        regularization=Regularization(),
        compile_blocks=compiled and device.type == "cuda",
    )
    init_model(model, seed=1)
    runner = StepRunner(model, AdamW(model.shards, Optimizer.model_validate({"lr": 1e-4}), device))
    generator = torch.Generator().manual_seed(0)
    cuda = device.type == "cuda"
    seconds, loss = [], 0.0
    for step in range(options.steps):
        tokens = torch.randint(0, config.vocab_size, (rows, options.length + 1), generator=generator).to(device)
        batch = LocalBatch(rows, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
        if cuda and step == 2:
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        with around():
            loss = runner.step(batch, rows, 1e-4).read().loss
        seconds.append(time.monotonic() - began)
    steady = sorted(seconds[2:])[len(seconds[2:]) // 2]
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    host = model.stages[0].spec.offload
    host_gib = host.host_bytes / 2**30 if host is not None else 0.0
    torch.compiler.reset()
    rate = rows * options.length / steady
    return (
        f"{1000 * steady:8.1f} ms  {rate:9,.0f} tokens/s  {memory:7.1f} GiB  host {host_gib:6.1f} GiB  loss {loss:.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    peer = partial(torch.autograd.graph.save_on_cpu, pin_memory=options.device == "cuda")
    for recompute in ("none", "full"):
        for name, offload, around, compiled in (
            ("on the GPU", None, nullcontext, True),
            ("offload: activations", "activations", nullcontext, True),
            ("on the GPU, uncompiled", None, nullcontext, False),
            ("save_on_cpu, uncompiled", None, peer, False),
        ):
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(f"recompute {recompute:4}  {name:23}  ", end="", flush=True)
            try:
                print(run(options, recompute, offload, around, compiled=compiled), flush=True)
            except torch.OutOfMemoryError as error:
                print(str(error).splitlines()[0][:120], flush=True)


if __name__ == "__main__":
    main()

"""Predicted and measured training steps of our own engine, on this machine's GPU.

    python benchmarks/planner_gpu.py [--only NAME ...] [--small]

Each case is a model of real layer shapes with as many layers as fit. Prints predicted and measured seconds and GiB side
by side; asserts nothing. `--small` runs tiny shapes anywhere, to see that the benchmark itself works.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from dataclasses import dataclass

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
from trainshed.plan.layout import resolve_layout
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.prediction import predict
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

STEPS = 8
OPTIONS = Optimizer(lr=1e-4)


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    preset: str
    layers: int
    length: int
    micro_batch: int
    micro_batches: int = 1
    recompute: str = "none"
    precision: str = "bf16"

    @property
    def config(self) -> ModelConfig:
        """The model."""
        config = model_preset(self.preset)
        positions = max(config.max_positions, self.length)
        return config.model_copy(update={"layers": self.layers, "max_positions": positions})

    @property
    def description(self) -> str:
        """What it is, for the table."""
        parts = [f"{self.preset} x{self.layers}", f"seq {self.length}", f"mb {self.micro_batch}"]
        if self.micro_batches > 1:
            parts.append(f"x{self.micro_batches}")
        if self.recompute != "none":
            parts.append(self.recompute)
        return ", ".join([*parts, self.precision])


CASES = {
    "8b": Case("llama3-8b", 16, 8192, 1),
    "8b-mb2": Case("llama3-8b", 16, 8192, 2),
    "8b-4k": Case("llama3-8b", 16, 4096, 2, 4),
    "8b-32k": Case("llama3-8b", 12, 32768, 1, recompute="full"),
    "8b-full": Case("llama3-8b", 16, 8192, 4, recompute="full"),
    "8b-selective": Case("llama3-8b", 16, 8192, 2, recompute="selective"),
    "8b-fp8": Case("llama3-8b", 16, 8192, 2, precision="fp8"),
    "8b-fp8-x2": Case("llama3-8b", 16, 8192, 1, 2, precision="fp8"),
    "1b": Case("llama3.2-1b", 16, 8192, 4, 2),
    "3b": Case("llama3.2-3b", 28, 4096, 2),
    "70b": Case("llama3-70b", 5, 8192, 1),
    "moe": Case("qwen3-30b-a3b", 6, 4096, 2),
    "moe-x4": Case("qwen3-30b-a3b", 6, 4096, 4, 4),
    "moe-full": Case("qwen3-30b-a3b", 6, 8192, 2, 2, recompute="full"),
    "mixtral": Case("mixtral-8x7b", 2, 8192, 2, 2),
    "qwen2.5-7b": Case("qwen2.5-7b", 14, 4096, 2, 2),
    "qwen2.5-0.5b": Case("qwen2.5-0.5b", 24, 4096, 4),
    "qwen3-8b": Case("qwen3-8b", 12, 8192, 1, 2),
    "qwen3-8b-selective": Case("qwen3-8b", 12, 16384, 1, recompute="selective"),
    "qwen3-14b-fp8": Case("qwen3-14b", 10, 4096, 2, 2, precision="fp8"),
    "mistral": Case("mistral-7b-v0.1", 14, 16384, 1),
    "gpt2-xl": Case("gpt2-xl", 48, 1024, 8),
    "1b-2k": Case("llama3.2-1b", 16, 2048, 1, 8),
    "1b-64k": Case("llama3.2-1b", 16, 65536, 1, recompute="full"),
    "1b-fp8": Case("llama3.2-1b", 16, 8192, 4, precision="fp8"),
    "70b-fp8": Case("llama3-70b", 5, 8192, 1, precision="fp8"),
    "70b-full": Case("llama3-70b", 5, 8192, 2, 2, recompute="full"),
}
SMALL = {"tiny": Case("tiny", 2, 256, 1), "tiny-full": Case("tiny", 2, 256, 2, 2, recompute="full")}


def measure(case: Case, device: torch.device) -> tuple[float, float]:
    """Seconds of a step (the median, after warming up) and the GiB that tensors filled at its peak."""
    keys = {"micro_batch": case.micro_batch, "recompute": case.recompute}
    layout = resolve_layout(Layout.model_validate(keys), case.config)
    model = build_model(
        case.config,
        single_rank_mesh(layout, device),
        sequence_length=case.length,
        precision=case.precision,
        regularization=Regularization(),
        compile_blocks=device.type == "cuda",
    )
    init_model(model, seed=0)
    runner = StepRunner(model, AdamW(model.shards, OPTIONS, device))
    batch = case.micro_batch * case.micro_batches
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randint(0, case.config.vocab_size, (batch, case.length + 1), generator=generator, device=device)
    local_batch = LocalBatch(batch, rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def step() -> object:
        return runner.step(local_batch, batch, OPTIONS.lr)

    for _ in range(3):
        step()
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began, 0.0
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return times[STEPS // 2] / 1000, torch.cuda.max_memory_allocated() / 2**30


def prediction_of(case: Case, gpu_name: str) -> tuple[float, float]:
    """Predicted seconds of a step, and GiB that tensors fill at its peak."""
    keys = {"micro_batch": case.micro_batch, "recompute": case.recompute}
    layout = resolve_layout(Layout.model_validate(keys), case.config, world_size=1)
    batch = case.micro_batch * case.micro_batches
    hardware = hardware_of_gpu(gpu_name)
    training = TrainingShape(
        model_shape(case.config), case.length, batch, case.precision, hardware, 1, engine_constants("torch")
    )
    prediction = predict(training, layout)
    return prediction.step_seconds, prediction.memory.allocated


def main() -> None:
    """Measure the chosen cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    known = gpu_by_device_name(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if known is None and not arguments.small:
        sys.exit("no GPU of the catalog here: --small shows that the benchmark works")
    name = "h200" if known is None else known.name
    rows = []
    for key, case in (SMALL if arguments.small else CASES).items():
        if arguments.only and key not in arguments.only:
            continue
        predicted_seconds, predicted_gib = prediction_of(case, name)
        try:
            took, gib = measure(case, device)
        except torch.cuda.OutOfMemoryError:
            rows.append(
                [
                    case.description,
                    f"{predicted_seconds * 1e3:.0f}",
                    "out of memory",
                    "",
                    f"{predicted_gib:.1f}",
                    "",
                    "",
                ]
            )
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
        off, off_gib = predicted_seconds / took - 1, predicted_gib / gib - 1 if gib else 0.0
        seconds = [f"{predicted_seconds * 1e3:.0f}", f"{took * 1e3:.0f}", f"{off:+.1%}"]
        rows.append([case.description, *seconds, f"{predicted_gib:.1f}", f"{gib:.1f}", f"{off_gib:+.1%}"])
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["case", "predicted ms", "measured ms", "off", "predicted GiB", "measured GiB", "off"]
    table(f"the planner beside the torch engine, {name}", columns, rows)


if __name__ == "__main__":
    main()

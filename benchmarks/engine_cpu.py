"""One training step on a CPU: the torch engine beside plain transformers, same shapes, weights and tokens, in one run.

    python benchmarks/engine_cpu.py [--model tiny] [--precision fp32] [--steps 12] [--threads 1] [--profile]

A step is forward, backward, clipping and AdamW (fused on both sides); transformers runs LlamaForCausalLM with sdpa.
Both sides start from the same weights and see the same tokens; the losses printed after training show that they do the
same work. The sides take turns at every step, and the best step of each counts: other processes on the machine only
ever make a step slower. On a busy machine the seconds of CPU time with `--threads 1` still say something: they count
no waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from measure import table
from trainshed.catalog import model_preset
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.models.hf_tensors import hf_tensors
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

OPTIONS = Optimizer(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0)


@dataclass(frozen=True)
class Shape:
    """What is trained: an architecture, and the tokens of a step."""

    config: ModelConfig
    length: int
    batch: int


def shapes() -> dict[str, Shape]:
    """The models to compare on: the smallest preset, and one whose matrices are large enough to be the work."""
    sizes = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408}
    small = {"family": "llama", **sizes, "vocab_size": 8192, "max_positions": 1024, "rope": {"base": 10000.0}}
    return {
        "tiny": Shape(model_preset("tiny"), length=256, batch=8),
        "small": Shape(ModelConfig.model_validate(small), length=512, batch=4),
    }


class Ours:
    """Trainshed's engine."""

    name = "trainshed"

    def __init__(self, shape: Shape, precision: str) -> None:
        layout = resolve_layout(Layout.model_validate({"micro_batch": shape.batch}), shape.config)
        device = torch.device("cpu")
        self.model = build_model(
            shape.config,
            single_rank_mesh(layout, device),
            sequence_length=shape.length,
            precision=precision,
            regularization=Regularization(),
        )
        init_model(self.model, seed=0)
        self.runner = StepRunner(self.model, AdamW(self.model.shards, OPTIONS, device))

    def step(self, rows: torch.Tensor) -> float:
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        batch = LocalBatch(len(rows), inputs, labels)
        return self.runner.step(batch, len(rows), OPTIONS.lr).read().loss


class Transformers:
    """LlamaForCausalLM and torch.optim.AdamW, written as its users write it."""

    name = "transformers"

    def __init__(self, shape: Shape, precision: str, like: RankModel) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM._from_config(
            llama_config(shape.config), attn_implementation="sdpa", dtype=torch.float32
        )
        self.model.train()
        self.autocast = precision == "bf16"
        copy_weights(like, self.model)
        matrices = [weight for weight in self.model.parameters() if weight.dim() > 1]
        others = [weight for weight in self.model.parameters() if weight.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": OPTIONS.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=OPTIONS.lr,
            betas=OPTIONS.betas,
            eps=OPTIONS.eps,
            fused=True,
        )

    def step(self, rows: torch.Tensor) -> float:
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        assert OPTIONS.clip is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIONS.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def llama_config(config: ModelConfig) -> Any:
    """Say a Llama's sizes in transformers' words."""
    from transformers import LlamaConfig

    assert config.rope is not None
    assert config.ffn is not None
    return LlamaConfig(
        num_hidden_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.base},
    )


@torch.no_grad()
def copy_weights(ours: RankModel, theirs: torch.nn.Module) -> None:
    """Give a transformers model the weights of ours."""
    native = {weight.name: weight.local_tensor for weight in ours.shards}
    named = dict(theirs.named_parameters())
    for tensor in hf_tensors(ours.config):
        for mapping in tensor.row_mappings:
            rows = mapping.native_rows(0, mapping.rows)
            named[tensor.name][mapping.hf_start : mapping.hf_start + mapping.rows] = native[mapping.native_name][rows]


def compare(shape: Shape, precision: str, steps: int) -> list[list[str]]:
    """Time both sides in turn; returns the rows of a table."""
    ours = Ours(shape, precision)
    sides = [ours, Transformers(shape, precision, ours.model)]
    generator = torch.Generator().manual_seed(0)
    walls: dict[str, list[float]] = defaultdict(list)
    works: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, float] = {}
    for number in range(steps + 1):
        rows = torch.randint(shape.config.vocab_size, (shape.batch, shape.length + 1), generator=generator)
        for side in sides if number % 2 else sides[::-1]:
            wall, work = time.perf_counter(), time.process_time()
            losses[side.name] = side.step(rows)
            if number:  # the first step warms up
                walls[side.name].append(time.perf_counter() - wall)
                works[side.name].append(time.process_time() - work)
    tokens, theirs = shape.batch * shape.length, Transformers.name
    return [
        [
            name,
            f"{tokens / min(walls[name]):,.0f}",
            f"{tokens / statistics.median(walls[name]):,.0f}",
            f"{min(walls[theirs]) / min(walls[name]):.2f}x",
            f"{min(works[name]):.3f}",
            f"{min(works[theirs]) / min(works[name]):.2f}x",
            f"{losses[name]:.4f}",
        ]
        for name in (Ours.name, theirs)
    ]


def profile(name: str, step: Callable[[], object], steps: int) -> None:
    """Print where a side's time goes, by kernel."""
    from torch.profiler import ProfilerActivity

    step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    averages = sorted(found.key_averages(), key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in averages)
    rows = [
        [each.key, f"{each.count / steps:.0f}", f"{each.self_cpu_time_total / steps / 1000:.2f}",
         f"{each.self_cpu_time_total / total:.1%}"]
        for each in averages[:18]
    ]  # fmt: skip
    table(f"{name}: {total / steps / 1000:.1f} ms a step, by operation", ["operation", "calls", "ms", "share"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*shapes(), "all"], default="all")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each side")
    parser.add_argument("--threads", type=int, help="threads of both sides (default: one for each core)")
    parser.add_argument("--profile", action="store_true", help="show where the time of both sides goes")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for name, shape in shapes().items():
        if arguments.model not in (name, "all"):
            continue
        config = shape.config
        title = (
            f"{name}: {config.layers} layers of {config.hidden}, ffn {config.ffn}, vocabulary {config.vocab_size}, "
            f"{shape.batch} x {shape.length} tokens, {arguments.precision}, {torch.get_num_threads()} threads"
        )
        columns = ["side", "tokens/s best", "median", "ratio", "CPU seconds", "ratio", "loss"]
        table(title, columns, compare(shape, arguments.precision, arguments.steps))
        if arguments.profile:
            rows = torch.randint(config.vocab_size, (shape.batch, shape.length + 1))
            ours = Ours(shape, arguments.precision)
            for side in (ours, Transformers(shape, arguments.precision, ours.model)):
                profile(side.name, partial(side.step, rows), steps=3)


if __name__ == "__main__":
    main()

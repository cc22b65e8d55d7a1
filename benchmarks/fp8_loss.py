"""The loss of fp8 beside that of bf16, on real text: the same fresh weights, the same batches, step by step.

    python benchmarks/fp8_loss.py [--model llama3.2-1b] [--steps 200] [--length 8192] [--rows 4]

Text comes from the machine itself (`corpus.py`), 16 million bytes of it, with a byte-level BPE of 32k tokens trained on
it. Without a GPU a small model multiplies in float8 on the CPU: slowly, with the same roundings. Prints the loss at
some steps, as the mean of the last ten, and the largest distance between the two; asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from pathlib import Path

import orjson
import torch
from tokenizers import Tokenizer

from corpus import byte_level_bpe, gather
from measure import table
from trainshed.catalog import model_preset
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.models.parameters import parameter_count
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
VOCABULARY = 32_000
SMALL = ModelConfig.model_validate(
    {
        "family": "llama",
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 768,
        "vocab_size": VOCABULARY,
        "max_positions": 8192,
        "rope": {"base": 500000.0},
        "tied_embeddings": True,
    }
)
"""What two cores train in minutes."""
OPTIONS = Optimizer(lr=6e-4, weight_decay=0.1)
WARMUP, WINDOW = 20, 10


def text_rows(length: int, count: int) -> torch.Tensor:
    """Return rows of tokens, in the order of the documents: int64 [count, length + 1]; they repeat if there are few."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = gather(Path(folder) / "corpus.jsonl", 16)
        tokenizer = Tokenizer.from_file(
            str(byte_level_bpe(corpus, Path(folder) / "bpe", VOCABULARY) / "tokenizer.json")
        )
        texts = [orjson.loads(line)["text"] for line in corpus.read_bytes().splitlines()]
    end = tokenizer.token_to_id("<|endoftext|>")
    stream = [token for encoding in tokenizer.encode_batch(texts) for token in [*encoding.ids, end]]
    rows = torch.tensor(stream[: len(stream) // (length + 1) * (length + 1)]).view(-1, length + 1)
    return rows[torch.arange(count) % len(rows)]


def losses(config: ModelConfig, precision: str, rows: torch.Tensor, rows_per_step: int) -> list[float]:
    """Train on the rows, so many a step, and return the loss of each step."""
    layout = resolve_layout(Layout.model_validate({"micro_batch": rows_per_step}), config)
    model = build_model(
        config,
        single_rank_mesh(layout, DEVICE),
        sequence_length=rows.shape[1] - 1,
        precision=precision,
        regularization=Regularization(),
        compile_blocks=DEVICE.type == "cuda",
    )
    init_model(model, seed=0)
    runner = StepRunner(model, AdamW(model.shards, OPTIONS, DEVICE))
    pending = []
    started = time.perf_counter()
    batches = rows.split(rows_per_step)
    for number, batch in enumerate(batches):
        lr = OPTIONS.lr * min(1.0, (number + 1) / WARMUP) * (1 + math.cos(math.pi * number / len(batches))) / 2
        inputs, labels = batch[:, :-1].contiguous().to(DEVICE), batch[:, 1:].contiguous().to(DEVICE)
        pending.append(runner.step(LocalBatch(rows_per_step, inputs, labels), rows_per_step, lr))
        if (number + 1) % 50 == 0:
            seconds = (time.perf_counter() - started) / (number + 1)
            print(f"{precision}: step {number + 1}, loss {pending[-1].read().loss:.4f}, {seconds:.2f} s", flush=True)
    return [metrics.read().loss for metrics in pending]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b", help="a preset; a small model is used without a GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=8192 if DEVICE.type == "cuda" else 256)
    parser.add_argument("--rows", type=int, default=4, help="in a step")
    arguments = parser.parse_args()
    if arguments.steps < WINDOW:
        parser.error(f"losses are means of {WINDOW} steps: --steps {WINDOW} at least")
    config = SMALL
    if DEVICE.type == "cuda":
        config = model_preset(arguments.model).model_copy(update={"vocab_size": VOCABULARY})
    rows = text_rows(arguments.length, arguments.steps * arguments.rows)
    device = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"
    print(
        f"{device}, torch {torch.__version__}, {parameter_count(config) / 1e6:,.0f}M parameters, "
        f"{rows[:, 1:].numel():,} tokens in {arguments.steps} steps"
    )
    results: dict[str, torch.Tensor] = {}
    for precision in ("bf16", "fp8"):
        results[precision] = torch.tensor(losses(config, precision, rows, arguments.rows), dtype=torch.float64)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    windows = {name: values.unfold(0, WINDOW, 1).mean(1) for name, values in results.items()}
    apart = windows["fp8"] / windows["bf16"] - 1
    shown_steps = sorted({*range(WINDOW, arguments.steps + 1, max(WINDOW, arguments.steps // 8)), arguments.steps})
    body = [
        [str(step), *(f"{windows[name][step - WINDOW]:.4f}" for name in results), f"{apart[step - WINDOW]:+.3%}"]
        for step in shown_steps
    ]
    table(f"Loss, mean of the last {WINDOW} steps", ["step", *results, "fp8 to bf16"], body)
    print(f"\n  at most {apart.abs().max():.3%} apart; {apart[-1]:+.3%} at the end")


if __name__ == "__main__":
    main()

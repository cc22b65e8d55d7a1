"""Fine-tuning steps on one GPU: the torch engine beside transformers and PEFT, in one run.

    python benchmarks/finetune_gpu.py [--length 4096 8192] [--tokens 8192] [--document 600] [--what lora full]

LoRA (rank 16 on all projections, base frozen in bf16) on Llama-3-8B whole; full fine-tuning (fp32 weights and Adam
states) on 16 of its layers, because 8B of them do not fit. Rows of packed conversations of random lengths; about half
of their tokens are learned. The peer has what a knowledgeable user gives it: conversations flattened into one row with
variable-length flash attention, every layer compiled, fused AdamW; for LoRA the base in bf16. A second peer has
Liger's fused loss too, where that package is installed. Random weights on both sides: speed does not depend on them.
Prints tokens/s of all and of learned tokens, and memory; asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from engine_gpu import DEVICE, OPTIONS, document_starts, measured
from measure import table
from trainshed.catalog import model_preset
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.models.decoder import Regularization
from trainshed.models.loss import IGNORE_INDEX
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Lora

LORA = Lora(rank=16, alpha=32.0, targets=("attn", "mlp"))
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Batch:
    """Rows of packed conversations, and the share of their tokens that is learned."""

    def __init__(self, config: ModelConfig, rows: int, length: int, mean: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.rows, self.length = rows, length
        shape = (rows, length)
        self.tokens = torch.randint(0, config.vocab_size, shape, generator=generator, device=DEVICE)
        self.starts = [document_starts(rows, length, mean, seed) for seed in range(5)]
        learned = torch.rand((rows, length // 32), generator=generator, device=DEVICE) < 0.5
        labels = torch.roll(self.tokens, -1, 1)
        self.labels = torch.where(learned.repeat_interleave(32, 1), labels, IGNORE_INDEX)
        self.learned = int((self.labels != IGNORE_INDEX).sum())


def ours(config: ModelConfig, batch: Batch, lora: Lora | None, precision: str) -> Callable[[], object]:
    """A function that makes one step with our engine."""
    layout = resolve_layout(Layout.model_validate({"micro_batch": batch.rows}), config)
    model = build_model(
        config,
        single_rank_mesh(layout, DEVICE),
        sequence_length=batch.length,
        precision=precision,
        regularization=Regularization(),
        compile_blocks=True,
        lora=lora,
    )
    with torch.no_grad():
        for shard in (*model.shards, *model.frozen_shards):
            # Fresh weights of our own, which are the same on any layout, would take minutes for 8B.
            shard.local_tensor.normal_(std=0.02) if shard.parameter.init != "ones" else shard.local_tensor.fill_(1.0)
    runner = StepRunner(model, AdamW(model.shards, OPTIONS, DEVICE))
    starts = cycle(batch.starts)

    def step() -> object:
        local = LocalBatch(batch.rows, batch.tokens, batch.labels, document_starts=next(starts))
        return runner.step(local, batch.rows, OPTIONS.lr)

    return step


def varlen_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface over a flattened row: [1, heads, T, D] each."""
    ends, longest = options["cu_seq_lens_q"], options["max_length_q"]
    query, key, value = (x[0].transpose(0, 1).to(torch.bfloat16) for x in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(query, key, value, ends, ends, longest, longest, 0.0, True, False)[0]
    return out[None], None


def peer(config: ModelConfig, batch: Batch, lora: Lora | None, precision: str, *, liger: bool) -> Callable[[], object]:
    """The same with transformers, and PEFT for LoRA."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True)
    AttentionInterface.register("varlen", varlen_attention)
    shape: dict[str, Any] = {
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": batch.length,
        "rope_theta": 500000.0,
        "attn_implementation": "varlen",
    }
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = model.to(torch.bfloat16)
        adapters = LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=MODULES, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    model.train()
    for layer in (model.base_model.model if lora is not None else model).model.layers:
        layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=OPTIONS.lr, betas=OPTIONS.betas, weight_decay=0.1, fused=True)
    total = batch.rows * batch.length
    tokens, labels = batch.tokens.view(1, total), batch.labels.view(1, total)
    columns = torch.arange(batch.length, device=DEVICE)
    positions = (columns - batch.starts[0]).view(1, total)
    begins = (positions[0] == 0).nonzero()[:, 0]
    ends = torch.cat([begins, torch.tensor([total], device=DEVICE)]).to(torch.int32)
    longest = int(ends.diff().max())
    packing = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(
                input_ids=tokens,
                position_ids=positions,
                labels=labels,
                shift_labels=labels,
                use_cache=False,
                **packing,
            ).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--document", type=int, default=600, help="mean length of a conversation")
    parser.add_argument("--what", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    parser.add_argument("--layers", type=int, help="of both models; left out: 32 for LoRA, 16 in full")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for what in arguments.what:
        lora = LORA if what == "lora" else None
        layers = arguments.layers or (32 if lora is not None else 16)
        config = model_preset("llama3-8b").model_copy(update={"layers": layers})
        for length in arguments.length:
            batch = Batch(config, arguments.tokens // length, length, arguments.document)
            sides: list[tuple[str, Callable[..., Callable[[], object]], str]] = [
                (f"trainshed {precision}", ours, precision) for precision in arguments.precision
            ]
            sides.append(("transformers", partial(peer, liger=False), "bf16"))
            if importlib.util.find_spec("liger_kernel") is not None:
                sides.append(("transformers, Liger", partial(peer, liger=True), "bf16"))
            first: float | None = None
            for name, build, precision in sides:
                torch.cuda.reset_peak_memory_stats()
                try:
                    step = build(config, batch, lora, precision)
                    seconds, warm, _ = measured(step, arguments.steps)
                except torch.OutOfMemoryError as error:
                    print(f"{what} {length} {name}: {str(error).splitlines()[0]}", flush=True)
                    continue
                first = first or seconds
                memory = torch.cuda.max_memory_allocated() / 2**30
                rate = batch.rows * length / seconds
                rows.append(
                    [
                        f"{what}, {layers} layers",
                        str(length),
                        name,
                        f"{rate:,.0f}",
                        f"{batch.learned / seconds:,.0f}",
                        f"{memory:.1f} GiB",
                        f"{warm:.0f} s",
                        f"{seconds / first:.2f}x",
                    ]
                )
                print(rows[-1], flush=True)
                del step
                torch.compiler.reset()
                gc.collect()
                torch.cuda.empty_cache()
    columns = ["what", "length", "side", "tokens/s", "learned/s", "memory", "warm-up", "time to ours"]
    table(f"fine-tuning, {arguments.tokens} tokens a step, conversations of {arguments.document}", columns, rows)


if __name__ == "__main__":
    main()

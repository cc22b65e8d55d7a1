"""Generation: our generator beside transformers' `generate`, the same weights, in one run.

    python benchmarks/serve.py                      # on the CPU, a small model, fp32
    python benchmarks/serve.py --gpu [--layers 16]  # on one GPU, a Llama of about a billion weights, bf16

Every answer has the same length and is the likeliest token each time; transformers gets a batch of equal prompts, which
is what it does best. Prints tokens a second and the ratio; asserts nothing. Rounding differs with the number of rows,
so on random weights the two may choose different tokens after a while: `same` says after how many.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from measure import table
from trainshed.recipe import ModelConfig
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.loading import load_model
from trainshed.serve.request import GenerationEvent, GenerationFailed, GenerationFinished, OutputToken, SamplingParams
from trainshed.serve.scheduler import ModelGenerator

CPU_MODEL: dict[str, Any] = {"layers": 6, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab_size": 8192}
# Llama-3.2-1B's sizes.
GPU_MODEL: dict[str, Any] = {
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab_size": 128256,
}


def saved_model(sizes: dict[str, Any], folder: Path, dtype: torch.dtype, device: str) -> ModelConfig:
    """Random weights as transformers saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=sizes["layers"],
                hidden_size=sizes["hidden"],
                num_attention_heads=sizes["heads"],
                num_key_value_heads=sizes["kv_heads"],
                intermediate_size=sizes["ffn"],
                vocab_size=sizes["vocab_size"],
                max_position_embeddings=8192,
                tie_word_embeddings=False,
                initializer_range=sizes["hidden"] ** -0.5,
            )
        )
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    return ModelConfig.model_validate({"family": "llama", **sizes, "max_positions": 8192, "rope": {"base": 1e4}})


def ours(
    generator: ModelGenerator, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[float, float, list[list[int]]]:
    """Seconds for all answers, seconds to the last first token, and the tokens."""
    answers: list[list[int]] = [[] for _ in prompts]
    left, over = [len(prompts)], threading.Event()
    firsts: list[float] = []

    def tell(number: int, event: GenerationEvent) -> None:
        if isinstance(event, OutputToken):
            if not answers[number]:
                firsts.append(time.perf_counter())
            answers[number].append(event.token)
        if isinstance(event, GenerationFailed):
            raise SystemExit(event.reason)
        if isinstance(event, GenerationFinished):
            left[0] -= 1
            if not left[0]:
                over.set()

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        generator.submit(prompt, sampling, lambda event, number=number: tell(number, event))
    over.wait()
    return time.perf_counter() - began, max(firsts) - began, answers


def theirs(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """The same with transformers: seconds and the tokens."""
    tokens = torch.tensor(prompts, device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answers = found[:, tokens.shape[1] :].tolist()
    return time.perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--eager", action="store_true", help="ours without CUDA graphs, too")
    arguments = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if arguments.gpu else ("cpu", torch.float32)
    sizes = dict(GPU_MODEL if arguments.gpu else CPU_MODEL)
    sizes["layers"] = arguments.layers or sizes["layers"]
    batches = arguments.batch or ([1, 8, 64] if arguments.gpu else [1, 8])
    new_tokens = arguments.new or (256 if arguments.gpu else 64)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as place:
        config = saved_model(sizes, Path(place), dtype, device)
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        chunk = load_model(place, device=device, dtype="bf16" if arguments.gpu else "fp32").decoder
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(config.vocab_size, (batch, arguments.prompt), generator=generator).tolist()
            for eager in [False, True] if arguments.eager else [False]:
                length = arguments.prompt + new_tokens
                answering = ModelGenerator(chunk, ServingLimits(batch, length, batch * length), eager=eager)
                ours(answering, prompts, 4)
                theirs(peer, prompts, 4)
                # In turn, so that whatever else the machine does falls on both.
                rounds = [
                    (ours(answering, prompts, new_tokens), theirs(peer, prompts, new_tokens))
                    for _ in range(arguments.rounds)
                ]
                answering.close()
                seconds, first, found = min((each for each, _ in rounds), key=lambda each: each[0])
                peer_seconds, expected = min((each for _, each in rounds), key=lambda each: each[0])
                same = min(_same(a, b) for a, b in zip(found, expected, strict=True))
                rows.append(
                    [
                        f"{batch}{' eager' if eager else ''}",
                        f"{batch * new_tokens / seconds:,.0f}",
                        f"{batch * new_tokens / peer_seconds:,.0f}",
                        f"{peer_seconds / seconds:.2f}x",
                        f"{first * 1000:.0f} ms",
                        f"{(seconds - first) / max(new_tokens - 1, 1) * 1000:.2f} ms",
                        f"{same} of {new_tokens}",
                    ]
                )
                print(rows[-1], flush=True)
                del answering
                gc.collect()
    name = torch.cuda.get_device_name() if arguments.gpu else f"CPU, {torch.get_num_threads()} threads"
    columns = ["batch", "ours tokens/s", "transformers", "ratio", "first token", "per step", "same"]
    table(f"{name}, torch {torch.__version__}, {config.layers} layers of {config.hidden}", columns, rows)


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


if __name__ == "__main__":
    main()

"""Adapters on a GPU: run by hand with `pytest -m gpu tests/serve/test_adapters_gpu.py`; CI has none.

The reference is the same on the CPU in fp32, which `test_adapters.py` holds against PEFT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.one_process import token_rows
from support.runs.small_generators import ask, begin, fresh_chunk, generating
from trainshed.checkpoints.lora.adapter import LoraAdapter
from trainshed.checkpoints.lora.find import open_adapter
from trainshed.models.decoder import DecoderStage
from trainshed.recipe import Lora, ModelConfig
from trainshed.serve.adapters import AdapterBank
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.loading import build_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
CONFIG = ModelConfig.model_validate(
    {
        "family": "llama",
        "layers": 3,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_positions": 600,
        "ffn": 512,
        "rope": {"base": 10000.0},
    }
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"rank": 16, "alpha": 32.0, "targets": ["attn", "mlp"]},
    "dora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"], "dora": True},
}
ROOM = ServingLimits(8, 600, 4800)


def adapters_in(folder: Path) -> dict[str, LoraAdapter]:
    found: dict[str, LoraAdapter] = {}
    for seed, (name, keys) in enumerate(ADAPTERS.items()):
        run = save_lora_checkpoint(folder / name, CONFIG, Lora.model_validate(keys), "hf://org/name", seed=seed)
        found[name] = open_adapter(str(run), CONFIG)
    return found


def copied(chunk: DecoderStage, dtype: torch.dtype, device: torch.device | str) -> DecoderStage:
    other = build_decoder(CONFIG, dtype, torch.device(device))
    other.load_state_dict({name: each.to(device, dtype) for name, each in chunk.state_dict().items()}, assign=True)
    return other


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_adapters_in_one_batch_answer_as_the_cpu_does(eager: bool, tmp_path: Path) -> None:
    from trainshed.models.cached_decoder import put_gates_first

    adapters = adapters_in(tmp_path)
    chunk = fresh_chunk(CONFIG)
    reference, served = copied(chunk, torch.float32, "cpu"), copied(chunk, torch.bfloat16, GPU)
    put_gates_first(reference)
    put_gates_first(served)
    asked = [(name, length) for length in (1, 30, 300) for name in (None, *ADAPTERS)]
    prompts = [token_rows(CONFIG, 1, length, seed=length)[0].tolist() for _, length in asked]
    with (
        generating(served, room=ROOM, adapters=AdapterBank(served, adapters), eager=eager) as generator,
        generating(reference, room=ROOM, adapters=AdapterBank(reference, adapters)) as exact,
    ):
        keys: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        answers = [
            begin(generator, prompt, adapter=name, **keys) for (name, _), prompt in zip(asked, prompts, strict=True)
        ]
        for (name, _), prompt, answer in zip(asked, prompts, answers, strict=True):
            tokens = prompt + answer.wait().tokens
            scored = ask(exact, tokens, adapter=name, max_tokens=0, prompt_logprobs=True).prompt_pieces
            wanted = torch.tensor([piece.logprob for piece in scored[len(prompt) - 1 :]])
            apart = (torch.tensor([piece.logprob for piece in answer.pieces]) - wanted).abs()
            assert apart.median() < 0.05, (name, len(prompt), apart)
            assert apart.max() < 0.25, (name, len(prompt), apart)
        graphs = set(generator._runner._graphs)
        assert bool(graphs) is not eager
        plain = ask(generator, prompts[0], **keys)
        assert len(plain.tokens) == 12
        if not eager:
            assert (1, False) in generator._runner._graphs, "rows of the base alone have the graph without adapters"

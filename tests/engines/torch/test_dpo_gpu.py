"""Preference losses on a GPU: run by hand with `pytest -m gpu tests/engines/torch/test_dpo_gpu.py`; CI has none."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import gradient
from support.models.tiny_models import tiny_config
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import ReferenceModel, StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.collectives import SINGLE_RANK
from trainshed.models.decoder import Regularization
from trainshed.models.loss import IGNORE_INDEX, VocabularyShard
from trainshed.models.preference_loss import (
    PreferenceRule,
    linear_document_logps,
    linear_preference_loss,
    packed_documents,
)
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout
from trainshed.recipe.train import Optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTH, BATCH = 256, 4
DENSE = tiny_config("llama", hidden=256, head_dim=64, ffn=512, vocab_size=1024, max_positions=512)


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("length_normalized", [False, True])
def test_pairs_of_answers_have_the_loss_of_a_cpu(length_normalized: bool, frozen_head: bool) -> None:
    torch.manual_seed(0)
    rule, words = PreferenceRule(0.5, 0.1, length_normalized), 1003
    here = [torch.randn(2 * LENGTH, 64).requires_grad_(), (torch.randn(words, 64) / 8).requires_grad_(not frozen_head)]
    there = [x.detach().cuda().requires_grad_(x.requires_grad) for x in here]
    labels = torch.randint(0, words, (2 * LENGTH,))
    starts = (torch.arange(LENGTH) // 30 * 30).repeat(2, 1)

    def run(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device, vocabulary = hidden.device, VocabularyShard(words)
        documents = packed_documents(starts.to(device), torch.arange(LENGTH, device=device), SINGLE_RANK)
        arguments = (labels.to(device), documents)
        reference = linear_document_logps(0.9 * hidden, weight, *arguments, rule, vocabulary)
        scale = torch.tensor(1 / 8, device=device)
        return linear_preference_loss(hidden, weight, *arguments, reference, scale, rule, vocabulary)

    expected, actual = run(*here), run(*there)
    torch.testing.assert_close([x.cpu() for x in actual], list(expected), rtol=1e-3, atol=1e-3)
    expected[0].backward()
    actual[0].backward()
    for x, y in zip(there, here, strict=True):
        if y.grad is not None:
            torch.testing.assert_close(gradient(x).cpu(), y.grad, rtol=1e-2, atol=2e-3 * y.grad.abs().max().item())


def test_a_gpu_learns_a_preference_in_bf16() -> None:
    layout, place = resolve_layout(Layout.model_validate({"micro_batch": 2}), DENSE), torch.device("cuda")
    regularization = Regularization(preference=PreferenceRule(0.5))
    model, base = (
        build_model(
            DENSE,
            single_rank_mesh(layout, place),
            sequence_length=LENGTH,
            precision="bf16",
            regularization=regularization,
            compile_blocks=True,
            frozen=frozen,
        )
        for frozen in (False, True)
    )
    for each in (model, base):
        init_model(each, seed=1)
    runner = StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), place), ReferenceModel(base))
    generator = torch.Generator().manual_seed(0)
    metrics = []
    for _ in range(20):
        # Documents of 32 tokens: odd words in those that are preferred, even ones in the others.
        tokens = 2 * torch.randint(1, DENSE.vocab_size // 2, (BATCH, LENGTH), generator=generator)
        starts = (torch.arange(LENGTH) // 32 * 32).expand(BATCH, -1)
        tokens += (starts // 32 + 1) % 2
        tokens %= DENSE.vocab_size
        labels = tokens.roll(-1, 1)
        labels[:, 31::32] = IGNORE_INDEX
        batch = LocalBatch(BATCH, tokens.cuda(), labels.cuda(), document_starts=starts.contiguous().cuda())
        metrics.append(runner.step(batch, BATCH, 1e-3).read())
    torch.compiler.reset()
    assert (metrics[0].rewards["reward_chosen"], metrics[0].pairs) == (0.0, BATCH * LENGTH // 64)
    assert metrics[0].loss == pytest.approx(0.693147, abs=1e-5)
    assert metrics[-1].loss < 0.1
    assert metrics[-1].rewards["reward_accuracy"] > 0.9

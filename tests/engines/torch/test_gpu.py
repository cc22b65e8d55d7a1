"""What only a GPU can show: run by hand with `pytest -m gpu tests/engines/torch`; CI has none."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import gradient
from trainshed.data.prompts import ValidationPrompts
from trainshed.engines.torch import optimizer
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import RankModel, build_model, describe_float8_exclusions
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.sample_answers import SampleAnswers
from trainshed.engines.torch.step import StepMetrics, StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.attention import AttentionRule, causal_attention
from trainshed.models.collectives import AxisGroup, ParallelAxes
from trainshed.models.decoder import Regularization
from trainshed.models.documents import document_masks
from trainshed.models.loss import linear_cross_entropy
from trainshed.models.moe import GroupedExperts
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, Lora, ModelConfig
from trainshed.recipe.train import Optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DENSE = ModelConfig.model_validate(
    {
        "family": "llama",
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 512,
        "vocab_size": 1024,
        "max_positions": 512,
        "rope": {"base": 10000.0},
    }
)
EXPERTS = ModelConfig.model_validate(
    {
        "family": "qwen3_moe",
        "layers": 3,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 1024,
        "max_positions": 512,
        "rope": {"base": 10000.0},
        "moe": {"experts": 8, "top_k": 2, "ffn": 128, "shared_ffn": 128},
    }
)
_PATTERN = {"sliding_window": 48, "attention_pattern": ["window", "full"]}
_SIZES = DENSE.model_dump(include={"layers", "hidden", "heads", "kv_heads", "ffn", "vocab_size", "max_positions"})
FAMILIES = {
    # Scores and logits that are bent; two rotary tables and norms of 1 + weight; norms over all heads and YaRN.
    "gemma2": {"rope": {"base": 1e4}, "attention_soft_cap": 5.0, "logit_soft_cap": 3.0, **_PATTERN},
    "gemma3_text": {"rope": {"base": 1e6, "local_base": 1e4}, "query_scalar": 32, **_PATTERN},
    "olmo3": {
        "rope": {"base": 1e4, "local_base": 1e4, "scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 64}},
        **_PATTERN,
    },
    "nemotron": {"rope": {"base": 1e4, "fraction": 0.5}},
    # Sinks, by FlexAttention's logarithm of its sum; experts with biases, by grouped products.
    "gpt_oss": {
        "rope": {"base": 1e4},
        "ffn": None,
        "swiglu_limit": 1.0,
        "moe": {"experts": 8, "top_k": 2, "ffn": 128, "router_bias": True},
        **_PATTERN,
    },
    "llama4_text": {
        "rope": {"base": 1e4, "interleaved": True, "local_only": True},
        "attention_chunk": 96,  # the last chunk is a short one
        "attention_pattern": ["chunk", "full"],
        "attention_temperature": {"scale": 0.5, "tokens": 32},
        "qk_l2_norm": True,
        "moe": {
            "experts": 8,
            "top_k": 1,
            "ffn": 128,
            "shared_ffn": 128,
            "scores": "sigmoid",
            "normalize_top_k": False,
            "scale_inputs": True,
            "every": 2,
        },
    },
}
"""What families add to the decoder."""
LENGTH, BATCH = 256, 4


def outcomes(
    config: ModelConfig,
    device: str,
    precision: str,
    steps: int = 6,
    *,
    recompute: str = "none",
    dropout: float = 0.0,
    mean_document: int | None = None,
    lora: Lora | None = None,
    states: str | None = None,
    offload: str | None = None,
) -> list[StepMetrics]:
    keys = {"micro_batch": 2, "recompute": recompute, "offload": offload}
    layout = resolve_layout(Layout.model_validate(keys), config)
    place = torch.device(device)
    model: RankModel = build_model(
        config,
        single_rank_mesh(layout, place),
        sequence_length=LENGTH,
        precision=precision,
        regularization=Regularization(z_loss=1e-4, moe_balance=0.01, moe_z=1e-3, dropout=dropout, seed=7),
        compile_blocks=place.type == "cuda",
        lora=lora,
    )
    init_model(model, seed=1)
    options = Optimizer.model_validate({"lr": 1e-3, "states": states})
    runner = StepRunner(model, AdamW(model.shards, options, place))
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        rows = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1), generator=generator)
        drops = dropout or (lora is not None and lora.dropout)
        samples = torch.arange(step * BATCH, (step + 1) * BATCH, device=place) if drops else None
        starts = None if mean_document is None else random_documents(mean_document, generator).to(place)
        inputs, labels = rows[:, :-1].contiguous().to(place), rows[:, 1:].contiguous().to(place)
        batch = LocalBatch(BATCH, inputs, labels, samples, document_starts=starts)
        found.append(runner.step(batch, BATCH, 1e-3).read())
    torch.compiler.reset()
    return found


def random_documents(mean: int, generator: torch.Generator) -> torch.Tensor:
    """Document starts [BATCH, LENGTH] of documents of other lengths in every batch."""
    begins = torch.rand(BATCH, LENGTH, generator=generator) < 1 / mean
    columns = torch.where(begins, torch.arange(LENGTH), 0)
    return columns.cummax(1).values


@pytest.mark.parametrize("documents", [None, 60])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_add_trains_as_on_a_cpu(family: str, recompute: str, documents: int | None) -> None:
    config = ModelConfig.model_validate({"family": family, **_SIZES, **FAMILIES[family]})
    there = outcomes(config, "cuda", "bf16", 4, mean_document=documents, recompute=recompute)
    for gpu, cpu in zip(there, outcomes(config, "cpu", "fp32", 4, mean_document=documents), strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=3e-2)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["dense", "experts", "window"])
def test_documents_are_kept_apart_as_on_a_cpu(family: str, recompute: str) -> None:
    windowed = DENSE.model_copy(update={"sliding_window": 48, "family": "mistral"})
    config = {"dense": DENSE, "experts": EXPERTS, "window": windowed}[family]
    there = outcomes(config, "cuda", "bf16", 4, mean_document=60, recompute=recompute)
    here, without = outcomes(config, "cpu", "fp32", 4, mean_document=60), outcomes(config, "cpu", "fp32", 1)
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=3e-2)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=0.1)
    assert abs(here[0].grad_norm - without[0].grad_norm) > 1e-3 * without[0].grad_norm


@pytest.mark.parametrize("cp", [AxisGroup(), AxisGroup(2, 0), AxisGroup(2, 1)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_blocks_attend_as_the_plain_mask_does(cp: AxisGroup, window: int | None, soft_cap: float | None) -> None:
    generator, rule = torch.Generator().manual_seed(0), AttentionRule(window, 0.2, soft_cap)
    starts = torch.where(torch.rand(2, 1024, generator=generator) < 1 / 100, torch.arange(1024), 0).cummax(1).values
    plain, blocks = (
        document_masks(starts, cp, window, blocks=False),
        document_masks(starts.cuda(), cp, window, blocks=True),
    )
    for mask, block_mask in zip(plain, blocks, strict=True):
        assert isinstance(mask, torch.Tensor)
        shapes = [(mask.shape[-2], 2, 8, 64), (mask.shape[-1], 2, 2, 64), (mask.shape[-1], 2, 2, 64)]
        q, k, v = here = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        expected = causal_attention(q, k, v, rule, mask)
        q, k, v = there = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in here]
        got = causal_attention(q, k, v, rule, block_mask)
        expected.square().sum().backward()
        got.float().square().sum().backward()
        torch.testing.assert_close(got.float().cpu(), expected, rtol=3e-2, atol=3e-2)
        for x, y in zip(there, here, strict=True):
            scale = gradient(y).abs().max().item()
            torch.testing.assert_close(gradient(x).float().cpu(), y.grad, rtol=5e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-3), ("bf16", 3e-2)])
def test_a_gpu_computes_what_a_cpu_computes(config: ModelConfig, precision: str, bound: float) -> None:
    # fp32 products may be rounded to TF32 by nobody here; bf16 is held against the CPU's fp32.
    there, here = outcomes(config, "cuda", precision), outcomes(config, "cpu", "fp32")
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=bound)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=5 * bound)
        assert gpu.loss_terms == pytest.approx(cpu.loss_terms, rel=bound, abs=1e-9)


ADAPTERS: dict[str, tuple[ModelConfig, dict[str, object]]] = {
    "lora": (DENSE, {"targets": ["all-linear"]}),
    "dora with dropout": (DENSE, {"targets": ["attn", "mlp"], "dora": True, "dropout": 0.2}),
    "some projections": (DENSE, {"targets": ["v_proj", "up_proj"], "rank": 3}),
    "int8": (DENSE, {"targets": ["attn", "mlp"], "quantize": "int8"}),
    "nf4": (DENSE, {"targets": ["attn"], "quantize": "nf4", "dora": True}),
    "experts": (EXPERTS, {"targets": ["all-linear"], "rank": 5}),
}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("config", "options"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_on_a_gpu_train_as_on_a_cpu(config: ModelConfig, options: dict[str, object], recompute: str) -> None:
    lora = Lora.model_validate({"rank": 8, "alpha": 16, **options})
    there = outcomes(config, "cuda", "bf16", 4, lora=lora, recompute=recompute)
    here = outcomes(config, "cpu", "fp32", 4, lora=lora)
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=3e-2)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=0.15)


def test_fp8_products_with_frozen_weights_follow_bf16() -> None:
    lora = Lora.model_validate({"rank": 8, "alpha": 16, "targets": ["all-linear"]})
    wide, narrow = (outcomes(DENSE, "cuda", precision, lora=lora) for precision in ("bf16", "fp8"))
    assert [step.loss for step in narrow] == pytest.approx([step.loss for step in wide], rel=3e-2)
    assert [step.grad_norm for step in narrow] == pytest.approx([step.grad_norm for step in wide], rel=0.2)
    assert [step.loss for step in narrow] != [step.loss for step in wide], "the products were not in fp8"


def test_states_in_bf16_are_rounded_as_on_a_cpu() -> None:
    there, here = (outcomes(DENSE, device, "fp32", states="bf16") for device in ("cuda", "cpu"))
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=2e-3)


def test_tensors_are_updated_alike_together_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    together = outcomes(DENSE, "cuda", "fp32")
    monkeypatch.setattr(optimizer, "FUSED_MAX_ELEMENTS", 0)
    apart = outcomes(DENSE, "cuda", "fp32")
    for one, other in zip(together, apart, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_recomputing_changes_nothing_that_matters(config: ModelConfig, recompute: str) -> None:
    plain, again = (outcomes(config, "cuda", "bf16", 4, recompute=each) for each in ("none", recompute))
    for one, other in zip(plain, again, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)


@pytest.mark.parametrize("mean_document", [None, 60])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_activations_that_wait_in_host_memory_change_nothing(
    config: ModelConfig, precision: str, recompute: str, mean_document: int | None
) -> None:
    plain, offloaded = (
        outcomes(config, "cuda", precision, 4, recompute=recompute, mean_document=mean_document, offload=offload)
        for offload in (None, "activations")
    )
    for one, other in zip(plain, offloaded, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_dropout_drops_what_a_cpu_drops(recompute: str) -> None:
    """More layers than PyTorch would compile one by one; without dropout the gradient is another."""
    deep = DENSE.model_copy(update={"layers": 10})
    there = outcomes(deep, "cuda", "fp32", 4, dropout=0.2, recompute=recompute)
    here, without = outcomes(deep, "cpu", "fp32", 4, dropout=0.2), outcomes(deep, "cpu", "fp32", 1)
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=2e-4)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=1e-3)
    assert abs(there[0].grad_norm - without[0].grad_norm) > 2e-2 * without[0].grad_norm


def test_projections_that_fp8_does_not_take_are_counted() -> None:
    odd = DENSE.model_copy(update={"ffn": 500})
    layout = resolve_layout(Layout.model_validate({"micro_batch": 2}), odd)
    place = single_rank_mesh(layout, torch.device("cuda"))
    built = [
        build_model(config, place, sequence_length=LENGTH, precision="fp8", regularization=Regularization())
        for config in (DENSE, odd)
    ]
    said = [describe_float8_exclusions(model) for model in built]
    # Gate and up together have 1,000 rows, and down 500 columns: neither is a multiple of 16.
    assert said == [None, "8 of 16 projections stay in bf16: fp8 products take sizes in multiples of 16"]


def test_fp8_follows_bf16() -> None:
    wide, narrow = outcomes(DENSE, "cuda", "bf16"), outcomes(DENSE, "cuda", "fp8")
    assert [each.loss for each in narrow] == pytest.approx([each.loss for each in wide], rel=3e-2)
    assert [each.loss for each in narrow] != [each.loss for each in wide], "the products were not in fp8"


def test_grouped_products_equal_products_one_by_one() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        experts = GroupedExperts(EXPERTS, ParallelAxes())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    counts = torch.tensor([5, 0, 17, 1, 64, 33, 0, 80], device="cuda")
    rows = torch.randn(200, EXPERTS.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = rows.detach().float().requires_grad_()
    together, apart = experts(rows, counts), None
    together.float().square().sum().backward()
    grads = [gradient(parameter).clone() for parameter in experts.parameters()]
    for parameter in experts.parameters():
        parameter.grad = None
    apart = experts(wide, counts)
    apart.square().sum().backward()
    torch.testing.assert_close(together.float(), apart, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(gradient(rows).float(), wide.grad, rtol=5e-2, atol=5e-2)
    for grouped, parameter in zip(grads, experts.parameters(), strict=True):
        scale = gradient(parameter).abs().max().item()
        torch.testing.assert_close(grouped, parameter.grad, rtol=5e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("words", [1000, 1003, 1024])
def test_a_vocabulary_of_any_size_gives_the_loss_of_a_cpu(words: int) -> None:
    torch.manual_seed(0)
    hidden, weight = here = [torch.randn(300, 64).requires_grad_(), (torch.randn(words, 64) / 8).requires_grad_()]
    labels, scale = torch.randint(0, words, (300,)), torch.tensor(1 / 300)
    expected, _ = linear_cross_entropy(hidden, weight, labels, scale, z_loss=1e-3)
    hidden, weight = there = [
        hidden.detach().to("cuda", torch.bfloat16).requires_grad_(),
        weight.detach().cuda().requires_grad_(),
    ]
    found, _ = linear_cross_entropy(hidden, weight, labels.cuda(), scale.cuda(), z_loss=1e-3)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=0)
    for x, y in zip(there, here, strict=True):
        torch.testing.assert_close(
            gradient(x).float().cpu(), y.grad, rtol=5e-2, atol=2e-2 * gradient(y).abs().max().item()
        )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("queries", "window"), [(128, None), (128, 48), (512, 48), (512, 511)])
def test_queries_see_what_is_before_them_as_far_as_the_window(compiled: bool, queries: int, window: int | None) -> None:
    torch.manual_seed(0)
    heads, groups, width, keys = 8, 2, 64, 512
    shapes = [(queries, 2, heads, width), (keys, 2, groups, width), (keys, 2, groups, width)]
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in here]

    def run(inputs: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = inputs
        return causal_attention(q, k, v, AttentionRule(window))

    found = torch.compile(run, fullgraph=True)(there) if compiled else run(there)
    expected = run(here)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    torch.testing.assert_close(found.float().cpu(), expected, rtol=3e-2, atol=3e-2)
    for x, y in zip(there, here, strict=True):
        scale = gradient(y).abs().max().item()
        torch.testing.assert_close(gradient(x).float().cpu(), y.grad, rtol=5e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("packed", [False, True])
def test_prompts_are_answered_as_on_a_cpu(packed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = tuple(tuple(torch.randint(0, 1024, (length,), generator=generator).tolist()) for length in (3, 40, 90))
    prompts = ValidationPrompts(("a", "b", "c"), tokens, answer_tokens=12, end_tokens=frozenset())
    answers = []
    for device in ("cuda", "cpu"):
        layout = resolve_layout(Layout.model_validate({"micro_batch": 2}), DENSE)
        model = build_model(
            DENSE,
            single_rank_mesh(layout, torch.device(device)),
            sequence_length=LENGTH,
            precision="fp32",
            regularization=Regularization(),
            compile_blocks=device == "cuda",
        )
        init_model(model, seed=1)
        answers.append(SampleAnswers(prompts, model, packed=packed).ask().answers)
        torch.compiler.reset()
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0]}) == 3

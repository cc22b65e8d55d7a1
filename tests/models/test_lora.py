"""Adapters compute what PEFT computes, forward and backward, for every option, target and family.

Whole models are compared in float64, where nothing hides behind the rounding of the rest; single modules in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from support.models.one_process import gradients, one_process_model, token_rows
from support.models.tiny_models import random_hf_model, tiny_config
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.engines.torch.model import RankModel
from trainshed.engines.torch.weights import fill_frozen, init_adapters
from trainshed.models.decoder import Regularization
from trainshed.models.layers import CounterDropout, Linear
from trainshed.models.lora import adapters_disabled
from trainshed.models.parameters import AddedRows
from trainshed.recipe import Lora, ModelConfig

ROWS, LENGTH, SEED = 2, 16, 3
SAMPLES = torch.tensor([5, 9])
# What transformers calls the projections, where that is another name; of GPT-2 by the end of the module's path.
GPT2_MODULES = {"o_proj": "attn.c_proj", "up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


class Pair:
    """One model with random adapters twice: PEFT's around transformers', and ours."""

    def __init__(self, family: str, folder: Path, options: dict[str, Any], added: AddedRows | None = None) -> None:
        from peft import LoraConfig, get_peft_model

        self.lora = Lora.model_validate({"rank": 4, "alpha": 6, **options})
        self.config = tiny_config(family)
        hf = random_hf_model(self.config, SEED)
        hf.save_pretrained(folder)
        norm_in_float64(hf.double())
        if self.config.moe is not None:
            hf.set_experts_implementation("eager")  # the others have no float64
        names = [GPT2_MODULES[name] if family == "gpt2" else name for name in self.lora.projections]
        self.theirs = get_peft_model(
            hf,
            LoraConfig(
                r=self.lora.rank,
                lora_alpha=self.lora.alpha,
                lora_dropout=self.lora.dropout,
                target_modules=names,
                use_rslora=self.lora.rslora,
                use_dora=self.lora.dora,
                fan_in_fan_out=family == "gpt2",
                trainable_token_indices=None if added is None else trained_tokens(self.config, added),
            ),
        )
        self.theirs.train()
        self.ours = adapted_model(self.config, self.lora, "fp64", added=added)
        with HfWeights(folder) as saved:
            fill_frozen(self.ours, saved.read)
            init_adapters(self.ours, saved.read, SEED)
        self._check_magnitudes()
        self._fill_adapters()
        if self.lora.dropout:
            self._share_masks()

    def their_adapters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """PEFT's tensors by our names."""
        for name, tensor in self.theirs.named_parameters():
            if tensor.requires_grad:
                yield native_name(name, ungated=not self.config.gated), tensor

    def _check_magnitudes(self) -> None:
        """Without values in B, DoRA's lengths are those of the base."""
        ours = {shard.name: shard.local_tensor for shard in self.ours.shards}
        for name, tensor in self.their_adapters():
            if name.endswith("magnitude"):
                torch.testing.assert_close(ours[name], tensor.detach(), rtol=1e-12, atol=0.0)

    def _fill_adapters(self) -> None:
        ours = {shard.name: shard.local_tensor for shard in self.ours.shards}
        theirs = dict(self.their_adapters())
        assert ours.keys() == theirs.keys()
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for name, tensor in theirs.items():
                assert ours[name].shape == tensor.shape, name
                if name.endswith("magnitude"):
                    tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
                else:
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
                assert tensor.dtype == torch.float64
                ours[name].copy_(tensor)

    def _share_masks(self) -> None:
        """Let PEFT drop what our counters drop."""
        (stage,) = self.ours.stages
        for name, module in self.theirs.named_modules():
            if hasattr(module, "lora_dropout"):
                linear = stage.get_submodule(native_name(name + ".lora_A").partition(".lora.")[0])
                assert isinstance(linear, Linear)
                assert linear.lora is not None
                module.lora_dropout["default"] = CountedMask(linear.lora.dropout)

    def compare(self, bound: float = 1e-9) -> None:
        tokens, labels = (token_rows(self.config, ROWS, LENGTH, seed=seed) for seed in (0, 1))
        (stage,) = self.ours.stages
        samples = SAMPLES if self.lora.dropout else None
        hidden = stage(tokens, samples=samples)
        their_logits = self.theirs(tokens).logits
        assert_close(stage.logits(hidden).transpose(0, 1), their_logits, "logits", bound)
        self.ours.normalization.tokens.fill_(1.0 / tokens.numel())
        stage(tokens, labels, samples)[0].backward()
        nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
        ours = gradients(self.ours)
        for name, tensor in self.their_adapters():
            assert tensor.grad is not None
            assert_close(ours[name], tensor.grad, name, bound)


class CountedMask(nn.Module):
    """Our dropout, for activations [B, S, H]."""

    def __init__(self, dropout: CounterDropout) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:  # transformers gives latents the shape of heads
            return self.forward(x[:, 0])[:, None]
        return self.dropout(x.transpose(0, 1), SAMPLES, torch.arange(LENGTH)).transpose(0, 1)


def trained_tokens(config: ModelConfig, added: AddedRows) -> dict[str, list[int]]:
    """What PEFT is told of added tokens."""
    tables = ["wte" if config.family == "gpt2" else "embed_tokens", *([] if config.tied_embeddings else ["lm_head"])]
    return {table: list(range(added.start, added.stop)) for table in tables}


def adapted_model(
    config: ModelConfig,
    lora: Lora,
    precision: str = "fp32",
    recompute: str = "none",
    added: AddedRows | None = None,
) -> RankModel:
    """Ours, with fresh weights."""
    return one_process_model(
        config,
        length=LENGTH,
        micro_batch=ROWS,
        precision=precision,
        recompute=recompute,
        regularization=Regularization(seed=SEED),
        lora=lora,
        added=added,
    )


def native_name(name: str, *, ungated: bool = False) -> str:
    """Say a tensor of PEFT's in our words: base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight."""
    if "trainable_tokens" in name:
        return f"{'head' if 'lm_head' in name else 'embedding'}.added.weight"
    path, _, kind = name.partition(".lora_")
    parts = path.split(".")
    layer, projection = parts[next(i for i, part in enumerate(parts) if part in ("layers", "h")) + 1], parts[-1]
    projection = next((ours for ours, theirs in GPT2_MODULES.items() if path.endswith(theirs)), projection)
    gated = "gate_up" if "model.layers" in path and not ungated else "up"
    latent = {"q_a_proj": "q_down", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b_proj": "kv_up"}
    block = "mlp.shared" if ".shared_expert" in path else "mlp"
    module = {
        **{name: f"attention.{ours}" for name, ours in latent.items()},
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.qkv"),
        "o_proj": "attention.out",
        **dict.fromkeys(("gate_proj", "up_proj"), f"{block}.{gated}"),
        "down_proj": f"{block}.down",
    }[projection]
    tensor = {"A": "a", "B": "b", "m": "magnitude"}[kind[0]]
    return f"layers.{layer}.{module}.lora.{projection}.{tensor}"


def their_epsilon(norm: nn.Module) -> Any:
    """The epsilon of a norm; Llama 4 has another word for it."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def norm_in_float64(model: nn.Module) -> None:
    """Keep transformers from computing norms in float32, whatever the model's dtype."""

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        gemma = type(norm).__name__.startswith("Gemma")
        eps, weight = (norm.eps, 1.0 + norm.weight) if gemma else (their_epsilon(norm), norm.weight)
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str, bound: float) -> None:
    """The difference, relative to the size of the whole tensor."""
    difference = float((ours - theirs).detach().norm() / theirs.detach().norm())
    assert difference <= bound, f"{what}: {difference:.2e}"


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank": {"rank": 7, "alpha": 3},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "dropout": {"dropout": 0.3},
    "dora with dropout": {"dora": True, "dropout": 0.3, "rslora": True},
}
TARGETS = [["q_proj"], ["k_proj", "v_proj"], ["o_proj"], ["up_proj"], ["gate_proj", "down_proj"], ["attn"], ["mlp"]]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_is_that_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    Pair("llama", tmp_path, {"targets": ["attn", "mlp"], **options}).compare()


@pytest.mark.parametrize("targets", TARGETS, ids=[",".join(targets) for targets in TARGETS])
def test_every_set_of_targets_is_that_of_peft(tmp_path: Path, targets: list[str]) -> None:
    Pair("llama", tmp_path, {"targets": targets, "dora": True}).compare()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "olmo2", "gemma3_text", "nemotron"])
def test_every_family_is_that_of_peft(tmp_path: Path, family: str, dora: bool) -> None:
    Pair(family, tmp_path, {"targets": ["attn", "mlp"], "dora": dora}).compare()


@pytest.mark.parametrize(
    "options",
    [{"targets": ["attn"]}, {"targets": ["attn"], "dora": True, "dropout": 0.3}, {"targets": ["kv_b_proj"]}],
)
def test_latent_attention_is_that_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    # transformers' router computes in float32.
    Pair("deepseek_v3", tmp_path, options).compare(bound=1e-6)


def test_attention_with_sinks_is_that_of_peft(tmp_path: Path) -> None:
    # transformers' norms and router compute in float32.
    Pair("gpt_oss", tmp_path, {"targets": ["attn"], "dora": True}).compare(bound=1e-6)


def test_dense_layers_and_shared_experts_between_others_are_those_of_peft(tmp_path: Path) -> None:
    Pair("llama4_text", tmp_path, {"targets": ["attn", "mlp"]}).compare(bound=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_gpt2_is_that_of_peft_where_its_projections_are_apart(tmp_path: Path, dora: bool) -> None:
    Pair("gpt2", tmp_path, {"targets": ["o_proj", "up_proj", "down_proj"], "dora": dora}).compare()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])  # a head of its own; a tied one; other names
def test_the_rows_of_added_tokens_are_those_of_peft(tmp_path: Path, family: str) -> None:
    rows = tiny_config(family).vocab_size
    pair = Pair(family, tmp_path, {"targets": ["o_proj"]}, AddedRows(rows - 40, 30, rows))
    pair.compare()
    (stage,) = pair.ours.stages
    tokens = token_rows(pair.config, ROWS, LENGTH)
    with torch.no_grad(), adapters_disabled([stage]), pair.theirs.disable_adapter():
        assert_close(stage.logits(stage(tokens)).transpose(0, 1), pair.theirs(tokens).logits, "the base", 1e-9)


def block_diagonal(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Stack [.., rows, columns] blocks so that each has rows and columns of its own."""
    rows, columns = (sum(block.shape[dim] for block in blocks) for dim in (-2, -1))
    whole = blocks[0].new_zeros((*blocks[0].shape[:-2], rows, columns))
    row = column = 0
    for block in blocks:
        whole[..., row : row + block.shape[-2], column : column + block.shape[-1]] = block
        row, column = row + block.shape[-2], column + block.shape[-1]
    return whole


def diagonal_blocks(whole: torch.Tensor, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the blocks of `block_diagonal` again."""
    parts, row, column = [], 0, 0
    for block in blocks:
        parts.append(whole[..., row : row + block.shape[-2], column : column + block.shape[-1]])
        row, column = row + block.shape[-2], column + block.shape[-1]
    return parts


class FusedPair:
    """A model of which transformers fuses projections that have adapters of their own here.

    PEFT has one adapter for the fused weight. With the stacked A and the B on the diagonal of one matrix, and so of a
    multiple of the rank, it is the same update.
    """

    def __init__(self, family: str, folder: Path, options: dict[str, Any], peft_options: dict[str, Any]) -> None:
        from peft import LoraConfig, get_peft_model

        self.lora = Lora.model_validate({"rank": 4, "alpha": 6, **options})
        self.config = tiny_config(family)
        # transformers routes in float32, whatever the model's dtype.
        self.bound = 1e-9 if self.config.moe is None else 1e-6
        hf = random_hf_model(self.config, SEED)
        hf.save_pretrained(folder)
        norm_in_float64(hf.double())
        if self.config.moe is not None:
            hf.set_experts_implementation("eager")  # the grouped kernel does not know float64
        self.theirs = get_peft_model(hf, LoraConfig(r=4, lora_alpha=6, use_rslora=self.lora.rslora, **peft_options))
        self.ours = adapted_model(self.config, self.lora, "fp64")
        with HfWeights(folder) as saved:
            fill_frozen(self.ours, saved.read)
        generator = torch.Generator().manual_seed(SEED)
        for shard in self.ours.shards:
            noise = torch.randn(shard.local_tensor.shape, generator=generator, dtype=torch.float64)
            shard.local_tensor.copy_(0.2 * noise)

    def parts(self, module: str, names: tuple[str, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All A and all B of a module, and after backward their gradients."""
        ours = {shard.name: shard for shard in self.ours.shards}
        parts = [[ours[f"{module}.lora.{name}.{kind}"] for name in names] for kind in "ab"]
        return tuple([shard.local_tensor for shard in side] for side in parts)  # type: ignore[return-value]

    def run(self) -> dict[str, torch.Tensor]:
        """Run both and compare the logits; return our gradients."""
        tokens, labels = (token_rows(self.config, ROWS, LENGTH, seed=seed) for seed in (0, 1))
        (stage,) = self.ours.stages
        their_logits = self.theirs(tokens).logits
        assert_close(stage.logits(stage(tokens)).transpose(0, 1), their_logits, "logits", self.bound)
        self.ours.normalization.tokens.fill_(1.0 / tokens.numel())
        stage(tokens, labels)[0].backward()
        nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
        return gradients(self.ours)


# PEFT applies the patterns to parameters, and then says that no module matched.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_experts_are_those_of_peft_on_the_fused_parameters(tmp_path: Path, rslora: bool) -> None:
    fused = r".*experts\.gate_up_proj"
    pair = FusedPair(
        "mixtral",
        tmp_path,
        {"targets": ["experts"], "rslora": rslora},
        {
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            # Gate and up of rank 4 are one of rank 8; its scale must be the same.
            "rank_pattern": {fused: 8},
            "alpha_pattern": {fused: 6 * 2**0.5 if rslora else 12},
        },
    )
    experts, pairs = 4, []
    for layer, block in enumerate(pair.theirs.base_model.model.model.layers):
        outer = block.mlp.experts
        pairs += [(layer, outer.base_layer, ("gate_proj", "up_proj")), (layer, outer, ("down_proj",))]

    def a_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(experts, -1, tensor.shape[1])

    def b_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(tensor.shape[0], -1, experts).permute(2, 0, 1)

    for layer, wrapper, names in pairs:
        a, b = pair.parts(f"layers.{layer}.mlp.experts", names)
        with torch.no_grad():
            a_of(wrapper.lora_A["default"].weight).copy_(torch.cat(a, dim=1))
            b_of(wrapper.lora_B["default"].weight).copy_(block_diagonal(b))
    ours = pair.run()
    for layer, wrapper, names in pairs:
        prefix = f"layers.{layer}.mlp.experts.lora"
        their_a = a_of(wrapper.lora_A["default"].weight.grad)
        assert_close(torch.cat([ours[f"{prefix}.{name}.a"] for name in names], dim=1), their_a, prefix, pair.bound)
        b = [ours[f"{prefix}.{name}.b"] for name in names]
        for name, mine, their_b in zip(
            names, b, diagonal_blocks(b_of(wrapper.lora_B["default"].weight.grad), b), strict=True
        ):
            assert_close(mine, their_b, f"{prefix}.{name}.b", pair.bound)


def test_gpt2_with_its_fused_queries_keys_and_values_is_that_of_peft(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "rank_pattern": {"c_attn": 12}}
    pair = FusedPair("gpt2", tmp_path, {"targets": list(names)}, {**options, "alpha_pattern": {"c_attn": 18}})
    layers = [block.attn.c_attn for block in pair.theirs.base_model.model.transformer.h]
    for layer, module in enumerate(layers):
        a, b = pair.parts(f"layers.{layer}.attention.qkv", names)
        with torch.no_grad():
            module.lora_A["default"].weight.copy_(torch.cat(a))
            module.lora_B["default"].weight.copy_(block_diagonal(b))
    ours = pair.run()
    for layer, module in enumerate(layers):
        prefix = f"layers.{layer}.attention.qkv.lora"
        a, b = ([ours[f"{prefix}.{name}.{kind}"] for name in names] for kind in "ab")
        assert_close(torch.cat(a), module.lora_A["default"].weight.grad, prefix, pair.bound)
        for mine, theirs in zip(b, diagonal_blocks(module.lora_B["default"].weight.grad, b), strict=True):
            assert_close(mine, theirs, prefix, pair.bound)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dora": True, "dropout": 0.3}, {"dropout": 0.3}])
def test_one_module_is_that_of_peft_in_float32(options: dict[str, Any]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    lora = Lora.model_validate({"rank": 8, "alpha": 16, "targets": ["o_proj"], **options})
    model = adapted_model(tiny_config("llama"), lora)
    ours = model.stages[0].layers["0"].get_submodule("attention.out")
    assert isinstance(ours, Linear)
    assert ours.lora is not None
    adapter = ours.lora.adapters["o_proj"]
    holder = nn.ModuleDict({"proj": nn.Linear(32, 32, bias=False)})
    asked = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["proj"],
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        init_lora_weights=False,
    )
    inject_adapter_in_model(asked, holder)
    theirs = holder["proj"].train()
    if lora.dropout:
        theirs.lora_dropout["default"] = CountedMask(ours.lora.dropout)
    with torch.no_grad():
        ours.weight.copy_(theirs.base_layer.weight)
        adapter.a.copy_(theirs.lora_A["default"].weight)
        adapter.b.copy_(theirs.lora_B["default"].weight)
        if adapter.magnitude is not None:
            adapter.magnitude.copy_(theirs.lora_magnitude_vector["default"].weight)
    generator = torch.Generator().manual_seed(SEED)
    x, grad = (torch.randn((ROWS, LENGTH, 32), generator=generator) for _ in range(2))
    inputs = [x.clone().requires_grad_(), x.transpose(0, 1).contiguous().requires_grad_()]
    expected, got = theirs(inputs[0]), ours(inputs[1], SAMPLES if lora.dropout else None)
    expected.backward(grad)
    got.backward(grad.transpose(0, 1))
    assert_close(got.transpose(0, 1), expected, "output", 1e-6)
    assert_close(inputs[1].grad.transpose(0, 1), inputs[0].grad, "gradient of the input", 1e-6)
    assert_close(adapter.a.grad, theirs.lora_A["default"].weight.grad, "a", 1e-6)
    assert_close(adapter.b.grad, theirs.lora_B["default"].weight.grad, "b", 1e-6)
    if adapter.magnitude is not None:
        their_grad = theirs.lora_magnitude_vector["default"].weight.grad
        assert_close(adapter.magnitude.grad, their_grad, "magnitude", 1e-6)

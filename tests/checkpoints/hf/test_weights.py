"""Weights that transformers saved, read into our tensors: all of them, any part of them, and nothing by mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.models.tiny_models import VARIANTS, save_tiny_hf
from support.runs.small_generators import Notes
from trainshed.checkpoints.formats import open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.errors import CorruptData, InputError, NotFound, TrainshedError
from trainshed.models.parameters import Parameter, parameter_count, parameters
from trainshed.recipe import ModelConfig

State = dict[str, torch.Tensor]


class Saved:
    """One tiny model on disk, its Hugging Face tensors, and its native tensors read whole."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.folder = folder
        self.config = save_tiny_hf(variant, folder, seed=1)
        self.state: State = load_file(folder / "model.safetensors")
        self.weights = HfWeights(folder)
        self.parameters = list(parameters(self.config))
        self.native = {each.name: whole(self.weights, each) for each in self.parameters}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {variant: Saved(variant, tmp_path_factory.mktemp(variant)) for variant in VARIANTS}


def test_layers_for_multi_token_prediction_are_left_out_with_a_note_where_they_are_not_asked_for(
    tmp_path: Path,
) -> None:
    config = save_tiny_hf("deepseek_v3", tmp_path, seed=1)
    state = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.{config.layers}.{name}": torch.ones(2, 2) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(state | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    notes = Notes()
    with open_weights(tmp_path, config=config, reporter=notes) as weights:
        assert weights.config == config
    (note,) = notes.said
    assert note.startswith("2 tensors of multi-token prediction are left out: ")
    assert all(name in note for name in extra)
    with pytest.raises(InputError, match="missing"):
        HfWeights(tmp_path)  # a part of such a layer is none
    save_file(state | {"model.layers.1.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="left over"):
        HfWeights(tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_tiny_hf("llama", tmp_path, seed=1)
    return tmp_path


def whole(weights: HfWeights, parameter: Parameter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return weights.read(parameter, [0] * len(parameter.shape), parameter.shape, dtype)


def expected(config: ModelConfig, state: State) -> State:
    """The native tensors, written down row by row."""
    native = {}
    gpt2 = config.family == "gpt2"
    native["embedding.weight"] = state["transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"]
    if not config.tied_embeddings:
        native["head.weight"] = state["lm_head.weight"]
    for layer in range(config.layers):
        theirs = {
            name.split(f".{layer}.", 1)[1]: tensor
            for name, tensor in state.items()
            if name.startswith((f"model.layers.{layer}.", f"transformer.h.{layer}."))
        }
        for name, tensor in (gpt2_layer(config, theirs) if gpt2 else llama_layer(config, theirs)).items():
            native[f"layers.{layer}.{name}"] = tensor
    if gpt2:
        native["positions.weight"] = state["transformer.wpe.weight"]
        native |= {f"norm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    else:
        kinds = ("weight", "bias") if config.family == "nemotron" else ("weight",)
        native |= {f"norm.{kind}": state[f"model.norm.{kind}"] for kind in kinds}
    return native


def grouped(config: ModelConfig, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    size, queries = config.head_dim, config.heads // config.kv_heads
    parts = []
    for group in range(config.kv_heads):
        for head in range(group * queries, (group + 1) * queries):
            parts.append(query[head * size : (head + 1) * size])
        parts.append(key[group * size : (group + 1) * size])
        parts.append(value[group * size : (group + 1) * size])
    return torch.cat(parts)


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([row for pair in zip(gate, up, strict=True) for row in pair])


def layer_norms(config: ModelConfig, theirs: State) -> State:
    before, after = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}, {}
    if config.family.startswith(("olmo", "gemma")):
        after = {"attention.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}
        before |= {"mlp.norm": "pre_feedforward_layernorm"}
    names = after if config.family.startswith("olmo") else before | after
    kinds = ("weight", "bias") if config.family == "nemotron" else ("weight",)
    return {f"{ours}.{kind}": theirs[f"{name}.{kind}"] for ours, name in names.items() for kind in kinds}


def llama_layer(config: ModelConfig, theirs: State) -> State:
    native = layer_norms(config, theirs) | {"attention.out.weight": theirs["self_attn.o_proj.weight"]}
    if config.family == "phi3":
        keys = config.kv_heads * config.head_dim
        parts = theirs["self_attn.qkv_proj.weight"].split([config.heads * config.head_dim, keys, keys])
        native["attention.qkv.weight"] = grouped(config, *parts)
        native["mlp.gate_up.weight"] = alternating(*theirs["mlp.gate_up_proj.weight"].chunk(2))
        native["mlp.down.weight"] = theirs["mlp.down_proj.weight"]
        return native
    if config.mla is not None:
        names = {"q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
        names |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
        for ours, name in names.items():
            if f"self_attn.{name}.weight" in theirs:
                native[f"attention.{ours}.weight"] = theirs[f"self_attn.{name}.weight"]
        return native | deepseek_mlp(config, theirs)
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        native[f"attention.qkv.{kind}"] = grouped(config, *(theirs[f"self_attn.{part}_proj.{kind}"] for part in "qkv"))
    if config.output_bias:
        native["attention.out.bias"] = theirs["self_attn.o_proj.bias"]
    if config.qk_norm:
        native["attention.query_norm.weight"] = theirs["self_attn.q_norm.weight"]
        native["attention.key_norm.weight"] = theirs["self_attn.k_norm.weight"]
    if config.family == "nemotron":
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            native[f"mlp.up.{kind}"], native[f"mlp.down.{kind}"] = (
                theirs[f"mlp.up_proj.{kind}"],
                theirs[f"mlp.down_proj.{kind}"],
            )
        return native
    if config.family == "llama4_text":
        return native | llama4_block(theirs)
    if config.moe is None:
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            gate, up = (theirs[f"mlp.{part}_proj.{kind}"] for part in ("gate", "up"))
            native[f"mlp.gate_up.{kind}"] = alternating(gate, up)
            native[f"mlp.down.{kind}"] = theirs[f"mlp.down_proj.{kind}"]
        return native
    if config.family == "gpt_oss":
        return native | gpt_oss_block(theirs)
    mixtral = config.family == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    experts = [f"{block}.experts.{expert}" for expert in range(config.moe.experts)]
    native["mlp.router.weight"] = theirs[f"{block}.gate.weight"]
    native["mlp.experts.gate_up"] = torch.stack(
        [alternating(theirs[f"{expert}.{gate}.weight"], theirs[f"{expert}.{up}.weight"]) for expert in experts]
    )
    native["mlp.experts.down"] = torch.stack([theirs[f"{expert}.{down}.weight"] for expert in experts])
    return native


def deepseek_mlp(config: ModelConfig, theirs: State) -> State:
    def block(ours: str, name: str) -> State:
        gate_up = alternating(theirs[f"{name}.gate_proj.weight"], theirs[f"{name}.up_proj.weight"])
        return {f"{ours}.gate_up.weight": gate_up, f"{ours}.down.weight": theirs[f"{name}.down_proj.weight"]}

    if "mlp.gate.weight" not in theirs:
        return block("mlp", "mlp")
    assert config.moe is not None
    experts = [block("expert", f"mlp.experts.{expert}") for expert in range(config.moe.experts)]
    return block("mlp.shared", "mlp.shared_experts") | {
        "mlp.router.weight": theirs["mlp.gate.weight"],
        "mlp.router.score_bias": theirs["mlp.gate.e_score_correction_bias"],
        "mlp.experts.gate_up": torch.stack([expert["expert.gate_up.weight"] for expert in experts]),
        "mlp.experts.down": torch.stack([expert["expert.down.weight"] for expert in experts]),
    }


def llama4_block(theirs: State) -> State:
    """Of each expert transposed, all gates before all ups; or a dense block."""

    def block(ours: str, name: str) -> State:
        gate_up = alternating(theirs[f"{name}.gate_proj.weight"], theirs[f"{name}.up_proj.weight"])
        return {f"{ours}.gate_up.weight": gate_up, f"{ours}.down.weight": theirs[f"{name}.down_proj.weight"]}

    if "feed_forward.router.weight" not in theirs:
        return block("mlp", "feed_forward")
    experts = theirs["feed_forward.experts.gate_up_proj"].transpose(1, 2)
    return block("mlp.shared", "feed_forward.shared_expert") | {
        "mlp.router.weight": theirs["feed_forward.router.weight"],
        "mlp.experts.gate_up": torch.stack([alternating(*expert.chunk(2)) for expert in experts]),
        "mlp.experts.down": theirs["feed_forward.experts.down_proj"].transpose(1, 2),
    }


def gpt_oss_block(theirs: State) -> State:
    """Stacked as ours, of each expert transposed; columns of gate and up alternate there as rows do here."""
    return {
        "attention.sinks": theirs["self_attn.sinks"],
        "attention.out.bias": theirs["self_attn.o_proj.bias"],
        "mlp.router.weight": theirs["mlp.router.weight"],
        "mlp.router.bias": theirs["mlp.router.bias"],
        "mlp.experts.gate_up": theirs["mlp.experts.gate_up_proj"].transpose(1, 2),
        "mlp.experts.gate_up_bias": theirs["mlp.experts.gate_up_proj_bias"],
        "mlp.experts.down": theirs["mlp.experts.down_proj"].transpose(1, 2),
        "mlp.experts.down_bias": theirs["mlp.experts.down_proj_bias"],
    }


def gpt2_layer(config: ModelConfig, theirs: State) -> State:
    native = {}
    for kind in ("weight", "bias"):
        native[f"attention.norm.{kind}"] = theirs[f"ln_1.{kind}"]
        native[f"mlp.norm.{kind}"] = theirs[f"ln_2.{kind}"]
        native[f"attention.qkv.{kind}"] = grouped(config, *theirs[f"attn.c_attn.{kind}"].t().chunk(3))
        native[f"attention.out.{kind}"] = theirs[f"attn.c_proj.{kind}"].t()
        native[f"mlp.up.{kind}"] = theirs[f"mlp.c_fc.{kind}"].t()
        native[f"mlp.down.{kind}"] = theirs[f"mlp.c_proj.{kind}"].t()
    return native


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_put_together_as_written_down_by_hand(variant: str, saved: dict[str, Saved]) -> None:
    model = saved[variant]
    wanted = expected(model.config, model.state)
    assert model.weights.config == model.config
    assert model.weights.dtypes == ["float32"]
    assert model.weights.parameter_count == parameter_count(model.config)
    assert set(model.native) == set(wanted)
    for name, tensor in model.native.items():
        assert torch.equal(tensor, wanted[name]), name


@given(data=st.data())
def test_any_box_is_that_part_of_the_whole(data: st.DataObject, saved: dict[str, Saved]) -> None:
    model = saved[data.draw(st.sampled_from(VARIANTS))]
    parameter = data.draw(st.sampled_from(model.parameters))
    cuts = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in parameter.shape]
    offset, shape = [low for low, _ in cuts], [high - low for low, high in cuts]
    part = model.weights.read(parameter, offset, shape, torch.float32)
    assert torch.equal(part, model.native[parameter.name][tuple(slice(low, high) for low, high in cuts)])


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_a_box_reads_the_rows_it_lies_in_and_no_others(
    variant: str, saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = saved[variant], []
    original = os.preadv

    def counting(file: int, buffers: list[memoryview], offset: int) -> int:
        read.append(original(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for parameter in model.parameters:
        read.clear()
        shape = [-(-length // 2) for length in parameter.shape]
        model.weights.read(parameter, [length // 2 for length in parameter.shape], shape, torch.float32)
        rows = torch.Size(shape if len(shape) == 1 else [*shape[:-1], parameter.shape[-1]]).numel()
        assert sum(read) == rows * torch.float32.itemsize, parameter.name


def test_a_file_that_shrinks_while_it_is_read_is_an_error(llama: Path) -> None:
    weights = HfWeights(llama)
    os.truncate(llama / "model.safetensors", 5_000)
    layer = next(each for each in parameters(weights.config) if each.name == "layers.1.mlp.down.weight")
    with pytest.raises(CorruptData, match="ends before"):
        whole(weights, layer)


def test_weights_in_many_files_and_in_bf16_are_the_same_weights(saved: dict[str, Saved], tmp_path: Path) -> None:
    save_tiny_hf("qwen3_moe", tmp_path, seed=1, shard_bytes=20_000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    for file in files:
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    with HfWeights(tmp_path) as weights:
        assert weights.dtypes == ["bfloat16"]
        for parameter in parameters(weights.config):
            exact = saved["qwen3_moe"].native[parameter.name]
            assert torch.equal(whole(weights, parameter, torch.bfloat16), exact.bfloat16())
            assert torch.equal(whole(weights, parameter), exact.bfloat16().float())


def test_a_box_outside_of_the_tensor_is_a_mistake_of_the_caller(saved: dict[str, Saved]) -> None:
    model = saved["llama"]
    with pytest.raises(ValueError, match="has no box"):
        model.weights.read(model.parameters[0], [90, 0], [7, 32], torch.float32)
    assert model.weights.read(model.parameters[0], [96, 0], [0, 32], torch.float32).shape == (0, 32)


def test_opening_and_checking_needs_no_torch(llama: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from trainshed.checkpoints.formats import open_weights
from trainshed.checkpoints.hf.weights import HfWeights
HfWeights(Path({str(llama)!r})).check_tied_head()
assert not {{'torch', 'safetensors', 'transformers'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a saved model."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def test_masks_and_frequencies_of_older_versions_are_no_weights(llama: Path, tmp_path: Path) -> None:
    rewrite(llama, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    HfWeights(llama)


def test_gpt2_as_openai_published_it_has_no_prefix_and_its_masks(saved: dict[str, Saved], tmp_path: Path) -> None:
    model = saved["gpt2"]
    bare = {name.removeprefix("transformer."): tensor for name, tensor in model.state.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    weights = HfWeights(tmp_path)
    for parameter in model.parameters:
        assert torch.equal(whole(weights, parameter), model.native[parameter.name])


def test_a_tied_head_may_be_stored_twice_but_not_be_another(tmp_path: Path) -> None:
    save_tiny_hf("qwen2", tmp_path, seed=1)
    rewrite(tmp_path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    HfWeights(tmp_path).check_tied_head()
    rewrite(tmp_path, lambda state: state["lm_head.weight"].add_(1))
    with pytest.raises(InputError, match=r"`lm_head.weight` and `model.embed_tokens.weight` are one, and they differ"):
        HfWeights(tmp_path).check_tied_head()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("lm_head.weight"), "lm_head.weight missing"),
        (lambda state: state.update({"model.layers.0.extra": torch.ones(1)}), "model.layers.0.extra left over"),
        (lambda state: state.update({"model.norm.weight": torch.ones(31)}), r"norm.weight` is \[31\], not \[32\]"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            "`model.norm.weight` is F8_E4M3",
        ),
        (
            lambda state: [state.pop(name) for name in list(state) if "layers.1" in name],
            r"model.layers.1.input_layernorm.weight, .* and 4 more missing",
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_not_those_of_the_config_are_named(change: Any, message: str, llama: Path) -> None:
    rewrite(llama, change)
    with pytest.raises(InputError, match=message):
        HfWeights(llama)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_file_that_is_cut_short_is_found_out_at_once(keep: int, llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptData, match=r"only its beginning|is cut short") as caught:
        HfWeights(llama)
    assert caught.value.where == str(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a header at all, but long enough to be taken for one", "only its beginning"),
        ((9).to_bytes(8, "little") + b"not JSON!", "not JSON"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "nobody can read"),
        (
            (57).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}   ' + bytes(8),
            "`a` has another size than its shape says",
        ),
    ],
)
def test_a_file_that_is_something_else_is_not_opened(content: bytes, message: str, llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptData, match=message):
        HfWeights(llama)


def sharded(folder: Path) -> dict[str, Any]:
    save_tiny_hf("llama", folder, seed=1, shard_bytes=20_000)
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(
    ("tensor", "file", "message"),
    [
        ("model.norm.weight", "model-00009-of-00009.safetensors", "is named by the index and not there"),
        ("model.norm.weight", "../elsewhere.safetensors", "which is not a file beside it"),
        ("invented.weight", "model-00001-of-00005.safetensors", "invented.weight not where it says"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tensor: str, file: str, message: str, tmp_path: Path) -> None:
    index = sharded(tmp_path)
    assert "model-00001-of-00005.safetensors" in index["weight_map"].values()
    index["weight_map"][tensor] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptData, match=message):
        HfWeights(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("config.json", None, NotFound, "there is no config.json"),
        ("config.json", b"[]", CorruptData, "is not a JSON object"),
        ("config.json", b"{", CorruptData, "is not a JSON object"),
        ("model.safetensors", None, NotFound, "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_folder_without_a_model(
    name: str, content: bytes | None, kind: type[TrainshedError], message: str, llama: Path
) -> None:
    (llama / name).unlink()
    if content is not None:
        (llama / name).write_bytes(content)
    with pytest.raises(kind, match=message):
        HfWeights(llama)


def test_an_architecture_written_in_the_recipe_is_taken_as_it_is(llama: Path, saved: dict[str, Saved]) -> None:
    (llama / "config.json").write_text("{}")
    stretched = saved["llama"].config.model_copy(update={"max_positions": 4096})
    assert HfWeights(llama, stretched).config == stretched

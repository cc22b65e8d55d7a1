"""Native to Megatron and back, bit by bit: every family, every layout, any box of any tensor."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.models.megatron_folders import LLAMA3, MadeWeights, assert_equal, written
from support.models.tiny_models import MEGATRON_FAMILIES, MEGATRON_VARIANTS, save_tiny_hf, tiny_config
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.megatron import weights as megatron_weights
from trainshed.checkpoints.megatron.args import MegatronLayout
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights, MegatronLegacyWriter
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights, MegatronDistWriter
from trainshed.errors import CorruptData, InputError
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig

SHARED = {"moe": {"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 40}}


def config_of(variant: str) -> ModelConfig:
    if variant == "shared":
        return tiny_config("mixtral", **SHARED)
    if variant in ("alike", "further"):
        # All layers have experts, so that keys are stacked; two more layers, which never are.
        moe = {"experts": 4, "top_k": 2, "ffn": 12, "shared_ffn": 12, "scores": "sigmoid", "score_bias": True}
        return tiny_config("moonlight-megatron", ffn=None, moe=moe, mtp_layers=2 if variant == "further" else 0)
    return tiny_config(variant, **(LLAMA3 if variant == "llama3" else {}))


@pytest.mark.parametrize("variant", [*MEGATRON_VARIANTS, "shared", "alike", "further"])
@pytest.mark.parametrize("spec", ["te", "local"])
def test_torch_dist_gives_every_tensor_and_the_architecture_back(variant: str, spec: Any, tmp_path: Path) -> None:
    source = MadeWeights(config_of(variant))
    writer = MegatronDistWriter(source.config, dtype=torch.float32, spec=spec)
    with MegatronDistWeights(written(writer, source, tmp_path)) as weights:
        assert_equal(source, weights)
        assert weights.padded_vocab_size == 128
        assert weights.dtypes == ["float32"]


def test_blocks_of_a_few_rows_are_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_weights, "BLOCK_BYTES", 1000)
    source = MadeWeights(tiny_config("mixtral"))
    dist = written(MegatronDistWriter(source.config, dtype=torch.float32), source, tmp_path / "dist")
    legacy = written(MegatronLegacyWriter(source.config, dtype=torch.float32, tp=2), source, tmp_path / "legacy")
    with MegatronDistWeights(dist) as one, MegatronLegacyWeights(legacy) as other:
        assert_equal(source, one)
        assert_equal(source, other)


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("qwen2"))
    written(MegatronDistWriter(source.config, dtype=torch.bfloat16), source, tmp_path / "dist")
    written(MegatronLegacyWriter(source.config, dtype=torch.bfloat16, tp=2), source, tmp_path / "legacy")
    for weights in (MegatronDistWeights(tmp_path / "dist"), MegatronLegacyWeights(tmp_path / "legacy")):
        with weights:
            assert weights.dtypes == ["bfloat16"]
            assert_equal(source, weights, torch.bfloat16)


def test_the_biases_of_scores_stay_in_fp32_where_weights_are_rounded(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("moonlight-megatron"))
    written(MegatronDistWriter(source.config, dtype=torch.bfloat16), source, tmp_path / "dist")
    written(MegatronLegacyWriter(source.config, dtype=torch.bfloat16, ep=2), source, tmp_path / "legacy")
    bias = next(each for each in parameters(source.config) if each.buffer)
    for weights in (MegatronDistWeights(tmp_path / "dist"), MegatronLegacyWeights(tmp_path / "legacy")):
        with weights:
            assert weights.dtypes == ["bfloat16"]
            assert_equal(source, weights, torch.bfloat16)
            assert torch.equal(weights.read(bias, [0], bias.shape, torch.float32), source.tensors[bias.name])


def layouts() -> st.SearchStrategy[dict[str, Any]]:
    pipeline = st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)])
    return st.builds(
        lambda tp, pipe, ep, etp, spec: {
            "tp": tp, "pp": pipe[0], "vp": pipe[1], "ep": ep, "etp": etp, "spec": spec[0], "experts": spec[1],
        },
        st.sampled_from([1, 2, 4]),
        pipeline,
        st.sampled_from([1, 2, 4]),
        st.sampled_from([None, 1, 2, 4]),
        st.sampled_from([("te", None), ("te", "sequential"), ("local", None)]),
    )  # fmt: skip


def through_legacy(family: str, layout: dict[str, Any]) -> None:
    source = MadeWeights(tiny_config(family, layers=4))
    try:
        writer = MegatronLegacyWriter(source.config, dtype=torch.float32, **layout)
        units = writer.output_files()
    except InputError:
        assume(False)
        return
    assert len({unit.path for unit in units}) == len(units)
    with TemporaryDirectory() as folder, MegatronLegacyWeights(written(writer, source, Path(folder))) as weights:
        assert_equal(source, weights)
        assert weights.layout == writer.layout


@settings(max_examples=25)
@given(st.sampled_from(MEGATRON_FAMILIES), layouts())
def test_any_legacy_layout_gives_every_tensor_back(family: str, layout: dict[str, Any]) -> None:
    through_legacy(family, layout)


@pytest.mark.full
@settings(max_examples=300)
@given(st.sampled_from(MEGATRON_FAMILIES), layouts())
def test_very_many_legacy_layouts_give_every_tensor_back(family: str, layout: dict[str, Any]) -> None:
    through_legacy(family, layout)


@settings(max_examples=40)
@given(data=st.data())
def test_any_box_of_any_tensor_is_read_from_either_format(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "boxes"
    source = MadeWeights(tiny_config("qwen3_moe", layers=2))
    if not folder.exists():
        written(MegatronDistWriter(source.config, dtype=torch.float32), source, folder / "dist")
        legacy = MegatronLegacyWriter(source.config, dtype=torch.float32, tp=2, pp=2, ep=2)
        written(legacy, source, folder / "legacy")
    parameter = data.draw(st.sampled_from(list(parameters(source.config))))
    starts = [data.draw(st.integers(0, length)) for length in parameter.shape]
    shape = [data.draw(st.integers(0, length - start)) for start, length in zip(starts, parameter.shape, strict=True)]
    wanted = source.read(parameter, starts, shape, torch.float32)
    for weights in (MegatronDistWeights(folder / "dist"), MegatronLegacyWeights(folder / "legacy")):
        with weights:
            assert torch.equal(weights.read(parameter, starts, shape, torch.float32), wanted)


def test_the_files_of_ranks_hold_what_megatron_cuts_out_of_hugging_faces_tensors(tmp_path: Path) -> None:
    # By the rules of facts about Megatron, from Hugging Face's tensors: nothing of ours on this side.
    from safetensors.torch import load_file

    config = save_tiny_hf("llama", tmp_path / "hf", layers=4)
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    writer = MegatronLegacyWriter(config, dtype=torch.float32, tp=2, pp=2, vp=2, spec="local")
    with HfWeights(tmp_path / "hf") as source:
        written(writer, source, tmp_path / "megatron")
    assert writer.layout == MegatronLayout(2, 2, 2, 1, 2)
    release = tmp_path / "megatron" / "release"
    names = [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)]
    assert sorted(each.name for each in release.iterdir()) == names
    for tp in range(2):
        # Stage 1 has layers 1 and 3: chunks go round the pipeline.
        saved = torch.load(release / f"mp_rank_{tp:02d}_001" / "model_optim_rng.pt", weights_only=False)
        assert "embedding.word_embeddings.weight" not in saved["model0"]
        chunk, layer = saved["model1"], "model.layers.3."
        query, key, value = (hf[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv")
        groups = [
            torch.cat([query[g * 16 : g * 16 + 16], key[g * 8 : g * 8 + 8], value[g * 8 : g * 8 + 8]]) for g in (0, 1)
        ]
        gate, up = (hf[f"{layer}mlp.{name}_proj.weight"].chunk(2)[tp] for name in ("gate", "up"))
        assert torch.equal(chunk["decoder.layers.0.self_attention.linear_qkv.weight"], groups[tp])
        assert torch.equal(chunk["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
        down = hf[f"{layer}mlp.down_proj.weight"].chunk(2, dim=1)[tp]
        assert torch.equal(chunk["decoder.layers.0.mlp.linear_fc2.weight"], down)
        assert torch.equal(chunk["decoder.layers.0.input_layernorm.weight"], hf[f"{layer}input_layernorm.weight"])
        head = torch.cat([hf["lm_head.weight"], torch.zeros(256 - 96, 32)]).chunk(2)[tp]
        assert torch.equal(chunk["output_layer.weight"], head)


def test_experts_lie_where_their_ranks_are(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("mixtral"))
    writer = MegatronLegacyWriter(source.config, dtype=torch.float32, tp=2, ep=4, etp=1)
    release = written(writer, source, tmp_path) / "release"
    # tp fastest among the dense ranks, ep (etp is 1) among the expert ranks: rank 3 is tp 1 and ep 3.
    names = ["mp_rank_00_000", "mp_rank_00_002", "mp_rank_01_001", "mp_rank_01_003"]
    assert sorted(each.name for each in release.iterdir()) == names
    saved = torch.load(release / "mp_rank_01_003" / "model_optim_rng.pt", weights_only=False)["model"]
    wanted = source.tensors["layers.1.mlp.experts.down"][3]
    assert torch.equal(saved["decoder.layers.1.mlp.experts.linear_fc2.weight0"], wanted)


def test_the_tied_embedding_is_stored_again_on_the_last_stage(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("qwen2"))
    written(MegatronLegacyWriter(source.config, dtype=torch.float32, pp=2), source, tmp_path)
    saved = torch.load(tmp_path / "release" / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)["model"]
    assert torch.equal(saved["output_layer.weight"][:96], source.tensors["embedding.weight"])
    assert not saved["output_layer.weight"][96:].any()


@pytest.mark.parametrize(
    ("variant", "layout", "folder", "tensor"),
    [
        ("llama", {"tp": 2}, "mp_rank_01", "decoder.final_layernorm.weight"),
        ("mixtral", {"ep": 2}, "mp_rank_00_001", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ("gpt2", {"pp": 2}, "mp_rank_00_001", "output_layer.weight"),
    ],
)
def test_ranks_that_hold_different_replicas_are_not_converted(
    variant: str, layout: dict[str, int], folder: str, tensor: str, tmp_path: Path
) -> None:
    source = MadeWeights(config_of(variant))
    root = written(MegatronLegacyWriter(source.config, dtype=torch.float32, **layout), source, tmp_path)
    file = next(Path(root).rglob(f"{folder}/model_optim_rng.pt"))
    document = torch.load(file, weights_only=False)
    document["model"][tensor].view(-1)[1] += 1e-6
    torch.save(document, file)
    with MegatronLegacyWeights(tmp_path) as weights, pytest.raises(CorruptData, match=f"not the same in .*{folder}"):
        assert_equal(source, weights)

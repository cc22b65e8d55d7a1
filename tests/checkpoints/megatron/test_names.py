"""The names and shapes that Megatron looks for, held still in golden files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.models.megatron_folders import MadeWeights, written
from support.models.tiny_models import tiny_config
from support.recipes.golden_files import check_golden
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWriter
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWriter
from trainshed.errors import InputError


@pytest.mark.parametrize(
    ("family", "spec", "layers"),
    [
        ("llama", "te", 1),
        ("gpt2", "local", 1),
        ("qwen3_moe", "te", 1),
        ("mixtral", "local", 1),
        ("deepseek-megatron", "te", 2),
        ("moonlight-megatron", "local", 3),
    ],
)
def test_the_tensors_of_a_family_are_called_as_they_always_were(
    family: str, spec: Any, layers: int, tmp_path: Path
) -> None:
    source = MadeWeights(tiny_config(family, layers=layers))
    written(MegatronDistWriter(source.config, dtype=torch.float32, spec=spec), source, tmp_path / "dist")
    table = dcp.FileSystemReader(tmp_path / "dist" / "release").read_metadata().state_dict_metadata
    lines = [f"{key} {list(each.size) if hasattr(each, 'size') else 'bytes'}" for key, each in table.items()]
    ep = 2 if source.config.moe else 1
    writer = MegatronLegacyWriter(source.config, dtype=torch.float32, spec=spec, ep=ep)
    for folder in sorted((written(writer, source, tmp_path / "legacy") / "release").iterdir()):
        model = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
        lines += ["", folder.name, *(f"{name} {list(tensor.shape)}" for name, tensor in model.items())]
    check_golden(f"megatron_tensors/{family}-{spec}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"tp": 3}, "tp 3 does not go with 4 heads"),
        ({"pp": 3}, "2 layers cannot be shared out evenly by pp 3"),
        ({"vp": 2}, "vp 2 needs a pipeline"),
        ({"ep": 3}, "ep 3 does not divide the 4 experts"),
        ({"etp": 2}, "share one file of the legacy format"),
        ({"tp": 4, "etp": 16, "ep": 1}, "share one file|cannot be cut"),
        ({"spec": "local", "experts": "grouped"}, "no grouped experts"),
    ],
)
def test_a_layout_that_megatron_does_not_have_is_refused(layout: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        MegatronLegacyWriter(tiny_config("mixtral"), dtype=torch.float32, **layout)


def test_latent_attention_is_not_cut_for_ranks_as_versions_do_it_differently() -> None:
    with pytest.raises(InputError, match="no one form of latent attention for tp 2") as caught:
        MegatronLegacyWriter(tiny_config("moonlight-megatron"), dtype=torch.float32, tp=2)
    assert "torch_dist" in str(caught.value.hint)


def test_layers_that_predict_further_tokens_have_names_of_their_own(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("deepseek-megatron", layers=2, mtp_layers=1))
    written(MegatronDistWriter(source.config, dtype=torch.float32), source, tmp_path)
    table = dcp.FileSystemReader(tmp_path / "release").read_metadata().state_dict_metadata
    tensors = [key for key, each in table.items() if hasattr(each, "size")]
    further, last = (
        {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)}
        for prefix in ("mtp.layers.0.", "decoder.layers.1.")
    )
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    assert further == own | {f"transformer_layer.{name}" for name in last}


def test_only_experts_are_shared_out_by_ep() -> None:
    with pytest.raises(InputError, match="ep 2 needs experts"):
        MegatronLegacyWriter(tiny_config("llama"), dtype=torch.float32, ep=2)

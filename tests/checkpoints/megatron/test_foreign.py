"""Checkpoints as others write them: other spellings, other cuts, other versions; what is not understood is refused."""

from __future__ import annotations

import sys
import types
import warnings
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from support.models.megatron_folders import MadeWeights, assert_equal, written
from support.models.tiny_models import tiny_config
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights, MegatronLegacyWriter
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights, MegatronDistWriter
from trainshed.errors import CorruptData, InputError, NotFound, TrainshedError

LAYER = "decoder.layers."


def legacy(source: MadeWeights, folder: Path, **layout: Any) -> Path:
    return written(MegatronLegacyWriter(source.config, dtype=torch.float32, **layout), source, folder) / "release"


def dist(source: MadeWeights, folder: Path, **options: Any) -> Path:
    return written(MegatronDistWriter(source.config, dtype=torch.float32, **options), source, folder) / "release"


def file_of(release: Path, name: str = "mp_rank_00") -> Path:
    return release / name / "model_optim_rng.pt"


def rewrite(file: Path, change: Any) -> None:
    """Change what a file holds, and let torch.save write it."""
    document = torch.load(file, weights_only=False)
    change(document)
    torch.save(document, file)


def all_tensors(release: Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch_dist checkpoint, read by PyTorch."""
    reader = dcp.FileSystemReader(release)
    table = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {key: torch.empty(each.size) for key, each in table.items() if hasattr(each, "size")}
    with warnings.catch_warnings(action="ignore"):  # it says that it is alone
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a state dict as torch.distributed.checkpoint does: one file, and objects pickled."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings(action="ignore"):  # as above
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)


def common_args(release: Path) -> Namespace:
    return torch.load(release / "common.pt", weights_only=False)["args"]


def test_experts_of_the_old_grouped_layer_lie_transposed_in_one_matrix(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("mixtral"))
    release = legacy(source, tmp_path, ep=2, tp=2)

    def group(document: dict[str, Any]) -> None:
        model = document["model"]
        for layer in range(2):
            for old, linear in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
                names = [f"{LAYER}{layer}.mlp.experts.{linear}.weight{expert}" for expert in range(2)]
                block = torch.stack([model.pop(name).T for name in names])
                shape = (32, -1) if old == "weight1" else (-1, 32)
                model[f"{LAYER}{layer}.mlp.experts.{old}"] = block.reshape(shape).contiguous()

    for folder in release.iterdir():
        rewrite(folder / "model_optim_rng.pt", group)
    with MegatronLegacyWeights(tmp_path) as weights:
        assert_equal(source, weights)


def test_an_uneven_pipeline_is_seen_in_its_files(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("llama", layers=4))
    release = legacy(source, tmp_path, pp=2)
    moved = {}

    def give(document: dict[str, Any]) -> None:
        model = document["model"]
        for name in [name for name in model if name.startswith(f"{LAYER}0.")]:
            moved[name.replace(f"{LAYER}0.", f"{LAYER}2.")] = model.pop(name)
        for name in [name for name in model if name.startswith(f"{LAYER}1.")]:
            model[name.replace(f"{LAYER}1.", f"{LAYER}0.")] = model.pop(name)

    rewrite(file_of(release, "mp_rank_00_001"), give)
    rewrite(file_of(release, "mp_rank_00_000"), lambda document: document["model"].update(moved))
    with MegatronLegacyWeights(release) as weights:
        assert_equal(source, weights)


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_norms_stored_less_one_get_it_back(tmp_path: Path, name: str) -> None:
    source = MadeWeights(tiny_config("qwen3"))
    for key, tensor in source.tensors.items():
        if key.endswith("norm.weight"):
            tensor.mul_(256).round_().div_(256)  # so that nothing is lost to rounding
    release = legacy(source, tmp_path)

    def less_one(document: dict[str, Any]) -> None:
        setattr(document["args"], name, True)
        for key, tensor in document["model"].items():
            if "norm" in key:
                tensor.sub_(1)

    rewrite(file_of(release), less_one)
    with MegatronLegacyWeights(release) as weights:
        assert_equal(source, weights)


def test_what_megatron_keeps_beside_the_weights_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MadeWeights(tiny_config("llama"))
    release = legacy(source, tmp_path, spec="local")
    enums = types.ModuleType("megatron.core.enums")

    class Backend(Enum):
        AUTO = 5

    Backend.__module__, Backend.__qualname__ = enums.__name__, "Backend"
    enums.Backend = Backend  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, enums.__name__, enums)

    def add(document: dict[str, Any]) -> None:
        document["args"].attention_backend = Backend.AUTO
        document["optimizer"] = {"state": {0: torch.ones(3)}, "param_groups": [{"lr": 0.1}]}
        document["rng_state"] = [{"np": ("MT19937", torch.get_rng_state().numpy())}]
        document["model"][f"{LAYER}0.mlp.linear_fc1._extra_state"] = None
        document["model"] = {
            name: torch.nn.Parameter(each) if each is not None else None for name, each in document["model"].items()
        }

    rewrite(file_of(release), add)
    with MegatronLegacyWeights(tmp_path) as weights:
        assert_equal(source, weights)


def test_layers_under_keys_of_their_own_and_the_common_state_of_later_versions(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("mixtral"))
    release = dist(source, tmp_path / "ours")
    state: dict[str, Any] = {"common_state/shard_0_1": [{"args": common_args(release), "iteration": 0}]}
    for key, tensor in all_tensors(release).items():
        if not key.startswith(LAYER):
            state[key] = tensor
            continue
        for layer in range(2):
            name = f"{LAYER}{layer}.{key.removeprefix(LAYER)}"
            if "linear_fc1" in key:  # experts, gate and up by themselves
                for expert in range(4):
                    gate, up = tensor[layer, expert].clone().chunk(2)
                    alone = name.replace("experts.experts.", f"experts.experts.{expert}.")
                    state |= {f"{alone}_w": gate, f"{alone}_v": up}
            else:
                state[name] = tensor[layer].clone()
    state["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = torch.ones(128, 32)
    save_dcp(state, tmp_path / "theirs")
    with MegatronDistWeights(tmp_path / "theirs") as weights:
        assert_equal(source, weights)


def test_the_true_size_of_the_vocabulary_is_asked_for_where_nobody_noted_it(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("llama"))
    release = legacy(source, tmp_path)
    rewrite(file_of(release), lambda document: setattr(document["args"], "vocab_size", None))
    with pytest.raises(InputError, match="how many of the 128 rows of the embedding are tokens"):
        MegatronLegacyWeights(tmp_path)
    with MegatronLegacyWeights(tmp_path, vocab_size=96) as weights:
        assert_equal(source, weights)
        assert weights.padded_vocab_size == 128


def refused(kind: type[TrainshedError], match: str, folder: Path) -> None:
    reader = MegatronDistWeights if (folder / ".metadata").exists() else MegatronLegacyWeights
    with pytest.raises(kind, match=match):
        reader(folder)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    release = legacy(MadeWeights(tiny_config("llama")), tmp_path, tp=2)
    (release / "mp_rank_01").rename(tmp_path / "elsewhere")
    refused(NotFound, "say tp 2, pp 1, ep 1, and of its ranks' folders mp_rank_01 missing", release)
    (tmp_path / "elsewhere").rename(release / "mp_rank_02")
    refused(NotFound, "mp_rank_01 missing; mp_rank_02 left over", release)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    source = MadeWeights(tiny_config("llama"))
    file = file_of(legacy(source, tmp_path / "legacy"))
    file.write_bytes(file.read_bytes()[:-100])
    refused(CorruptData, "only its beginning", tmp_path / "legacy" / "release")
    release = dist(source, tmp_path / "dist")
    part = release / "__0_1.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    with MegatronDistWeights(release) as weights, pytest.raises(CorruptData, match="only its beginning"):
        assert_equal(source, weights)
    part.unlink()
    refused(NotFound, "there is no __0_1.distcp", release)


def test_tensors_that_are_not_those_of_the_arguments_are_named(tmp_path: Path) -> None:
    release = legacy(MadeWeights(tiny_config("llama")), tmp_path / "legacy", spec="local")

    def spoil(document: dict[str, Any]) -> None:
        model = document["model"]
        del model[f"{LAYER}0.mlp.linear_fc2.weight"]
        model[f"{LAYER}0.mlp.linear_fc3.weight"] = torch.ones(2)
        model[f"{LAYER}1.mlp.linear_fc1.weight"] = torch.ones(2, 2)

    rewrite(file_of(release), spoil)
    refused(
        InputError,
        r"layers.0.mlp.linear_fc2.weight missing; .*linear_fc3.weight left over; `.*fc1.weight` is \[2, 2\], not",
        release,
    )
    ours = dist(MadeWeights(tiny_config("llama")), tmp_path / "dist")
    state = all_tensors(ours)
    state["decoder.layers.mlp.linear_fc3.weight"] = state.pop("decoder.layers.mlp.linear_fc2.weight")
    save_dcp({**state, "common_state/shard_0_1": [{"args": common_args(ours)}]}, tmp_path / "theirs")
    refused(InputError, "layers.0.mlp.down.weight, layers.1.mlp.down.weight missing; .*fc3", tmp_path / "theirs")


class Call:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_pickle_with_something_else_in_it_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = legacy(MadeWeights(tiny_config("llama")), tmp_path)

    def add(document: dict[str, Any]) -> None:
        document["harmless"] = Call()

    rewrite(file_of(release), add)
    refused(InputError, r"asks for `builtins.print`", release)
    assert capsys.readouterr().out == ""


def test_folders_without_a_checkpoint_say_so(tmp_path: Path) -> None:
    refused(NotFound, "no mp_rank folder", tmp_path)
    with pytest.raises(NotFound, match=r"no \.metadata"):
        MegatronDistWeights(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    refused(NotFound, "no iter_0000012", tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    refused(CorruptData, "names `soon`", tmp_path)

"""Two models against each other: equal bit by bit, or different by name, amount and place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.models.tiny_models import save_tiny_hf, tiny_config
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.prove.compare import boxes, compare_weights

VALUE = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_hf("llama", folder, seed=1)
    return folder


def changed(llama: Path, folder: Path, **tensors: torch.Tensor) -> HfWeights:
    """A copy of the model with some tensors in place of its own."""
    folder.mkdir()
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(load_file(llama / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    return HfWeights(folder)


def test_a_model_equals_itself_however_its_files_are_cut(llama: Path, tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path, seed=1, shard_bytes=20_000)
    found = compare_weights(HfWeights(llama), HfWeights(tmp_path))
    assert found.equal
    assert found.first_difference is None
    assert found.compared == 15
    assert found.to_plain()["equal"] is True


def test_one_changed_weight_is_named_with_its_place_and_its_amount(llama: Path, tmp_path: Path) -> None:
    values = load_file(llama / "model.safetensors")[VALUE].clone()
    values[5, 7] += 0.5
    found = compare_weights(HfWeights(llama), changed(llama, tmp_path / "b", **{VALUE: values}))
    (difference,) = found.differences
    assert not found.equal
    # Row 5 of the values is in the first group, behind its two query heads and its key head of 8 rows each.
    assert (difference.name, difference.first) == ("layers.1.attention.qkv.weight", (2 * 8 + 8 + 5, 7))
    assert difference.different == 1
    assert difference.max_absolute == pytest.approx(0.5, rel=1e-5)
    assert "1 of 2,048 differ by 0.5 at most" in (found.first_difference or "")


def test_a_relative_difference_is_written_as_a_share_of_the_value(llama: Path, tmp_path: Path) -> None:
    values = load_file(llama / "model.safetensors")[VALUE].clone()
    values[5, 7] = 0.0
    found = compare_weights(HfWeights(llama), changed(llama, tmp_path / "b", **{VALUE: values}))
    assert "at most (100% of the value)" in (found.first_difference or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_a_difference_without_an_amount(llama: Path, tmp_path: Path, value: float) -> None:
    values = load_file(llama / "model.safetensors")[VALUE].clone()
    values[0, 0] = value
    other = changed(llama, tmp_path / "b", **{VALUE: values})
    found = compare_weights(HfWeights(llama), other)
    assert [each.max_absolute for each in found.differences] == [None]
    assert compare_weights(other, other).equal, "the same bits are the same, whatever they mean"
    json.dumps(found.to_plain(), allow_nan=False)


def test_negative_zero_is_not_zero(llama: Path, tmp_path: Path) -> None:
    zeros = torch.zeros_like(load_file(llama / "model.safetensors")[VALUE])
    one, two = changed(llama, tmp_path / "a", **{VALUE: zeros}), changed(llama, tmp_path / "b", **{VALUE: -zeros})
    (difference,) = compare_weights(one, two).differences
    assert (difference.different, difference.max_absolute, difference.max_relative) == (zeros.numel(), 0.0, 0.0)


def test_a_cast_counts_as_equal_only_where_it_was_asked_for(llama: Path, tmp_path: Path) -> None:
    rounded = {name: each.bfloat16() for name, each in load_file(llama / "model.safetensors").items()}
    other = changed(llama, tmp_path / "b", **rounded)
    found = compare_weights(HfWeights(llama), other, dtype=torch.bfloat16)
    assert found.equal
    assert (found.dtypes_a, found.dtypes_b) == (("float32",), ("bfloat16",))
    assert len(compare_weights(HfWeights(llama), other).differences) == 15


def test_other_architectures_are_told_key_by_key(llama: Path, tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "b", seed=1, layers=3, vocab_size=64, tied_embeddings=True)
    found = compare_weights(HfWeights(llama), HfWeights(tmp_path / "b"))
    assert found.only_a == ("head.weight",)
    assert all(name.startswith("layers.2.") for name in found.only_b)
    assert found.shapes == (("embedding.weight", (96, 32), (64, 32)),)
    assert "`layers` is 2 in the first, 3 in the second" in found.config
    assert "`tied_embeddings` is false in the first, true in the second" in found.config


def test_a_value_that_null_stands_for_is_no_difference(tmp_path: Path) -> None:
    config = save_tiny_hf("llama-yarn", tmp_path, seed=1)
    scaling = {"kind": "yarn", "factor": 8.0, "original_positions": 16}
    same = tiny_config("llama-yarn", rope={"base": 1e4, "scaling": scaling | {"beta_fast": 32.0, "truncate": True}})
    other = tiny_config("llama-yarn", rope={"base": 1e4, "scaling": scaling | {"beta_fast": 16.0}})
    assert same != config
    with HfWeights(tmp_path) as one:
        assert compare_weights(one, HfWeights(tmp_path, same)).equal
        assert any("`rope`" in each for each in compare_weights(one, HfWeights(tmp_path, other)).config)


def test_a_lost_rope_scaling_is_a_difference_though_all_tensors_are_equal(tmp_path: Path) -> None:
    save_tiny_hf("llama3", tmp_path / "a", seed=1)
    save_tiny_hf("llama3", tmp_path / "b", seed=1, rope={"base": 100.0})
    found = compare_weights(HfWeights(tmp_path / "a"), HfWeights(tmp_path / "b"))
    assert not found.differences
    assert not found.equal
    assert "`rope` is" in (found.first_difference or "")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 40))
def test_boxes_cover_every_element_once_and_stay_small(shape: list[int], elements: int) -> None:
    counted = torch.zeros(shape, dtype=torch.int64)
    for offset, box in boxes(tuple(shape), elements):
        part = counted[tuple(slice(start, start + length) for start, length in zip(offset, box, strict=True))]
        assert part.numel() <= elements
        part += 1
    assert bool((counted == 1).all())

"""The map between our tensors and Hugging Face's: exact names and shapes, every row once, any cut by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.tiny_models import FAMILIES, VARIANTS, random_hf_model, tiny_config
from support.recipes.golden_files import check_golden
from trainshed.errors import InputError
from trainshed.models.hf_tensors import RowMapping, hf_names, hf_row_mappings, hf_tensors
from trainshed.models.parameters import parameters

DENSE = [variant for variant in VARIANTS if tiny_config(variant).moe is None]


def rows_by_the_definition(mapping: RowMapping) -> list[int]:
    return [mapping.start + i // mapping.run * mapping.period + i % mapping.run for i in range(mapping.rows)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_a_family_are_called_as_they_always_were(family: str) -> None:
    lines = [
        f"{tensor.name} {list(tensor.shape)} <- {tensor.row_mappings[0].native_name}"
        for tensor in hf_tensors(tiny_config(family))
    ]
    check_golden(f"hf_tensors/{family}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("variant", DENSE)
def test_a_dense_model_of_transformers_has_the_same_tensors(variant: str) -> None:
    # Experts are fused in its memory and separate in its files: tests/checkpoints/hf/test_weights.py reads those.
    config = tiny_config(variant)
    state = {name: tuple(weight.shape) for name, weight in random_hf_model(config, 0).named_parameters()}
    assert {tensor.name: tensor.shape for tensor in hf_tensors(config)} == state
    assert hf_names(config) == set(state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_lies_in_exactly_one_place_on_both_sides(variant: str) -> None:
    config = tiny_config(variant)
    by_tensor = {tensor.name: tensor for tensor in hf_tensors(config)}
    for parameter in parameters(config):
        row_mappings = hf_row_mappings(config, parameter)
        rows = parameter.shape[1 if parameter.expert else 0]
        for expert in range(parameter.shape[0]) if parameter.expert else (None,):
            laid = [
                row for mapping in row_mappings if mapping.expert == expert for row in rows_by_the_definition(mapping)
            ]
            assert sorted(laid) == list(range(rows))
        assert all(mapping in by_tensor[mapping.hf_name].row_mappings for mapping in row_mappings)
    for tensor in by_tensor.values():
        taken = [(mapping, mapping.hf_start + i) for mapping in tensor.row_mappings for i in range(mapping.rows)]
        first = tensor.row_mappings[0]
        if first.stacked and first.transposed:  # columns begin anew for each expert
            places = [(mapping.expert, row) for mapping, row in taken]
            assert places == [(expert, row) for expert in range(tensor.shape[0]) for row in range(tensor.shape[2])]
            continue
        rows = tensor.shape[1 if first.transposed else 0] * (tensor.shape[1] if first.stacked else 1)
        assert [row for _, row in taken] == list(range(rows))


@given(
    run=st.integers(1, 5),
    gap=st.integers(0, 4),
    runs=st.integers(1, 6),
    start=st.integers(0, 5),
    cut=st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_any_cut_takes_one_block_of_a_strip(run: int, gap: int, runs: int, start: int, cut: tuple[int, int]) -> None:
    mapping = RowMapping("theirs", "ours", 0, run * runs, start, run, run + gap)
    rows = rows_by_the_definition(mapping)
    first, last = mapping.within(min(cut), max(cut))
    assert [i for i, row in enumerate(rows) if min(cut) <= row < max(cut)] == list(range(first, last))
    assert np.arange(100)[mapping.native_rows(first, last)].tolist() == rows[first:last]


def test_a_tensor_that_hugging_face_does_not_have_is_named() -> None:
    config = tiny_config("mixtral", moe={"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 8})
    with pytest.raises(InputError, match=r"mixtral has no tensor for `layers.0.mlp.shared.gate_up.weight`"):
        hf_names(config)

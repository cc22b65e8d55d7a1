"""Documents packed into a row give the logits, losses and gradients that they give one by one."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import gradients, one_process_model, token_rows
from support.models.tiny_models import FAMILIES, tiny_config
from trainshed.models import documents
from trainshed.models.collectives import AxisGroup
from trainshed.models.documents import document_masks, document_positions
from trainshed.models.loss import IGNORE_INDEX

LENGTHS = [[5, 3, 8], [16], [1, 1, 13, 1], [7, 9]]
"""Lengths of the documents of each row."""
LENGTH = 16


def starts_of(lengths: list[list[int]]) -> torch.Tensor:
    rows = []
    for row in lengths:
        starts: list[int] = []
        for length in row:
            starts += [len(starts)] * length
        rows.append(starts)
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("family", "changes", "recompute"),
    [
        *((family, {}, "none") for family in FAMILIES),
        ("llama", {}, "full"),
        ("llama", {}, "selective"),
        ("mistral", {"sliding_window": 3}, "none"),
    ],
)
def test_packed_documents_give_what_they_give_alone(family: str, changes: dict[str, int], recompute: str) -> None:
    config = tiny_config(family, **changes)
    model = one_process_model(config, length=LENGTH, precision="fp64", recompute=recompute)
    (stage,) = model.stages
    tokens = token_rows(config, len(LENGTHS), LENGTH)
    labels = token_rows(config, len(LENGTHS), LENGTH, seed=1)
    packed = stage(tokens, labels, None, starts_of(LENGTHS))
    packed[0].backward()
    packed_gradients = gradients(model)
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        column = 0
        for length in lengths:
            # A document alone: at the beginning of a row, followed by tokens that carry no label.
            alone, alone_labels = torch.zeros(1, LENGTH, dtype=torch.int64), torch.full((1, LENGTH), IGNORE_INDEX)
            alone[0, :length] = tokens[row, column : column + length]
            alone_labels[0, :length] = labels[row, column : column + length]
            loss = stage(alone, alone_labels)
            loss[0].backward()
            total += loss[0].detach()
            column += length
    alone_gradients = gradients(model)
    router = {name for name in alone_gradients if "router" in name}
    assert packed[0].item() == pytest.approx(float(total), rel=1e-12)
    for name in alone_gradients.keys() - router:
        assert torch.allclose(packed_gradients[name], alone_gradients[name], rtol=1e-9, atol=1e-12), name


def test_one_document_a_row_is_what_no_documents_are() -> None:
    config = tiny_config("llama")
    (stage,) = one_process_model(config, length=LENGTH, precision="fp64").stages
    tokens = token_rows(config, 2, LENGTH)
    assert torch.allclose(stage(tokens), stage(tokens, document_starts=torch.zeros(2, LENGTH, dtype=torch.int64)))


def test_positions_count_from_the_beginning_of_a_document() -> None:
    positions = document_positions(starts_of([[5, 3, 8]]), torch.tensor([0, 4, 5, 7, 8, 15]))
    assert positions[:, 0].tolist() == [0, 4, 0, 2, 0, 7]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cp", [AxisGroup(), AxisGroup(2, 0), AxisGroup(2, 1)])
def test_blocks_hold_what_the_plain_mask_holds(cp: AxisGroup, window: int | None) -> None:
    starts = starts_of([[300, 12, 700, 12], [1, 127, 128, 512, 256], [1024]])
    plain = document_masks(starts, cp, window, blocks=False)
    for mask, (begin, end) in zip(plain, _parts(cp, 1024), strict=True):
        assert isinstance(mask, torch.Tensor)
        first_key = mask[:, 0].to(torch.int8).argmax(-1)
        blocks = documents._block_mask(first_key, begin, end)
        size = 128
        queries, keys = (end - begin) // size, end // size
        visible = mask.view(3, 1, queries, size, keys, size).permute(0, 1, 2, 4, 3, 5).flatten(4)
        partial = torch.zeros(3, 1, queries, keys, dtype=torch.bool)
        whole = torch.zeros_like(partial)
        for target, count, index in (
            (partial, blocks.kv_num_blocks, blocks.kv_indices),
            (whole, blocks.full_kv_num_blocks, blocks.full_kv_indices),
        ):
            assert count is not None
            assert index is not None
            for b in range(3):
                for q in range(queries):
                    target[b, 0, q, index[b, 0, q, : count[b, 0, q]].long()] = True
        assert not (partial & whole).any()
        assert torch.equal(partial | whole, visible.any(-1))
        assert torch.equal(whole, visible.all(-1))
        b, q, k = torch.meshgrid(torch.arange(3), torch.arange(end - begin), torch.arange(end), indexing="ij")
        assert torch.equal(blocks.mask_mod(b, torch.zeros_like(b), q, k), mask[:, 0])


def _parts(cp: AxisGroup, length: int) -> list[tuple[int, int]]:
    if cp.size == 1:
        return [(0, length)]
    part = length // (2 * cp.size)
    return [(n * part, (n + 1) * part) for n in (cp.rank, 2 * cp.size - 1 - cp.rank)]

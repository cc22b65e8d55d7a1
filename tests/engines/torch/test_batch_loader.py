"""A rank's rows of a step: labels, and where documents begin, on every rank of a layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.models.tiny_models import tiny_config
from support.runs.conversations import numbered_documents, write_conversations
from trainshed.data.order import DataOrder, packed_order
from trainshed.data.sampling.packing import PackRule
from trainshed.data.sampling.rows import IGNORED_LABEL
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.sampling.sources import SyntheticSource
from trainshed.data.tokens.token_source import TokenSource
from trainshed.engines.torch.batch_loader import BatchLoader
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.models.attention import context_parallel_shard
from trainshed.models.loss import IGNORE_INDEX
from trainshed.plan import parse_layout, resolve_layout
from trainshed.plan.layout import RankLayout
from trainshed.recipe import Layout

CPU = torch.device("cpu")
LENGTH = 24
BATCH = 6


@pytest.fixture
def order(tmp_path) -> DataOrder:
    lengths = [int(n) for n in 2 + np.arange(90) * 7 % 20]
    prefix = write_conversations(tmp_path / "c", numbered_documents(lengths))
    return packed_order(
        [TokenSource.open("a", [prefix])],
        indexes=tmp_path / "index",
        seed=3,
        sequence_length=LENGTH,
        rule=PackRule(),
        schedule=BatchSchedule(BATCH),
        build=True,
    )


def layout_of(keys: str, *, uneven: bool = False) -> RankLayout:
    return replace(
        resolve_layout(Layout.model_validate(parse_layout(keys)), tiny_config("llama", layers=6)), uneven=uneven
    )


def batches_of(order: DataOrder, layout: RankLayout, rank: int, steps: int = 3):
    mesh = replace(single_rank_mesh(layout, CPU), coordinates=layout.coordinates(rank))
    loader = BatchLoader(order, mesh, with_sample_ids=False)
    batches = [loader.batch(step, ahead=step + 1 < steps) for step in range(steps)]
    loader.close()
    return mesh, batches


@pytest.mark.parametrize("keys", ["dp=1", "dp=2", "dp=2,cp=2", "pp=3", "cp=3,pp=2"])
def test_every_rank_gets_the_documents_of_its_rows(order, keys):
    assert IGNORED_LABEL == IGNORE_INDEX
    layout = layout_of(keys)
    for rank in range(layout.world_size):
        mesh, batches = batches_of(order, layout, rank)
        for step, batch in enumerate(batches):
            rows = layout.sample_range(BATCH, mesh.coordinates.dp)
            expected = order.rows(step, rows.start, rows.stop)
            starts = torch.from_numpy(expected.document_starts[:, :-1].astype(np.int64))
            assert batch.rows == len(rows)
            assert batch.document_starts is not None
            assert batch.document_starts.dtype == torch.int64
            assert torch.equal(batch.document_starts, starts), "whole rows, on every rank"
            if not mesh.reads_tokens:
                assert batch.tokens is batch.labels is None
                continue
            cp = layout.cp, mesh.coordinates.cp
            labels = context_parallel_shard(torch.from_numpy(expected.labels()), *cp)
            assert torch.equal(batch.labels, labels)
            inputs = torch.from_numpy(expected.tokens[:, :-1].astype(np.int64))
            assert torch.equal(batch.tokens, context_parallel_shard(inputs, *cp))
            assert (batch.labels != IGNORE_INDEX).any()


def test_padding_rows_are_one_document_without_labels(order):
    layout = layout_of("dp=4,micro_batch=2", uneven=True)
    padded = 0
    for rank in range(4):
        mesh, (batch,) = batches_of(order, layout, rank, steps=1)
        padding = layout.padding(BATCH, mesh.coordinates.dp)
        padded += padding
        assert batch.document_starts.shape == batch.labels.shape == (batch.rows, LENGTH)
        if padding:
            assert not batch.document_starts[-padding:].any()
            assert (batch.labels[-padding:] == IGNORE_INDEX).all()
    assert padded


def test_plain_rows_have_no_documents_and_all_their_labels():
    source = SyntheticSource(vocab_size=50, sequence_length=LENGTH, seed=1)
    order = DataOrder([source], BatchSchedule(BATCH))
    _, (batch,) = batches_of(order, layout_of("dp=1"), 0, steps=1)
    assert batch.document_starts is None
    assert torch.equal(batch.labels, torch.from_numpy(order.batch(0).tokens[:, 1:].astype(np.int64)))
    _, (middle,) = batches_of(order, layout_of("pp=3"), 1, steps=1)
    assert middle.document_starts is middle.tokens is None

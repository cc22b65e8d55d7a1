"""The benchmark source: random access, frozen, uniform."""

from __future__ import annotations

import numpy as np

from trainshed.data.order import DataOrder, hash_batch
from trainshed.data.sampling.rows import SampleRows
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.sampling.sources import SyntheticSource


def rows_of(draws, **changed) -> np.ndarray:
    options = {"vocab_size": 50_000, "sequence_length": 64, "seed": 1} | changed
    return SyntheticSource(**options).read(np.asarray(draws)).tokens


def test_tokens_are_frozen():
    assert rows_of([0, 10**12])[:, :4].tolist() == [[15377, 11886, 11396, 7343], [31841, 5889, 36897, 10107]]
    assert hash_batch(SampleRows(rows_of(range(8)))) == "5811db4210a812d4"


def test_a_sample_does_not_depend_on_its_batch():
    together = rows_of(range(100))
    assert np.array_equal(together[37], rows_of([37])[0])
    assert not np.array_equal(together, rows_of(range(100), seed=2))


def test_tokens_are_spread_over_the_whole_vocabulary():
    tokens = rows_of(range(2000), vocab_size=256).reshape(-1)
    counts = np.bincount(tokens, minlength=256)
    expected = tokens.size / 256
    assert counts.size == 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255)
    assert rows_of([5], vocab_size=1).max() == 0


def test_an_order_can_stand_on_it_alone():
    source = SyntheticSource(vocab_size=100, sequence_length=16, seed=3)
    order = DataOrder([source], BatchSchedule(4))
    assert order.batch(10**6).tokens.shape == (4, 17)
    assert order.budget(10)[0].samples == 40
    assert order.budget(10)[0].epochs is None


def test_documents_begin_at_frozen_columns_and_change_no_token():
    options = {"vocab_size": 50_000, "sequence_length": 64, "seed": 1}
    apart = SyntheticSource(**options, keeps_documents_apart=True)
    rows = apart.read(np.arange(500))
    assert np.array_equal(rows.tokens, rows_of(range(500)))
    assert np.unique(apart.document_starts(np.array([0]))).tolist() == [0, 10, 28, 30]
    assert np.array_equal(rows.document_starts, np.stack([apart.document_starts(np.array([k]))[0] for k in range(500)]))
    columns = np.arange(65)
    begins = rows.document_starts == columns
    assert begins[:, 0].all()
    assert np.array_equal(rows.document_starts, np.maximum.accumulate(np.where(begins, columns, 0), axis=1))
    assert 4 < begins.sum() / len(begins) < 6, "about one in sixteen columns, and the first"

"""The benchmark source: random access, frozen, uniform."""

from __future__ import annotations

import numpy as np

from trainshed.data.order import DataOrder, hash_batch
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.sampling.sources import SyntheticSource


def rows_of(draws, **changed) -> np.ndarray:
    options = {"vocab_size": 50_000, "sequence_length": 64, "seed": 1} | changed
    out = np.empty((len(draws), options["sequence_length"] + 1), np.int32)
    SyntheticSource(**options).read(np.asarray(draws), out)
    return out


def test_tokens_are_frozen():
    assert rows_of([0, 10**12])[:, :4].tolist() == [[15377, 11886, 11396, 7343], [31841, 5889, 36897, 10107]]
    assert hash_batch(rows_of(range(8))) == "5811db4210a812d4"


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
    assert order.batch(10**6).shape == (4, 17)
    assert order.budget(10)[0].samples == 40
    assert order.budget(10)[0].epochs is None

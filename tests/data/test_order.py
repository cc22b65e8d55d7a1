"""The order of a run's samples: a function of (data section, seed, step, skip list) and of nothing else."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.data.order import (
    DataOrder,
    build_order,
    format_batch_hash,
    hash_batch,
    hash_batch_rows,
    open_order,
)
from trainshed.data.sampling.rows import SampleRows
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule, SkipList
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.data.tokens.token_files import shard_name
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import InputError, NotFound

SEQUENCE_LENGTH = 32
BATCH = 24
STEPS = 120


def write_corpus(folder: Path) -> list[TokenSource]:
    """Three sources made by arithmetic alone: long documents in shards, short ones, and int32 tokens."""

    def write(name: str, lengths: np.ndarray, dtype: str, salt: int) -> None:
        tokens = (np.arange(lengths.sum(), dtype=np.int64) * 2654435761 + salt) % 65536
        (folder / f"{name}.bin").write_bytes(tokens.astype(dtype).tobytes())
        write_index(folder / f"{name}.idx", np.dtype(dtype), lambda: [lengths.astype("<i4")])

    for shard in range(4):
        write(shard_name("long", shard, 4), 40 + np.arange(60) * 7919 % 3000, "<u2", shard)
    write("short", np.arange(3000) * 104729 % 30, "<u2", 11)
    write("wide", np.arange(500) * 31 % 211, "<i4", 12)
    return [
        TokenSource.open("0", (str(folder / "long"),), weight=0.7, name="long"),
        TokenSource.open("1", (str(folder / "short"),), weight=0.2, name="short"),
        TokenSource.open("2", (str(folder / "wide"),), weight=0.1, name="wide"),
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[list[TokenSource], Path]:
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder), folder / "indexes"


def order_of(corpus, *, steps=STEPS, schedule=None, skip=(), seed=1234) -> DataOrder:
    files, indexes = corpus
    return build_order(
        files,
        indexes=indexes,
        seed=seed,
        sequence_length=SEQUENCE_LENGTH,
        schedule=schedule or BatchSchedule(BATCH),
        steps=steps,
        skip=SkipList(skip),
    )


@pytest.fixture(scope="module")
def order(corpus) -> DataOrder:
    return order_of(corpus)


def digest(batch: np.ndarray) -> str:
    """Of the bytes as they are: independent of how the product hashes batches."""
    return hashlib.blake2b(np.ascontiguousarray(batch, "<i4").data, digest_size=8).hexdigest()


def test_batches_are_frozen(corpus, order):
    """Order algorithm 1: if one of these changes, runs that resume see other data."""
    assert [digest(order.batch(step).tokens) for step in (0, 1, 60, 119)] == [
        "81a8ad5e747cffa0",
        "ed66eda418dbb575",
        "d2cbda1bf5ff6ccd",
        "27ed3f305f3412a8",
    ]
    skipped = order_of(corpus, skip=[(24, 30), (100, 1000)], schedule=BatchSchedule(BATCH, BatchRampUp(8, 8, 64)))
    assert [digest(skipped.batch(step).tokens) for step in (0, 5, 60)] == [
        "62ae5afb14251a78",
        "40183f25570ec4d1",
        "6429ad6f93e54418",
    ]
    assert order.batch_hash(0) == "a0407ab5a88d03e5"


def test_ranks_that_hash_their_rows_make_the_batch_hash_together(order):
    whole = order.batch(3).tokens
    parts = [hash_batch_rows(SampleRows(whole[start : start + 6]), start) for start in range(0, BATCH, 6)]
    assert format_batch_hash(sum(low for low, _ in parts), sum(high for _, high in parts)) == order.batch_hash(3)
    swapped = whole[[1, 0, *range(2, BATCH)]]
    assert hash_batch(SampleRows(swapped)) != order.batch_hash(3), "the place of a row counts"


def test_any_division_into_ranks_gives_the_same_batch(order):
    for step in (0, 7, 119):
        whole = order.batch(step).tokens
        assert whole.shape == (BATCH, SEQUENCE_LENGTH + 1)
        for ranks in (1, 2, 3, 8, 24):
            each = BATCH // ranks
            parts = [order.rows(step, rank * each, (rank + 1) * each).tokens for rank in range(ranks)]
            assert np.array_equal(np.concatenate(parts), whole)
    with pytest.raises(IndexError, match="rows 0 to 25 of a batch of 24"):
        order.rows(0, 0, 25)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_read_the_same_batches(order, start):
    steps = [3, 117, 40, 0]
    expected = [order.batch_hash(step) for step in steps]
    with multiprocessing.get_context(start).Pool(2) as pool:
        assert pool.map_async(order.batch_hash, steps, chunksize=1).get(timeout=60) == expected


def test_threads_share_one_order(corpus, order):
    fresh = order_of(corpus)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(fresh.batch_hash, range(40))) == [order.batch_hash(step) for step in range(40)]
    for source in fresh.sources:
        source.close()
    assert fresh.batch_hash(3) == order.batch_hash(3)


def test_a_new_process_that_opens_midway_continues_the_same_order(corpus, order):
    files, indexes = corpus
    opened = open_order(
        files, indexes=indexes, seed=1234, sequence_length=SEQUENCE_LENGTH, schedule=BatchSchedule(BATCH)
    )
    assert opened.batch_hash(77) == order.batch_hash(77)
    assert pickle.loads(pickle.dumps(order)).batch_hash(77) == order.batch_hash(77)


def test_a_longer_run_begins_as_the_shorter_one(corpus, tmp_path):
    files, _ = corpus
    fresh = (files, tmp_path)
    before = [order_of(fresh, steps=20).batch_hash(step) for step in range(20)]
    longer = order_of(fresh, steps=2000)
    assert [longer.batch_hash(step) for step in range(20)] == before
    assert longer.batch(1999).tokens.shape == (BATCH, SEQUENCE_LENGTH + 1)


def test_ramp_up_takes_the_same_samples_in_other_batches(corpus, order):
    ramped = order_of(corpus, schedule=BatchSchedule(BATCH, BatchRampUp(4, 4, 100)))
    stream = np.concatenate([ramped.batch(step).tokens for step in range(20)])
    plain = np.concatenate([order.batch(step).tokens for step in range(20)])
    assert [len(ramped.batch(step)) for step in (0, 19)] == [4, BATCH]
    assert ramped.consumed(20) == len(stream) < len(plain)
    assert np.array_equal(stream, plain[: len(stream)])


def test_skipping_removes_samples_and_changes_nothing_before_them(corpus, order):
    stream = np.concatenate([order.batch(step).tokens for step in range(12)])
    skipped = order_of(corpus, skip=[(100, 130), (200, 210)])
    kept = np.concatenate([order_of(corpus, skip=[(100, 130)]).batch(step).tokens for step in range(6)])
    ours = np.concatenate([skipped.batch(step).tokens for step in range(10)])
    expected = np.delete(stream, [*range(100, 130), *range(200, 210)], axis=0)
    assert np.array_equal(ours, expected[: len(ours)])
    assert np.array_equal(kept, ours[: len(kept)])


def test_every_token_comes_from_where_the_order_says(corpus, order):
    """Rebuild rows from (source, epoch, window) with plain Python and the permutations alone."""
    samples = order.sample_indices(55)
    location = order.locate(samples)
    batch = order.batch(55).tokens
    for row in range(0, BATCH, 5):
        source = order.sources[location.source[row]]
        units, _ = source.index.epoch_order(int(location.epoch[row]))
        starts, wanted = source.index.starts, SEQUENCE_LENGTH + 1
        skipped, tokens = int(location.window[row]) * SEQUENCE_LENGTH, []
        for unit in units(np.arange(source.index.units)):
            length = int(starts[unit + 1] - starts[unit])
            if skipped < length:
                tokens += range(int(starts[unit]) + skipped, int(starts[unit + 1]))
            skipped = max(0, skipped - length)
            if len(tokens) >= wanted:
                break
        raw = np.concatenate([np.fromfile(shard + ".bin", source.reader.dtype) for shard in source.shards])
        assert np.array_equal(batch[row], raw[tokens[:wanted]])


def test_budget_counts_what_is_really_drawn(corpus, tmp_path):
    order = order_of((corpus[0], tmp_path), skip=[(100, 130), (500, 10_000)])
    drawn = np.concatenate([order.locate(order.sample_indices(step)).source for step in range(STEPS)])
    budgets = order.budget(STEPS)
    assert [budget.samples for budget in budgets] == np.bincount(drawn, minlength=3).tolist()
    assert [budget.name for budget in budgets] == ["long", "short", "wide"]
    assert [budget.tokens for budget in budgets] == [budget.samples * SEQUENCE_LENGTH for budget in budgets]
    last = order.locate(order.sample_indices(STEPS - 1))
    for number, (source, budget) in enumerate(zip(order.sources, budgets, strict=True)):
        # The index holds the epochs that the last step reaches, and not one more.
        assert source.index.epochs == math.ceil(budget.epochs)
        assert source.index.epochs == 1 + last.epoch[last.source == number].max()


@settings(max_examples=30)
@given(step=st.integers(0, 10**9))
def test_any_step_is_located_without_its_past(order, step):
    location = order.locate(order.sample_indices(step))
    for number, source in enumerate(order.sources):
        assert location.window[location.source == number].max(initial=0) < source.epoch_samples


def test_another_seed_or_label_is_another_order(corpus, order):
    files, indexes = corpus
    assert order_of(corpus, seed=1235).batch_hash(0) != order.batch_hash(0)
    with pytest.raises(InputError, match="two sources would be shuffled alike"):
        order_of(([files[0], files[0]], indexes))
    both = order_of(([files[1], TokenSource.open("9", files[1].prefixes, weight=0.2)], indexes))
    assert not np.array_equal(*(source.locate(np.arange(50))[1] for source in both.sources))


def test_moved_files_keep_their_order(corpus, order, tmp_path):
    write_corpus(tmp_path)
    moved = order_of((write_corpus(tmp_path), tmp_path / "indexes"))
    assert moved.batch_hash(9) == order.batch_hash(9)


def test_weights_left_out_make_many_files_one_proportional_blend(corpus):
    files, indexes = corpus
    bare = [TokenSource.open(each.label, each.prefixes) for each in files]
    order = order_of((bare, indexes))
    tokens = [source.tokens for source in order.sources]
    assert order.blend.weights == pytest.approx([count / sum(tokens) for count in tokens])
    one = order_of(([TokenSource.open("all", files[0].prefixes + files[1].prefixes)], indexes))
    assert one.sources[0].tokens == tokens[0] + tokens[1]


def test_what_was_not_prepared_is_named(corpus, tmp_path, order):
    files, _ = corpus
    options = {"sequence_length": SEQUENCE_LENGTH, "schedule": BatchSchedule(BATCH), "seed": 1}
    with pytest.raises(NotFound, match=r"source 'long' has no index\nrun `trainshed run RECIPE` first"):
        open_order(files, indexes=tmp_path, **options)
    with pytest.raises(InputError, match="is not in its index"):
        order.batch(10**6)


def test_batches_are_read_only_and_hash_by_value(order):
    batch = order.batch(0).tokens
    with pytest.raises(ValueError, match="read-only"):
        batch[0, 0] = 1
    assert hash_batch(SampleRows(batch.astype(np.int64))) == order.batch_hash(0)

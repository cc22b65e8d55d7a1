"""Where the documents of a row begin, in pretraining: as the documents themselves say, and as Megatron resets them."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainshed.data.order import DataOrder, build_order, hash_batch, hash_batch_rows, open_order
from trainshed.data.sampling.rows import IGNORED_LABEL, SampleRows
from trainshed.data.sampling.schedule import BatchSchedule, SkipList
from trainshed.data.tokens.indexed_dataset import HEADER, MAGIC
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import NotFound

SHARED = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
EOD = 0
BATCH = 4


def order_of(folder: Path, prefixes, length, *, document_mask=True, steps=3, seed=7) -> DataOrder:
    sources = [TokenSource.open(str(number), [prefix], weight=1) for number, prefix in enumerate(prefixes)]
    return build_order(
        sources,
        indexes=folder / "indexes",
        seed=seed,
        sequence_length=length,
        schedule=BatchSchedule(BATCH),
        steps=steps,
        document_mask=document_mask,
    )


def ended_documents(lengths, first=1) -> list[np.ndarray]:
    """Documents of different tokens, each with the end-of-document token after it."""
    ends = first + np.cumsum(lengths, dtype=np.int64)
    return [np.append(np.arange(end - n, end), EOD) for end, n in zip(ends, lengths, strict=True)]


def starts_by_the_tokens(tokens: np.ndarray) -> np.ndarray:
    """A document begins in the first column and after every end of one."""
    starts = np.empty(tokens.shape, np.int32)
    for row in range(len(tokens)):
        begin = 0
        for column in range(tokens.shape[1]):
            if column and tokens[row, column - 1] == EOD:
                begin = column
            starts[row, column] = begin
    return starts


lengths_of_documents = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=20, max_size=80)


@SHARED
@given(one=lengths_of_documents, other=lengths_of_documents, length=st.integers(1, 40), seed=st.integers(0, 3))
def test_documents_begin_where_their_tokens_say(write_tokens, tmp_path, one, other, length, seed):
    prefixes = [write_tokens("a", ended_documents(one)), write_tokens("b", ended_documents(other, 5000), "<i4")]
    if min(sum(lengths) + len(lengths) for lengths in (one, other)) <= length:
        return
    order = order_of(tmp_path, prefixes, length, seed=seed)
    plain = order_of(tmp_path, prefixes, length, seed=seed, document_mask=False)
    assert (order.keeps_documents_apart, plain.keeps_documents_apart) == (True, False)
    for step in range(3):
        batch = order.batch(step)
        assert np.array_equal(batch.tokens, plain.batch(step).tokens), "the order of samples does not change"
        assert plain.batch(step).document_starts is plain.document_starts(step, 0, BATCH) is None
        assert np.array_equal(batch.document_starts, starts_by_the_tokens(batch.tokens))
        assert batch.document_starts.dtype == np.int32
        assert np.array_equal(order.document_starts(step, 1, 3), batch.document_starts[1:3])


@pytest.fixture(scope="session")
def ltor_masks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
    return _get_ltor_masks_and_position_ids


@SHARED
@given(lengths=lengths_of_documents, length=st.integers(1, 40))
def test_attention_positions_and_loss_are_those_of_megatron(
    megatron, ltor_masks, write_tokens, tmp_path, lengths, length
):
    if sum(lengths) + len(lengths) <= length:
        return
    batch = order_of(tmp_path, [write_tokens("a", ended_documents(lengths))], length).batch(0)
    labels = batch.labels()
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    for row in range(BATCH):
        masked, loss_mask, positions = ltor_masks(
            megatron.torch.from_numpy(batch.tokens[row, :-1].copy()),
            EOD,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=True,
            create_attention_mask=True,
        )
        starts = batch.document_starts[row, :-1]
        assert np.array_equal(np.arange(length) - starts, positions.numpy())
        assert np.array_equal((starts[:, None] <= key) & (key <= query), ~masked[0].numpy())
        assert np.array_equal(labels[row] != IGNORED_LABEL, loss_mask.numpy() == 1)
        assert np.array_equal(labels[row][labels[row] >= 0], batch.tokens[row, 1:][labels[row] >= 0])


def write_foreign(prefix: Path, documents: list[list[int]]) -> str:
    """Token files of others: documents of several sequences, given by their lengths. Tokens count from 0."""
    lengths = [length for document in documents for length in document]
    bounds = np.concatenate(([0], np.cumsum([len(document) for document in documents])))
    pointers = 4 * (np.cumsum(lengths) - lengths)
    header = HEADER.pack(MAGIC, 1, 4, len(lengths), len(bounds))
    parts = (np.array(lengths, "<i4"), pointers.astype("<i8"), bounds.astype("<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    Path(f"{prefix}.bin").write_bytes(np.arange(sum(lengths), dtype="<i4").tobytes())
    assert len(header) == struct.calcsize("<9sQBQQ")
    return str(prefix)


@SHARED
@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=30),
    length=st.integers(1, 40),
    seed=st.integers(0, 20),
)
def test_sequences_of_one_document_that_meet_again_stay_one_document(tmp_path, documents, length, seed):
    """Sequences are shuffled one by one, as in Megatron. Where two neighbours meet, their document goes on."""
    lengths = [n for document in documents for n in document]
    if sum(lengths) <= length:
        return
    order = order_of(tmp_path, [write_foreign(tmp_path / "foreign", documents)], length, seed=seed)
    document_of = np.repeat([number for number, document in enumerate(documents) for _ in document], lengths)
    batch = order.batch(1)
    tokens = batch.tokens
    goes_on = (tokens[:, 1:] == tokens[:, :-1] + 1) & (document_of[tokens[:, 1:]] == document_of[tokens[:, :-1]])
    columns = np.arange(1, length + 1)
    expected = np.maximum.accumulate(np.where(goes_on, 0, columns), axis=1)
    assert np.array_equal(batch.document_starts[:, 1:], expected)
    assert not batch.document_starts[:, 0].any()


def test_an_index_of_a_run_without_the_mask_gains_it(write_tokens, tmp_path):
    prefix = write_tokens("a", ended_documents([7, 3, 9, 12, 5, 8, 20]))
    plain = order_of(tmp_path, [prefix], 8, document_mask=False)
    (folder,) = (path for path in (tmp_path / "indexes").iterdir() if path.is_dir())
    before = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    options = {"indexes": tmp_path / "indexes", "seed": 7, "sequence_length": 8, "schedule": BatchSchedule(BATCH)}
    sources = [source.source for source in plain.sources]
    with pytest.raises(NotFound, match="the index of source '0' does not say where documents begin"):
        open_order(sources, **options, document_mask=True)
    masked = order_of(tmp_path, [prefix], 8)
    after = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    assert before.items() < after.items()
    assert after.keys() - before.keys() == {"continued.npy"}
    opened = open_order(sources, **options, document_mask=True)
    assert opened.batch_hash(2) == masked.batch_hash(2)
    assert open_order(sources, **options).batch_hash(2) == plain.batch_hash(2)


def test_starts_and_learned_tokens_are_part_of_the_hash():
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    starts, learned = np.zeros((2, 9), np.int32), np.ones((2, 9), bool)
    moved = starts.copy()
    moved[1, 8] = 8
    unlearned = learned.copy()
    unlearned[0, 0] = False
    variants = [
        SampleRows(tokens),
        SampleRows(tokens, starts),
        SampleRows(tokens, moved),
        SampleRows(tokens, starts, learned),
        SampleRows(tokens, starts, unlearned),
    ]
    assert len({hash_batch(rows) for rows in variants}) == len(variants)
    halves = [
        hash_batch_rows(SampleRows(*(array[row : row + 1] for array in variants[4].arrays())), row) for row in (0, 1)
    ]
    assert hash_batch_rows(variants[4], 0) == tuple(np.sum(halves, axis=0))


def test_skipped_samples_take_their_documents_with_them(write_tokens, tmp_path):
    order = order_of(tmp_path, [write_tokens("a", ended_documents([7, 3, 9, 12, 5, 8, 20] * 5))], 8)
    skipping = DataOrder(order.sources, order.schedule, skip=SkipList([(2, 5)]))
    stream = np.concatenate([order.batch(step).document_starts for step in range(3)])
    ours = np.concatenate([skipping.batch(step).document_starts for step in range(2)])
    assert np.array_equal(ours, np.delete(stream, range(2, 5), axis=0)[:8])
    assert np.array_equal(skipping.document_starts(0, 0, BATCH), ours[:BATCH])


def test_rows_cannot_be_written_to(write_tokens, tmp_path):
    batch = order_of(tmp_path, [write_tokens("a", ended_documents([7, 3, 9, 12]))], 8).batch(0)
    for array in batch.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1

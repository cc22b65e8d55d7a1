"""Conversations packed into rows: each once an epoch, never split, as full as best fit decreasing makes them."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.runs.conversations import numbered_documents, write_conversations
from trainshed.data.sampling.packing import (
    PackedDataset,
    PackIndex,
    PackRule,
    PackSpec,
    best_fit,
    build_pack_index,
    pack_documents,
)
from trainshed.data.sampling.rows import IGNORED_LABEL
from trainshed.data.tokens.token_files import shard_name
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import CorruptData, InputError, NotFound

SHARED = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTH = 24
PACKED = PackRule()
shards_of_lengths = st.lists(
    st.lists(st.one_of(st.integers(1, 5), st.integers(1, LENGTH)), max_size=60), min_size=1, max_size=3
)


def packed(folder, shards, *, length=LENGTH, rule=PACKED, seed=5, split=(0.0, 1.0), learned=None, dtype="<i4"):
    prefixes, first = [], 1
    for number, lengths in enumerate(shards):
        prefix = folder / shard_name("c", number, len(shards) + 1)
        masks = None if learned is None else learned[number]
        prefixes.append(write_conversations(prefix, numbered_documents(lengths, first), masks, dtype))
        first += sum(lengths)
    source = TokenSource.open("a", prefixes)
    spec = PackSpec.of(source, seed, length, rule, split)
    return PackedDataset(source, build_pack_index(folder / spec.key, spec, prefixes))


def documents_of(rows, row):
    """The documents of a row by its `document_starts`, the padding last."""
    starts = rows.document_starts[row]
    cuts = [*np.unique(starts).tolist(), len(starts)]
    assert all((starts[begin:end] == begin).all() for begin, end in pairwise(cuts))
    return [rows.tokens[row, begin:end].tolist() for begin, end in pairwise(cuts)]


@given(lengths=st.lists(st.integers(1, 40), max_size=300), room=st.integers(40, 90))
def test_best_fit_is_what_trying_every_row_finds(lengths, room):
    lengths = np.array(sorted(lengths, reverse=True), np.int64)
    row_of = best_fit(lengths, room)
    left: list[int] = []
    for length in lengths.tolist():
        fitting = [row for row, space in enumerate(left) if space >= length]
        if fitting:
            left[min(fitting, key=lambda row: left[row])] -= length
        else:
            left.append(room - length)
    filled = np.bincount(row_of, lengths, minlength=len(left)).astype(int)
    assert sorted(filled.tolist()) == sorted(room - space for space in left)


@SHARED
@given(shards=shards_of_lengths, seed=st.integers(0, 3), epoch=st.integers(0, 10**6))
def test_every_epoch_has_every_conversation_once_and_whole(tmp_path, shards, seed, epoch):
    dataset = packed(tmp_path, shards, seed=seed)
    expected = sorted(document.tolist() for document in numbered_documents([n for part in shards for n in part]))
    rows = dataset.epoch_samples
    if not rows:
        assert not expected
        return
    read = dataset.read(np.arange(rows) + epoch * rows)
    found = []
    for row in range(rows):
        *documents, padding = documents_of(read, row)
        found += documents
        assert set(padding) == {0}, "the last column is always padding"
        assert sum(map(len, documents)) <= LENGTH
    assert sorted(found) == expected
    assert np.array_equal(read.learned, learned_reference(read))


def learned_reference(rows) -> np.ndarray:
    """The later half of each document, as `write_conversations` writes it."""
    starts, columns = rows.document_starts, np.arange(rows.tokens.shape[1])
    lengths = np.stack([np.bincount(row, minlength=rows.tokens.shape[1])[row] for row in starts])
    return (columns - starts >= lengths // 2) & (rows.tokens > 0)


@SHARED
@given(shards=shards_of_lengths.filter(lambda shards: any(shards)), data=st.data())
def test_any_row_is_read_alone_and_in_any_order(tmp_path, shards, data):
    dataset = packed(tmp_path, shards)
    draws = np.arange(3 * dataset.epoch_samples)
    together = dataset.read(draws)
    chosen = np.array(data.draw(st.lists(st.sampled_from(draws.tolist()), min_size=1, max_size=8)))
    apart = pickle.loads(pickle.dumps(dataset)).read(chosen)
    assert np.array_equal(apart.tokens, together.tokens[chosen])
    assert np.array_equal(apart.document_starts, together.document_starts[chosen])
    assert np.array_equal(apart.learned, together.learned[chosen])
    assert np.array_equal(dataset.document_starts(chosen), together.document_starts[chosen])


@SHARED
@given(shards=shards_of_lengths.filter(lambda shards: any(shards)), data=st.data())
def test_labels_are_those_of_each_conversation_alone(tmp_path, shards, data):
    masks = [[data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in part] for part in shards]
    dataset = packed(tmp_path, shards, learned=masks)
    documents = numbered_documents([n for part in shards for n in part])
    expected = {}
    for tokens, mask in zip(documents, (mask for part in masks for mask in part), strict=True):
        following = [token if on else IGNORED_LABEL for token, on in zip(tokens[1:], mask[1:], strict=True)]
        expected |= dict(zip(tokens.tolist(), [*following, IGNORED_LABEL], strict=True))
    rows = dataset.read(np.arange(dataset.epoch_samples))
    labels = rows.labels()
    assert labels.shape == (dataset.epoch_samples, LENGTH)
    assert labels.dtype == np.int64
    assert np.array_equal(labels, np.vectorize(expected.get)(rows.tokens[:, :-1], IGNORED_LABEL))
    assert dataset.index.learned_tokens == sum(sum(mask) for part in masks for mask in part)


def test_packed_rows_are_frozen(tmp_path):
    """Packing 1: if one of these changes, fine-tuning runs that resume see other data."""
    spec = PackSpec("content", "learned", "a", 1234, 512, PackRule())
    assert spec.key == "850b9ba7db06279717d8516ef67bfdfc"
    lengths = 3 + np.arange(3000) * 7919 % 500
    rows, items = pack_documents(lengths, spec)
    assert len(rows) == 1481
    assert items[:6].tolist() == [2821, 253, 1321, 753, 821, 2753]
    assert rows[-4:].tolist() == [2954, 2956, 2958, 3000]
    dataset = packed(tmp_path, [lengths], length=512, seed=1234)
    assert dataset.locate(np.array([0, 1, len(rows) - 1, 10**9]))[1].tolist() == [41, 462, 17, 1200]


def test_rows_are_visited_in_another_order_in_every_epoch(tmp_path):
    dataset = packed(tmp_path, [[20] * 50])
    epochs = [dataset.locate(np.arange(50) + 50 * epoch) for epoch in range(3)]
    assert [set(epoch.tolist()) for epoch, _ in epochs] == [{0}, {1}, {2}]
    assert len({tuple(row) for _, row in epochs}) == 3
    assert all(sorted(row) == list(range(50)) for _, row in epochs)


def test_without_packing_each_conversation_has_its_row(tmp_path):
    lengths = [3, 24, 1, 7]
    dataset = packed(tmp_path, [lengths], rule=PackRule(packed=False))
    assert dataset.epoch_samples == 4
    rows = dataset.read(np.arange(4))
    found = sorted(documents_of(rows, row)[0] for row in range(4))
    assert found == sorted(document.tolist() for document in numbered_documents(lengths))
    assert dataset.index.efficiency == 35 / (4 * 24)


@SHARED
@given(
    shards=st.lists(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30), min_size=1, max_size=3),
    on=st.booleans(),
)
def test_the_answers_of_a_pair_stay_together(tmp_path, shards, on):
    lengths = [[length for pair in part for length in pair] for part in shards]
    dataset = packed(tmp_path, lengths, rule=PackRule(packed=on, pairs=True))
    assert dataset.pairs
    documents = [document.tolist() for document in numbered_documents([n for part in lengths for n in part])]
    expected = sorted(zip(documents[0::2], documents[1::2], strict=True))
    found = []
    for row in range(dataset.epoch_samples):
        *answers, _ = documents_of(dataset.read(np.array([row])), 0)
        assert on or len(answers) == 2
        found += zip(answers[0::2], answers[1::2], strict=True)
    assert sorted(found) == expected


def test_shares_of_a_split_hold_different_pairs(tmp_path):
    lengths = [5, 6] * 10
    parts = [packed(tmp_path, [lengths], rule=PackRule(pairs=True), split=split) for split in ((0, 0.75), (0.75, 1))]
    tokens = [set(part.read(np.arange(part.epoch_samples)).tokens.reshape(-1).tolist()) - {0} for part in parts]
    # 7.5 pairs are rounded to 8, as Megatron rounds.
    assert tokens == [set(range(1, 89)), set(range(89, 111))]
    assert [part.index.documents for part in parts] == [16, 4]


def test_the_manifest_counts_what_is_there(tmp_path):
    dataset = packed(tmp_path, [[20, 10, 14], [4, 24]])
    facts = json.loads((dataset.index.folder / "manifest.json").read_text())["facts"]
    names = ("rows", "documents", "tokens", "learned_tokens", "efficiency", "pack")
    assert [facts[name] for name in names] == [3, 5, 72, 36, 1.0, 1]
    assert dataset.tokens == 3 * LENGTH
    dataset.index.check()
    items = dataset.index.folder / "items.npy"
    damaged = bytearray(items.read_bytes())
    damaged[-8] ^= 1
    items.write_bytes(damaged)
    with pytest.raises(CorruptData, match=r"items\.npy: is not what its manifest says"):
        PackIndex(dataset.index.folder).check()


def test_a_pack_index_is_of_one_spec_and_version(tmp_path):
    dataset = packed(tmp_path, [[20, 10]])
    folder, spec = dataset.index.folder, dataset.index.spec
    variants = [
        replace(spec, content="b"),
        replace(spec, learned="b"),
        replace(spec, label="b"),
        replace(spec, seed=6),
        replace(spec, sequence_length=25),
        replace(spec, split=(0.0, 0.5)),
        replace(spec, rule=PackRule(packed=False)),
        replace(spec, rule=PackRule(pairs=True)),
    ]
    assert len({spec.key, *(variant.key for variant in variants)}) == 9
    with pytest.raises(CorruptData, match="is the pack index of something else"):
        build_pack_index(folder, variants[0], dataset.shards)
    body = json.loads((folder / "manifest.json").read_text())
    body["facts"]["pack"] = 2
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CorruptData, match="is 'pack' with packing 2; this version reads 'pack' with packing 1"):
        PackIndex(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(NotFound, match="no pack index here"):
        PackIndex(folder)


def test_what_cannot_be_packed_is_named(tmp_path):
    with pytest.raises(InputError, match="conversation 1 has 30 tokens, more than a sample of 24; 1 others do not fit"):
        packed(tmp_path / "long", [[10, 30, 25]])
    with pytest.raises(InputError, match="pair 0 has 28 tokens, more than a sample of 24") as raised:
        packed(tmp_path / "pair", [[14, 14, 2, 2]], rule=PackRule(pairs=True))
    assert "`data.sequence_length: 28` or more" in str(raised.value.hint)
    with pytest.raises(CorruptData, match="its 3 sequences are not groups of 2 with tokens in each"):
        packed(tmp_path / "odd", [[4, 4, 4]], rule=PackRule(pairs=True))
    with pytest.raises(CorruptData, match=r"c-00000-of-00002\.learned: byte 5 is 7; 0 and 1 are known"):
        packed(tmp_path / "mask", [[4, 4]], learned=[[[0, 1, 1, 1], [0, 7, 1, 1]]])
    prefix = write_conversations(tmp_path / "bare", [[1, 2, 3]])
    Path(f"{prefix}.learned").unlink()
    with pytest.raises(NotFound, match="the tokens of source 'a' do not say which of them are learned"):
        PackSpec.of(TokenSource.open("a", [prefix]), 1, 8, PackRule())
    with pytest.raises(InputError, match="source 'a' holds no conversations"):
        packed(tmp_path / "none", [[]]).locate(np.array([0]))


def test_a_mask_of_another_length_than_the_tokens_is_refused(tmp_path):
    dataset = packed(tmp_path, [[4, 4]])
    (mask,) = tmp_path.glob("*.learned")
    mask.write_bytes(b"\1" * 7)
    with pytest.raises(CorruptData, match=r"\.learned: has 7 bytes, its index says 8 tokens of uint8"):
        PackedDataset(dataset.source, dataset.index)


KILLED = """
import os, signal, sys
from pathlib import Path
from trainshed.data.sampling.packing import PackRule, PackSpec, build_pack_index
from trainshed.data.tokens.token_source import TokenSource

prefix, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
def kill_at(event, arguments):
    # A step: a file of the artefact is opened, or gets its name.
    global steps
    if event in ("open", "os.rename") and str(arguments[0]).startswith(folder):
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill_at)
spec = PackSpec.of(TokenSource.open("a", [prefix]), 5, 24, PackRule())
build_pack_index(Path(folder) / spec.key, spec, [prefix])
"""


def test_packing_may_be_killed_at_any_moment(tmp_path):
    lengths = [int(length) for length in 1 + np.arange(200) * 37 % 23]
    prefix = write_conversations(tmp_path / "c", numbered_documents(lengths))

    spec = PackSpec.of(TokenSource.open("a", [prefix]), 5, 24, PackRule())

    def files(folder: Path) -> dict[str, bytes]:
        # What a store was writing when it was killed stays beside the files, under a name of its own.
        return {path.name: path.read_bytes() for path in (folder / spec.key).iterdir() if path.suffix != ".part"}

    build_pack_index(tmp_path / "whole" / spec.key, spec, [prefix])
    expected, states, steps = files(tmp_path / "whole"), [], 0
    assert sorted(expected) == ["items.npy", "manifest.json", "rows.npy", "starts.npy"]
    while True:
        folder = tmp_path / f"killed-{steps}"
        command = [sys.executable, "-c", KILLED, prefix, str(folder), str(steps)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        left = files(folder) if (folder / spec.key).exists() else {}
        states.append(len([name for name in left if name in expected]))
        if "manifest.json" in left:
            assert expected.items() <= left.items(), "an artefact with a manifest is complete"
        build_pack_index(folder / spec.key, spec, [prefix])
        assert files(folder) == expected
        steps += 1
    assert set(states) == {0, 1, 2, 3, 4}

"""The index of a source: built once, extended without touching the past, and cut as Megatron cuts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainshed.data.sampling import index as index_module
from trainshed.data.sampling.index import (
    IndexSpec,
    SourceIndex,
    build_index,
    split_range,
    unit_order,
)
from trainshed.data.sampling.sources import TokenDataset
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.token_files import shard_name
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import CorruptData, InputError, NotFound

SHARED = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
shards_of_lengths = st.lists(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), max_size=150), min_size=1, max_size=3
)


def numbered(lengths, first=0):
    """Documents whose tokens are all different, so that a token tells where it came from."""
    ends = first + np.cumsum(lengths, dtype=np.int64)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def source_of(write_tokens, folder, shards, length, *, epochs=2, seed=5, split=(0.0, 1.0)):
    prefixes, first = [], 0
    for number, lengths in enumerate(shards):
        prefixes.append(write_tokens(shard_name("c", number, len(shards) + 1), numbered(lengths, first), "<i4"))
        first += sum(lengths)
    source = TokenSource.open("a", prefixes)
    spec = IndexSpec.of(source, seed, split)
    return TokenDataset(source, build_index(folder / spec.key, spec, prefixes, epochs=epochs), length)


@SHARED
@given(shards=shards_of_lengths, length=st.integers(1, 50), epoch=st.integers(0, 1))
def test_windows_are_what_megatron_cuts_from_our_document_order(
    megatron, write_tokens, tmp_path, shards, length, epoch
):
    """Given the order of documents, `build_sample_idx` of megatron-core finds the same tokens."""
    sizes = np.array([size for lengths in shards for size in lengths if size], np.int32)
    source = source_of(write_tokens, tmp_path, shards, length)
    if not source.epoch_samples:
        assert sizes.sum() <= length
        return
    order = unit_order(source.index.spec, len(sizes), epoch)(np.arange(len(sizes))).astype(np.int32)
    cuts = megatron.helpers.build_sample_idx(sizes, order, length, 1, int(sizes.sum()))
    assert len(cuts) - 1 == source.epoch_samples
    documents = numbered(sizes)
    windows = np.arange(source.epoch_samples)
    draws = source._window_order(epoch).inverse(windows) + epoch * source.epoch_samples
    rows = source.read(draws).tokens
    for window in windows:
        (first, begin), (last, end) = cuts[window], cuts[window + 1]
        if first == last:
            expected = documents[order[first]][begin : end + 1]
        else:
            middle = [documents[order[place]] for place in range(first + 1, last)]
            tail = documents[order[last]][: end + 1]
            expected = np.concatenate([documents[order[first]][begin:], *middle, tail])
        assert np.array_equal(rows[window], expected)


@SHARED
@given(shards=shards_of_lengths, length=st.integers(1, 50))
def test_an_epoch_visits_every_window_once(write_tokens, tmp_path, shards, length):
    source = source_of(write_tokens, tmp_path, shards, length)
    samples = source.epoch_samples
    if samples:
        epoch, window = source.locate(np.arange(2 * samples))
        assert epoch.tolist() == [0] * samples + [1] * samples
        assert np.array_equal(np.sort(window[:samples]), np.arange(samples))
        assert np.array_equal(np.sort(window[samples:]), np.arange(samples))


def test_many_shards_are_one_concatenation(write_tokens, tmp_path):
    lengths = [int(length) for length in np.arange(900) * 37 % 23]
    whole = source_of(write_tokens, tmp_path / "whole", [lengths], 16)
    parts = source_of(write_tokens, tmp_path / "parts", [lengths[:100], [], lengths[100:350], lengths[350:]], 16)
    draws = np.arange(whole.epoch_samples + 10)
    assert np.array_equal(whole.read(draws).tokens, parts.read(draws).tokens)


def test_more_epochs_only_add_files(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[9] * 300], 8, epochs=1)
    folder, spec = source.index.folder, source.index.spec
    past = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    with pytest.raises(InputError, match=r"epoch 1 of source 'a' is not in its index of 1"):
        source.index.epoch_order(1)
    build_index(folder, spec, source.shards, epochs=3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "epoch-00000.npy",
        "epoch-00001.npy",
        "epoch-00002.npy",
        "manifest.json",
        "starts.npy",
    ]
    assert all((folder / name).read_bytes() == content for name, content in past.items())
    assert build_index(folder, spec, source.shards, epochs=1).epochs == 3


def test_small_chunks_and_large_ones_build_the_same_index(write_tokens, tmp_path, monkeypatch):
    lengths = [int(length) for length in np.arange(2000) * 41 % 17]
    large = source_of(write_tokens, tmp_path / "large", [lengths, lengths], 8)
    monkeypatch.setattr(index_module, "CHUNK_UNITS", 100)
    monkeypatch.setattr(index_module, "CHUNK_POSITIONS", 128)
    small = source_of(write_tokens, tmp_path / "small", [lengths, lengths], 8)
    for name in ("starts.npy", "epoch-00000.npy", "epoch-00001.npy", "manifest.json"):
        assert (large.index.folder / name).read_bytes() == (small.index.folder / name).read_bytes()


def test_an_index_without_a_manifest_does_not_exist(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[5] * 50], 8)
    folder = source.index.folder
    content = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").unlink()
    with pytest.raises(NotFound, match="no index here"):
        SourceIndex(folder)
    build_index(folder, source.index.spec, source.shards, epochs=2)
    assert (folder / "manifest.json").read_bytes() == content


def test_every_input_has_its_own_address():
    specs = [
        IndexSpec("c", "a", 1),
        IndexSpec("d", "a", 1),
        IndexSpec("c", "b", 1),
        IndexSpec("c", "a", 2),
        IndexSpec("c", "a", 1, (0.0, 0.5)),
    ]
    assert len({spec.key for spec in specs}) == len(specs)
    # Indexes that exist are found again: a change here builds all of them anew.
    assert specs[0].key == "7880d31af19c0ee3fc7d9d1413884585"
    assert specs[4].key == "d452957c353c2997b2c5e431b93d043d"
    assert IndexSpec("d", "source-0", 1234, (0.9, 1.0)).key == "9a56758113dee3dfe7eadaae09871df4"


def test_damage_is_found(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[5] * 50], 8)
    folder = source.index.folder
    source.index.check()
    table = folder / "epoch-00001.npy"
    content = bytearray(table.read_bytes())
    content[-3] ^= 1
    table.write_bytes(content)
    with pytest.raises(CorruptData, match=r"epoch-00001\.npy: is not what its manifest says"):
        SourceIndex(folder).check()
    (folder / "starts.npy").write_bytes(b"short")
    with pytest.raises(CorruptData, match=r"starts\.npy: cannot be read"):
        SourceIndex(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["facts"]["order"] = 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptData, match="with order 2; this version reads 'index' with order 1"):
        SourceIndex(folder)


def test_token_files_that_do_not_fit_their_index_are_refused(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[5] * 50], 8)
    with pytest.raises(CorruptData, match="has 2 token files, its index was made of 1"):
        TokenDataset(source.source, source.index, 8, shards=source.shards * 2)
    other = write_tokens("other", [[1, 2]], "<i4")
    with pytest.raises(CorruptData, match="has 8 bytes, its index says 250 tokens of int32"):
        TokenDataset(TokenSource.open("a", [other]), source.index, 8)
    with pytest.raises(NotFound, match=r"gone\.bin: no such token file"):
        TokenDataset(source.source, source.index, 8, shards=[str(tmp_path / "gone")])
    floats = write_tokens("floats", [[1, 2, 3]], "<f4")
    float_source = TokenSource.open("f", [floats])
    spec = IndexSpec.of(float_source, 1)
    with pytest.raises(InputError, match="holds float32 values; tokens are integers"):
        TokenDataset(float_source, build_index(tmp_path / "f", spec, [floats], epochs=1), 1)
    mixed = IndexSpec("m", "m", 1)
    with pytest.raises(InputError, match=r"holds float32 tokens, but .* holds int32"):
        build_index(tmp_path / "m", mixed, [other, floats], epochs=1)


@given(sequences=st.integers(0, 10_000), fractions=st.tuples(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1)))
def test_a_split_takes_the_sequences_megatron_takes(megatron, sequences, fractions):
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    vector = config.parse_and_normalize_split(",".join(f"{share:.6f}" for share in fractions))
    for share in config.convert_split_vector_to_split_matrix(vector):
        if share is not None:
            expected = tuple(round(edge * float(sequences)) for edge in share)
            assert split_range(share, sequences) == expected


def test_the_shares_of_a_split_hold_different_documents(write_tokens, tmp_path):
    lengths = [int(length) for length in np.arange(400) * 37 % 23]
    seen = []
    for split in ((0.0, 0.9), (0.9, 1.0)):
        source = source_of(write_tokens, tmp_path, [lengths[:150], lengths[150:]], 4, split=split)
        rows = source.read(np.arange(source.epoch_samples)).tokens
        seen.append(set(rows.reshape(-1).tolist()))
        assert source.tokens - len(seen[-1]) < 5
    assert not seen[0] & seen[1]
    assert max(seen[0]) < min(seen[1])


def test_a_token_leads_back_to_its_file_and_document(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[3, 0, 2], [4]], 4)
    rows = source.read(np.arange(2)).tokens
    for row in range(2):
        tokens = []
        for span in source.document_spans(0, int(source.locate(np.array([row]))[1][0])):
            assert span.column == len(tokens)
            with IndexedDataset(span.file) as reader:
                tokens += reader.document(span.document)[span.offset :][: span.tokens].tolist()
        assert tokens == rows[row].tolist()


def test_too_little_text_for_one_sample_is_an_error(write_tokens, tmp_path):
    source = source_of(write_tokens, tmp_path, [[3, 2]], 5)
    with pytest.raises(InputError, match="source 'a' has 5 tokens, fewer than one sample of 6"):
        source.locate(np.array([0]))

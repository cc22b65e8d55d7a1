"""Token files against megatron-core 0.16.1: each side writes, the other reads, and the bytes are equal."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainshed.data.tokens.indexed_dataset import (
    IndexedDataset,
    encode_index,
    lengths_from_file,
    token_dtype,
    write_index,
)
from trainshed.data.tokens.token_files import shard_name, shard_prefixes
from trainshed.errors import AddressError, CorruptData, InputError, NotFound

DTYPES = {"<u2": 65535, "<i4": 2**31 - 1}
SHARED = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def documents_of(dtype: str) -> st.SearchStrategy[list[list[int]]]:
    token = st.one_of(st.integers(0, DTYPES[dtype]), st.sampled_from([0, 65499, 65500, 65535, DTYPES[dtype]]))
    token = token.filter(lambda value: value <= DTYPES[dtype])
    return st.lists(st.lists(token, max_size=6), max_size=12)


corpora = st.sampled_from(sorted(DTYPES)).flatmap(lambda name: st.tuples(st.just(name), documents_of(name)))


def megatron_writes(megatron, prefix: Path, dtype: str, documents) -> None:
    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        # What preprocess_data.py does: a document without tokens becomes a document without sequences.
        if len(document):
            builder.add_item(megatron.torch.from_numpy(np.asarray(document, np.int64)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def test_token_type_follows_megatrons_rule_at_its_boundary(megatron):
    for vocab_size in (1, 65499, 65500, 65536, 300_000):
        assert token_dtype(vocab_size).type is megatron.indexed.DType.optimal_dtype(vocab_size)


@SHARED
@given(corpus=corpora, chunk=st.integers(1, 5))
def test_our_files_are_byte_identical_to_megatrons(megatron, tmp_path, corpus, chunk):
    dtype, documents = corpus
    megatron_writes(megatron, tmp_path / "theirs", dtype, documents)
    lengths = np.array([len(document) for document in documents], "<i4")
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_index(tmp_path / "ours.idx", np.dtype(dtype), lengths_from_file(tmp_path / "lengths", chunk))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


@SHARED
@given(corpus=corpora)
def test_we_read_what_megatron_writes(megatron, tmp_path, corpus):
    dtype, documents = corpus
    megatron_writes(megatron, tmp_path / "theirs", dtype, documents)
    with IndexedDataset(tmp_path / "theirs") as reader:
        reader.check()
        assert [reader.document(number).tolist() for number in range(reader.documents)] == documents
        assert reader.sequences == sum(1 for document in documents if document)
        assert reader.tokens == sum(map(len, documents))
        flat = [token for document in documents for token in document]
        assert [token for chunk in reader.token_chunks(3) for token in chunk.tolist()] == flat


@SHARED
@given(corpus=corpora)
def test_megatron_reads_what_we_write(megatron, tmp_path, write_tokens, corpus):
    dtype, documents = corpus
    prefix = write_tokens("ours", documents, dtype)
    # numpy cannot map an empty file, so Megatron opens a corpus without tokens only without mmap.
    theirs = megatron.indexed.IndexedDataset(prefix, mmap=any(documents))
    assert [theirs[number].tolist() for number in range(len(theirs))] == [each for each in documents if each]
    assert len(theirs.document_indices) - 1 == len(documents)


def test_many_documents_read_back_the_same_on_both_sides(megatron, tmp_path, write_tokens):
    random = np.random.default_rng(7)
    documents = np.split(np.arange(300_000) % 60_000, np.sort(random.integers(0, 300_000, 50_000)))
    prefix = write_tokens("many", documents)
    theirs = megatron.indexed.IndexedDataset(prefix)
    with IndexedDataset(prefix) as reader:
        reader.check()
        assert reader.documents == 50_001
        for number in random.integers(0, reader.sequences, 200):
            assert np.array_equal(reader.sequence(number), theirs[int(number)])
        for number in random.integers(0, reader.documents, 200):
            assert np.array_equal(reader.document(number), documents[number])


def test_sentence_split_files_give_whole_documents(megatron, tmp_path):
    builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / "s.bin"), dtype=np.uint16)
    builder.add_document(np.array([1, 2, 3, 4, 5]), [2, 3])
    builder.add_document(np.array([6]), [1])
    builder.finalize(str(tmp_path / "s.idx"))
    with IndexedDataset(tmp_path / "s") as reader:
        assert (reader.documents, reader.sequences) == (2, 3)
        assert reader.document(0).tolist() == [1, 2, 3, 4, 5]
        assert reader.sequence(1).tolist() == [3, 4, 5]


def test_multimodal_modes_are_read(megatron, tmp_path):
    builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    builder.add_item(megatron.torch.tensor([1, 2]), 3)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    with IndexedDataset(tmp_path / "m") as reader:
        assert reader.modes.tolist() == [3]


def test_arrays_are_read_only_and_readers_travel_to_workers(write_tokens):
    reader = IndexedDataset(write_tokens("a", [[1, 2], [3]]))
    for array in (reader.lengths, reader.pointers, reader.document_indices, reader.document(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    assert pickle.loads(pickle.dumps(reader)).document(1).tolist() == [3]


def test_the_index_of_a_huge_file_is_made_in_small_memory():
    import tracemalloc

    chunk = np.full(1 << 16, 5, "<i4")
    tracemalloc.start()
    total = sum(len(piece) for piece in encode_index(np.dtype("<u2"), lambda: (chunk for _ in range(64))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 34 + 12 * (64 << 16) + 8 * ((64 << 16) + 1)
    assert peak < 16 * chunk.nbytes


def patched(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"XXXXXXXXX", "no index of a token file"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x63", "token type code 99"),
        (18, struct.pack("<Q", 5), "5 sequences and 3 documents take 126"),
        (26, struct.pack("<Q", 0), "no document indices"),
        (34 + 2 * 12, struct.pack("<q", 1), "documents span sequences 1 to 2 of 2"),
        (34 + 2 * 12 + 24, struct.pack("<q", 3), "documents span sequences 0 to 3 of 2"),
    ],
)
def test_a_damaged_header_is_named(write_tokens, offset, data, message):
    prefix = write_tokens("a", [[1, 2], [], [3]])
    patched(Path(prefix + ".idx"), offset, data)
    with pytest.raises(CorruptData, match=message) as error:
        IndexedDataset(prefix)
    assert error.value.where == prefix + ".idx"
    assert error.value.hint


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (34, struct.pack("<i", -1), "sequence 0 has -1 tokens"),
        (34, struct.pack("<i", 3), "sequence 1 points to byte 4, but the sequences before it end at byte 6"),
        (34 + 2 * 12 + 8, struct.pack("<q", 2), "document 1 ends before it starts"),
    ],
)
def test_a_damage_inside_is_found_by_check(write_tokens, offset, data, message):
    prefix = write_tokens("a", [[1, 2], [], [3]])
    patched(Path(prefix + ".idx"), offset, data)
    with IndexedDataset(prefix) as reader, pytest.raises(CorruptData, match=message):
        reader.check()


@pytest.mark.parametrize(("suffix", "message"), [(".bin", "cut short: 5 bytes"), (".idx", "is 89 bytes")])
def test_a_truncated_file_is_named(write_tokens, suffix, message):
    prefix = write_tokens("a", [[1, 2], [], [3]])
    path = Path(prefix + suffix)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match=message):
        IndexedDataset(prefix)


def test_a_file_that_shrinks_under_the_reader_is_an_error(write_tokens):
    prefix = write_tokens("a", [[1, 2], [3]])
    with IndexedDataset(prefix) as reader:
        Path(prefix + ".bin").write_bytes(b"\x01\x00")
        with pytest.raises(CorruptData, match="ends at byte 2"):
            reader.document(0)


def test_a_missing_half_is_named(write_tokens):
    prefix = write_tokens("a", [[1]])
    Path(prefix + ".bin").unlink()
    with pytest.raises(NotFound, match=r"a\.bin: no such token file"):
        IndexedDataset(prefix)


def test_a_prefix_stands_for_its_shards(write_tokens, tmp_path):
    names = [write_tokens(shard_name("c", shard, 3), [[shard]]) for shard in range(3)]
    assert shard_prefixes(tmp_path / "c") == names
    assert shard_prefixes(names[1]) == [names[1]]


def test_missing_and_ambiguous_shards_are_named(write_tokens, tmp_path):
    with pytest.raises(AddressError, match="no token files with this prefix"):
        shard_prefixes(tmp_path / "c")
    write_tokens("c-00001-of-00003", [[1]])
    with pytest.raises(NotFound, match=r"2 of 3 shards are missing: c-00000-of-00003\.idx, c-00002"):
        shard_prefixes(tmp_path / "c")
    write_tokens("c-00000-of-00002", [[1]])
    with pytest.raises(InputError, match="of 2 and of 3"):
        shard_prefixes(tmp_path / "c")
    write_tokens("c", [[1]])
    with pytest.raises(InputError, match="both a whole file and a sharded one"):
        shard_prefixes(tmp_path / "c")

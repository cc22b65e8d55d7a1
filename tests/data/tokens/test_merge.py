"""Merging shards: the same bytes as one unsharded file, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainshed.data.tokens import merge as merging
from trainshed.data.tokens.indexed_dataset import IndexedDataset, write_index
from trainshed.data.tokens.merge import merge_tokens
from trainshed.data.tokens.token_files import shard_name
from trainshed.errors import Conflict, CorruptData, InputError, NoSpace

documents = st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=8)


def both(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards=st.lists(documents, min_size=1, max_size=4))
def test_merged_shards_equal_the_unsharded_file(write_tokens, tmp_path, shards):
    prefixes = [write_tokens(f"s{number}", shard) for number, shard in enumerate(shards)]
    whole = write_tokens("whole", [document for shard in shards for document in shard])
    header = merge_tokens(prefixes, str(tmp_path / "out"), overwrite=True)
    assert both(tmp_path / "out") == both(whole)
    assert header.documents == sum(map(len, shards))


def test_a_sharded_prefix_is_merged_in_order(write_tokens, tmp_path):
    for shard in range(3):
        write_tokens(shard_name("c", shard, 3), [[shard, shard], []])
    merge_tokens([str(tmp_path / "c")], str(tmp_path / "out"))
    with IndexedDataset(tmp_path / "out") as reader:
        assert [reader.document(number).tolist() for number in (0, 2, 4)] == [[0, 0], [1, 1], [2, 2]]


def test_files_with_several_sequences_per_document_merge_as_megatron_merges_them(megatron, tmp_path):
    def build(name, parts):
        builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        for lengths in parts:
            builder.add_document(np.arange(sum(lengths)), lengths)
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return str(tmp_path / name)

    first, second = build("a", [[2, 0, 3], [], [1]]), build("b", [[4], [1, 1]])
    builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_index(first)
    builder.add_index(second)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge_tokens([first, second], str(tmp_path / "ours"))
    assert both(tmp_path / "ours") == both(tmp_path / "theirs")


def test_different_token_types_are_refused(write_tokens, tmp_path):
    with pytest.raises(InputError, match=r"b: holds int32 tokens, but .*a holds uint16"):
        merge_tokens([write_tokens("a", [[1]]), write_tokens("b", [[1]], "<i4")], str(tmp_path / "out"))


def test_a_damaged_input_is_refused_and_leaves_nothing(write_tokens, tmp_path):
    good, bad = write_tokens("a", [[1]]), write_tokens("b", [[1, 2], [3]])
    content = bytearray(Path(bad + ".idx").read_bytes())
    content[34] = 1
    Path(bad + ".idx").write_bytes(content)
    with pytest.raises(CorruptData, match="sequence 1 points to byte 4"):
        merge_tokens([good, bad], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_an_existing_output_is_kept_unless_told(write_tokens, tmp_path):
    first, second = write_tokens("a", [[1]]), write_tokens("b", [[2, 3]])
    out = str(tmp_path / "out")
    merge_tokens([first], out)
    with pytest.raises(InputError, match="exists already"):
        merge_tokens([second], out)
    assert both(out) == both(first)
    merge_tokens([second], out, overwrite=True)
    assert both(out) == both(second)
    with pytest.raises(InputError, match="also an input"):
        merge_tokens([first, out], out, overwrite=True)


def test_two_merges_into_one_output_cannot_mix(write_tokens, tmp_path, monkeypatch):
    source, out = write_tokens("a", [[1, 2]]), str(tmp_path / "out")
    copy = merging._append_file

    def meddle(*args):
        monkeypatch.setattr(merging, "_append_file", copy)
        with pytest.raises(Conflict, match="another process is writing"):
            merge_tokens([source], out)
        copy(*args)

    monkeypatch.setattr(merging, "_append_file", meddle)
    merge_tokens([source], out)
    assert both(out) == both(source)


def test_copying_works_where_the_kernel_cannot_share_a_range(write_tokens, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    source = write_tokens("a", [[1, 2], [], [3]])
    merge_tokens([source, source], str(tmp_path / "out"))
    assert both(tmp_path / "out") == both(write_tokens("twice", [[1, 2], [], [3]] * 2))


def test_a_full_disk_is_named_and_leaves_nothing(write_tokens, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(NoSpace, match=r"out\.(bin|idx): the disk is full"):
        merge_tokens([write_tokens("a", [[1]])], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_merge_killed_anywhere_can_be_run_again(tmp_path):
    """A real process, really killed, at moments spread over its whole run."""
    lengths = np.full(200_000, 40, "<i4")
    prefixes = []
    for number in range(2):
        prefixes.append(str(tmp_path / f"s{number}"))
        tokens = np.arange(lengths.sum(), dtype="<u2") + np.uint16(number)
        Path(prefixes[-1] + ".bin").write_bytes(tokens.tobytes())
        write_index(prefixes[-1] + ".idx", np.dtype("<u2"), lambda: [lengths])
    out = tmp_path / "out"
    program = (
        "import sys; from trainshed.data.tokens.merge import merge_tokens; print('go', flush=True);"
        "merge_tokens(sys.argv[2:], sys.argv[1], overwrite=True); print('done', flush=True)"
    )
    command = [sys.executable, "-c", program, str(out), *prefixes]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = both(out)
    assert whole[0] == both(prefixes[0])[0] + both(prefixes[1])[0]
    killed = 0
    for delay in np.linspace(0.0, max(0.08, (time.monotonic() - started) / 3), 6):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        if out.with_suffix(".idx").exists():
            assert both(out) == whole
    assert killed
    merge_tokens(prefixes, str(out), overwrite=True)
    assert both(out) == whole
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]

"""Conversations to token files: from any file, by any number of workers, proven, counted, and the same after a kill."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.chat_styles import STYLES, conversations, write_style
from support.runs.chatting import tokenized, tokens_of
from support.runs.preparing import left_behind
from trainshed.cli import run_cli
from trainshed.data.tokenize.workers import TokenBlock
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.data.tokens.merge import merge_tokens
from trainshed.data.tokens.shard_writer import ChatCounts, RemoteShardWriter, TokenCounts
from trainshed.data.tokens.token_files import learned_path, open_token_file
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import InputError
from trainshed.storage import LocalStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_style(tmp_path_factory.mktemp("tokenizer") / "t", STYLES["qwen2.5"])


ROWS: list[dict[str, Any]] = [{"messages": messages} for messages in conversations()]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def prepare(path: Path, folder: Path, output: Path, *flags: str, code: int = 0) -> None:
    command = ["data", "prepare", "-i", str(path), "--tokenizer", str(folder), "--output", str(output)]
    if "--rows" not in flags:
        flags = ("--rows", "chat", *flags)
    if "--sequence-length" not in flags:
        flags = ("--sequence-length", "4096", *flags)
    assert run_cli([*command, *flags]) == code


def sequences(prefix: Path) -> list[tuple[list[int], list[int]]]:
    """What is in the files: ids, and what is learned of them at the same offsets."""
    learned = Path(learned_path(str(prefix))).read_bytes()
    with IndexedDataset(str(prefix)) as reader:
        assert reader.documents == reader.sequences
        starts = reader.pointers // reader.dtype.itemsize
        return [
            (reader.sequence(number).tolist(), list(learned[start : start + length]))
            for number, (start, length) in enumerate(zip(starts.tolist(), reader.lengths.tolist(), strict=True))
        ]


def nested(rows: list[dict[str, Any]], path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_every_kind_of_file_gives_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    import zstandard

    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    with_tools = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "x"},
    ]
    rows = [*ROWS, {"messages": with_tools}]
    expected = tokens_of(tokenized(folder, rows))
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl.gz", rows)
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    (tmp_path / "d.json").write_text(json.dumps(rows))
    nested(rows, tmp_path / "e.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.json", "e.parquet"):
        more = ("--format", "json") if name == "d.json" else ()
        prepare(tmp_path / name, folder, tmp_path / name[0], *more)
        assert sequences(tmp_path / name[0]) == expected, name
        (verdict,) = verify_tokens(str(tmp_path / name[0]))
        assert verdict.passed
        assert "learned tokens" in verdict.checked
    assert not left_behind(tmp_path)


def test_tables_hold_prompts_and_answers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('instruction,input,output\nAdd.,"1, 2",3\nSay hi.,,hi\n')
    (tmp_path / "a.tsv").write_text("question\treply\nWhat?\tThat.\n")
    prepare(tmp_path / "a.csv", folder, tmp_path / "alpaca", "--rows", "alpaca")
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Say hi.", "output": "hi"}]
    assert sequences(tmp_path / "alpaca") == tokens_of(tokenized(folder, rows, sample_format="alpaca"))
    renamed = ("--columns", "prompt=question", "answer=reply")
    prepare(tmp_path / "a.tsv", folder, tmp_path / "instruct", "--rows", "instruct", *renamed)
    expected = tokens_of(tokenized(folder, [{"prompt": "What?", "answer": "That."}], sample_format="instruct"))
    assert sequences(tmp_path / "instruct") == expected


def test_pairs_follow_one_another(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(5)]
    prepare(write_jsonl(tmp_path / "a.jsonl", rows), folder, tmp_path / "p", "--rows", "preference")
    pairs = sequences(tmp_path / "p")
    assert len(pairs) == 10
    assert pairs == tokens_of(tokenized(folder, rows, sample_format="preference"))
    manifest = read_token_manifest(str(tmp_path / "p"))
    assert manifest is not None
    assert manifest.counts.chat is not None
    assert (manifest.counts.documents, manifest.counts.chat.conversations) == (10, 5)


def test_the_bytes_do_not_depend_on_the_workers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshed.data.text import reader

    monkeypatch.setattr(reader, "BLOCK_BYTES", 4000)
    path = write_jsonl(tmp_path / "a.jsonl", ROWS * 20)
    prepare(path, folder, tmp_path / "one", "--workers", "1")
    prepare(path, folder, tmp_path / "two", "--workers", "2")
    for suffix in ("bin", "idx", "learned"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_counts_are_in_the_manifest_and_in_the_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 100}]}
    unlearned = {"messages": [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "a"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:1], long, unlearned, {"messages": []}])
    capsys.readouterr()
    flags = ("--sequence-length", "80", "--on-bad-line", "skip")
    prepare(path, folder, tmp_path / "t", *flags, "-o", "json")
    report = json.loads(capsys.readouterr().out)
    manifest = read_token_manifest(str(tmp_path / "t"))
    assert manifest is not None
    assert manifest.counts.chat is not None
    chat = report["chat"]
    assert chat == manifest.counts.to_plain()["chat"]
    assert (chat["conversations"], chat["truncated"], chat["cut_answers"], chat["dropped_unlearned"]) == (2, 1, 1, 1)
    assert report["bad_lines"] == 1
    assert manifest.counts.bad_line_examples == (f"{path}:4: an empty conversation",)
    assert chat["learned_tokens"] == sum(sum(mask) for _, mask in sequences(tmp_path / "t"))
    prepare(path, folder, tmp_path / "t", *flags)
    said = capsys.readouterr().out
    assert "2 conversations" in said
    assert "1 truncated (1 in an answer)" in said
    assert "1 dropped because nothing to learn was left" in said
    prepare(path, folder, tmp_path / "d", *flags, "--on-too-long", "drop", "-o", "json")
    assert json.loads(capsys.readouterr().out)["chat"]["dropped_too_long"] == 2
    capsys.readouterr()
    prepare(path, folder, tmp_path / "s", *flags, "--on-too-long", "stop", code=2)
    assert f"{path}:2: this conversation has " in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_line_is_named_by_its_place_and_a_wrong_setting_is_never_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], {"messages": [{"role": "bard", "content": "x"}]}])
    prepare(path, folder, tmp_path / "t", "--on-bad-line", policy, code=2 if policy == "stop" else 0)
    said = capsys.readouterr().err
    assert f"{path}:3: message 1 has the unknown role 'bard'" in said
    thinking = {"role": "assistant", "content": "<think>t</think>a"}
    write_jsonl(path, [*ROWS[:2], {"messages": [{"role": "user", "content": "q"}, thinking]}])
    prepare(path, folder, tmp_path / "u", "--on-bad-line", policy, code=2)
    said = capsys.readouterr().err
    assert f"{path}:3: message 2 has a thinking trace" in said
    assert "--thinking keep" in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rows", "text"), "--sequence-length is read with --rows chat only"),
        (("--bos",), "--bos is read with --rows text only"),
        (("--columns", "message=x"), "--columns message=x is not understood"),
        (("--columns", "messages"), "--columns messages is not understood"),
        (("--template", "vicuna"), "there is no chat template 'vicuna'"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], why: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    prepare(path, folder, tmp_path / "t", *flags, code=2)
    assert why in capsys.readouterr().err


def test_other_settings_make_other_tokens(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    prepare(path, folder, tmp_path / "t")
    prepare(path, folder, tmp_path / "t")
    assert "1 already there" in capsys.readouterr().out
    prepare(path, folder, tmp_path / "t", "--train-on", "last", code=2)
    assert "was made differently (answers)" in capsys.readouterr().err
    prepare(path, folder, tmp_path / "t", "--train-on", "last", "--overwrite")
    assert sequences(tmp_path / "t") == tokens_of(tokenized(folder, ROWS, train_on="last"))


def test_a_text_preparation_over_conversations_leaves_no_old_mask(folder: Path, tmp_path: Path) -> None:
    prepare(write_jsonl(tmp_path / "a.jsonl", ROWS), folder, tmp_path / "t")
    assert (tmp_path / "t.learned").exists()
    write_jsonl(tmp_path / "b.jsonl", [{"text": "words"}])
    command = ["data", "prepare", "-i", str(tmp_path / "b.jsonl"), "--tokenizer", str(folder), "--overwrite"]
    assert run_cli([*command, "--output", str(tmp_path / "t")]) == 0
    assert not (tmp_path / "t.learned").exists()


@pytest.mark.parametrize("suffix", ["bin", "idx", "learned"])
def test_a_flipped_byte_is_found(folder: Path, tmp_path: Path, suffix: str) -> None:
    prepare(write_jsonl(tmp_path / "a.jsonl", ROWS), folder, tmp_path / "t")
    assert run_cli(["data", "verify", str(tmp_path / "t")]) == 0
    file = tmp_path / f"t.{suffix}"
    whole = file.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert run_cli(["data", "verify", str(tmp_path / "t")]) == 1, at
    file.write_bytes(whole[:-1])
    assert run_cli(["data", "verify", str(tmp_path / "t")]) == 1
    file.write_bytes(whole)
    assert run_cli(["data", "verify", str(tmp_path / "t")]) == 0


def test_masks_that_mean_nothing_are_found_without_a_manifest(folder: Path, tmp_path: Path) -> None:
    prepare(write_jsonl(tmp_path / "a.jsonl", ROWS), folder, tmp_path / "t")
    (tmp_path / "t.manifest.json").unlink()
    flags = np.frombuffer((tmp_path / "t.learned").read_bytes(), np.uint8).copy()
    length = len(sequences(tmp_path / "t")[0][0])
    flags[:length] = 0
    flags[-1] = 7
    (tmp_path / "t.learned").write_bytes(flags.tobytes())
    (verdict,) = verify_tokens(str(tmp_path / "t"))
    assert any("nothing of sequence 0 is learned" in problem for problem in verdict.problems)
    assert any("is neither 0 nor 1" in problem for problem in verdict.problems)


def test_shards_merge_with_their_masks(folder: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    prepare(path, folder, tmp_path / "one")
    prepare(path, folder, tmp_path / "set", "--shards", "3")
    merge_tokens([str(tmp_path / "set")], str(tmp_path / "merged"))
    for suffix in ("bin", "idx", "learned"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"merged.{suffix}").read_bytes()
    assert all(verdict.passed for verdict in verify_tokens(str(tmp_path / "merged")))
    write_jsonl(tmp_path / "b.jsonl", [{"text": "words"}])
    command = ["data", "prepare", "-i", str(tmp_path / "b.jsonl"), "--tokenizer", str(folder)]
    assert run_cli([*command, "--output", str(tmp_path / "text")]) == 0
    with pytest.raises(InputError, match="is text, and others are conversations"):
        merge_tokens([str(tmp_path / "one"), str(tmp_path / "text")], str(tmp_path / "mixed"))


def test_a_bucket_gets_the_same_files(tmp_path: Path) -> None:
    """The writer for buckets, over a folder as its store."""
    store = LocalStore(tmp_path)
    with ExitStack() as stack:
        writer = RemoteShardWriter(store, "x/tokens", stack, learned=True)
        for number in range(3):
            block = TokenBlock(b"\1\0\2\0", b"\2\0\0\0", 1, 2, learned=b"\0\1", chat=ChatCounts(1, 1))
            writer.append(block, TokenCounts(documents=1, tokens=2, chat=block.chat), number)
        entries = writer.finish(np.dtype("<u2"))
        assert writer.progress.counts.chat == ChatCounts(3, 3)
    assert [entry.path for entry in entries] == ["tokens.bin", "tokens.idx", "tokens.learned"]
    assert (tmp_path / "x/tokens.learned").read_bytes() == b"\0\1" * 3
    file = open_token_file(learned_path(str(tmp_path / "x/tokens")))
    view = bytearray(2)
    file.read_into(memoryview(view), 4)
    assert (file.size, bytes(view)) == (6, b"\0\1")
    (verdict,) = verify_tokens(str(tmp_path / "x/tokens"))
    assert verdict.passed
    with ExitStack() as stack:  # not finished: nothing may be seen
        RemoteShardWriter(store, "y/tokens", stack, learned=True)
    assert not list(tmp_path.glob("y/[!.]*"))


KILLED = """
import sys, time
from trainshed.cli import run_cli
from trainshed.data.text import reader
from trainshed.data.tokens import shard_writer

shard_writer.JOURNAL_SECONDS = 0
reader.BLOCK_BYTES = reader.READ_BYTES = 6000
stall_after = int(sys.argv[1])
append = shard_writer.LocalShardWriter.append
blocks = 0


def stalling(self, *arguments):
    global blocks
    append(self, *arguments)
    blocks += 1
    if blocks == stall_after:
        print("waiting", flush=True)
        time.sleep(600)


shard_writer.LocalShardWriter.append = stalling
sys.exit(run_cli(sys.argv[2:]))
"""


def test_killed_at_any_block_the_rerun_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS * 12)
    flags = ["--rows", "chat", "--sequence-length", "300", "--workers", "1", "--split", "train[3:66]"]
    prepare(path, folder, tmp_path / "whole", *flags)
    command = ["data", "prepare", "-i", str(path), "--tokenizer", str(folder), "--output", str(tmp_path / "t"), *flags]
    (tmp_path / "driver.py").write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    for stall_after in (2, 1, 4):
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "driver.py"), str(stall_after), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with (tmp_path / "t.learned.partial").open("ab") as torn:
            torn.write(b"\1\0\1")  # written after the journal's last entry
    assert run_cli(command) == 0
    for suffix in ("bin", "idx", "learned"):
        assert (tmp_path / f"t.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    ours, whole = (read_token_manifest(str(tmp_path / name)) for name in ("t", "whole"))
    assert ours is not None
    assert whole is not None
    assert ours.counts == whole.counts
    assert not left_behind(tmp_path)


def test_a_mask_that_was_damaged_meanwhile_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    from trainshed.data.tokens import shard_writer

    key, ids = "key", ["input"]
    block = TokenBlock(b"\1\0", b"\1\0\0\0", 1, 1, learned=b"\1", chat=ChatCounts(1, 1))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(shard_writer, "JOURNAL_SECONDS", 0)
        writer = shard_writer.LocalShardWriter(str(tmp_path / "t"), key, ids, stack, learned=True)
        writer.append(block, TokenCounts(1, 0, 1, 1, chat=ChatCounts(1, 1)), 5)
    shutil.copy(tmp_path / "t.learned.partial", tmp_path / "kept")
    with ExitStack() as stack:
        writer = shard_writer.LocalShardWriter(str(tmp_path / "t"), key, ids, stack, learned=True)
        assert writer.progress.position == 5
        assert writer.progress.counts.chat == ChatCounts(1, 1)
    (tmp_path / "t.learned.partial").write_bytes(b"\0")
    with ExitStack() as stack:
        writer = shard_writer.LocalShardWriter(str(tmp_path / "t"), key, ids, stack, learned=True)
        assert writer.progress.position == 0


def test_notes_say_which_template_and_encoder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(write_jsonl(tmp_path / "a.jsonl", ROWS), folder, tmp_path / "t")
    said = capsys.readouterr().err
    assert "chat template: the tokenizer's own" in said
    assert "encoder: " in said

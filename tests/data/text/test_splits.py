"""Split expressions mean what `datasets` means by them, on rows of any file."""

from __future__ import annotations

import csv
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.servers.hub_server import COMMIT, running
from trainshed.data.text.corpus import assign_shards, count_file_rows, find_inputs
from trainshed.data.text.reader import InputReader, InputSlice, extract_documents, extract_rows
from trainshed.data.text.splits import parse_split, split_of
from trainshed.errors import InputError
from trainshed.storage import open_store

COLUMNS = ("messages",)


def their_rows(expression: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import ReadInstruction
    parts = ReadInstruction.from_spec(expression).to_absolute(sizes)
    return [(part.splitname, part.from_, max(part.from_, part.to)) for part in parts]


bounds = st.one_of(st.none(), st.integers(-120, 120))


@st.composite
def terms(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(["train", "test"]))
    if draw(st.booleans()):
        return name
    percent = "%" if draw(st.booleans()) else ""
    first, last = draw(bounds), draw(bounds)
    if percent:
        first, last = (bound if bound is None else max(-100, min(100, bound)) for bound in (first, last))
    return f"{name}[{'' if first is None else f'{first}{percent}'}:{'' if last is None else f'{last}{percent}'}]"


@settings(max_examples=400)
@given(st.lists(terms(), min_size=1, max_size=3), st.integers(0, 500), st.integers(0, 500))
def test_an_expression_means_what_datasets_means(parts: list[str], train: int, test: int) -> None:
    sizes = {"train": train, "test": test}
    ours = [(term.name, *term.rows(sizes[term.name])) for term in parse_split(" + ".join(parts))]
    assert ours == their_rows("+".join(parts), sizes)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("train[", "is not understood"),
        ("train[1:2:3]", "is not understood"),
        ("train[:0.5%]", "is not understood"),
        ("", "is not understood"),
        ("train[:10%]+", "is not understood"),
        ("train[5%:10]", "a bound in percent and one in rows"),
        ("train[:101%]", "more than 100%"),
    ],
)
def test_an_expression_that_means_nothing_is_refused(expression: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_split(expression)


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002-abc.parquet", "train"),
        ("data/train_sft-00000-of-00003.parquet", "train_sft"),
        ("train.jsonl", "train"),
        ("en/validation.json.gz", "validation"),
        ("my_train_data.csv", "train"),
        ("my-train-data.csv", "train"),
        ("test/0001.parquet", "test"),
        ("dev_set/a.jsonl", "validation"),
        ("dev/a.jsonl", "validation"),
        ("constraints.jsonl", None),
    ],
)
def test_names_of_files_say_their_split(path: str, split: str | None) -> None:
    assert split_of(path) == split


def numbers(inputs: list[InputSlice]) -> list[int]:
    """The rows that are really read."""
    read = []
    for item in inputs:
        for block in InputReader(item, *open_store(item.address)).blocks():
            read += [int(row["messages"]) for _, row in extract_rows(block) if isinstance(row, dict)]
    return read


def write_rows(path: Path, rows: range) -> Path:
    records = [{"messages": str(number), "other": "x" * (number % 7)} for number in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=4)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["messages", "other"])
            writer.writeheader()
            writer.writerows(records)
    elif path.name.endswith(".array.json"):
        path.write_text(json.dumps(records))
    else:
        # Blank lines are not rows, and the last line has no end.
        text = "\n\n".join(json.dumps(record) for record in records).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.csv"])
@pytest.mark.parametrize("expression", ["train", "train[:50%]", "train[7:23]", "train[-5:]", "train[20:]+train[:3]"])
def test_rows_of_all_files_together_are_counted(tmp_path: Path, name: str, expression: str) -> None:
    for part, rows in enumerate((range(11), range(11, 12), range(12, 31))):
        write_rows(tmp_path / f"{part}{name}", rows)
    inputs = find_inputs([str(tmp_path / f"*{name}")], columns=COLUMNS, split=expression)
    expected = [row for _, first, last in their_rows(expression, {"train": 31}) for row in range(first, last)]
    assert numbers(inputs) == expected
    if expression != "train":
        shards = assign_shards(inputs, 5)
        assert len(shards) == 5
        assert numbers([item for shard in shards for item in shard]) == expected


def test_a_json_array_has_rows_too(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.array.json", range(10))
    assert numbers(find_inputs([str(path)], columns=COLUMNS, format="json", split="train[3:5]")) == [3, 4]


def test_lines_keep_their_numbers_and_reading_resumes_inside_of_a_split(tmp_path: Path) -> None:
    from trainshed.data.text import reader

    path = write_rows(tmp_path / "a.jsonl", range(200))
    (item,) = find_inputs([str(path)], columns=COLUMNS, split="train[50:150]")
    lines = path.read_bytes().split(b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK_BYTES", 500)
        patch.setattr(reader, "READ_BYTES", 300)
        blocks = list(InputReader(item, *open_store(item.address)).blocks())
        assert len(blocks) > 5
        for block in blocks:
            for number, row in extract_rows(block):
                assert json.loads(lines[number - 1]) == row
        for done in (1, 3, len(blocks) - 2):
            rest = InputReader(item, *open_store(item.address))
            after = list(rest.blocks(blocks[done].resume_position))
            assert [block.payload for block in after] == [block.payload for block in blocks[done + 1 :]]
            whole = InputReader(item, *open_store(item.address))
            list(whole.blocks())
            assert rest.sha256 == whole.sha256


def test_text_can_be_split_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(10)))
    inputs = find_inputs([str(tmp_path / "a.txt")], documents="line", split="train[8:]")
    (block,) = InputReader(inputs[0], *open_store(inputs[0].address)).blocks()
    assert extract_documents(block, "text")[0] == ["line 8", "line 9"]
    for number in range(4):
        (tmp_path / f"{number}.md").write_text(str(number))
    files = find_inputs([str(tmp_path / "?.md")], split="train[1:3]")
    assert [Path(item.address).name for item in files] == ["1.md", "2.md"]
    with pytest.raises(InputError, match="paragraphs are not counted"):
        find_inputs([str(tmp_path / "a.txt")], documents="blank_line", split="train[:1]")


def test_a_folder_is_picked_apart_by_the_names_of_its_files(tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    for name in ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"):
        write_rows(dataset / name, range(5))
    write_rows(dataset / "data/test_sft-00000-of-00001.parquet", range(3))
    (dataset / "README.md").write_text("# A dataset")
    (dataset / "dataset_infos.json").write_text("{}")
    (dataset / ".gitattributes").write_text("x")
    named = {split: find_inputs([str(dataset)], columns=COLUMNS, split=split) for split in ("train", "test_sft")}
    assert [Path(item.address).name for item in named["train"]] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert len(named["test_sft"]) == 1
    assert numbers(find_inputs([str(dataset)], columns=COLUMNS, split="train[:30%]")) == [0, 1, 2]
    with pytest.raises(InputError, match="several splits here: test_sft, train") as error:
        find_inputs([str(dataset)], columns=COLUMNS)
    assert "--split train" in str(error.value.hint)
    with pytest.raises(InputError, match="no files of the split `validation`") as error:
        find_inputs([str(dataset)], columns=COLUMNS, split="validation")
    assert "test_sft, train" in str(error.value.hint)


def test_named_files_are_train_whatever_their_names_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "my.test.jsonl", range(10))
    assert numbers(find_inputs([str(path)], columns=COLUMNS, split="train[:2]")) == [0, 1]
    assert numbers(find_inputs([str(path)], columns=COLUMNS, split="test[:2]")) == [0, 1]
    with pytest.raises(InputError, match="no files of the split `validation`"):
        find_inputs([str(path)], columns=COLUMNS, split="validation")
    with pytest.raises(InputError, match="has no rows"):
        find_inputs([str(path)], columns=COLUMNS, split="train[10:]")


def test_rows_are_counted_once_by_what_is_given_for_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", range(10))
    counted: list[Any] = []

    def count(item: InputSlice) -> int:
        counted.append(item.address)
        return count_file_rows(item)

    find_inputs([str(path)], columns=COLUMNS, split="train", count_rows=count)
    assert not counted
    find_inputs([str(path)], columns=COLUMNS, split="train[:1]", count_rows=count)
    assert counted == [str(path)]


def test_a_dataset_on_the_hub_is_named_by_its_split(
    no_cloud: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        name: write_rows(tmp_path / "x.parquet", rows).read_bytes()
        for name, rows in (("a", range(4)), ("b", range(4, 9)))
    }
    files = {
        "README.md": b"# A dataset",
        "data/train-00000-of-00002.parquet": parts["a"],
        "data/train-00001-of-00002.parquet": parts["b"],
        "data/test-00000-of-00001.parquet": parts["a"],
    }
    configurations = {f"{name}/train-00000-of-00001.parquet": parts["a"] for name in ("main", "socratic")}
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos |= {"datasets/org/chats": files, "datasets/org/two": configurations}
        read = find_inputs(["hf://datasets/org/chats"], columns=COLUMNS, split="train[50%:]")
        assert numbers(read) == [4, 5, 6, 7, 8]
        pinned = find_inputs([f"hf://datasets/org/chats@{COMMIT}"], columns=COLUMNS, split="test")
        assert numbers(pinned) == [0, 1, 2, 3]
        with pytest.raises(InputError, match="several splits here: test, train"):
            find_inputs(["hf://datasets/org/chats"], columns=COLUMNS)
        with pytest.raises(InputError, match=r"several folders \(main, socratic\)"):
            find_inputs(["hf://datasets/org/two"], columns=COLUMNS, split="train")
        assert numbers(find_inputs(["hf://datasets/org/two/main"], columns=COLUMNS, split="train[:1]")) == [0]

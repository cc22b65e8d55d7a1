"""Packing conversations into rows: ours beside trl's `pack_dataset` and plain first fit, on the same documents.

    python benchmarks/packing.py [--documents 200000] [--length 512] [--repeat 3]

Ours writes an index and leaves the tokens where they are; trl writes the packed tokens. So ours is also measured
together with reading every row once. trl packs `batch_size` documents at a time (1,000 if nothing is said); its second
line packs all at once. First fit tries every row for every document, and gets at most 20,000 of them. "Full" is the
part of the rows that is tokens of documents. Times are the median of the repeats.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from measure import table
from trainshed.data.sampling.packing import PackedDataset, PackRule, PackSpec, best_fit, build_pack_index
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.data.tokens.token_source import TokenSource

FIRST_FIT_DOCUMENTS = 20_000
READ_ROWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files are made (default: a temporary folder)")
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        lengths = conversation_lengths(arguments.documents, arguments.length)
        compare(Path(name), lengths, arguments.length, arguments.repeat)


def conversation_lengths(documents: int, longest: int) -> np.ndarray:
    """Lengths as conversations have them: most are short, some fill a row."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 1.0, documents)
    return np.clip(drawn, 2, longest).astype(np.int64)


def compare(folder: Path, lengths: np.ndarray, length: int, repeat: int) -> None:
    source = write_source(folder, lengths)
    spec = PackSpec.of(source, 1, length, PackRule())
    indexes = folder / "indexes"

    def pack() -> PackedDataset:
        shutil.rmtree(indexes, ignore_errors=True)
        return PackedDataset(source, build_pack_index(indexes / spec.key, spec, source.shards()))

    def pack_and_read() -> None:
        dataset = pack()
        for first in range(0, dataset.epoch_samples, READ_ROWS):
            dataset.read(np.arange(first, min(first + READ_ROWS, dataset.epoch_samples)))

    ours = median_seconds(pack, repeat)
    rows = [["ours", f"{ours:.3f} s", "1.0x", f"{pack().index.efficiency:.2%}"]]
    seconds = median_seconds(pack_and_read, repeat)
    rows.append(["ours, and reading every row", f"{seconds:.3f} s", f"{seconds / ours:.1f}x", ""])
    for title, batch_size in (("trl bfd", 1000), ("trl bfd, all at once", len(lengths))):
        theirs, packed_rows = time_trl(folder, lengths, length, batch_size, repeat)
        efficiency = lengths.sum() / (packed_rows * length)
        rows.append([title, f"{theirs:.3f} s", f"{theirs / ours:.1f}x", f"{efficiency:.2%}"])
    columns = ["packing", "time", "of ours", "full"]
    table(f"{len(lengths):,} documents, {lengths.sum():,} tokens, rows of {length}", columns, rows)

    few = lengths[:FIRST_FIT_DOCUMENTS]
    falling = -np.sort(-few)
    seconds = {
        "best fit decreasing, ours": (
            median_seconds(lambda: best_fit(falling, length), repeat),
            best_fit(falling, length),
        ),
        "first fit": (median_seconds(lambda: first_fit(few, length), repeat), first_fit(few, length)),
        "first fit decreasing": (
            median_seconds(lambda: first_fit(falling, length), repeat),
            first_fit(falling, length),
        ),
    }
    least = seconds["best fit decreasing, ours"][0]
    rows = [
        [title, f"{1e3 * taken:.1f} ms", f"{taken / least:.0f}x", f"{few.sum() / ((row_of.max() + 1) * length):.2%}"]
        for title, (taken, row_of) in seconds.items()
    ]
    table(f"the algorithm alone on {len(few):,} documents", columns, rows)


def write_source(folder: Path, lengths: np.ndarray) -> TokenSource:
    tokens = np.random.default_rng(1).integers(1, 60_000, int(lengths.sum()), dtype="<u2")
    tokens.tofile(folder / "chat.bin")
    (tokens % 2).astype(np.uint8).tofile(folder / "chat.learned")
    write_index(folder / "chat.idx", tokens.dtype, lambda: [lengths.astype("<i4")])
    return TokenSource.open("chat", [str(folder / "chat")])


def time_trl(folder: Path, lengths: np.ndarray, length: int, batch_size: int, repeat: int) -> tuple[float, int]:
    """Return the seconds that trl takes, and how many rows it makes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pyarrow as pa
        from datasets import Dataset, disable_caching, disable_progress_bars
        from trl import pack_dataset
    disable_caching()
    disable_progress_bars()
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    tokens = np.fromfile(folder / "chat.bin", "<u2")
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens.astype(np.int32))),
        "assistant_masks": pa.ListArray.from_arrays(offsets, pa.array((tokens % 2).astype(np.int8))),
    }
    dataset = Dataset(pa.table(columns))
    packed = pack_dataset(dataset, length, map_kwargs={"batch_size": batch_size})
    seconds = median_seconds(lambda: pack_dataset(dataset, length, map_kwargs={"batch_size": batch_size}), repeat)
    return seconds, len(packed)


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each document: the first that has room for it."""
    left = np.full(len(lengths), room, np.int64)
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    for number, length in enumerate(lengths.tolist()):
        row = int(np.argmax(left[: rows + 1] >= length))
        row_of[number] = row
        left[row] -= length
        rows = max(rows, row + 1)
    return row_of


def median_seconds(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()

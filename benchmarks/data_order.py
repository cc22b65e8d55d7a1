"""Data order: building the index, seeking and reading, beside megatron-core's GPTDataset on the same files, in one run.

    python benchmarks/data_order.py [--documents 1000000] [--repeat 5]

Both sides read the same token files and write their index to the same disk. Times are the median of the
repeats. The seek is measured in new processes; its token files are sparse (all zeros, no disk), which is
the same work for finding the tokens, but reads of them never wait for a disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from measure import table
from trainshed.data.order import DataOrder, build_order
from trainshed.data.sampling.permutation import Permutation
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.tokens.indexed_dataset import token_dtype, write_index
from trainshed.data.tokens.token_source import TokenSource

SEQUENCE_LENGTH = 4096
SEEK = {"sources": 10, "documents": 100_000, "tokens": 1_000_000_000, "length": 512, "batch": 16, "step": 1_000_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files are made (default: a temporary folder)")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        lengths = 1 + np.random.default_rng(0).integers(0, 200, arguments.documents).astype("<i4")
        tokens = np.random.default_rng(1).integers(0, 60_000, int(lengths.sum()), dtype="<u2")
        tokens.tofile(folder / "corpus.bin")
        write_index(folder / "corpus.idx", tokens.dtype, lambda: [lengths])
        megatron = Megatron(folder)
        indexing(folder, megatron, arguments.repeat, len(lengths), int(lengths.sum()))
        reading(folder, megatron, arguments.repeat)
        seeking(folder, arguments.repeat)


class Megatron:
    """GPTDataset over one prefix, as pretrain_gpt.py builds it."""

    def __init__(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        self._folder = folder
        self._build, self._config, self._split = GPTDataset, GPTDatasetConfig, Split.train
        self._files = IndexedDataset(str(folder / "corpus"))

    def dataset(self, samples: int) -> Any:
        tokenizer: Any = SimpleNamespace(
            vocab_size=60_000, eod=0, eos=0, pad=-1, special_tokens_dict={}, unique_identifiers={"class": "none"}
        )
        config = self._config(
            random_seed=1,
            sequence_length=SEQUENCE_LENGTH,
            blend=([str(self._folder / "corpus")], None),
            split="1,0,0",
            path_to_cache=str(self._folder / "megatron"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        indices = np.arange(len(self._files), dtype=np.int32)
        return self._build(self._files, str(self._folder / "corpus"), indices, samples, self._split, config)


def ours(folder: Path, samples: int, batch: int = 1) -> DataOrder:
    return build_order(
        [TokenSource.open("0", (str(folder / "corpus"),))],
        indexes=folder / "indexes",
        seed=1,
        sequence_length=SEQUENCE_LENGTH,
        schedule=BatchSchedule(batch),
        steps=samples // batch,
    )


def median_seconds(work: Callable[[], object], repeat: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(repeat):
        before()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def indexing(folder: Path, megatron: Megatron, repeat: int, documents: int, tokens: int) -> None:
    rows = []
    for epochs in (1, 10):
        samples = epochs * ((tokens - 1) // SEQUENCE_LENGTH)

        def clear() -> None:
            for name in ("megatron", "indexes"):
                shutil.rmtree(folder / name, ignore_errors=True)

        theirs = median_seconds(lambda samples=samples: megatron.dataset(samples), repeat, clear)
        theirs_bytes = folder_bytes(folder / "megatron")
        mine = median_seconds(lambda samples=samples: ours(folder, samples), repeat, clear)
        times = [f"{1e3 * seconds:.1f} ms" for seconds in (theirs, mine)]
        sizes = [f"{size / 1e6:.1f} MB" for size in (theirs_bytes, folder_bytes(folder / "indexes"))]
        rows.append([f"{epochs}", *times, f"{theirs / mine:.2f}x", *sizes])
    title = f"index of {documents:,} documents, {tokens:,} tokens, sequence length {SEQUENCE_LENGTH}"
    table(title, ["epochs", "GPTDataset", "ours", "ratio", "GPTDataset on disk", "ours on disk"], rows)
    keyed, positions = Permutation(documents, 1), np.arange(documents)
    seconds = median_seconds(lambda: keyed(positions), repeat)
    print(
        f"  ours includes a hash of every file and flushing it to disk; GPTDataset does neither\n"
        f"  the keyed permutation alone: {1e9 * seconds / documents:.1f} ns a document"
    )


def reading(folder: Path, megatron: Megatron, repeat: int) -> None:
    count = 512
    dataset = megatron.dataset(count)
    rows = []

    def rate(name: str, work: Callable[[], object], base: float | None = None) -> float:
        work()
        per_second = count * SEQUENCE_LENGTH / median_seconds(work, repeat)
        ratio = f"{per_second / base:.2f}x" if base else ""
        rows.append([name, f"{per_second / 1e6:.1f}", f"{1e6 * SEQUENCE_LENGTH / per_second:.0f} µs", ratio])
        return per_second

    query = dataset._query_document_sample_shuffle_indices
    base = rate("GPTDataset, tokens alone", lambda: [query(number) for number in range(count)])
    rate("GPTDataset[i] (with masks and positions)", lambda: [dataset[number] for number in range(count)], base)
    for batch in (1, 8, 64, 512):
        order = ours(folder, count, batch)
        rate(
            f"ours, {batch} rows at a time",
            lambda order=order, batch=batch: [order.batch(s) for s in range(count // batch)],
            base,
        )
    title = f"reading samples of {SEQUENCE_LENGTH} tokens (about 40 documents each) from the page cache"
    table(title, ["reader", "million tokens/s", "a sample", "ratio"], rows)


SEEKER = """
import json, sys, time
from pathlib import Path
from trainshed.data.order import open_order
from trainshed.data.tokens.token_source import TokenSource
from trainshed.data.sampling.schedule import BatchSchedule
folder, seek = Path(sys.argv[1]), json.loads(sys.argv[2])
files = [TokenSource.open(str(n), (str(folder / f"s{n}"),), weight=1 + n) for n in range(seek["sources"])]
marks = [time.perf_counter()]
order = open_order(files, indexes=folder / "indexes", seed=1, sequence_length=seek["length"],
                   schedule=BatchSchedule(seek["batch"]))
marks.append(time.perf_counter())
order.locate(order.sample_indices(seek["step"]))
marks.append(time.perf_counter())
order.batch(seek["step"])
marks.append(time.perf_counter())
order.batch(seek["step"] // 3)
marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""


def seeking(folder: Path, repeat: int) -> None:
    files = []
    for number in range(SEEK["sources"]):
        lengths = np.full(SEEK["documents"], SEEK["tokens"] // SEEK["sources"] // SEEK["documents"], "<i4")
        lengths[::2] -= 500
        lengths[1::2] += 500
        with (folder / f"s{number}.bin").open("wb") as file:
            file.truncate(2 * int(lengths.sum()))
        write_index(folder / f"s{number}.idx", token_dtype(60_000), lambda lengths=lengths: [lengths])
        files.append(TokenSource.open(str(number), (str(folder / f"s{number}"),), weight=1 + number))
    started = time.perf_counter()
    order = build_order(
        files,
        indexes=folder / "indexes",
        seed=1,
        sequence_length=SEEK["length"],
        schedule=BatchSchedule(SEEK["batch"]),
        steps=SEEK["step"] + 1,
    )
    built = time.perf_counter() - started
    epochs = max(budget.epochs or 0 for budget in order.budget(SEEK["step"] + 1))
    command = [sys.executable, "-c", SEEKER, str(folder), json.dumps(SEEK)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(repeat)]
    names = [
        "open the order (memory-map every index)",
        f"find the {SEEK['batch']} samples of step {SEEK['step']:,}",
        "read that batch",
        f"read the batch of step {SEEK['step'] // 3:,}",
    ]
    rows = [
        [name, f"{1e3 * statistics.median(times):.2f} ms"]
        for name, times in zip(names, zip(*runs, strict=True), strict=True)
    ]
    title = (
        f"seek in a new process: {SEEK['tokens']:,} tokens in {SEEK['sources']} sources, up to {epochs:.1f} epochs "
        f"(index built in {built:.1f} s)"
    )
    table(title, ["", "median"], rows)


if __name__ == "__main__":
    main()

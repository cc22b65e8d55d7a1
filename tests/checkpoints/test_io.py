"""Files that are written in any order by several threads: their bytes, their checksum, and what a failure does."""

from __future__ import annotations

import random
import threading
import zlib
from functools import partial
from pathlib import Path

import pytest

from trainshed.checkpoints.io import HashedFile, run_in_threads
from trainshed.checkpoints.torch_save_writer import crc32_combine
from trainshed.storage import checksum_of


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ["first to last", "last to first", "any"])
def test_the_checksum_is_that_of_the_bytes_whatever_order_they_came_in(
    order: str, threads: int, tmp_path: Path
) -> None:
    chance = random.Random(order)
    pieces = [chance.randbytes(chance.choice([1, 7, 4096, 1_500_000])) for _ in range(40)]
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    turns = list(range(len(pieces)))
    if order == "last to first":
        turns.reverse()
    elif order == "any":
        chance.shuffle(turns)

    def write(number: int) -> None:
        middle = len(pieces[number]) // 2
        parts = memoryview(pieces[number])[:middle], memoryview(pieces[number])[middle:]
        assert file.write(starts[number], *parts) == starts[number] + len(pieces[number])

    with HashedFile(tmp_path / "file") as file:
        run_in_threads((partial(write, number) for number in turns), threads)
        checksum = file.checksum(sum(map(len, pieces)))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert checksum == checksum_of(b"".join(pieces))


def test_a_file_with_a_hole_has_no_checksum(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "file") as file:
        file.write(0, b"begin")
        file.write(10, b"end")
        with pytest.raises(AssertionError, match="written to 5 of 13"):
            file.checksum(13)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_job_that_fails_ends_the_others(threads: int) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def job(number: int) -> None:
        if number == 5:
            raise ValueError("five")
        with lock:
            done.append(number)

    with pytest.raises(ValueError, match="five"):
        run_in_threads((partial(job, number) for number in range(100_000)), threads)
    assert 5 not in done
    assert len(done) < 100_000 - 1


@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 0, 70_000], [5, 1 << 20, 7]])
def test_sums_of_parts_put_together_are_the_sum_of_the_whole(lengths: list[int]) -> None:
    parts = [random.Random(length).randbytes(length) for length in lengths]
    assert crc32_combine((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))

"""Memory on loan, and rows of a file read straight to where they belong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainshed.checkpoints.io import BufferPool, bytes_of, read_rows


def test_memory_that_was_given_back_is_lent_again() -> None:
    scratch = BufferPool()
    with scratch.borrow((100, 3), torch.float32) as one, scratch.borrow((7,), torch.bfloat16) as other:
        assert (one.shape, one.dtype, other.dtype) == ((100, 3), torch.float32, torch.bfloat16)
        assert one.data_ptr() != other.data_ptr()
        places = {one.data_ptr(), other.data_ptr()}
    with scratch.borrow((5, 5), torch.float64) as again:
        assert again.data_ptr() in places


@pytest.fixture
def stored(tmp_path: Path) -> tuple[int, torch.Tensor]:
    """A file with eight bytes and a matrix, opened."""
    matrix = torch.randn(1500, 640)
    (tmp_path / "file").write_bytes(b"12345678" + bytes(bytes_of(matrix)))
    return os.open(tmp_path / "file", os.O_RDONLY), matrix


@pytest.mark.parametrize("few", [None, 1, 5000])
@pytest.mark.parametrize("columns", [640, 64])  # rows that are put apart by the kernel, and by a copy
@pytest.mark.parametrize("step", [1, 2])
def test_rows_come_to_their_places_however_little_the_kernel_gives_at_once(
    stored: tuple[int, torch.Tensor], step: int, columns: int, few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, matrix = stored
    wanted = matrix.view(-1, columns)[: 30 if few == 1 else None]
    if few is not None:
        whole = os.preadv

        def less(descriptor: int, pieces: list[memoryview], start: int) -> int:
            return whole(descriptor, [memoryview(pieces[0])[:few]], start)

        monkeypatch.setattr(os, "preadv", less)
    into = torch.zeros(step * len(wanted), columns)
    read_rows(descriptor, 8, into[::step], BufferPool())
    assert torch.equal(into[::step], wanted)
    assert step == 1 or not into[1::2].any()


def test_a_file_that_ends_before_is_said_to(stored: tuple[int, torch.Tensor]) -> None:
    descriptor, _ = stored
    for rows in (torch.empty(1500, 640), torch.empty(3000, 640)[::2], torch.empty(30_000, 64)[::2]):
        with pytest.raises(EOFError):
            read_rows(descriptor, 9, rows, BufferPool())

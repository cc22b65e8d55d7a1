"""Files of torch.save that torch did not write: torch reads them, and so does every zip program."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from trainshed.checkpoints import torch_save_writer
from trainshed.checkpoints.io import HashedFile, bytes_of
from trainshed.checkpoints.torch_save_reader import DTYPE_BYTES, PickledTensor, read_torch_save
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout, TorchSaveWriter
from trainshed.storage import checksum_of

TENSORS = {
    "wide": torch.randn(40, 30),
    "half": torch.randn(7, dtype=torch.bfloat16),
    "none": torch.randn(0, 3),
}


def write(path: Path) -> None:
    layout = TorchSaveLayout(
        {"model": {name: TensorPlaceholder(tuple(each.shape), each.dtype) for name, each in TENSORS.items()}, "step": 3}
    )
    with HashedFile(path) as file:
        file.write(0, b"before")  # an item among others
        writer = TorchSaveWriter(layout, file, 6)
        # Last to first, and each in two parts, the second before the first.
        for number, data in reversed(list(enumerate(map(bytes_of, TENSORS.values())))):
            middle = len(data) // 3
            writer.write(number, middle, data[middle:])
            if middle:
                writer.write(number, 0, data[:middle])
        assert path.stat().st_size == 6 + layout.length
        assert file.checksum(6 + layout.length) == checksum_of(path.read_bytes())


def check(path: Path) -> None:
    inside = io.BytesIO(path.read_bytes()[6:])
    for weights_only in (True, False):
        inside.seek(0)
        found = torch.load(inside, weights_only=weights_only)
        assert found["step"] == 3
        assert all(torch.equal(found["model"][name], each) for name, each in TENSORS.items())
    assert zipfile.ZipFile(inside).testzip() is None
    opened = read_torch_save(path, 6, len(inside.getvalue()))
    for name, wanted in TENSORS.items():
        tensor = opened.document["model"][name]
        assert isinstance(tensor, PickledTensor)
        assert tensor.shape == wanted.shape
        start = opened.storages[tensor.storage]
        assert (start - 6) % 64 == 0
        raw = path.read_bytes()[start : start + wanted.numel() * DTYPE_BYTES[tensor.dtype]]
        assert raw == bytes(bytes_of(wanted))


def test_torch_and_zip_read_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "items")
    check(tmp_path / "items")


def test_sizes_beyond_32_bits_are_written_in_64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No test writes 4 GiB: everything from 1,000 bytes up counts as too large.
    monkeypatch.setattr(torch_save_writer, "_ZIP64_FROM", 1000)
    write(tmp_path / "items")
    assert b"PK\x06\x06" in (tmp_path / "items").read_bytes()
    check(tmp_path / "items")

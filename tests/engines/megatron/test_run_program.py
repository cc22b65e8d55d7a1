"""pretrain_gpt.py of an old Megatron-LM saves with any PyTorch: those before and after each change of `_write_item`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from trainshed.engines.megatron import run_program
from trainshed.engines.megatron.run_program import with_missing_arguments


class Transforms:
    """As PyTorch's `_StorageWriterTransforms`."""


class Formats:
    """As PyTorch's `SerializationFormat`."""

    TORCH_SAVE = "torch_save"


def first(stream: Any, data: Any, write_item: Any, storage_key: Any) -> tuple[Any, ...]:
    return stream, data, write_item, storage_key


def with_transforms(transforms: Any, stream: Any, data: Any, write_item: Any, storage_key: Any) -> tuple[Any, ...]:
    assert isinstance(transforms, Transforms)
    return stream, data, write_item, storage_key


def with_format(
    transforms: Any, stream: Any, data: Any, write_item: Any, storage_key: Any, serialization_format: Any
) -> tuple[Any, ...]:
    assert isinstance(transforms, Transforms)
    assert serialization_format == "torch_save"
    return stream, data, write_item, storage_key


@pytest.mark.parametrize("write_item", [first, with_transforms, with_format])
def test_the_call_of_every_megatron_fits_every_pytorch(write_item: Any) -> None:
    classes = {first: (None, None), with_transforms: (Transforms, None), with_format: (Transforms, Formats)}[write_item]
    write = with_missing_arguments(write_item, *classes)
    assert write("stream", "data", "item", "key") == ("stream", "data", "item", "key")
    if write_item is not first:
        assert write(Transforms(), "stream", "data", "item", "key") == ("stream", "data", "item", "key")
    if write_item is with_format:
        given = {"serialization_format": Formats.TORCH_SAVE}
        assert write(Transforms(), "stream", "data", "item", "key", **given) == ("stream", "data", "item", "key")


PROGRAM = """
import io, json, multiprocessing, sys
import neighbour

def save():
    from torch.distributed.checkpoint.filesystem import _write_item
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    stream, item = io.BytesIO(), WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO)
    _write_item(stream, io.BytesIO(b"saved"), item, "a.distcp")
    assert stream.getvalue() == b"saved"
    print(neighbour.NAME)

if __name__ == "__main__":
    save()
    process = multiprocessing.get_context("spawn").Process(target=save)
    process.start()
    process.join()
    assert process.exitcode == 0
    print(json.dumps(sys.argv))
"""


def test_the_program_runs_as_if_python_had_been_given_it_and_so_do_processes_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/pretrain_gpt.py").write_text(PROGRAM)
    (tmp_path / "source/neighbour.py").write_text("NAME = 'a module beside it'")
    # As in AMD's image, which starts in the folder of Megatron-LM.
    command = [sys.executable, run_program.__file__, "pretrain_gpt.py", "--save", "a b"]
    done = subprocess.run(command, cwd=tmp_path / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *names, words = done.stdout.splitlines()
    assert names == ["a module beside it"] * 2
    assert json.loads(words) == ["pretrain_gpt.py", "--save", "a b"]


def test_the_shipped_recipe_for_minio_is_started_so_and_newer_versions_are_not() -> None:
    seeds = TESTS / "golden" / "seeds"
    started = "/etc/trainshed/job/programs/run_program.py pretrain_gpt.py"
    assert started in (seeds / "minio-llama3-1-70b-cpt.txt").read_text()
    assert "run_program.py" not in (seeds / "aks-gpt-175b.txt").read_text()

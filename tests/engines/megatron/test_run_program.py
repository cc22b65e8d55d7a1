"""pretrain_gpt.py is run so that a rank that fails ends, and so that an old Megatron-LM saves with any PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
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


def test_the_shipped_recipes_of_megatron_are_started_so() -> None:
    programs = {"minio-llama3-1-70b-cpt": "pretrain_gpt.py", "aks-gpt-175b": "/megatron-lm/pretrain_gpt.py"}
    programs["eks-llama2-7b-cpt"] = "/opt/megatron-lm/pretrain_gpt.py"
    for name, program in programs.items():
        rendered = (TESTS / "golden" / "seeds" / f"{name}.txt").read_text()
        assert f"/etc/trainshed/job/programs/run_program.py {program}" in rendered


WITH_A_WORKER = """
import multiprocessing, os, sys

def work(queue, file):
    while queue.get() != "DONE":
        queue.task_done()
    open(file, "w").write("saved")
    queue.task_done()

class Caller:
    # As PersistentAsyncCaller: its process is not a daemon, and whoever destroys it waits for all that was asked of it.
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.queue = context.JoinableQueue()
        self.process = context.Process(target=work, args=(self.queue, sys.argv[1]))
        self.process.start()
        print(self.process.pid, flush=True)
        self.queue.put("a checkpoint")
        self.queue.join()

    def close(self):
        self.queue.put("DONE")
        self.queue.join()
        self.process.join()

    __del__ = close

if __name__ == "__main__":
    caller = Caller()
    {ending}
"""


def run_with_a_worker(ending: str, folder: Path) -> tuple[int, int, str]:
    """Run a program that has a worker; returns its exit code, the worker's process and what it wrote to stderr."""
    (folder / "pretrain_gpt.py").write_text(WITH_A_WORKER.replace("{ending}", ending))
    command = [sys.executable, run_program.__file__, "pretrain_gpt.py", "saved.txt"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes) as process:
        try:
            written, errors = process.communicate(timeout=240)  # Python starts three times, on a busy machine too
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, int(written), errors


@pytest.mark.parametrize(
    ("ending", "exit_code", "written"),
    [
        ("raise RuntimeError('Connection closed by peer')", 1, "RuntimeError: Connection closed by peer"),
        ("sys.exit(16)", 16, ""),
        ("sys.exit('no such checkpoint')", 1, "no such checkpoint"),
        ("import signal; os.kill(os.getpid(), signal.SIGINT)", 1, "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_fails_ends_although_its_checkpoint_worker_waits_for_work(
    ending: str, exit_code: int, written: str, tmp_path: Path
) -> None:
    code, worker, text = run_with_a_worker(ending, tmp_path)
    assert code == exit_code
    assert written in text
    assert not psutil.pid_exists(worker)
    assert not (tmp_path / "saved.txt").exists()


@pytest.mark.parametrize("ending", ["caller.close()", "sys.exit(caller.close())", "caller.close(); sys.exit(0)"])
def test_a_rank_that_ends_well_ends_its_checkpoint_worker_itself(ending: str, tmp_path: Path) -> None:
    # A second call would wait for a process that is gone: as there, nothing is closed twice.
    code, _, text = run_with_a_worker(f"Caller.__del__ = lambda self: None; {ending}", tmp_path)
    assert code == 0, text
    assert (tmp_path / "saved.txt").read_text() == "saved"

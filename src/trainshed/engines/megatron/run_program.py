"""Run pretrain_gpt.py of an old Megatron-LM on a newer PyTorch: `python3 run_program.py pretrain_gpt.py ARGUMENTS`.

Versions before 0.13 call `_write_item` of torch.distributed.checkpoint, which has got further parameters since: the
transforms (https://github.com/pytorch/pytorch/pull/143359) and the format. Without them every save of a checkpoint in
the format torch_dist ends with a TypeError, also in AMD's image rocm/megatron-lm:v25.4. Here they are added to the
call, also in the processes that Megatron spawns for a save.

This file is copied into the job as it is: it needs Python 3.8 and PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
from typing import Any

_PROGRAM_VARIABLE = "TRAINSHED_MEGATRON_PROGRAM"


def with_missing_arguments(write_item: Any, transforms: Any, formats: Any) -> Any:
    """Return `_write_item` so that it can be called without the transforms and without the format.

    `transforms` and `formats` are PyTorch's classes of these, None where it has none.
    """
    parameters = list(inspect.signature(write_item).parameters)

    @functools.wraps(write_item)
    def write(*values: Any, **named: Any) -> Any:
        if parameters[0] == "transforms" and "transforms" not in named and not isinstance(values[0], transforms):
            values = (transforms(), *values)
        if "serialization_format" in parameters[len(values) :] and "serialization_format" not in named:
            named["serialization_format"] = formats.TORCH_SAVE
        return write_item(*values, **named)

    return write


def adapt_pytorch() -> None:
    """Let `_write_item` be called as Megatron-LM calls it."""
    from torch.distributed.checkpoint import filesystem

    write_item = getattr(filesystem, "_write_item", None)
    if write_item is None:
        return
    classes = (getattr(filesystem, name, None) for name in ("_StorageWriterTransforms", "SerializationFormat"))
    setattr(filesystem, "_write_item", with_missing_arguments(write_item, *classes))  # noqa: B010


def main() -> None:
    """Run the program that the first argument names, as if Python had been given it.

    This file stays the main module: a process that is spawned then loads it first, and the program after it.
    """
    sys.argv = sys.argv[1:]
    program = os.path.abspath(sys.argv[0])
    os.environ[_PROGRAM_VARIABLE] = program
    sys.path[0] = os.path.dirname(program)
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    exec(code, globals())


if __name__ in ("__main__", "__mp_main__"):
    adapt_pytorch()
if __name__ == "__mp_main__":
    globals().update(runpy.run_path(os.environ[_PROGRAM_VARIABLE], run_name="__mp_main__"))
if __name__ == "__main__":
    main()

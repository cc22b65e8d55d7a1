"""Run pretrain_gpt.py as a rank that ends when it fails: `python3 run_program.py pretrain_gpt.py ARGUMENTS`.

With --async-save --use-persistent-ckpt-worker a rank starts a process that writes checkpoints. A rank that raises would
wait for it at its exit, and it waits for the next checkpoint: torchrun would see no failure, and GPUs be held until
somebody looks. Here a failure ends that process, and then the rank.

Versions before 0.13 call `_write_item` of torch.distributed.checkpoint, which has got further parameters since: the
transforms (https://github.com/pytorch/pytorch/pull/143359) and the format. Without them every save of a checkpoint in
the format torch_dist ends with a TypeError, also in AMD's image rocm/megatron-lm:v25.4. Here they are added to the
call, also in the processes that Megatron spawns for a save.

This file is copied into the job as it is: it needs Python 3.8 and PyTorch.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import runpy
import signal
import sys
from typing import Any

_PROGRAM_VARIABLE = "TRAINSHED_MEGATRON_PROGRAM"
_EXIT_SECONDS = 20
"""How long exit functions (of wandb, say) may take after a failure."""


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
    try:
        exec(code, globals())
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        end_at_once(error)
    except BaseException as error:
        end_at_once(error)


def end_at_once(error: BaseException) -> None:
    """Print an error and end this process with its processes, as Python would if it waited for none of them.

    Objects are not destroyed: Megatron's `PersistentAsyncCaller` then waits for its process, which is gone.
    """
    exit_code = 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif isinstance(error.code, int):
        exit_code = error.code
    else:
        sys.stderr.write(f"{error.code}\n")
    for child in multiprocessing.active_children():
        child.kill()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ in ("__main__", "__mp_main__"):
    adapt_pytorch()
if __name__ == "__mp_main__":
    globals().update(runpy.run_path(os.environ[_PROGRAM_VARIABLE], run_name="__mp_main__"))
if __name__ == "__main__":
    main()

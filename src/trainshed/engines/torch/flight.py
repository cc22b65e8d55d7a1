"""A rank's own account of where it stands, for the comparison with those of the others.

PyTorch's flight recorder keeps the last collectives of gloo and of NCCL; both are read here. gloo records no
point-to-point operations and does not end them at a group's timeout either: there the Python stack says that a rank
waits, and the watchdog ends it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import orjson
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d

from trainshed.observe.flight_record import NCCL_DUMP, Collective, FlightRecord, Group, RankError, record_file
from trainshed.observe.torch_trace import collectives

_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_BUFFER_ENTRIES = "2000"  # PyTorch's own default since 2.9; some builds and images turn it off
_OF_PEERS = re.compile(r"gloo|nccl|closed by peer|timed out waiting|connection reset", re.IGNORECASE)
# Frames of PyTorch that stand between the wait and who asked for it.
_THROUGH = ("/torch/_ops.py", "/torch/utils/", "/torch/autograd/")
_recording = threading.Lock()
_of_errors: set[Path] = set()


def switch_on(folder: Path) -> None:
    """Have collectives recorded; called before the first process group is made.

    NCCL's own watchdog, where it is first, leaves PyTorch's dump in `folder` too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _BUFFER_ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / NCCL_DUMP))


def limit_waits(seconds: float) -> None:
    """Give every process group made so far one timeout: those of a mesh do not inherit the first group's."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def record(
    folder: Path,
    rank: int,
    *,
    reason: str = "asked to",
    error: BaseException | None = None,
    step: int | None = None,
    phase: str | None = None,
) -> Path:
    """Write this rank's flight record into `folder` (`health/attempt-0001`); returns its file.

    An error's record stays: when the watchdog comes to its end while one is being written, that is no news.
    """
    path = folder / record_file(rank)
    with _recording:
        if error is not None or path not in _of_errors:
            _record(path, rank, reason, error, step, phase)
        if error is not None:
            _of_errors.add(path)
    return path


def _record(
    path: Path, rank: int, reason: str, error: BaseException | None, step: int | None, phase: str | None
) -> None:
    frames = _frames(error)
    stacks = FlightRecord(
        rank=rank,
        time=time.time(),
        reason=reason,
        step=step,
        phase=phase,
        error=None if error is None else _described(error),
        stack=[f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-30:]],
        waiting=_waiting(frames),
        threads=_all_threads(),
        missing="the recorder did not answer",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # First without the collectives: reading them asks CUDA, which may be what hangs.
    _write(path, stacks)
    groups = _groups()
    found, missing = _collectives(groups)
    _write(path, replace(stacks, groups=groups, collectives=found, missing=missing))


def _described(error: BaseException) -> RankError:
    text = str(error).strip()
    about_others = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _OF_PEERS.search(text) is not None
    )
    return RankError(type(error).__name__, text[:500], about_others)


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Where an error came from; without one, where the main thread is."""
    if error is not None:
        return list(traceback.extract_tb(error.__traceback__))
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(traceback.extract_stack(main))


def _waiting(frames: list[traceback.FrameSummary]) -> Literal["collective", "point-to-point"] | None:
    """What the innermost frames wait for, if it is for other ranks."""
    inner = [frame for frame in frames if not any(part in frame.filename for part in _THROUGH)][-1:]
    for frame in inner:
        if "/torch/distributed/pipelining/" in frame.filename or frame.name in ("recv", "send", "irecv", "isend"):
            return "point-to-point"
        if "/torch/distributed/" in frame.filename and "/checkpoint/" not in frame.filename:
            return "collective"
        if frame.line is not None and ".wait(" in frame.line:
            return "point-to-point"
    return None


def _all_threads() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _groups() -> list[Group]:
    if not dist.is_initialized():
        return []
    found = []
    for group, name in distributed_c10d._world.pg_names.items():
        described = group.group_desc not in ("", "undefined")
        found.append(Group(name, group.group_desc if described else name, dist.get_process_group_ranks(group)))
    return found


def _collectives(groups: list[Group]) -> tuple[list[Collective], str | None]:
    """The last collectives of each group, oldest first; if there are none to be had, why."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return [], "TORCH_FR_BUFFER_SIZE=0 turns the recorder off"
    if not dist.is_initialized():
        return [], "there is no process group"
    used = {part for group in distributed_c10d._world.pg_map for part in dist.get_backend_config(group).split(",")}
    entries = []
    for backend, name in _RECORDERS.items():
        dump = getattr(bindings, name, None)
        if dump is not None:
            entries += orjson.loads(dump(True, False)).get("entries", [])
        elif any(part.split(":")[-1] == backend for part in used):
            return [], f"PyTorch {torch.__version__} has no flight recorder for {backend}"
    return collectives(entries, groups), None


def _write(path: Path, written: FlightRecord) -> None:
    """Whole or not at all: whoever started us may be reading, or may kill us."""
    part = path.with_suffix(".part")
    part.write_bytes(written.to_json())
    os.replace(part, path)

"""Small texts on the command line that several verbs read the same way."""

from __future__ import annotations

import re

from trainshed.errors import InputError


def parse_task(text: str) -> tuple[int, int]:
    """Read `--task i/N`: part i of N, counted from 0 as SLURM_ARRAY_TASK_ID and JOB_COMPLETION_INDEX are."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise InputError(f"--task {text} is not i/N", hint="write for example --task 0/16")
    number, count = int(match[1]), int(match[2])
    if number >= count:
        hint = f"tasks are counted from 0: write --task 0/{count} to --task {count - 1}/{count}" if count else None
        raise InputError(f"--task {text}: there is no such part", hint=hint or "write for example --task 0/16")
    return number, count

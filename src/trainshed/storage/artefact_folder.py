"""Where artefacts lie and who may make one: `<root>/<kind>/<hash of the spec>/`, one maker at a time."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson


def artefact_folder(root: Path, kind: str, spec: Mapping[str, Any]) -> Path:
    """Return the folder of the artefact that a spec describes: the same spec finds it again, another makes another."""
    canonical = orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)
    return root / kind / hashlib.sha256(canonical).hexdigest()[:16]


@contextmanager
def only_maker(folder: Path) -> Iterator[None]:
    """Be the only one on this machine who makes an artefact; of two that want it, one waits and then finds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

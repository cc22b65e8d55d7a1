"""Which network NCCL really took, from its own log (`NCCL_DEBUG=INFO`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trainshed.launch.fabric import FabricSetup
from trainshed.launch.preflight.checks import Check

_MOST_BYTES = 4 * 2**20
_NETWORK = re.compile(r"Using network (.+)$", re.MULTILINE)


def log_environment(folder: Path) -> dict[str, str]:
    """What makes NCCL write its log into files of its own in a folder; %h and %p are NCCL's host and process."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def read_logs(folder: Path) -> str:
    """Return what the ranks of this node wrote."""
    texts = []
    for file in sorted(folder.glob("nccl-*.log")):
        with file.open("rb") as log:
            texts.append(log.read(_MOST_BYTES).decode(errors="replace"))
    return "\n".join(texts)


def network_taken(log: str) -> str | None:
    """Return the network NCCL says it uses, None where it says nothing."""
    found = _NETWORK.search(log)
    return found[1].strip() if found else None


def check_fabric(setup: FabricSetup, log: str) -> Check:
    """Hold a node's log against what the setup says it must and must not show."""
    taken = network_taken(log)
    measured = {"network": taken}
    if not setup.selected and not setup.rejected:
        what = f"NCCL took {taken or 'no network'}; nothing says which it should be"
        return Check("fabric", "skipped", what, measured=measured)
    if not log.strip():
        return Check("fabric", "fail", "NCCL left no log: nothing proves that the fabric is used", measured=measured)
    hint = _hint(setup)
    if bad := first_line(log, setup.rejected):
        return Check("fabric", "fail", f"{setup.fabric} is not used: NCCL says `{bad}`", hint, measured)
    missing = [pattern for pattern in setup.selected if not re.search(pattern, log, re.MULTILINE)]
    if missing:
        told = f"it says `Using network {taken}`" if taken else "it names no network"
        what = f"{setup.fabric} is not proven: NCCL's log does not show /{missing[0]}/; {told}"
        return Check("fabric", "fail", what, hint, measured)
    return Check("fabric", "pass", f"NCCL uses {taken or setup.fabric}", measured=measured)


def first_line(log: str, patterns: Iterable[str]) -> str | None:
    """Return the first line that matches one of the patterns, without NCCL's prefix."""
    for pattern in patterns:
        if found := re.search(f"^.*(?:{pattern}).*$", log, re.MULTILINE):
            return re.sub(r"^.*NCCL (INFO|WARN) ", "", found[0]).strip()
    return None


def _hint(setup: FabricSetup) -> str:
    wanted = setup.environment.get("NCCL_NET", "")
    return f"is the plugin of {setup.name} {setup.version} in the image (NCCL_NET={wanted}), and are its devices there?"

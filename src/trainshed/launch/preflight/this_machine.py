"""What the machine in front of a person has, lacks and gets wrong; `trainshed doctor` without a cluster."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import orjson

from trainshed.catalog import gpu_by_device_name
from trainshed.launch.here import WITHOUT_TILES, machine_environment
from trainshed.launch.preflight.checks import Check
from trainshed.launch.preflight.gpus import check_gpus, find_gpus
from trainshed.launch.preflight.node import check_disk, check_shared_memory

# The extra, a module that only it brings, and what cannot be done without it.
_EXTRAS = (
    ("data", "tokenizers", "tokenising text and reading from the Hub"),
    ("train", "torch", "training, converting and comparing weights"),
    ("k8s", "lightkube", "submitting to Kubernetes"),
    ("ray", "ray", "being a node of a Ray cluster (to submit to one, nothing is needed)"),
)
_PROGRAMS = (
    ("git", "the state of the code is not kept with a run"),
    ("ssh", "Slurm behind a login node cannot be reached"),
    ("sbatch", "Slurm is reached through a login node only (slurm.login)"),
    ("kubectl", "objects are sent by our own client all the same"),
    ("helm", "charts can be written, not tried"),
)
_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": names}))
"""


def machine_checks() -> Iterator[Check]:
    """Look at this machine."""
    yield _python()
    yield from _extras()
    if find_spec("torch") is not None:
        yield from _torch()
        yield _products()
    yield check_shared_memory(Path("/dev/shm"), 0)
    yield check_disk(Path(tempfile.gettempdir()))
    yield from _programs()


def _python() -> Check:
    return Check("python", "pass", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _extras() -> Iterator[Check]:
    for extra, module, purpose in _EXTRAS:
        if find_spec(module) is not None:
            yield Check(f"extra {extra}", "pass", f"installed: {purpose}")
        else:
            yield Check(f"extra {extra}", "skipped", f"not installed: {purpose}", f"pip install 'trainshed[{extra}]'")


def _torch() -> Iterator[Check]:
    """PyTorch in a process of its own: a broken driver may take the process with it."""
    done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        yield Check(
            "torch", "fail", f"cannot be loaded: {said[-1]}", "install it again: pip install 'trainshed[train]'"
        )
        return
    found = orjson.loads(done.stdout.splitlines()[-1])
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    yield Check("torch", "pass", f"{found['torch']} ({build})", measured=found)
    seen = find_gpus()
    if seen is None and not found["devices"]:
        yield Check("gpus", "skipped", "none here; small models train on the processor")
        return
    yield from check_gpus(seen, len(seen.gpus) if seen else len(found["devices"]))
    if seen is not None and len(found["devices"]) < len(seen.gpus):
        what = f"PyTorch sees {len(found['devices'])} of {len(seen.gpus)} GPUs"
        yield Check("torch and gpus", "fail", what, f"a PyTorch for this driver ({build} is installed)")
    unknown = sorted({name for name in found["devices"] if gpu_by_device_name(name) is None})
    if unknown:
        hint = "`trainshed plan probe --to FILE` measures it"
        yield Check("gpu kind", "warn", f"the catalog does not know {', '.join(unknown)}: there is no MFU", hint)


def _products() -> Check:
    """Processors that claim matrix units which their hypervisor forbids kill bf16 products with SIGILL."""
    needed = machine_environment("bf16")
    if WITHOUT_TILES.keys() & needed.keys():
        setting = " ".join(f"{name}={value}" for name, value in WITHOUT_TILES.items())
        return Check(
            "bf16", "pass", f"products in bf16 die on this processor (SIGILL): ranks are started with {setting}"
        )
    return Check("bf16", "pass", "products in bf16 work on this processor")


def _programs() -> Iterator[Check]:
    for program, without in _PROGRAMS:
        place = shutil.which(program)
        if place is not None:
            yield Check(program, "pass", f"found: {place}")
        else:
            yield Check(program, "skipped", f"not found: {without}")

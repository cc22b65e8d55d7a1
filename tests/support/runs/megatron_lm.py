"""The real Megatron-LM on a CPU: its sources are unpacked from ../shared/peers, which not every checkout has."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trainshed.engines.megatron.arguments import KNOWN_VERSIONS

SOURCE_VERSIONS = tuple(version for version in KNOWN_VERSIONS if version != "head")
"""Versions whose sources are there."""
_HERE = Path(__file__).parent
CPU_ARGS = {
    "transformer-impl": "local",
    "use-cpu-initialization": True,
    "distributed-backend": "gloo",
    "no-masked-softmax-fusion": True,
    "no-gradient-accumulation-fusion": True,
    "no-persist-layer-norm": True,
    "no-bias-dropout-fusion": True,
    "num-workers": 0,
}
"""`engine.args` with which any model trains on a CPU; fusions that a model chooses are left to it."""


def peers() -> Path:
    """The folder with the sources; skips a test where there is none, or something else is missing."""
    folders = [parent / "shared" / "peers" for parent in _HERE.parents]
    folder = next((folder for folder in folders if (folder / "megatron_on_cpu").is_dir()), None)
    if folder is None:
        pytest.skip("the sources of Megatron-LM are in ../shared/peers, which is not here")
    if importlib.util.find_spec("einops") is None:
        pytest.skip("Megatron-LM needs einops: pip install -e '.[test]'")
    if shutil.which("zstd") is None:
        pytest.skip("the sources of Megatron-LM are packed with zstd, which is not here")
    return folder


def unpacked(version: str, folder: Path) -> Path:
    """Unpack a version's sources into a folder, with the index helpers of the installed megatron-core."""
    archive = peers() / f"megatron-lm-{version}.tar.zst"
    source = folder / version
    source.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "--zstd", "-xf", archive, "-C", source], check=True)
    spec = importlib.util.find_spec("megatron")  # its parts would be imported to be found
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = Path(next(iter(spec.submodule_search_locations)), "core", "datasets")
    helpers = next(installed.glob("helpers_cpp*.so"))
    # The program runs `make` there at its start, which finds it newer than its source.
    shutil.copy(helpers, source / "megatron" / "core" / "datasets" / helpers.name)
    os.utime(source / "megatron" / "core" / "datasets" / helpers.name)
    return source


def engine_programs(source: Path, folder: Path) -> str:
    """A PATH whose `python3` is that of an image with Megatron-LM: it alone has the sources and plays a GPU."""
    variables = environment(source, folder)
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value and name != "PATH"}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]
    python = folder / "bin" / "python3"
    python.write_text("\n".join(["#!/bin/sh", *lines, f'exec "{sys.executable}" "$@"', ""]))
    return variables["PATH"]


def environment(source: Path, folder: Path) -> dict[str, str]:
    """The variables with which Python, torchrun and `make` find everything."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name, text in {
        "python3": f'exec "{sys.executable}" "$@"',
        "python3-config": f"echo {suffix}",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    shim = peers() / "megatron_on_cpu"
    einops = importlib.util.find_spec("einops")
    assert einops is not None
    assert einops.origin is not None
    path = [source, _HERE / "megatron_on_cpu", shim, Path(einops.origin).parents[1]]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "SHIM": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }

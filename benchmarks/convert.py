"""Converting weights: our rate beside `cp` of the same bytes, our memory beside transformers', in one run.

    python benchmarks/convert.py [--gigabytes 4] [--folder /some/disk]

A synthetic model in bf16 lies on the disk. `cp` copies its folder; we convert it hf → native → hf and to Megatron; and
transformers loads it and saves it again. `write` is our writing alone, every byte hashed; `whole` has starting Python,
the disk's sync and the proof (every tensor of the target read back and compared bit by bit) in it, which no other side
has. Peaks are of the whole process, page cache that it maps included.

On a virtual machine that gives free memory back to its host (free page reporting) the first touch of a page costs many
times what a copy into it does, whoever copies. So both sides begin with memory that was in use a moment ago: a ballast
is held until they begin to write. Neighbours come and go as well: each side runs several times, each time after a copy,
and its best is held against the best of those copies.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from measure import Measured, measure, table
from trainshed.checkpoints.hf.writer import HfWeightsWriter
from trainshed.models.parameters import Parameter, parameter_count
from trainshed.recipe import ModelConfig

THEIRS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2], max_shard_size="5GB")
"""
_WRITING = re.compile(r"^converting .* in (?:(\d+):(\d+):(\d+)|([\d.]+) s)", re.MULTILINE)


class _Noise:
    """Weights that nobody has stored."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.dtypes = config, ["bfloat16"]
        self._bits = torch.randint(-(2**15), 2**15, (2**24,), dtype=torch.int16)
        self._bits[(self._bits & 0x7F80) == 0x7F80] = 0  # neither infinite nor no number

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Some numbers; no two tensors begin with the same ones."""
        wanted = torch.Size(shape).numel()
        start = hash((parameter.name, tuple(offset))) % 2**20
        bits = self._bits.roll(start).repeat(-(-wanted // self._bits.numel()))[:wanted]
        return bits.view(torch.bfloat16).view(tuple(shape)).to(dtype)

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """The same."""
        yield self.read(parameter, offset, shape, dtype)

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def model(gigabytes: float) -> ModelConfig:
    """A Llama of the shape of the 8B one, with as many layers as are asked for."""
    config = {
        "family": "llama",
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 14336,
        "vocab_size": 32000,
        "max_positions": 8192,
        "rope": {"base": 500000.0},
    }
    one, two = (parameter_count(ModelConfig.model_validate(config | {"layers": layers})) for layers in (1, 2))
    layers = max(1, round((gigabytes * 1e9 / 2 - one) / (two - one)) + 1)
    return ModelConfig.model_validate(config | {"layers": layers})


def save(config: ModelConfig, folder: Path) -> None:
    """Write the synthetic model as transformers would."""
    folder.mkdir()
    writer = HfWeightsWriter(config, dtype=torch.bfloat16)
    for unit in writer.output_files():
        writer.write(unit, _Noise(config), folder / unit.path, lambda _: None)
    writer.finish(folder, [])


class Ballast:
    """Memory that is in use, and free the moment somebody begins to write."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # so that giving it back takes no time from whoever writes
        for start in range(0, size, mmap.PAGESIZE):
            self._memory[start] = 1

    def drop(self) -> None:
        """Give it back."""
        self._memory.close()

    def drop_once_there(self, path: Path) -> None:
        """Give it back when a file or folder appears."""

        def watch() -> None:
            while not path.exists():
                time.sleep(0.001)
            self.drop()

        threading.Thread(target=watch, daemon=True).start()


def copying_seconds(source: Path, target: Path, size: int) -> float:
    """`cp`, into the page cache as it is everybody's first; nothing of before is left to be written."""
    os.sync()
    Ballast(size).drop()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def writing_seconds(output: str) -> float:
    """What the progress report says about the writing alone."""
    found = _WRITING.search(output)
    assert found is not None, output
    hours, minutes, seconds, short = found.groups()
    return float(short) if short else int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        run(arguments, place)
    finally:
        shutil.rmtree(place)


def run(arguments: argparse.Namespace, place: Path) -> None:
    """Measure all sides and print them."""
    config = model(arguments.gigabytes)
    save(config, place / "hf")
    size = sum(path.stat().st_size for path in (place / "hf").iterdir())
    shared = ["--no-logits", "--workers", str(arguments.workers)]

    def ours(source: str, target: str, options: list[str]) -> tuple[float, Measured]:
        os.sync()
        Ballast(size * 5 // 4).drop_once_there(place / f".{target}.converting")
        command = [sys.executable, "-m", "trainshed", "model", "convert", str(place / source), str(place / target)]
        done = measure([*command, *options, *shared], alone=True)
        return writing_seconds(done.output), done

    def theirs() -> tuple[float, Measured]:
        os.sync()
        done = measure([sys.executable, "-c", THEIRS, str(place / "hf"), str(place / "theirs")], alone=True)
        return done.seconds, done

    legacy = ["--to", "megatron", "--format", "torch", "--tp", "2"]
    sides: dict[str, tuple[str, Callable[[], tuple[float, Measured]]]] = {
        "hf → native": ("native", lambda: ours("hf", "native", ["--to", "native"])),
        "native → hf": ("back", lambda: ours("native", "back", ["--to", "hf"])),
        "hf → megatron torch_dist": ("dist", lambda: ours("hf", "dist", ["--to", "megatron"])),
        "hf → megatron torch, tp 2": ("legacy", lambda: ours("hf", "legacy", legacy)),
        "transformers, load and save": ("theirs", theirs),
    }
    found: dict[str, list[tuple[float, Measured]]] = {name: [] for name in sides}
    copies: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeat):
        for name, (target, side) in sides.items():
            copies[name].append(copying_seconds(place / "hf", place / "copy", size * 5 // 4))
            shutil.rmtree(place / target, ignore_errors=True)
            found[name].append(side())
            if target != "native":
                shutil.rmtree(place / target)
    copy = min(min(each) for each in copies.values())
    rows = [["cp", f"{copy:.2f} s", f"{size / copy / 1e6:,.0f}", "", "", ""]]
    for name, runs in found.items():
        seconds, whole = min(each for each, _ in runs), min(done.seconds for _, done in runs)
        peak = max(done.peak_mib for _, done in runs)
        told = "" if name.startswith("transformers") else f"{whole:.2f} s"
        rate = f"{size / seconds / 1e6:,.0f}"
        rows.append([name, f"{seconds:.2f} s", rate, told, f"{min(copies[name]) / seconds:.2f}", f"{peak:,.0f} MiB"])
    largest = 2 * config.vocab_size * config.hidden / 2**20
    title = f"{size / 1e9:.2f} GB in bf16, {config.layers} layers; the largest tensor has {largest:,.0f} MiB"
    table(title, ["side", "write", "MB/s", "whole", "of cp", "peak"], rows)


if __name__ == "__main__":
    main()

"""Converting weights: our rate beside `cp` of the same bytes, our memory beside transformers', in one run.

    python benchmarks/convert.py [--gigabytes 2] [--folder /some/disk]

A synthetic model in bf16 lies on the disk. `cp` copies its folder; we convert it hf → native → hf and to Megatron; and
transformers loads it and saves it again. `write` is our writing alone, every byte hashed; `whole` has starting Python,
the disk's sync and the proof (every tensor of the target read back and compared bit by bit) in it, which no other side
has. Peaks are of the whole process, page cache that it maps included.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from measure import Measured, measure, table
from trainshed.checkpoints.hf.writer import HfWriter
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
    writer = HfWriter(config, dtype=torch.bfloat16)
    for unit in writer.units():
        writer.write(unit, _Noise(config), folder / unit.path, lambda _: None)
    writer.finish(folder, [])


def copying_seconds(source: Path, target: Path) -> float:
    """`cp`, into the page cache as it is everybody's first; nothing of before is left to be written."""
    os.sync()
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        config = model(arguments.gigabytes)
        save(config, place / "hf")
        size = sum(path.stat().st_size for path in (place / "hf").iterdir())
        rows = []
        copies = [copying_seconds(place / "hf", place / "copy")]

        def add(name: str, seconds: float, done: Measured, *, ours: bool) -> None:
            # Neighbours on the machine come and go: each side is held against the copies just before and after it.
            copies.append(copying_seconds(place / "hf", place / "copy"))
            ratio = (copies[-2] + copies[-1]) / 2 / seconds
            whole = f"{done.seconds:.2f} s" if ours else ""
            rate, peak = f"{size / seconds / 1e6:,.0f}", f"{done.peak_mib:,.0f} MiB"
            rows.append([name, f"{seconds:.2f} s", rate, whole, f"{ratio:.2f}", peak])

        command = [sys.executable, "-m", "trainshed", "model", "convert"]
        sides = {
            "hf → native": ("hf", "native", ["--to", "native"]),
            "native → hf": ("native", "back", ["--to", "hf"]),
            "hf → megatron torch_dist": ("hf", "dist", ["--to", "megatron"]),
            "hf → megatron torch, tp 2": ("hf", "legacy", ["--to", "megatron", "--format", "torch", "--tp", "2"]),
        }
        for name, (source, target, options) in sides.items():
            shared = ["--no-logits", "--workers", str(arguments.workers)]
            os.sync()
            done = measure([*command, str(place / source), str(place / target), *options, *shared], alone=True)
            add(name, writing_seconds(done.output), done, ours=True)
            if target != "native":
                shutil.rmtree(place / target)
        os.sync()
        done = measure([sys.executable, "-c", THEIRS, str(place / "hf"), str(place / "theirs")], alone=True)
        add("transformers, load and save", done.seconds, done, ours=False)
        middle = sorted(copies)[len(copies) // 2]
        rows.insert(0, ["cp, the middle one", f"{middle:.2f} s", f"{size / middle / 1e6:,.0f}", "", "", ""])
        largest = 2 * config.vocab_size * config.hidden / 2**20
        title = f"{size / 1e9:.2f} GB in bf16, {config.layers} layers; the largest tensor has {largest:,.0f} MiB"
        table(title, ["side", "write", "MB/s", "whole", "of cp", "peak"], rows)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()

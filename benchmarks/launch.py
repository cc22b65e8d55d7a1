"""Launching, against torchrun (starting ranks) and torchx (rendering a job for Slurm).

    python benchmarks/launch.py [--ranks 4] [--rounds 5]

Both sides start the same processes on this machine, in turn; ratios are of medians. torchx is taken
from PATH: its own pins do not go with ours, so it needs an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainshed.launch.ranks import run_ranks

RANK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ours(script: Path, ranks: int, folder: Path) -> None:
    result = run_ranks([sys.executable, str(script)], ranks=ranks, logs=folder, environment={"OMP_NUM_THREADS": "1"})
    assert result.exit_code == 0, result


def torchruns(script: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def our_render() -> None:
    command = [sys.executable, "-m", "trainshed", "render", "quickstart", "--on", "slurm-h100", "layout.dp=16"]
    subprocess.run([*command, "train.global_batch=16", "layout.micro_batch=1"], check=True, capture_output=True)


def torchx_render(program: str, folder: Path) -> None:
    command = [program, "run", "--dryrun", "--scheduler", "slurm", "dist.ddp", "-j", "2x8", "--script", "rank.py"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "rank.py"
        script.write_text(RANK)
        pairs = [
            (
                seconds(lambda: ours(script, asked.ranks, folder / "logs")),
                seconds(lambda: torchruns(script, asked.ranks)),
            )
            for _ in range(asked.rounds)
        ]
        mine, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"start {asked.ranks} ranks, one all-reduce, end: ours {mine:.2f} s, torchrun {theirs:.2f} s")
        print(f"  ratio {theirs / mine:.2f} (above 1: ours is faster)")
        program = shutil.which("torchx", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if program is None:
            print("render for Slurm: there is no torchx on PATH (pip install torchx, in an environment of its own)")
            return
        pairs = [(seconds(our_render), seconds(lambda: torchx_render(program, folder))) for _ in range(asked.rounds)]
        mine, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"render 16 GPUs for Slurm: ours (planned, checked) {mine:.2f} s, torchx (arguments only) {theirs:.2f} s")
        print(f"  ratio {theirs / mine:.2f} (above 1: ours is faster)")


if __name__ == "__main__":
    main()

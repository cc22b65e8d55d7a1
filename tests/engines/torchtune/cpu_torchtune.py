"""Starts the installed torchtune on CPUs by our own start program, and notes what its dataset gives.

torchtune 0.6.1 (the newest on PyPI) asks for two functions that its quantizers took from an older torchao, and for
statistics of a GPU's memory. Nothing else of it is changed.

    python cpu_torchtune.py START_PROGRAM NOTES RECIPE CONFIG BASE OUTPUT RESUME [LENGTH]
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed
import torchao.quantization

for quantizer in ("int4_weight_only", "int8_dynamic_activation_int4_weight"):
    if not hasattr(torchao.quantization, quantizer):
        setattr(torchao.quantization, quantizer, None)

from omegaconf import OmegaConf  # noqa: E402  (torchtune imports them, and must find what it looks for)
from torchtune import config, training  # noqa: E402


def run_on_cpus() -> None:
    """Replace what asks for a GPU: statistics of its memory, and its backend of torch.distributed."""
    training.get_memory_stats = lambda **options: {}
    training.log_memory_stats = lambda *statistics, **options: None
    training.cleanup_before_training = lambda: None
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *backend, **options: init_process_group("gloo")


def samples(file: str) -> list[dict[str, Any]]:
    """What the dataset of a configuration gives, as plain lists."""
    settings = OmegaConf.load(file)
    dataset = config.instantiate(settings.dataset, config.instantiate(settings.tokenizer))
    return [{key: list(map(int, value)) for key, value in dataset[index].items()} for index in range(len(dataset))]


if __name__ == "__main__":
    start, notes, *arguments = sys.argv[1:]
    run_on_cpus()
    if os.environ["RANK"] == "0":
        Path(notes).write_text(json.dumps(samples(arguments[1])))
    sys.argv = [start, *arguments]
    runpy.run_path(start, run_name="__main__")

"""Measure the loss of base weights on the probe batch, on one process in fp32, when they are fetched."""

from __future__ import annotations

from pathlib import Path

import torch

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.probe import Probe, write_probe
from trainshed.engines.torch.build import build_model
from trainshed.engines.torch.mesh import alone
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.starting import PROBE_ROWS, PROBE_TOKENS, load_base, measure_probe
from trainshed.engines.torch.step import Stepper
from trainshed.models.decoder import Losses
from trainshed.models.parameters import parameter_count
from trainshed.plan import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer
from trainshed.reporting import Reporter


def probe_base(base: BaseWeights, config: ModelConfig, reporter: Reporter) -> None:
    """Measure and store the probe of base weights, or say why it was not measured."""
    needed_gib = parameter_count(config) * 4 * 1.2 / 2**30
    free_gib = _free_memory_gib()
    if free_gib is not None and needed_gib > free_gib:
        reporter.warn(
            f"the loss of the base weights was not measured: that takes {needed_gib:.0f} GiB of memory, and "
            f"{free_gib:.0f} are free here. The run will say its loss without comparing it"
        )
        return
    layout = resolve_layout(Layout(micro_batch=PROBE_ROWS), config)
    model = build_model(
        config,
        alone(layout, torch.device("cpu")),
        sequence_length=PROBE_TOKENS,
        precision="fp32",
        losses=Losses(),
    )
    load_base(model, base)
    stepper = Stepper(model, AdamW([], Optimizer(lr=1.0), torch.device("cpu")))
    loss = measure_probe(stepper, PROBE_TOKENS, PROBE_ROWS)
    probe = Probe.measured(loss, vocab_size=config.vocab_size, sequence_length=PROBE_TOKENS, precision="fp32")
    write_probe(base.folder, probe)
    reporter.note(f"base weights: loss {loss:.4f} on the probe batch")


def _free_memory_gib() -> float | None:
    """Memory that can be had without swapping, where the system tells."""
    facts = Path("/proc/meminfo")
    if not facts.exists():
        return None
    found = next((line for line in facts.read_text().splitlines() if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) / 2**20 if found else None

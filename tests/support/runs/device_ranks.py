"""A few steps of a layout on GPUs of this machine, or with all ranks on one device.

NCCL takes one rank per GPU. Ranks that share one meet by gloo, which does for FSDP and experts: the collectives of
layers (tp, cp) ended such processes without a word (torch 2.11).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist

from trainshed.engines.torch.batch_loader import to_local_batch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import build_mesh
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.launch.ranks import free_port
from trainshed.models.decoder import Regularization
from trainshed.plan.layout import parse_layout, resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer


@dataclass(frozen=True)
class DeviceRun:
    """Some steps on random tokens."""

    config: ModelConfig
    layout: str
    device: str
    precision: str
    steps: int = 4
    rows: int = 4
    length: int = 256

    def losses(self) -> list[tuple[float, float]]:
        """Train; returns loss and gradient norm of each step, which are the same on all ranks."""
        layout = resolve_layout(Layout.model_validate(parse_layout(self.layout)), self.config)
        if layout.world_size == 1:
            return self._train()
        context, port = get_context("spawn"), free_port()
        answers: SimpleQueue[list[tuple[float, float]]] = context.SimpleQueue()
        ranks = [
            context.Process(target=self._run_rank, args=(rank, layout.world_size, port, answers))
            for rank in range(layout.world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert {rank.exitcode for rank in ranks} == {0}
        first, *others = (answers.get() for _ in ranks)
        assert all(other == first for other in others)
        return first

    def _run_rank(self, rank: int, world_size: int, port: int, answers: SimpleQueue) -> None:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        own_gpus = self.device == "cuda" and torch.cuda.device_count() >= world_size
        if self.device == "cuda":
            torch.cuda.set_device(rank if own_gpus else 0)
        dist.init_process_group("nccl" if own_gpus else "gloo", rank=rank, world_size=world_size)
        answers.put(self._train())
        dist.destroy_process_group()

    def _train(self) -> list[tuple[float, float]]:
        layout = resolve_layout(Layout.model_validate(parse_layout(self.layout)), self.config)
        mesh = build_mesh(layout, torch.device(self.device), self.config)
        model = build_model(
            self.config,
            mesh,
            sequence_length=self.length,
            precision=self.precision,
            regularization=Regularization(z_loss=1e-4, moe_balance=0.01, moe_z=1e-3),
            compile_blocks=self.device == "cuda",
        )
        init_model(model, seed=1)
        runner = StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), mesh.device))
        random, steps = np.random.default_rng(0), []
        for _ in range(self.steps):
            tokens = random.integers(0, self.config.vocab_size, (self.rows, self.length + 1))
            local = layout.sample_range(self.rows, mesh.coordinates.dp)
            rows = tokens[local.start : local.stop]
            metrics = runner.step(to_local_batch(rows[:, :-1], rows[:, 1:], mesh), self.rows, 1e-3).read()
            steps.append((metrics.loss, metrics.grad_norm))
        torch.compiler.reset()
        return steps

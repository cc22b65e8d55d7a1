"""Small runs with adapters: a base of random weights in float64, and the ranks that train on it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.megatron_folders import MadeWeights
from support.recipes.small_recipes import ALONE, MODELS, small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from trainshed.checkpoints.base import BaseWeights, fetch_base
from trainshed.checkpoints.native.weights import NativeWeightsWriter
from trainshed.engines.torch import rank
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.rank import train_rank
from trainshed.models.decoder import DecoderLayer
from trainshed.observe.event_log import read_steps
from trainshed.recipe import ModelConfig, Recipe
from trainshed.storage import LocalStore

LORA = "{rank: 4, alpha: 8, targets: [all-linear]}"


def write_base(model: str, folder: Path, **changes: Any) -> Path:
    """Write a base for a small model; returns the folder of its artefact."""
    config = ModelConfig.model_validate(MODELS[model] | changes)
    made = MadeWeights(config, seed=7)
    for name, tensor in made.tensors.items():
        # Activations stay near 1 through all layers.
        made.tensors[name] = tensor * config.hidden**-0.5 if tensor.dim() > 1 else 1 + 0.2 * tensor
    writer = NativeWeightsWriter(config, dtype=torch.float64)
    for output in writer.output_files():
        (folder / "weights" / output.path).parent.mkdir(parents=True, exist_ok=True)
        writer.write(output, made, folder / "weights" / output.path, lambda _: None)
    writer.finish(folder / "weights", [])
    return fetch_base(str(folder / "weights"), folder / "artefacts").folder


def adapted_recipe(model: str, base: Path, lora: str, overrides: Sequence[str]) -> Recipe:
    """A small recipe that trains adapters on a base."""
    return small_recipe(model, ["model.init=null", f"model.from={base}", f"train.lora={lora}", *overrides])


def train_adapters(
    folder: Path, model: str, layout: str, base: Path, lora: str, overrides: Sequence[str], compiled: bool = False
) -> int:
    """Train as one rank; `compiled`: with its blocks captured as for a GPU, their graphs run operation by operation."""
    job = small_job(folder, adapted_recipe(model, base, lora, overrides), layout)
    job = replace(job, base=BaseWeights.from_folder(base))

    def build_compiled(*arguments: Any, **options: Any) -> RankModel:
        return build_model(*arguments, **options | {"compile_blocks": True})

    def compile_block(block: DecoderLayer, **options: Any) -> None:
        torch.nn.Module.compile(block, backend="aot_eager", **options)

    with pytest.MonkeyPatch.context() as patch:
        if compiled:
            warnings.simplefilter("ignore")  # of PyTorch's own, when it loads its compiler
            patch.setattr(rank, "build_model", build_compiled)
            patch.setattr(DecoderLayer, "compile", compile_block)
        return train_rank(job, run_folder=folder)


class AdaptedRuns:
    """Runs with adapters on the rank pool; remembers bases and what one process gave."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self._made = 0
        self._bases: dict[str, Path] = {}
        self._alone: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def new_folder(self) -> Path:
        """A folder for another run."""
        self._made += 1
        made = self.folder / f"run-{self._made}"
        made.mkdir()
        return made

    def base(self, model: str) -> Path:
        """The base of a small model, written once."""
        if model not in self._bases:
            layers = {"layers": 4} if model.endswith("-4") else {}
            self._bases[model] = write_base(model.removesuffix("-4"), self.folder / f"base-{model}", **layers)
        return self._bases[model]

    def train(
        self, folder: Path, model: str, layout: str, *overrides: str, lora: str = LORA, compiled: bool = False
    ) -> list[dict[str, Any]]:
        """Train a run, or train on; returns its step events. A model `dense-4` has four layers."""
        if model.endswith("-4"):
            overrides = ("model.config.layers=4", *overrides)
        arguments = (folder, model.removesuffix("-4"), layout, self.base(model), lora, overrides, compiled)
        codes = self.pool.run(train_adapters, *arguments, ranks=world_size(layout))
        assert set(codes) == {0}
        return read_steps(LocalStore(folder), "")

    def alone(self, model: str, *overrides: str, lora: str = LORA) -> list[dict[str, Any]]:
        """The step events of one process, trained once."""
        key = (model, overrides, lora)
        if key not in self._alone:
            self._alone[key] = self.train(self.new_folder(), model, ALONE, *overrides, lora=lora)
        return self._alone[key]

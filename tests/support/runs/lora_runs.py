"""Small runs with adapters: a base of random weights in float64, and the ranks that train on it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from support.models.megatron_folders import MadeWeights
from support.recipes.small_recipes import ALONE, MODELS, small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from trainshed.checkpoints.base import BaseWeights, fetch_base
from trainshed.checkpoints.native.weights import NativeWeightsWriter
from trainshed.engines.torch import rank
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torch.trainer import Trainer, TrainingEnd
from trainshed.models.decoder import DecoderLayer
from trainshed.models.parameters import AddedRows
from trainshed.observe.event_log import read_steps
from trainshed.recipe import ModelConfig, Recipe
from trainshed.storage import LocalStore

LORA = "{rank: 4, alpha: 8, targets: [all-linear]}"


def write_base(model: str, folder: Path, seed: int = 7, **changes: Any) -> Path:
    """Write a base for a small model; returns the folder of its artefact."""
    config = ModelConfig.model_validate(MODELS[model] | changes)
    made = MadeWeights(config, seed=seed)
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
    # Beside adapters the routers stay as they are.
    still = ["train.moe.bias_update=null"] if "mla" in MODELS[model.removesuffix("-4")] and lora != "null" else []
    return small_recipe(model, ["model.init=null", f"model.from={base}", f"train.lora={lora}", *still, *overrides])


def train_adapters(
    folder: Path,
    model: str,
    layout: str,
    base: Path,
    lora: str,
    overrides: Sequence[str],
    compiled: bool = False,
    added: AddedRows | None = None,
) -> int:
    """Train as one rank; `compiled`: with its blocks captured as for a GPU, their graphs run operation by operation.

    With `added` the model has the rows of added tokens; with `lora` null all weights are trained.
    """
    job = small_job(folder, adapted_recipe(model, base, lora, overrides), layout)
    config = job.config if added is None else added.grown(job.config)
    job = replace(job, base=BaseWeights.from_folder(base), config=config, added=added)

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
        self,
        folder: Path,
        model: str,
        layout: str,
        *overrides: str,
        lora: str = LORA,
        compiled: bool = False,
        added: AddedRows | None = None,
    ) -> list[dict[str, Any]]:
        """Train a run, or train on; returns its step events. A model `dense-4` has four layers."""
        if model.endswith("-4"):
            overrides = ("model.config.layers=4", *overrides)
        arguments = (folder, model.removesuffix("-4"), layout, self.base(model), lora, overrides, compiled, added)
        codes = self.pool.run(train_adapters, *arguments, ranks=world_size(layout))
        assert set(codes) == {0}
        return read_steps(LocalStore(folder), "")

    def alone(
        self, model: str, *overrides: str, lora: str = LORA, added: AddedRows | None = None
    ) -> list[dict[str, Any]]:
        """The step events of one process, trained once."""
        key = (model, overrides, lora, added)
        if key not in self._alone:
            self._alone[key] = self.train(self.new_folder(), model, ALONE, *overrides, lora=lora, added=added)
        return self._alone[key]


def train_hashing(
    folder: Path, model: str, layout: str, base: Path, lora: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train as one rank; returns what became of its frozen weights: hashes before and after, dtypes, gradients."""
    report: dict[str, Any] = {}

    class HashingTrainer(Trainer):
        def run(self) -> TrainingEnd:
            model = self.runner.model
            report["before"] = _hash_frozen(model)
            end = super().run()
            report["after"] = _hash_frozen(model)
            report["frozen"] = {str(shard.local_tensor.dtype) for shard in model.frozen_shards}
            report["trained"] = {str(shard.local_tensor.dtype) for shard in model.shards}
            report["gradients"] = [shard.name for shard in model.frozen_shards if shard.gradient is not None]
            report["gathered"] = _gathered_dtypes(model)
            return end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "Trainer", HashingTrainer)
        train_adapters(folder, model, layout, base, lora, overrides)
    return report


def _hash_frozen(model: RankModel) -> dict[str, str]:
    tensors = {shard.name: shard.local_tensor for shard in model.frozen_shards}
    for shard in model.quantized:
        name = shard.parameter.name
        tensors |= {f"{name}.codes": shard.weight.codes, f"{name}.scales": shard.weight.scales}
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
        if tensor.numel()
    }


def _gathered_dtypes(model: RankModel) -> dict[str, set[str]]:
    """In which dtypes FSDP gathers weights: frozen and trained ones."""
    dtypes: dict[str, set[str]] = {"frozen": set(), "trained": set()}
    for module in model.stages[0].modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            kind = "trained" if parameter.sharded_param.requires_grad else "frozen"
            dtypes[kind].add(str(parameter.param_dtype or parameter.orig_dtype))
    return dtypes

"""Engines that are not ours: what one is asked to train, and what it needs to be started.

An adapter (`megatron/`, `nemo/`, `torchtune/`) turns an `EngineTask` into an `EngineLaunch`. It imports nothing of its
framework and decides nothing that the recipe or the plan has decided: the same task gives the same bytes.

What is only known once the data is prepared (where tokens, tokenizer and base weights lie) is found under fixed names
in the run's folder: the stage before training leaves it there (`Wanted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe

Wanted = Literal["data-args", "data-prefix", "tokenizer", "base-megatron", "base-hf"]
"""What a CPU stage leaves under `<run>/engine/` for the engine:

data-args       data.json: Megatron's --per-split-data-args-path, {"train": [w, prefix, …], "valid": …, "test": …}
data-prefix     data_prefix.txt: NeMo's `model.data.data_prefix` as one Hydra value
tokenizer       tokenizer/: the tokenizer's files
base-megatron   base/: the base weights as a Megatron `torch_dist` checkpoint, with their verdict
base-hf         base/: the base weights as Hugging Face safetensors
"""


@dataclass(frozen=True)
class EnginePlace:
    """Where a foreign engine runs; paths are those that its processes see."""

    run: str
    """The run's folder in the store."""
    job: str
    """The folder in which the job's files (`EngineLaunch.files`) lie."""
    nodes: int
    gpus_per_node: int
    image: str | None = None
    sharp: bool = False
    vendor: Literal["nvidia", "amd"] = "nvidia"

    @property
    def engine(self) -> str:
        """The folder with what earlier stages made for the engine."""
        return f"{self.run}/engine"


@dataclass(frozen=True)
class EngineTask:
    """A recipe on one layout, ready to be written in another engine's words."""

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    steps: int
    place: EnginePlace


@dataclass(frozen=True)
class CpuStage:
    """Work of the engine's own that needs no GPU (an index to build): done in its image before GPUs are asked for."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class EngineLaunch:
    """How to start an engine: on every node torchrun starts `program` with `arguments` on every GPU."""

    program: str
    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files of the job, by their name in the job's folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    wanted: tuple[Wanted, ...] = ()
    late_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments whose value is read from a file when the job starts: `{"++model.data.data_prefix=": "/run/…txt"}`."""
    before: tuple[CpuStage, ...] = ()
    module: bool = False
    """`program` is a Python module (`-m`), not a file."""
    notes: tuple[str, ...] = ()
    """What was chosen, and what this engine does otherwise than the recipe's words would make one think."""

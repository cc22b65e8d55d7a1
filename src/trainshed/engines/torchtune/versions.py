"""The versions of torchtune that are rendered for, each with what it reads and lacks, from a data file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainshed.engines.keys import KnownKeys
from trainshed.recipe import Recipe
from trainshed.recipe.yaml_io import parse_yaml

DEFAULT_VERSION = "0.6.1"
"""The newest on PyPI, which `trainshed image build --engine torchtune` installs."""
SOURCE_VERSION = "0.7.0"
"""Its last state, which is on no index: it is installed from its source."""
VERSIONS = (DEFAULT_VERSION, SOURCE_VERSION)


@dataclass(frozen=True)
class TorchtuneVersion:
    """One version: the keys that it reads, the component of its loss, and the modules of models that it lacks."""

    name: str
    keys: KnownKeys
    loss: str
    without_models: tuple[str, ...]

    @property
    def validates(self) -> bool:
        """Whether it measures the loss on other data during a run."""
        return self.keys.knows("run_val_every_n_steps")

    @property
    def saves_by_steps(self) -> bool:
        """Whether it saves between two passes over the data; otherwise after each of them alone."""
        return self.keys.knows("save_every_n_steps")

    @property
    def removes_old_checkpoints(self) -> bool:
        """Whether it keeps the last few checkpoints alone."""
        return self.keys.knows("checkpointer.keep_last_n_checkpoints")

    @property
    def has_fp8(self) -> bool:
        """Whether it trains in fp8."""
        return self.keys.knows("enable_fp8_training")

    @property
    def has_replicas(self) -> bool:
        """Whether shards of the weights may be held several times."""
        return self.keys.knows("data_parallel_replicate_dim")


@cache
def torchtune_version(name: str) -> TorchtuneVersion:
    """Return a version by its name."""
    file = Path(__file__).with_name(f"keys-{name}.yaml")
    facts = parse_yaml(file.read_text(encoding="utf-8"), file.name).value
    return TorchtuneVersion(name, KnownKeys(f"torchtune {name}", file), facts["loss"], tuple(facts["without_models"]))


def recipe_version(recipe: Recipe) -> TorchtuneVersion:
    """Return the version that a recipe is rendered for; one that is not known has been refused before."""
    wanted = recipe.engine.version or DEFAULT_VERSION
    return torchtune_version(wanted if wanted in VERSIONS else DEFAULT_VERSION)

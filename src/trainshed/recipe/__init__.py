"""The recipe and cluster files: schema, loading, overrides.

`load_recipe` gives a checked `Recipe`; `to_yaml` writes it back in full; `run_id` names its run.
"""

from trainshed.recipe.cluster import (
    Cluster,
    ClusterStorage,
    Nodes,
    SecretReference,
    StoreEndpoint,
    as_cluster,
    known_clusters,
    load_cluster,
)
from trainshed.recipe.data import DataSection, Source, Split, ValidationSource
from trainshed.recipe.layout import Layout
from trainshed.recipe.load import (
    as_recipe,
    find_recipe,
    load_recipe,
    parse_recipe,
    run_id,
    shipped_recipes,
    to_plain,
    to_yaml,
)
from trainshed.recipe.model import ModelConfig, ModelSection, TokenizerTraining, TrainedTokenizer
from trainshed.recipe.model_parts import Moe, Rope, RopeScaling
from trainshed.recipe.optimizer import Optimizer
from trainshed.recipe.overrides import split_overrides
from trainshed.recipe.schema import (
    Checkpoint,
    Elastic,
    Engine,
    Observe,
    Profile,
    Recipe,
    Resources,
    fit_problems,
)
from trainshed.recipe.schema_export import cluster_json_schema, recipe_json_schema
from trainshed.recipe.serving import Export, Serve
from trainshed.recipe.train import BatchRamp, Lora, MoeLosses, Schedule, TrainSection

__all__ = [
    "BatchRamp",
    "Checkpoint",
    "Cluster",
    "ClusterStorage",
    "DataSection",
    "Elastic",
    "Engine",
    "Export",
    "Layout",
    "Lora",
    "ModelConfig",
    "ModelSection",
    "Moe",
    "MoeLosses",
    "Nodes",
    "Observe",
    "Optimizer",
    "Profile",
    "Recipe",
    "Resources",
    "Rope",
    "RopeScaling",
    "Schedule",
    "SecretReference",
    "Serve",
    "Source",
    "Split",
    "StoreEndpoint",
    "TokenizerTraining",
    "TrainSection",
    "TrainedTokenizer",
    "ValidationSource",
    "as_cluster",
    "as_recipe",
    "cluster_json_schema",
    "find_recipe",
    "fit_problems",
    "known_clusters",
    "load_cluster",
    "load_recipe",
    "parse_recipe",
    "recipe_json_schema",
    "run_id",
    "shipped_recipes",
    "split_overrides",
    "to_plain",
    "to_yaml",
]

"""The cluster file: its schema, and where it is found."""

from trainshed.recipe.cluster.load import (
    DEFAULT_CLUSTER,
    as_cluster,
    check_cluster,
    find_cluster,
    known_clusters,
    load_cluster,
)
from trainshed.recipe.cluster.schema import (
    Capacity,
    Cluster,
    ClusterStorage,
    JobLimits,
    Kubernetes,
    Nodes,
    Ray,
    SecretReference,
    Slurm,
    StoreEndpoint,
    Volume,
)

__all__ = [
    "DEFAULT_CLUSTER",
    "Capacity",
    "Cluster",
    "ClusterStorage",
    "JobLimits",
    "Kubernetes",
    "Nodes",
    "Ray",
    "SecretReference",
    "Slurm",
    "StoreEndpoint",
    "Volume",
    "as_cluster",
    "check_cluster",
    "find_cluster",
    "known_clusters",
    "load_cluster",
]

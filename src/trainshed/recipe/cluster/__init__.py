"""The cluster file: its schema, and where it is found."""

from trainshed.recipe.cluster.checking import check_cluster
from trainshed.recipe.cluster.loading import DEFAULT_CLUSTER, find_cluster, known_clusters, load_cluster
from trainshed.recipe.cluster.places import ClusterStorage, SecretReference, StoreEndpoint, Volume
from trainshed.recipe.cluster.schema import Cluster, Nodes
from trainshed.recipe.cluster.targets import Capacity, JobLimits, Kubernetes, Ray, Slurm

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
    "check_cluster",
    "find_cluster",
    "known_clusters",
    "load_cluster",
]

"""The target of a cluster."""

from __future__ import annotations

from trainshed.errors import InputError
from trainshed.launch.target import Target
from trainshed.recipe import Cluster


def target_of(cluster: Cluster) -> Target:
    """Return what schedules the work of a cluster."""
    if cluster.target == "slurm":
        from trainshed.launch.slurm.target import SlurmTarget

        return SlurmTarget(cluster)
    if cluster.target == "kubernetes":
        from trainshed.launch.kubernetes.target import KubernetesTarget

        return KubernetesTarget(cluster)
    if cluster.target == "ray":
        from trainshed.launch.ray.target import RayTarget

        return RayTarget(cluster)
    raise InputError(
        "there is no scheduler on this machine to submit to",
        where=cluster.where("target"),
        hint="`trainshed run RECIPE` runs here; --on CLUSTER names another place",
    )

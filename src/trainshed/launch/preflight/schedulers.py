"""Does a cluster's scheduler answer, and could it take a job as the cluster file has it?"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.preflight.checks import Check
from trainshed.launch.preflight.job import preflight_stage
from trainshed.launch.targets import target_of
from trainshed.recipe import Cluster

_NOBODY = "doctor"
"""The name of a job that is asked about and never sent."""


def scheduler_checks(cluster: Cluster, *, nodes: int | None = None) -> Iterator[Check]:
    """Ask the scheduler; what cannot be asked from this machine is skipped, with the reason."""
    stage = preflight_stage(cluster, nodes=nodes)
    job = Job(_NOBODY, cluster.store_root, cluster, (stage,), {}, None)
    asked = f"{stage.nodes} nodes" if stage.nodes > 1 else "one node"
    asked += f" with {stage.gpus_per_node} GPUs" if stage.gpus_per_node else ""
    try:
        refusals = target_of(cluster).check(job)
    except InputError as error:
        yield Check(cluster.target, "skipped", f"cannot be asked from here: {error.what}", error.hint)
        return
    except TrainshedError as error:
        place = f" ({error.where})" if error.where else ""
        yield Check(cluster.target, "fail", f"does not answer: {error.what}{place}", error.hint)
        return
    for sentence in refusals:
        yield Check(cluster.target, "fail", sentence.removeprefix(f"{stage.name}: "), _where(cluster))
    if not refusals:
        yield Check(cluster.target, "pass", f"answers, and could give a job {asked}")
    if cluster.target == "kubernetes" and find_spec("lightkube") is not None:
        from trainshed.launch.preflight.kubernetes_rights import check_rights

        yield check_rights(cluster)


def _where(cluster: Cluster) -> str:
    return f"{cluster.where(cluster.target)} says what jobs ask for"

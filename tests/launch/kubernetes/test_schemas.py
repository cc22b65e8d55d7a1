"""The schemas that manifests are held against can say no."""

from __future__ import annotations

import copy

import pytest
from jsonschema import ValidationError

from support.clusters.kubernetes_jobs import job_of, train_alone
from support.clusters.kubernetes_schemas import all_objects, check
from trainshed.launch.kubernetes.render import render
from trainshed.recipe import load_cluster


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("jobset", "spec"),
        ("jobset", "spec.failurePolicy"),
        ("jobset", "spec.replicatedJobs.0.template.spec.template.spec"),
        ("jobset", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.0"),
        ("pytorchjob", "spec"),
        ("pytorchjob", "spec.runPolicy"),
        ("pytorchjob", "spec.pytorchReplicaSpecs.Master.template.spec"),
        ("trainjob", "spec.trainer"),
        ("rayjob", "spec"),
        ("rayjob", "spec.rayClusterSpec.headGroupSpec.template.spec"),
    ],
)
def test_a_key_that_nobody_knows_is_found_wherever_it_stands(kind: str, path: str) -> None:
    cluster = load_cluster("eks-p5", [f"kubernetes.kind={kind}"])
    found = copy.deepcopy(all_objects(render(job_of(cluster, stages=train_alone())))[-1])
    check(found)
    place = found
    for key in path.split("."):
        place = place[int(key)] if isinstance(place, list) else place[key]
    place["nobodyKnowsThis"] = "x"
    said = "nobodyKnowsThis|nobody_knows_this|its typed model loses a key|RayJob has no such key"
    with pytest.raises((ValidationError, TypeError, AssertionError), match=said):
        check(found)

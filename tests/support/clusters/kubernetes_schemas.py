"""Whether objects are what Kubernetes and its extensions take: their schemas, and typed models from PyPI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from support import TESTS
from trainshed.launch.kubernetes.objects import read_documents
from trainshed.launch.target import SubmitRequest

VERSION = "1.32"
CRDS = TESTS.parents[1] / "shared" / "crds"
"""Definitions of JobSet, PyTorchJob, TrainJob and RayJob, where the checkout lies beside them."""
# Keys of RayJob.spec in KubeRay 1.5's definition that we use; no package has its model.
_RAY_JOB_KEYS = {
    "activeDeadlineSeconds", "backoffLimit", "entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes",
    "submissionMode", "submitterPodTemplate", "suspend", "ttlSecondsAfterFinished",
}  # fmt: skip
_CORE = ("ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Job", "DaemonSet", "StorageClass",
         "PersistentVolumeClaim", "PersistentVolume", "Service", "Deployment")  # fmt: skip


def all_objects(request: SubmitRequest) -> list[dict[str, Any]]:
    """Everything a request leads to: what is applied, and what the driver applies later."""
    found = [obj for part in request.parts for obj in read_documents(part.text)]
    for each in list(found):
        if each["kind"] == "ConfigMap" and "-stages-" in each["metadata"]["name"]:
            for name, text in each["data"].items():
                found += read_documents(text) if name.endswith(".yaml") else []
    return found


def check(found: dict[str, Any]) -> None:
    """Raise where an object is not valid."""
    _check_names(found)
    if found["kind"] in _CORE:
        _validator(found["kind"], found["apiVersion"]).validate(found)
    for inner in _inner_objects(found):
        _validator(inner["kind"], inner["apiVersion"]).validate(inner)
    _check_model(found)
    schema = _definition(found["kind"])
    if schema is not None:
        jsonschema.Draft202012Validator(schema).validate(found)


@cache
def _validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """What `kubernetes-validate --strict` checks with, read once."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    folder = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", VERSION)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(folder))


@cache
def _definitions(folder: str) -> Registry:
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", VERSION)) @ Registry()


def _check_names(found: dict[str, Any]) -> None:
    name = found["metadata"]["name"]
    assert len(name) <= 63, name
    for key, value in found["metadata"].get("labels", {}).items():
        assert len(value) <= 63, (key, value)


def _inner_objects(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Jobs and pods inside of other objects, whose own schemas often leave them open."""
    spec = found.get("spec", {})
    if found["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}} | job["template"]
    if found["kind"] == "PyTorchJob":
        yield from (_pod(each["template"]) for each in spec["pytorchReplicaSpecs"].values())
    if found["kind"] == "RayJob":
        groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"].get("workerGroupSpecs", ())]
        yield from (_pod(group["template"]) for group in groups)
        yield _pod(spec["submitterPodTemplate"])


def _pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod"} | template


def _check_model(found: dict[str, Any]) -> None:
    """Read an object into its typed model and back: nothing may be lost on the way."""
    if found["kind"] in ("JobSet", "TrainJob"):
        from kubeflow_trainer_api import models

        name = "JobsetV1alpha2JobSet" if found["kind"] == "JobSet" else "TrainerV1alpha1TrainJob"
        model = getattr(models, name).from_dict(found)
        assert model.to_dict() == found, "its typed model loses a key"
    if found["kind"] in ("Service", "Deployment"):
        from lightkube.models import apps_v1, core_v1

        model = core_v1.Service if found["kind"] == "Service" else apps_v1.Deployment
        assert model.from_dict(found, lazy=False).to_dict() == found, "its typed model loses a key"
    if found["kind"] == "PyTorchJob":
        from kubeflow.training import KubeflowOrgV1PyTorchJob

        # These models are made from the top: a constructor refuses a key it does not know.
        spec = _pytorch_spec(found["spec"])
        KubeflowOrgV1PyTorchJob(
            api_version=found["apiVersion"], kind=found["kind"], metadata=found["metadata"], spec=spec
        )
    if found["kind"] == "RayJob":
        assert set(found["spec"]) <= _RAY_JOB_KEYS, "RayJob has no such key"


def _pytorch_spec(spec: dict[str, Any]) -> Any:
    from kubeflow.training import KubeflowOrgV1PyTorchJobSpec, KubeflowOrgV1ReplicaSpec, KubeflowOrgV1RunPolicy

    policy = KubeflowOrgV1RunPolicy(**_snake(spec["runPolicy"]))
    replicas = {name: KubeflowOrgV1ReplicaSpec(**_snake(each)) for name, each in spec["pytorchReplicaSpecs"].items()}
    return KubeflowOrgV1PyTorchJobSpec(**_snake(spec) | {"run_policy": policy, "pytorch_replica_specs": replicas})


def _snake(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "".join(f"_{char.lower()}" if char.isupper() else char for char in key): value for key, value in values.items()
    }


@cache
def _definition(kind: str) -> dict[str, Any] | None:
    files = {
        "JobSet": "jobset.x-k8s.io_jobsets.yaml",
        "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
        "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
        "RayJob": "ray.io_rayjobs.yaml",
    }
    if kind not in files or not (CRDS / files[kind]).is_file():
        return None
    loaded = yaml.load((CRDS / files[kind]).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(each for each in loaded["spec"]["versions"] if each.get("storage"))
    return _closed(version["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """The schema with unknown keys forbidden, as an API server prunes them; quantities may be numbers too."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in closed and "additionalProperties" not in closed:
        if not closed.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
        if set(closed["properties"]) == {"metadata", "apiVersion", "kind", "spec", "status"}:
            closed["properties"]["metadata"] = {"type": "object"}
    if closed.get("x-kubernetes-int-or-string"):
        closed.pop("pattern", None)
        closed["type"] = ["integer", "string"]
        closed.pop("anyOf", None)
    return closed

"""What creates the stages one after another inside the cluster: a small CPU job with its own, narrow rights.

A JobSet whose jobs depend on each other is one workload to Kueue, which would hold the GPUs while data is prepared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from trainshed.launch.job import Job
from trainshed.launch.kubernetes.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    POD,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    WORKLOAD,
    Kind,
    Object,
    kind_of,
    new_object,
)
from trainshed.launch.kubernetes.manifests.content import Content
from trainshed.launch.kubernetes.manifests.cpu_job import ignore_disruption
from trainshed.launch.kubernetes.manifests.environment import literal, variables
from trainshed.launch.kubernetes.manifests.naming import (
    ENTRY_FILE,
    JOB_FOLDER,
    LONGEST_NAME,
    MOST_RESTARTS,
    fitted,
    labels,
    metadata,
)
from trainshed.launch.kubernetes.manifests.placement import QUEUE
from trainshed.launch.kubernetes.manifests.pod import KEPT_SECONDS, entry_variables, image_of
from trainshed.launch.kubernetes.manifests.yaml_text import to_documents

DRIVER = "driver"
MANIFESTS_FOLDER = "/etc/trainshed/manifests"
_RETRIES = 20
"""Of a driver that is driven out or loses the API server for long; a stage that failed ends it at once."""


def driver_name(job: str) -> str:
    """Return the name of the driver's job, and of its account and role."""
    return fitted(job, f"-{DRIVER}", LONGEST_NAME - 11)


def driver_objects(job: Job, content: Content, stages: Mapping[str, Sequence[Object]]) -> list[Object]:
    """Return the driver's objects; the manifests of the stages lie in a ConfigMap, in the order of their creation."""
    name = driver_name(job.name)
    # Numbered, so that their order is the order of their names.
    texts = {f"{number:02d}-{stage}.yaml": to_documents(found) for number, (stage, found) in enumerate(stages.items())}
    mark = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:10]
    manifests = new_object(
        CONFIG_MAP, metadata(job, fitted(job.name, f"-stages-{mark}"), DRIVER), immutable=True, data=texts
    )
    namespace = job.cluster.on_kubernetes.namespace
    objects = [each for found in stages.values() for each in found]
    kinds = dict.fromkeys(kind_of(each) for each in objects)
    remade = [each["metadata"]["name"] for each in objects if MOST_RESTARTS in each["metadata"].get("annotations", {})]
    return [
        manifests,
        new_object(SERVICE_ACCOUNT, metadata(job, name, DRIVER)),
        new_object(ROLE, metadata(job, name, DRIVER), rules=_rules(job, list(kinds), remade)),
        new_object(
            ROLE_BINDING,
            metadata(job, name, DRIVER),
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
        _driver(job, content, name, manifests["metadata"]["name"]),
    ]


def _rules(job: Job, kinds: Sequence[Kind], remade: Sequence[str]) -> list[Object]:
    """Create what it was given and look at it; nothing else."""
    rules = [_rule(kind, "get", "create", "patch") for kind in kinds]
    # Only its own trainings, to make them anew.
    rules += [_rule(JOB, "delete") | {"resourceNames": [name]} for name in remade]
    rules.append(_rule(POD, "list"))
    if DEPLOYMENT in kinds:
        rules.append(_rule(EVENT, "list"))  # a probe that fails is told there and nowhere else
    if job.cluster.on_kubernetes.queue is not None or job.cluster.on_kubernetes.cpu_queue is not None:
        rules.append(_rule(WORKLOAD, "list"))
    return rules


def _rule(kind: Kind, *verbs: str) -> Object:
    return {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(verbs)}


def _driver(job: Job, content: Content, name: str, manifests: str) -> Object:
    cluster = job.cluster
    own = entry_variables(cluster) | ({"TRAINSHED_CODE": job.code.name} if job.code is not None else {})
    command = [cluster.python, "-P", "-m", "trainshed", "kubernetes", "drive", "--manifests", MANIFESTS_FOLDER]
    container: Object = {
        "name": DRIVER,
        "image": image_of(job),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [literal(word) for word in command],
        "env": variables(own),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [*content.mounts, {"name": "manifests", "mountPath": MANIFESTS_FOLDER, "readOnly": True}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: Object = {"restartPolicy": "Never", "serviceAccountName": name}
    if cluster.on_kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in cluster.on_kubernetes.image_pull_secrets]
    if cluster.on_kubernetes.cpu_node_selector:
        pod["nodeSelector"] = dict(cluster.on_kubernetes.cpu_node_selector)
    pod["containers"] = [container]
    pod["volumes"] = [*content.volumes, {"name": "manifests", "configMap": {"name": manifests}}]
    ended = {"action": "FailJob", "onExitCodes": {"containerName": DRIVER, "operator": "In", "values": [1, 2]}}
    found = metadata(job, name, DRIVER)
    spec: Object = {}
    if cluster.on_kubernetes.cpu_queue is not None:
        found["labels"] = found["labels"] | {QUEUE: cluster.on_kubernetes.cpu_queue}
        spec["suspend"] = True
    spec |= {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": [ended, ignore_disruption()]},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": {"metadata": {"labels": labels(job, DRIVER)}, "spec": pod},
    }
    return new_object(JOB, found, spec=spec)

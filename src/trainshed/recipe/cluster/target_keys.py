"""Which target reads which key of a cluster file. A key that nobody would read on a target is refused there by name.

`KEY_SUPPORT` has a row for every key of the schema. A test walks the schema and fails where a row is missing, and
shows for the keys that change what is sent that they do. A key counts as written where its value is not its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainshed.recipe.cluster.schema import CPU_MACHINE, Cluster, TargetName
from trainshed.recipe.registered import registered_class
from trainshed.recipe.section import Problem, Section
from trainshed.recipe.validation import ELEMENT
from trainshed.recipe.yaml_io import KeyPath, dotted_key

KeyEffect = Literal["request", "node", "plan", "client"]
"""Where a change of a key shows: in what is sent (besides the copy of the cluster file), on nodes that read their copy
of it, in the plan, or in what this machine does or refuses."""

TARGET_NAMES: tuple[TargetName, ...] = ("local", "slurm", "kubernetes", "ray")
_SCHEDULED: tuple[TargetName, ...] = ("slurm", "kubernetes", "ray")
_TARGET_PHRASES: dict[str, str] = {
    "local": "on this machine",
    "slurm": "on Slurm",
    "kubernetes": "on Kubernetes",
    "ray": "on a running Ray cluster",
}
_UNREAD_REASONS: dict[str, tuple[str, str]] = {
    "local": ("ranks are processes here, as they are", "delete it"),
    "slurm": ("it is another target's", "delete it"),
    "kubernetes": ("it is another target's", "delete it"),
    "ray": ("its nodes are what they are", "delete it"),
}


@dataclass(frozen=True)
class KeyCondition:
    """What else must be written for a key to be read."""

    met: Callable[[Cluster], bool]
    what: str
    hint: str


@dataclass(frozen=True)
class KeySupport:
    """Who reads a key."""

    targets: tuple[TargetName, ...] = TARGET_NAMES
    shown: KeyEffect = "request"
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By target that does not read it: why, and what to write instead."""
    needs: Mapping[str, KeyCondition] = field(default_factory=dict)


def unread_keys(cluster: Cluster) -> Iterator[Problem]:
    """Yield every written key that the cluster's target does not read."""
    yield from _unread(cluster, cluster, ())


def _unread(cluster: Cluster, section: Section, path: KeyPath) -> Iterator[Problem]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if not info.is_required() and value == info.get_default(call_default_factory=True, validated_data={}):
            continue
        here = (*path, info.alias or name)
        problem = _unread_problem(cluster, here)
        if problem is not None:
            yield problem
            continue  # what lies below it is not read either
        for steps, inner in _sections(value):
            yield from _unread(cluster, inner, (*here, *steps))


def _sections(value: Any) -> Iterator[tuple[KeyPath, Section]]:
    if isinstance(value, Section):
        yield (), value
    elif isinstance(value, dict):
        yield from (((key,), inner) for key, inner in value.items() if isinstance(inner, Section))
    elif isinstance(value, tuple):
        yield from (((number,), inner) for number, inner in enumerate(value) if isinstance(inner, Section))


def _unread_problem(cluster: Cluster, path: KeyPath) -> Problem | None:
    reader, target = KEY_SUPPORT[table_key(path)], cluster.target
    if (registered := registered_class("target", target)) is not None:
        if _reads_registered(registered, table_key(path)):
            return None
        return Problem(path, f"`{dotted_key(path)}` is not read by the target {target}", "delete it")
    if target not in reader.targets:
        why, hint = reader.elsewhere.get(target, _UNREAD_REASONS[target])
        return Problem(path, f"`{dotted_key(path)}` is not read {_TARGET_PHRASES[target]}: {why}", hint)
    need = reader.needs.get(target)
    if need is not None and not need.met(cluster):
        return Problem(path, f"`{dotted_key(path)}` is not read: {need.what}", need.hint)
    return None


def _reads_registered(target: Any, key: str) -> bool:
    """Whether a target of a plugin reads a key: what every scheduler reads, what it names, and its own options."""
    own = ("plugins", "target_options", *getattr(target, "reads", ()))
    return set(_SCHEDULED) <= set(KEY_SUPPORT[key].targets) or key in own


def table_key(path: KeyPath) -> str:
    """Return the name of a key's row: names that people choose, and places in lists, are `*`."""
    named = next((len(parent) for parent in _NAMED if path[: len(parent)] == parent), None)
    return ".".join(ELEMENT if isinstance(step, int) or number == named else step for number, step in enumerate(path))


_NAMED: tuple[KeyPath, ...] = (("stores",), ("secrets",), ("limits", "stages"))
"""Keys below which people choose names."""


def _in_container(cluster: Cluster) -> bool:
    return cluster.on_slurm.container == "pyxis"


_NO_CONTAINER = "jobs run on the nodes as they are (`slurm.container: none`)"
_PYXIS = KeyCondition(_in_container, _NO_CONTAINER, "write `slurm: {container: pyxis}`, or delete it")
_OWN_PYTHON = KeyCondition(
    lambda cluster: cluster.on_slurm.venv is None or _in_container(cluster),
    "jobs run the Python of `slurm.venv`",
    "delete one of the two",
)
_NOT_OF_TRAINING = KeyCondition(
    lambda cluster: "train" not in cluster.limits.stages,
    "`train` has whole nodes there",
    "delete `train`",
)
_ASKED_FOR = KeyCondition(
    lambda cluster: cluster.on_kubernetes.requests is None or not {"train", "serve"} & cluster.limits.stages.keys(),
    "pods with GPUs ask for devices alone (`kubernetes.requests`)",
    "delete what it says of `train` and `serve`",
)
_HERE = ("the commands here use this machine's own environment", "export it before you run, and delete it here")
_SECRET_OF_NODES = (
    "a pod has neither the variables nor the files of the machine that submits",
    "kubectl create secret generic NAME --from-literal=KEY=…, then write {k8s: NAME/KEY}",
)
_SECRET_OF_PODS = "its nodes know no secrets of Kubernetes", "write {env: NAME} or {file: PATH}"
_NO_DISKS_HERE: dict[str, tuple[str, str]] = {
    "ray": ("its nodes mount what they mount", "delete it; `store` must be a folder that they all have")
}
_POD_VOLUME = KeySupport(
    ("kubernetes",),
    elsewhere=_NO_DISKS_HERE
    | {"slurm": ("Slurm's nodes mount disks themselves", "write {mount: …, path: …}, a folder of the shared disk")},
)
_OF_PODS = KeySupport(("kubernetes",), elsewhere={"slurm": ("it is about pods", "delete it")})
_BY_PLAN = KeySupport(shown="plan")
_OF_JOBS = KeySupport(_SCHEDULED)
_BY_SLURM = KeySupport(("slurm",), elsewhere=dict.fromkeys(TARGET_NAMES, ("it is Slurm's", "delete it")))
_BY_KUBERNETES = KeySupport(("kubernetes",), elsewhere=dict.fromkeys(TARGET_NAMES, ("it is Kubernetes'", "delete it")))
_BY_RAY = KeySupport(("ray",), elsewhere=dict.fromkeys(TARGET_NAMES, ("it is a running Ray cluster's", "delete it")))
_BY_REGISTERED = KeySupport(
    (), elsewhere=dict.fromkeys(TARGET_NAMES, ("it is for a target that a plugin registers", "delete it"))
)


def _section_of(target: TargetName, reader: KeySupport) -> KeySupport:
    hint = f"delete it, or write `target: {target}`"
    return replace(reader, elsewhere=dict.fromkeys(TARGET_NAMES, ("it is not its section", hint)))


KEY_SUPPORT: dict[str, KeySupport] = {
    "trainshed": KeySupport(shown="client"),
    "name": KeySupport(shown="client"),
    "target": KeySupport(),
    "store": KeySupport(),
    "stores": KeySupport(shown="node"),
    "stores.*.endpoint": KeySupport(shown="node"),
    "stores.*.region": KeySupport(shown="node"),
    "stores.*.anonymous": KeySupport(shown="node"),
    "stores.*.addressing": KeySupport(shown="node"),
    "secrets": KeySupport(_SCHEDULED, elsewhere={"local": _HERE}),
    "secrets.*.env": KeySupport(("slurm", "ray"), elsewhere={"kubernetes": _SECRET_OF_NODES}),
    "secrets.*.file": KeySupport(("slurm", "ray"), elsewhere={"kubernetes": _SECRET_OF_NODES}),
    "secrets.*.k8s": KeySupport(("kubernetes",), elsewhere={"slurm": _SECRET_OF_PODS, "ray": _SECRET_OF_PODS}),
    "nodes": KeySupport(),
    "nodes.default": KeySupport(_SCHEDULED, elsewhere={"local": ("the layout says how many ranks", "delete it")}),
    "nodes.max": KeySupport(shown="client"),
    "machine": KeySupport(),
    "storage": _BY_PLAN,
    "storage.tier": _BY_PLAN,
    "storage.size_tib": _BY_PLAN,
    "storage.servers": _BY_PLAN,
    "calibration": _BY_PLAN,
    "price_per_gpu_hour": _BY_PLAN,
    "mtbf_hours": _BY_PLAN,
    "image": KeySupport(
        ("slurm", "kubernetes"),
        elsewhere={"ray": ("the image of a running cluster cannot be chosen", "delete it")},
        needs={"slurm": _PYXIS},
    ),
    "python": KeySupport(_SCHEDULED, needs={"slurm": _OWN_PYTHON}),
    "fabric": _OF_JOBS,
    "sharp": _OF_JOBS,
    "preflight": _OF_JOBS,
    "environment": KeySupport(_SCHEDULED, elsewhere={"local": _HERE}),
    "setup": KeySupport(_SCHEDULED, elsewhere={"local": _HERE}),
    "volumes": KeySupport(("slurm", "kubernetes"), elsewhere=_NO_DISKS_HERE, needs={"slurm": _PYXIS}),
    "volumes.*.mount": KeySupport(("slurm", "kubernetes")),
    "volumes.*.pvc": _POD_VOLUME,
    "volumes.*.create": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.kind": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.size": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.storage_class": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.sku": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.zone": replace(_POD_VOLUME, shown="client"),
    "volumes.*.create.parameters": replace(_POD_VOLUME, shown="client"),
    "volumes.*.bucket": _POD_VOLUME,
    "volumes.*.host": _POD_VOLUME,
    "volumes.*.path": KeySupport(
        ("slurm",), elsewhere={"kubernetes": ("it is for Slurm", "write pvc, bucket or host")}
    ),
    "volumes.*.read_only": KeySupport(("slurm", "kubernetes")),
    "volumes.*.options": _POD_VOLUME,
    "local_disk": KeySupport(shown="node"),
    "limits": _OF_JOBS,
    "limits.hours": KeySupport(
        ("slurm", "kubernetes"), elsewhere={"ray": ("Ray ends no job by the clock", "delete it")}
    ),
    "limits.restarts": KeySupport(
        _SCHEDULED,
        needs={
            "kubernetes": KeyCondition(
                lambda cluster: cluster.on_kubernetes.kind != "trainjob",
                "how often a TrainJob is started again is the business of its runtime",
                "delete it, or write `kind: jobset` below `kubernetes`",
            )
        },
    ),
    "limits.grace_seconds": _OF_JOBS,
    "limits.shared_memory": KeySupport(
        ("kubernetes",), elsewhere={"slurm": ("/dev/shm of Slurm's nodes is what they have", "delete it")}
    ),
    "limits.cpu_stage_cpus": _OF_JOBS,
    "limits.cpu_stage_memory": _OF_JOBS,
    "limits.stages": KeySupport(
        _SCHEDULED, needs={"slurm": _NOT_OF_TRAINING, "ray": _NOT_OF_TRAINING, "kubernetes": _ASKED_FOR}
    ),
    "limits.stages.*.cpus": _OF_JOBS,
    "limits.stages.*.memory": _OF_JOBS,
    "limits.prepare_parts": _OF_JOBS,
    "capacity": KeySupport(("slurm", "kubernetes")),
    "capacity.reservation": KeySupport(("slurm", "kubernetes")),
    "capacity.spot": KeySupport(
        ("kubernetes",),
        elsewhere={
            "slurm": ("Slurm offers such nodes as a partition or a quality of service", "write slurm.partition or .qos")
        },
    ),
    "capacity.flex_start_hours": KeySupport(
        ("kubernetes",), elsewhere={"slurm": ("flex start is Google's", "write `reservation: NAME`, or delete it")}
    ),
    "notify": KeySupport(shown="node"),
    **{f"notify.*.{key}": KeySupport(shown="node") for key in ("command", "webhook", "on")},
    **{f"notify.*.{key}": KeySupport(shown="node") for key in ("webhook.secret", "every_minutes", "low_goodput")},
    "service_account": replace(
        _OF_PODS, elsewhere={"slurm": ("jobs run as whoever submits them", "write slurm.account for who is charged")}
    ),
    "locked": KeySupport(shown="client"),
    "slurm": _section_of("slurm", _BY_SLURM),
    "slurm.partition": _BY_SLURM,
    "slurm.cpu_partition": _BY_SLURM,
    "slurm.account": _BY_SLURM,
    "slurm.qos": _BY_SLURM,
    "slurm.constraint": _BY_SLURM,
    "slurm.login": replace(_BY_SLURM, shown="client"),
    "slurm.gpus": replace(
        _BY_SLURM,
        needs={
            "slurm": KeyCondition(
                # null says that none are asked for, which is true of nodes without GPUs.
                lambda cluster: cluster.machine != CPU_MACHINE or cluster.on_slurm.gpus is None,
                "the nodes have no GPUs (`machine: cpu`)",
                "delete it, or name their machine",
            )
        },
    ),
    "slurm.container": _BY_SLURM,
    "slurm.venv": replace(
        _BY_SLURM,
        needs={
            "slurm": KeyCondition(
                lambda cluster: not _in_container(cluster),
                "jobs run in an image (`slurm.container: pyxis`)",
                "delete one of the two",
            )
        },
    ),
    "slurm.exclusive": _BY_SLURM,
    "slurm.port": _BY_SLURM,
    "slurm.options": _BY_SLURM,
    "kubernetes": _section_of("kubernetes", _BY_KUBERNETES),
    "kubernetes.kind": _BY_KUBERNETES,
    "kubernetes.context": replace(_BY_KUBERNETES, shown="client"),
    "kubernetes.namespace": _BY_KUBERNETES,
    "kubernetes.queue": _BY_KUBERNETES,
    "kubernetes.cpu_queue": _BY_KUBERNETES,
    "kubernetes.driver_account": _BY_KUBERNETES,
    "kubernetes.priority": replace(
        _BY_KUBERNETES,
        needs={
            "kubernetes": KeyCondition(
                lambda cluster: bool(cluster.on_kubernetes.queue or cluster.on_kubernetes.cpu_queue),
                "it is Kueue's, and there is no queue",
                "write `queue: NAME` beside it",
            )
        },
    ),
    "kubernetes.topology": _BY_KUBERNETES,
    "kubernetes.topology.level": _BY_KUBERNETES,
    "kubernetes.topology.required": _BY_KUBERNETES,
    "kubernetes.runtime": replace(
        _BY_KUBERNETES,
        needs={
            "kubernetes": KeyCondition(
                lambda cluster: cluster.on_kubernetes.kind == "trainjob",
                "it is a TrainJob's, and `kind` is another",
                "write `kind: trainjob`, or delete it",
            )
        },
    ),
    "kubernetes.host_network": _BY_KUBERNETES,
    "kubernetes.resources": replace(
        _BY_KUBERNETES,
        needs={
            "kubernetes": KeyCondition(
                lambda cluster: cluster.machine != CPU_MACHINE,
                "processors use no devices of a network (`machine: cpu`)",
                "delete it",
            )
        },
    ),
    "kubernetes.requests": replace(
        _BY_KUBERNETES,
        needs={
            "kubernetes": KeyCondition(
                lambda cluster: cluster.on_kubernetes.queue is not None and cluster.machine != CPU_MACHINE,
                "it is for pods with GPUs, in a queue that covers devices alone",
                "delete it, or write `queue: NAME` beside it",
            )
        },
    ),
    "kubernetes.node_selector": _BY_KUBERNETES,
    "kubernetes.cpu_node_selector": _BY_KUBERNETES,
    "kubernetes.tolerations": _BY_KUBERNETES,
    "kubernetes.tolerations.*.key": _BY_KUBERNETES,
    "kubernetes.tolerations.*.operator": _BY_KUBERNETES,
    "kubernetes.tolerations.*.value": _BY_KUBERNETES,
    "kubernetes.tolerations.*.effect": _BY_KUBERNETES,
    "kubernetes.avoid_nodes": _BY_KUBERNETES,
    "kubernetes.labels": _BY_KUBERNETES,
    "kubernetes.annotations": _BY_KUBERNETES,
    "kubernetes.image_pull_secrets": _BY_KUBERNETES,
    "kubernetes.code": _BY_KUBERNETES,
    "kubernetes.pre_pull": _BY_KUBERNETES,
    "plugins": _BY_REGISTERED,
    "target_options": _BY_REGISTERED,
    "ray": _section_of("ray", _BY_RAY),
    "ray.address": replace(_BY_RAY, shown="client"),
    "ray.gpu_resource": replace(_BY_RAY, shown="node"),
}
"""By key, as `docs/cluster-reference.md` lists them."""

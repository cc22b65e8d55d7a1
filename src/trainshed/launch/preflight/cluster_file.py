"""Is a cluster file sane, as far as it can be told without the cluster: `trainshed doctor --on CLUSTER`, first part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainshed.errors import InputError
from trainshed.launch.fabric import fabric_setup, machine_of
from trainshed.launch.fabric_lint import lint_environment
from trainshed.launch.preflight.checks import Check
from trainshed.recipe import Cluster, SecretReference
from trainshed.storage import parse


def cluster_file_checks(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Look at a cluster file."""
    yield from _image(cluster)
    yield _store(cluster)
    for name, reference in cluster.secrets.items():
        yield _secret(cluster, name, reference, environment)
    yield from _machine(cluster)
    if cluster.nodes.max is None and cluster.target != "local":
        what = "`nodes.max` is not set: a job that asks for more nodes than there are waits for ever"
        yield Check("nodes", "warn", what, f"{cluster.where('nodes')}: write nodes: {{default: 1, max: N}}")
    elif cluster.target != "local":
        yield Check("nodes", "pass", f"{cluster.nodes.default} by default, {cluster.nodes.max} at most")


def _image(cluster: Cluster) -> Iterator[Check]:
    in_container = cluster.target == "kubernetes" or (
        cluster.target == "slurm" and cluster.on_slurm.container == "pyxis"
    )
    if not in_container:
        if cluster.target == "slurm" and cluster.on_slurm.venv is None:
            what = f"jobs run with {cluster.python} as the nodes have it"
            hint = f"{cluster.where('slurm')}: write venv: /shared/env, or container: pyxis"
            yield Check("image", "warn", what, hint)
        return
    if cluster.image is None:
        hint = f"{cluster.where('image')}: write image: registry/name@sha256:…"
        yield Check("image", "fail", "jobs need a container image, and none is named", hint)
    elif "@sha256:" not in cluster.image and not cluster.image.startswith(("/", ".")):
        what = f"{cluster.image} is a tag, which may change between two attempts of a run"
        yield Check("image", "warn", what, f"{cluster.where('image')}: write it by digest, name@sha256:…")
    else:
        yield Check("image", "pass", cluster.image)


def _store(cluster: Cluster) -> Check:
    if cluster.store is None and cluster.target != "local":
        hint = f"{cluster.where('store')}: write store: s3://bucket/path, or a folder that every node has"
        return Check("store", "fail", "no store is named, and the nodes share no folder with this machine", hint)
    root = cluster.store_root
    if parse(root).scheme != "file" or cluster.target != "kubernetes":
        return Check("store", "pass", root)
    mounts = [volume.mount for volume in cluster.volumes]
    if any(Path(root).is_relative_to(mount) for mount in mounts):
        return Check("store", "pass", f"{root}, in a volume")
    hint = f"{cluster.where('store')}: mount a volume there (volumes: [{{mount: {root}, pvc: NAME}}])"
    return Check("store", "fail", f"{root} lies in no volume: every pod would have its own", hint)


def _secret(cluster: Cluster, name: str, reference: SecretReference, environment: Mapping[str, str]) -> Check:
    where = cluster.where(f"secrets.{name}")
    if reference.k8s is not None:
        return Check(f"secret {name}", "skipped", f"Kubernetes has it ({reference.k8s})")
    if reference.env is not None:
        if reference.env in environment:
            return Check(f"secret {name}", "pass", f"{reference.env} is set here")
        return Check(
            f"secret {name}", "fail", f"{reference.env} is not set here", f"{where}: export it, or name another"
        )
    file = Path(reference.file or "").expanduser()
    if file.is_file():
        return Check(f"secret {name}", "pass", f"{reference.file} is there")
    return Check(
        f"secret {name}", "skipped", f"{reference.file} is not on this machine", f"{where}: nodes read it, too"
    )


def _machine(cluster: Cluster) -> Iterator[Check]:
    """Machine, fabric and environment are known and belong together."""
    nodes = max(2, cluster.nodes.default)
    try:
        machine = machine_of(cluster)
        if machine is not None:
            yield Check("machine", "pass", f"{machine.name}: {machine.gpus} x {machine.gpu}, {machine.fabric}")
        elif cluster.target != "local":
            yield Check("machine", "pass", "nodes without GPUs: nothing is planned or compared")
        setup = fabric_setup(cluster, nodes=nodes)
    except InputError as error:
        yield Check("machine", "fail", error.what, f"{error.where}: {error.hint}")
        return
    if setup.fabric is not None:
        network = setup.environment.get("NCCL_NET")
        yield Check("fabric", "pass", f"{setup.fabric}: {setup.name} {setup.version}, NCCL_NET={network}")
        for note in setup.notes:
            yield Check("fabric needs", "skipped", note)
    elif cluster.target != "local":
        yield Check("fabric", "warn", setup.notes[0], f"{cluster.where('fabric')}: write fabric: NAME")
    try:
        odd = lint_environment(setup, cluster.environment, cluster.where)
    except InputError as error:
        yield Check("environment", "fail", f"{error.where}: {error.what}", error.hint)
        return
    yield from (Check("environment", "warn", what) for what in odd)
    if not odd:
        yield Check("environment", "pass", "every variable belongs to the fabric")

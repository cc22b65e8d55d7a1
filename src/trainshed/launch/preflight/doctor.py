"""What `trainshed doctor` checks without a job: this machine, a cluster file, and whether its scheduler answers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import orjson

from trainshed.catalog import gpu_by_device_name
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.attempt import WITHOUT_AMX, machine_environment
from trainshed.launch.fabric import fabric_setup, lint_environment, machine_of
from trainshed.launch.job import Job
from trainshed.launch.preflight.node import check_disk, check_gpus, check_shared_memory, find_gpus
from trainshed.launch.preflight.run import preflight_stage
from trainshed.launch.preflight.verdict import CheckResult
from trainshed.launch.target import target_of
from trainshed.observe.notify import Recipient, send, trial_message
from trainshed.recipe import Cluster, SecretReference
from trainshed.recipe.cluster.schema import is_shared_path
from trainshed.recipe.notify import Notification, WebhookSecret
from trainshed.this_machine import ON_WINDOWS, not_on_windows

# An extra, a module that only it installs, and what cannot be done without it.
_EXTRAS = (
    ("data", "tokenizers", "tokenising text and reading from the Hub"),
    ("train", "torch", "training, converting and comparing weights"),
    ("k8s", "lightkube", "submitting to Kubernetes"),
    ("ray", "ray", "being a node of a Ray cluster (to submit to one, nothing is needed)"),
)
_PROGRAMS = (
    ("git", "the state of the code is not kept with a run"),
    ("ssh", "Slurm behind a login node cannot be reached"),
    ("sbatch", "Slurm is reached through a login node only (slurm.login)"),
    ("kubectl", "objects are sent by our own client all the same"),
    ("helm", "charts can be written, not tried"),
)
_TORCH_SCRIPT = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": names}))
"""


def machine_checks() -> Iterator[CheckResult]:
    """Check this machine."""
    yield _check_python()
    if ON_WINDOWS:
        error = not_on_windows("Windows cannot train")
        yield CheckResult("training", "skipped", error.what, error.hint)
    yield from _check_extras()
    if find_spec("torch") is not None:
        yield from _check_torch()
        yield _check_bf16()
    yield check_shared_memory(Path("/dev/shm"), 0)
    yield check_disk(Path(tempfile.gettempdir()))
    yield from _check_programs()


def _check_python() -> CheckResult:
    return CheckResult("python", "pass", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _check_extras() -> Iterator[CheckResult]:
    for extra, module, purpose in _EXTRAS:
        if find_spec(module) is not None:
            yield CheckResult(f"extra {extra}", "pass", f"installed: {purpose}")
        else:
            yield CheckResult(
                f"extra {extra}", "skipped", f"not installed: {purpose}", f"pip install 'trainshed[{extra}]'"
            )


def _check_torch() -> Iterator[CheckResult]:
    """Load PyTorch in a process of its own: a broken driver may kill the process."""
    command = [sys.executable, "-P", "-c", _TORCH_SCRIPT]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        error_lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        yield CheckResult(
            "torch", "fail", f"cannot be loaded: {error_lines[-1]}", "install it again: pip install 'trainshed[train]'"
        )
        return
    torch_facts = orjson.loads(done.stdout.splitlines()[-1])
    build = (
        f"CUDA {torch_facts['cuda']}"
        if torch_facts["cuda"]
        else f"ROCm {torch_facts['hip']}"
        if torch_facts["hip"]
        else "CPU only"
    )
    yield CheckResult("torch", "pass", f"{torch_facts['torch']} ({build})", measured=torch_facts)
    node_gpus = find_gpus()
    if node_gpus is None and not torch_facts["devices"]:
        yield CheckResult("gpus", "skipped", "none here; small models train on the processor")
        return
    yield from check_gpus(node_gpus, len(node_gpus.gpus) if node_gpus else len(torch_facts["devices"]))
    if node_gpus is not None and len(torch_facts["devices"]) < len(node_gpus.gpus):
        what = f"PyTorch sees {len(torch_facts['devices'])} of {len(node_gpus.gpus)} GPUs"
        yield CheckResult("torch and gpus", "fail", what, f"a PyTorch for this driver ({build} is installed)")
    unknown = sorted({name for name in torch_facts["devices"] if gpu_by_device_name(name) is None})
    if unknown:
        hint = "`trainshed plan probe --to FILE` measures it"
        yield CheckResult("gpu kind", "warn", f"the catalog does not know {', '.join(unknown)}: there is no MFU", hint)


def _check_bf16() -> CheckResult:
    """Check whether a bf16 matmul dies of SIGILL: a CPU may report matrix units (AMX) that its hypervisor forbids."""
    variables = machine_environment("bf16")
    if WITHOUT_AMX.keys() & variables.keys():
        setting = " ".join(f"{name}={value}" for name, value in WITHOUT_AMX.items())
        return CheckResult(
            "bf16", "pass", f"products in bf16 die on this processor (SIGILL): ranks are started with {setting}"
        )
    return CheckResult("bf16", "pass", "products in bf16 work on this processor")


def _check_programs() -> Iterator[CheckResult]:
    for program, consequence in _PROGRAMS:
        path = shutil.which(program)
        if path is not None:
            yield CheckResult(program, "pass", f"found: {path}")
        else:
            yield CheckResult(program, "skipped", f"not found: {consequence}")


def cluster_file_checks(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Check a cluster file."""
    yield from _check_image(cluster)
    yield _check_store(cluster)
    for name, reference in cluster.secrets.items():
        yield _check_secret(cluster, name, reference, environment)
    yield from _check_machine(cluster)
    if cluster.nodes.max is None and cluster.target != "local":
        what = "`nodes.max` is not set: a job that asks for more nodes than there are waits for ever"
        yield CheckResult("nodes", "warn", what, f"{cluster.where('nodes')}: write nodes: {{default: 1, max: N}}")
    elif cluster.target != "local":
        yield CheckResult("nodes", "pass", f"{cluster.nodes.default} by default, {cluster.nodes.max} at most")


def _check_image(cluster: Cluster) -> Iterator[CheckResult]:
    in_container = cluster.target == "kubernetes" or (
        cluster.target == "slurm" and cluster.on_slurm.container == "pyxis"
    )
    if not in_container:
        if cluster.target == "slurm" and cluster.on_slurm.venv is None:
            what = f"jobs run with {cluster.python} as the nodes have it"
            hint = f"{cluster.where('slurm')}: write venv: /shared/env, or container: pyxis"
            yield CheckResult("image", "warn", what, hint)
        return
    if cluster.image is None:
        hint = f"{cluster.where('image')}: write image: registry/name@sha256:…"
        yield CheckResult("image", "fail", "jobs need a container image, and none is named", hint)
    elif "@sha256:" not in cluster.image and not cluster.image.startswith(("/", ".")):
        what = f"{cluster.image} is a tag, which may change between two attempts of a run"
        yield CheckResult("image", "warn", what, f"{cluster.where('image')}: write it by digest, name@sha256:…")
    else:
        yield CheckResult("image", "pass", cluster.image)


def _check_store(cluster: Cluster) -> CheckResult:
    if cluster.store is None and cluster.target != "local":
        hint = f"{cluster.where('store')}: write store: /data, a path that every node mounts"
        return CheckResult("store", "fail", "no store is named, and the nodes share no folder with this machine", hint)
    root = cluster.store_root
    if not is_shared_path(root, cluster.target):
        hint = f"{cluster.where('store')}: write a path on a shared disk; `checkpoint.to` may be a bucket"
        return CheckResult("store", "fail", f"{root} is not a path that every node mounts", hint)
    if cluster.target != "kubernetes":
        return CheckResult("store", "pass", root)
    mounts = [volume.mount for volume in cluster.volumes if not volume.read_only]
    if any(Path(root).is_relative_to(mount) for mount in mounts):
        return CheckResult("store", "pass", f"{root}, in a volume")
    hint = f"{cluster.where('store')}: mount a volume there (volumes: [{{mount: {root}, pvc: NAME}}])"
    return CheckResult("store", "fail", f"{root} lies in no volume: every pod would have its own", hint)


def notify_checks(
    cluster: Cluster, recipients: Sequence[Recipient], environment: Mapping[str, str] = os.environ
) -> Iterator[CheckResult]:
    """Send a test message to each recipient, from this machine."""
    for recipient in recipients:
        webhook = recipient.notification.webhook
        values = dict(environment)
        if isinstance(webhook, WebhookSecret) and (reference := cluster.secrets.get(webhook.secret)) is not None:
            if reference.k8s is not None:
                what = f"Kubernetes has the secret ({reference.k8s}), and it is not read from here"
                yield CheckResult(recipient.where, "skipped", what)
                continue
            values[webhook.secret] = _secret_value(reference, environment)
        problem = send(recipient.notification, trial_message(f"doctor on {cluster.name}"), values)
        if problem is None:
            yield CheckResult(recipient.where, "pass", f"a test message was sent by {_way(recipient.notification)}")
        else:
            yield CheckResult(recipient.where, "fail", problem)


def _secret_value(reference: SecretReference, environment: Mapping[str, str]) -> str:
    if reference.env is not None:
        return environment.get(reference.env, "")
    file = Path(reference.file or "").expanduser()
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _way(notification: Notification) -> str:
    return "its webhook" if notification.command is None else notification.command[0]


def _check_secret(
    cluster: Cluster, name: str, reference: SecretReference, environment: Mapping[str, str]
) -> CheckResult:
    where = cluster.where(f"secrets.{name}")
    if reference.k8s is not None:
        return CheckResult(f"secret {name}", "skipped", f"Kubernetes has it ({reference.k8s})")
    if reference.env is not None:
        if reference.env in environment:
            return CheckResult(f"secret {name}", "pass", f"{reference.env} is set here")
        return CheckResult(
            f"secret {name}", "fail", f"{reference.env} is not set here", f"{where}: export it, or name another"
        )
    file = Path(reference.file or "").expanduser()
    if file.is_file():
        return CheckResult(f"secret {name}", "pass", f"{reference.file} is there")
    return CheckResult(
        f"secret {name}", "skipped", f"{reference.file} is not on this machine", f"{where}: nodes read it, too"
    )


def _check_machine(cluster: Cluster) -> Iterator[CheckResult]:
    """Check whether machine, fabric and environment are known and belong together."""
    nodes = max(2, cluster.nodes.default)
    try:
        machine = machine_of(cluster)
        if machine is not None:
            yield CheckResult("machine", "pass", f"{machine.name}: {machine.gpus} x {machine.gpu}, {machine.fabric}")
        elif cluster.target != "local":
            yield CheckResult("machine", "pass", "nodes without GPUs: nothing is planned or compared")
        setup = fabric_setup(cluster, nodes=nodes)
    except InputError as error:
        yield CheckResult("machine", "fail", error.what, f"{error.where}: {error.hint}")
        return
    if setup.fabric is not None:
        network = setup.environment.get("NCCL_NET")
        yield CheckResult("fabric", "pass", f"{setup.fabric}: {setup.name} {setup.version}, NCCL_NET={network}")
        for note in setup.notes:
            yield CheckResult("fabric needs", "skipped", note)
    elif cluster.target != "local":
        yield CheckResult("fabric", "warn", setup.notes[0], f"{cluster.where('fabric')}: write fabric: NAME")
    try:
        odd = lint_environment(setup, cluster.environment, cluster.where)
    except InputError as error:
        yield CheckResult("environment", "fail", f"{error.where}: {error.what}", error.hint)
        return
    yield from (CheckResult("environment", "warn", what) for what in odd)
    if not odd:
        yield CheckResult("environment", "pass", "every variable belongs to the fabric")


_DOCTOR_JOB = "doctor"
"""The name of a job that the scheduler is asked about and that is never submitted."""


def scheduler_checks(cluster: Cluster, *, nodes: int | None = None) -> Iterator[CheckResult]:
    """Ask the scheduler; what cannot be asked from this machine is skipped with the reason."""
    stage = preflight_stage(cluster, nodes=nodes)
    job = Job(name=_DOCTOR_JOB, run=cluster.store_root, cluster=cluster, stages=(stage,), files={}, code=None)
    request_text = f"{stage.nodes} nodes" if stage.nodes > 1 else "one node"
    request_text += f" with {stage.gpus_per_node} GPUs" if stage.gpus_per_node else ""
    try:
        refusals = target_of(cluster).check(job)
    except InputError as error:
        yield CheckResult(cluster.target, "skipped", f"cannot be asked from here: {error.what}", error.hint)
        return
    except TrainshedError as error:
        place = f" ({error.where})" if error.where else ""
        yield CheckResult(cluster.target, "fail", f"does not answer: {error.what}{place}", error.hint)
        return
    for sentence in refusals:
        yield CheckResult(
            cluster.target, "fail", sentence.removeprefix(f"{stage.name}: "), _where_in_cluster_file(cluster)
        )
    if not refusals:
        yield CheckResult(cluster.target, "pass", f"answers, and could give a job {request_text}")
    if cluster.target == "kubernetes" and find_spec("lightkube") is not None:
        from trainshed.launch.preflight.kubernetes_permissions import check_permissions

        yield check_permissions(cluster)


def _where_in_cluster_file(cluster: Cluster) -> str:
    return f"{cluster.where(cluster.target)} says what jobs ask for"

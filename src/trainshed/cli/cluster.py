"""`trainshed doctor`, `image` and `storage`: what a cluster or this machine has and lacks, and what jobs need there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Flag, Output

if TYPE_CHECKING:
    from trainshed.launch.images import BuildTool, ImageRequest
    from trainshed.launch.preflight.verdict import CheckResult
    from trainshed.recipe import Cluster


_VERDICT_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skipped": "-"}


def doctor(
    *overrides: str,
    on: ClusterName | None = None,
    nodes: int | None = None,
    full: Flag = False,
    notify: Flag = False,
    recipe: RecipeName | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Look at this machine; with --on at a cluster file and its scheduler; with --nodes at its nodes too.

    Exit code 1 if something would keep a run from working.

    Parameters
    ----------
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    on
        The cluster file, by name or path; left out: this machine.
    nodes
        Take so many nodes of the cluster and prove them: GPUs, fabric, storage, pair by pair.
    full
        Measure for a minute instead of half a second.
    notify
        Only send a test message to everybody in `notify` of the cluster file; check nothing else.
    recipe
        With --notify: those of this recipe too.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.errors import InputError
    from trainshed.launch.preflight.verdict import worst_verdict

    if recipe is not None and not notify:
        raise InputError("a recipe is read for its `notify`", where="--recipe", hint="write --notify too")

    if nodes is not None and on is None:
        raise InputError("nodes of which cluster?", where="--nodes", hint="write --on CLUSTER too")
    if notify:
        groups = _notify_checks(on or "local", overrides, recipe)
    else:
        groups = _machine_checks(full) if on is None else _cluster_checks(on, overrides, nodes, full)
    verdict = worst_verdict(check for checks in groups.values() for check in checks)
    data: dict[str, Any] = {"schema": "trainshed.doctor/1", "on": on, "verdict": verdict}
    data["groups"] = {name: [check.to_plain() for check in checks] for name, checks in groups.items()}
    print_report(data, output, _checks_text(groups))
    return 1 if verdict == "fail" else 0


def _notify_checks(on: str, overrides: tuple[str, ...], recipe: str | None) -> dict[str, list[CheckResult]]:
    from trainshed.errors import InputError
    from trainshed.launch.preflight.doctor import notify_checks
    from trainshed.observe.notify import recipients_of
    from trainshed.recipe import load_cluster, load_recipe, split_overrides

    for_recipe, for_cluster = split_overrides(overrides)
    cluster = load_cluster(on, for_cluster)
    recipients = recipients_of(load_recipe(recipe, for_recipe) if recipe is not None else None, cluster)
    if not recipients:
        hint = (
            f"{cluster.where('notify')}: write notify: [{{webhook: {{secret: NAME}}}}], or name a --recipe that has it"
        )
        raise InputError("`notify` tells nobody", where="--notify", hint=hint)
    return {"notify": list(notify_checks(cluster, recipients))}


def _machine_checks(full: bool) -> dict[str, list[CheckResult]]:
    from trainshed.launch.preflight.doctor import machine_checks

    groups = {"this machine": list(machine_checks())}
    return groups | ({"preflight": _preflight_here(full=True)} if full else {})


def _cluster_checks(on: str, overrides: tuple[str, ...], nodes: int | None, full: bool) -> dict[str, list[CheckResult]]:
    from trainshed.launch.preflight.doctor import cluster_file_checks, scheduler_checks
    from trainshed.launch.preflight.verdict import CheckResult
    from trainshed.recipe import load_cluster, split_overrides

    cluster = load_cluster(on, split_overrides(overrides)[1])
    groups = {"cluster file": list(cluster_file_checks(cluster))}
    if cluster.target == "local":
        return groups | {"preflight": _preflight_here(full)}
    asked = list(scheduler_checks(cluster, nodes=nodes))
    if nodes is not None and not any(check.verdict == "fail" for check in asked):
        return groups | {cluster.target: asked, "preflight": _preflight_there(cluster, nodes, full)}
    what = f"before each training (preflight: {str(cluster.preflight).lower()}); --nodes 2 looks at two of them now"
    return groups | {cluster.target: [*asked, CheckResult("nodes", "skipped", what)]}


def _preflight_there(cluster: Cluster, nodes: int, full: bool) -> list[CheckResult]:
    """Preflight as a job of the cluster's own, followed to its end."""
    from pathlib import Path

    from trainshed import api
    from trainshed.cli.console import reporter
    from trainshed.launch.preflight.verdict import CheckResult, newest_verdict
    from trainshed.launch.target import target_of
    from trainshed.workflow.submission import RenderedJob
    from trainshed.workflow.submit import doctor_job

    job = doctor_job(cluster, nodes, full=full)
    sent = api.send(RenderedJob(job, target_of(cluster).render(job)), reporter=reporter())
    assert sent is not None, "nobody was asked"
    ended = sent.wait(check=False, reporter=reporter())
    verdict = newest_verdict(Path(job.run))
    if verdict is None:
        what = f"{ended['state']}; its result lies in {job.run}/health on the cluster"
        return [CheckResult("nodes", "pass" if ended["state"] == "done" else "fail", what)]
    checks = [
        CheckResult(f"{report.host}: {check.name}", check.verdict, check.what, check.hint)
        for report in verdict.nodes
        for check in report.checks
        if check.verdict != "pass"
    ]
    outcome = verdict.outcome if verdict.outcome in ("pass", "warn") else "fail"
    return [*checks, *verdict.checks, CheckResult("nodes", outcome, verdict.sentence)]


def _preflight_here(full: bool) -> list[CheckResult]:
    """Preflight of this machine alone, in a folder that is thrown away."""
    import tempfile
    from importlib.util import find_spec

    from trainshed.cli.console import reporter
    from trainshed.launch.fabric import SINGLE_NODE, FabricSetup
    from trainshed.launch.preflight import PreflightJob, run_preflight
    from trainshed.launch.preflight.node import find_gpus
    from trainshed.storage import LocalStore

    seen = find_gpus() if find_spec("torch") is not None else None
    gpus = len(seen.gpus) if seen is not None else 0
    with tempfile.TemporaryDirectory(prefix="trainshed-doctor-") as folder:
        job = PreflightJob(LocalStore(folder), "", 1, 1, gpus, FabricSetup(SINGLE_NODE, None, ""), full=full)
        verdict = run_preflight(job, node_rank=0, key_value_address=("127.0.0.1", 0), reporter=reporter())
    return [check for report in verdict.nodes for check in report.checks] + list(verdict.checks)


def _checks_text(groups: dict[str, list[CheckResult]]) -> str:
    lines = []
    for group, checks in groups.items():
        lines.append(group)
        width = max((len(check.name) for check in checks), default=0)
        for check in checks:
            lines.append(f"  {_VERDICT_MARKS[check.verdict]:<4}  {check.name:<{width}}  {check.what}")
            if check.hint and check.verdict != "pass":
                lines.append(f"        {'':<{width}}  {check.hint}")
    return "\n".join(lines)


image_app = App(name="image", help="What jobs run in: a container image, or an environment on a shared disk.")


@image_app.command
def build(
    tag: str | None = None,
    *,
    engine: Literal["torch", "megatron", "nemo", "torchtune"] = "torch",
    version: str | None = None,
    fabric: Literal["tcpxo", "gib", "efa", "infiniband", "roce"] | None = None,
    gpu: Literal["cuda", "rocm"] = "cuda",
    ray: Annotated[bool, Parameter(negative="")] = False,
    base: str | None = None,
    venv: str | None = None,
    on: ClusterName | None = None,
    python: str = "python3",
    out: Path | None = None,
    tool: Literal["docker", "podman", "buildah", "kaniko"] | None = None,
    push: Flag = False,
) -> int:
    """Build the image that a cluster's jobs run in, or with --venv a Python environment on its shared disk.

    Parameters
    ----------
    tag
        Name of the image: registry/name:tag.
    engine
        What trains in it: our own engine, or one of the others with its own parts.
    version
        The engine's version (default: the one that recipes without a version are rendered for).
    fabric
        The network between nodes, whose user-space libraries it needs.
    gpu
        Whose GPUs.
    ray
        With Ray, for clusters that start jobs by it.
    base
        The image to build on, whose PyTorch is kept (default: one that fits, by its exact tag).
    venv
        Make an environment at this path in place of an image; it must be new.
    on
        A Slurm cluster: the environment is made on its login node.
    python
        The Python an environment is made with.
    out
        Write the Containerfile (or the script) into this folder and build nothing.
    tool
        What builds it (default: the first of docker, podman, buildah and kaniko that works here).
    push
        Push the image when it is built.
    """
    from trainshed.errors import InputError
    from trainshed.launch.images import ImageRequest

    if (tag is None) == (venv is None):
        raise InputError("name one thing to build", hint="write registry/name:tag, or --venv /shared/path")
    request = ImageRequest(engine, fabric, gpu, ray, version, base)
    if venv is not None:
        return _build_environment(venv, on, python, out, request)
    assert tag is not None
    return _build_image(tag, request, out, tool, push)


def _build_image(tag: str, request: ImageRequest, out: Path | None, tool: BuildTool | None, push: bool) -> int:
    import shlex
    import subprocess
    import tempfile

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.images import CONTAINERFILE, build_commands, containerfile, find_tool

    text = containerfile(request)
    if request.unknown_arguments is not None:
        reporter().warn(request.unknown_arguments)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONTAINERFILE).write_text(text, encoding="utf-8", newline="\n")
        commands = build_commands(tag, str(out), tool=tool or "docker", push=push)
        reporter().note("written; build it with\n" + "\n".join("  " + shlex.join(argv) for argv in commands))
        return 0
    usable = find_tool(tool)
    if usable is None:
        commands = build_commands(tag, "FOLDER", tool=tool or "docker", push=push)
        raise InputError(
            f"no {tool or 'docker, podman, buildah or kaniko'} works on this machine",
            where="--tool",
            hint="write --out FOLDER, and where there is one: " + "; ".join(shlex.join(argv) for argv in commands),
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONTAINERFILE).write_text(text, encoding="utf-8", newline="\n")
        for command in build_commands(tag, folder, tool=usable, push=push):
            if subprocess.run(command, check=False).returncode:
                return 1
    reporter().note(f"built {tag}; write it into the cluster file, best by digest: `image: {tag}`")
    return 0


def _build_environment(venv: str, on: str | None, python: str, out: Path | None, request: ImageRequest) -> int:
    import subprocess

    from trainshed.cli.console import reporter
    from trainshed.launch.images import venv_script
    from trainshed.recipe import load_cluster

    script = venv_script(venv, python, request)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "environment.sh").write_text(script, encoding="utf-8", newline="\n")
        reporter().note(f"written; run it where the disk is: bash {out / 'environment.sh'}")
        return 0
    login = load_cluster(on).on_slurm.login if on is not None else None
    command = ["ssh", "--", login, "bash", "-s"] if login else ["bash", "-s"]
    code = subprocess.run(command, input=script.encode(), check=False).returncode
    if code == 0:
        reporter().note(f"made; write it into the cluster file: `slurm: {{venv: {venv}}}`")
    return code


storage_app = App(name="storage", help="The volume that a cluster's jobs share.")


@storage_app.command
def up(*overrides: str, on: ClusterName, dry_run: Flag = False) -> int:
    """Make the volumes that a cluster file describes (`volumes: [{pvc: …, create: {…}}]`); nothing deletes them.

    Parameters
    ----------
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    on
        The cluster file.
    dry_run
        Print what would be made, and make nothing.
    """
    import sys

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.kubernetes.storage import apply_storage, storage_text
    from trainshed.recipe import load_cluster, split_overrides

    cluster = load_cluster(on, split_overrides(overrides)[1])
    if cluster.target != "kubernetes":
        raise InputError(
            f"the nodes of a {cluster.target} cluster mount disks themselves", where=cluster.where("target")
        )
    text = storage_text(cluster)
    for sentence in checkpoint_time_notes(cluster):
        reporter().note(sentence)
    if dry_run:
        sys.stdout.write(text)
        return 0
    for made in apply_storage(cluster):
        reporter().note(f"made {made}; it is kept whatever becomes of the jobs")
    return 0


def checkpoint_time_notes(cluster: Cluster) -> list[str]:
    """Say how long checkpoints of known sizes take on the storage that a cluster names."""
    from trainshed.catalog.machines import find_machine
    from trainshed.catalog.models import model_preset
    from trainshed.models.parameters import parameter_count
    from trainshed.plan.budget.checkpoint_cost import checkpoint_cost
    from trainshed.plan.budget.storage import cluster_storage
    from trainshed.plan.layout import resolve_layout
    from trainshed.plan.training_shape import hardware_of
    from trainshed.recipe import Layout

    if cluster.gpu_machine is None or cluster.storage is None:
        return ["no storage is named for the plan (`storage: {tier: …}`): the time of a checkpoint is not known"]
    machine, storage = find_machine(cluster.gpu_machine), cluster_storage(cluster)
    hardware = hardware_of(machine)
    lines = []
    for preset in ("llama3-8b", "llama3-70b", "gpt-175b"):
        config = model_preset(preset)
        layout = resolve_layout(Layout(shard="full"), config, world_size=cluster.nodes.default * machine.gpus)
        cost = checkpoint_cost(parameter_count(config), layout, hardware, storage=storage, machine=machine)
        if cost.write_seconds is not None:
            size = cost.bytes / 1e9
            lines.append(f"a checkpoint of {preset} ({size:,.0f} GB) takes {cost.write_seconds / 60:.1f} minutes there")
    return lines

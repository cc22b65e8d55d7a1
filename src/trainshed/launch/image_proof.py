"""What the first stage of a job looks for in the image that trains, before data is prepared and GPUs are asked for.

`image.json` is a file of the job. In another engine's image the stage `image` reads it with `prove_image.py`, a file of
the job too. Our own image is the one that all stages on CPUs run in: the first of them makes the same checks.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from trainshed.engines import prove_image
from trainshed.engines.launch import NODE_NUMBER, PROGRAMS, EngineLaunch, EngineSite
from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup
from trainshed.recipe import Cluster
from trainshed.reporting import Reporter
from trainshed.run_folder import IMAGE_CHECKS

IMAGE_STAGE = "image"
REQUEST_FILE = "image.json"
PROGRAM_FILE = f"{PROGRAMS}/prove_image.py"
OLDEST_PYTHON = {"torch": (3, 11)}
"""By engine; for what runs of ours in the images of others it is 3.8."""
_OWN_MODULES = ("torch", "safetensors")
_TOPOLOGY = "NCCL_TOPO_FILE"
_KUBERAY_PROGRAMS = {
    "ray": "KubeRay starts every node with it",
    "wget": "KubeRay's probes ask with it whether a node is well",
    "python": "KubeRay's submitter waits with it for the head",
}
"""What KubeRay's operator runs in the image, and what for."""


def image_files(
    engine: str, launch: EngineLaunch | None, site: EngineSite, cluster: Cluster, setup: FabricSetup
) -> dict[str, str]:
    """Return the files of a job that say what is expected of its image, and look for it."""
    expects = launch.expects if launch is not None else None
    program = launch.program if launch is not None and expects is not None and not launch.is_module else None
    on_ray = cluster.target == "kubernetes" and cluster.on_kubernetes.kind == "rayjob"
    in_image = program is not None and expects is not None and expects.program_in_image
    request: dict[str, Any] = {
        "engine": engine,
        "python": OLDEST_PYTHON.get(engine, (3, 8)),
        "run": site.run_folder,
        "verdict": IMAGE_CHECKS,
        "image": site.image if _has_image(cluster) else None,
        "mounts": [{"path": volume.mount, "read_only": volume.read_only} for volume in _volumes(cluster)],
        "modules": (*(expects.modules if expects is not None else _OWN_MODULES), *(("ray",) if on_ray else ())),
        **({"programs": _KUBERAY_PROGRAMS} if on_ray else {}),
        "package": expects.package if expects is not None else None,
        "version": expects.version if expects is not None else None,
        "path": [str(Path(program).parent)] if in_image and program is not None else [],
        "libraries": setup.libraries,
        "library_path": setup.library_path,
        **({"files": files_of_image} if (files_of_image := _named_files(cluster, setup)) else {}),
        "fabric": setup.fabric,
        "program": program,
        "parser": expects.parser if expects is not None else None,
        "config": f"{site.job_folder}/{expects.config}" if expects is not None and expects.config else None,
        "arguments": _arguments(launch) if launch is not None else (),
        "environment": dict(launch.environment) if launch is not None else {},
        "world_size": site.nodes * site.gpus_per_node,
    }
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in request.items())
    files = {REQUEST_FILE: "{\n" + ",\n".join(lines) + "\n}\n"}
    if launch is not None:
        files[PROGRAM_FILE] = Path(prove_image.__file__).read_text(encoding="utf-8")
        files[f"{IMAGE_STAGE}.sh"] = _SCRIPT.format(
            command=shlex.join(("python3", f"{site.job_folder}/{PROGRAM_FILE}", f"{site.job_folder}/{REQUEST_FILE}"))
        )
    return files


def prove_own_image(job_folder: Path, reporter: Reporter) -> None:
    """Make the checks in this process; raises for what would keep the run from training."""
    try:
        asked = json.loads((job_folder / REQUEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:  # a job of an earlier release
        return
    checks = list(prove_image.prove(asked))
    prove_image.keep(asked, checks)
    for check in checks:
        if check.verdict == "warn":
            reporter.warn(f"{check.name}: {check.what}; {check.hint}")
    if failed := [check for check in checks if check.verdict == "fail"]:
        raise InputError(
            "; ".join(f"{check.name}: {check.what}" for check in failed),
            where=asked["image"] or asked["run"],
            hint=failed[0].hint or None,
        )


def _arguments(launch: EngineLaunch) -> list[str]:
    """Return the words as a rank will get them; what only a running job knows is stood in for."""
    words = list(launch.arguments)
    for start, file in launch.late_arguments.items():
        words += [f"{start}[1.0,{file}]"] if start.endswith("=") else [start, file]
    return words + [word.replace(NODE_NUMBER, "0") for word in launch.node_arguments]


def _has_image(cluster: Cluster) -> bool:
    """Whether stages run in an image; otherwise libraries are those of whichever node a stage runs on."""
    return cluster.target != "slurm" or cluster.on_slurm.container != "none"


def _volumes(cluster: Cluster) -> list[Any]:
    """Return the volumes that every stage sees; a folder of the node is another one on each."""
    return [volume for volume in cluster.volumes if volume.host is None] if cluster.target == "kubernetes" else []


def _named_files(cluster: Cluster, setup: FabricSetup) -> dict[str, str]:
    """Return the file that NCCL_TOPO_FILE names, unless pods get it from their node."""
    path = cluster.environment.get(_TOPOLOGY) or setup.environment.get(_TOPOLOGY)
    if not path:
        return {}
    if cluster.target == "slurm":
        mounted = [mount.split(":")[1] for mount in setup.slurm.mounts]
    else:
        of_node = [volume.mount for volume in cluster.volumes if volume.host is not None]
        mounted = [*of_node, *(mount["mountPath"] for mount in setup.kubernetes.mounts)]
    return {} if any(Path(path).is_relative_to(place) for place in mounted) else {_TOPOLOGY: path}


_SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
if ! command -v python3 >/dev/null; then
  echo "error: this image has no python3: name one that has the engine (engine.image)" >&2
  exit 2
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))'; then
  echo "error: $(python3 --version 2>&1) in this image, and 3.8 or newer is needed: name another (engine.image)" >&2
  exit 2
fi
exec {command}
"""

"""The images of the seeds as folders: Megatron-LM where each image has it, and Python with what ours needs."""

from __future__ import annotations

import sys
from pathlib import Path

from support.clusters.pod_runner import Image
from support.runs.megatron_lm import environment, unpacked
from trainshed.launch.fabric import fabric_setup
from trainshed.recipe import Cluster

_THREADS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_LIBRARIES = "/opt/fabric/lib"
MACHINE = """
{name}:
  source: a part of a node, as large as this machine can play
  gpu: {gpu}
  gpus: 2
  fabric: {fabric}
  network_gbps: 400.0
  nics: 1
  frontend_gbps: 20.0
  cpus: 24
  memory_gib: 200.0
  local_disk_tb: 7.0
  watts: 2550.0
"""


def megatron_image(version: str, place: str, folder: Path, cluster: Cluster) -> Image:
    """An image with a version of Megatron-LM at a place, and with the names of what a cluster's fabric needs."""
    source = unpacked(version, folder)
    variables = environment(Path(place), folder)
    kept = {name: variables[name] for name in variables if name not in ("HOME", "KUBECONFIG", "HF_ENDPOINT")}
    folders = {place: source, **fabric_libraries(cluster, folder / "lib")}
    return Image(folders, kept | {"LD_LIBRARY_PATH": _LIBRARIES})


def fabric_libraries(cluster: Cluster, folder: Path) -> dict[str, Path]:
    """A folder of an image with the names of the libraries that a cluster's fabric needs, by its place there."""
    folder.mkdir()
    for names in fabric_setup(cluster, nodes=2).libraries:
        (folder / names.partition("|")[0]).touch()
    return {_LIBRARIES: folder}


def own_image(**variables: str) -> Image:
    """An image that has what our code depends on: this machine's Python, which the cluster file names."""
    return Image({}, _THREADS | variables)


def small_machine(folder: Path, name: str, gpu: str, fabric: str) -> str:
    """A machine like the cluster's own with two GPUs, for `machine` of a cluster file."""
    file = folder / "machine.yaml"
    file.write_text(MACHINE.format(name=name, gpu=gpu, fabric=fabric))
    return str(file)


def pod_overrides(folder: Path, gpu: str, fabric: str) -> list[str]:
    """Keys of a shipped cluster file that differ where its pods are processes here."""
    return [
        f"machine={small_machine(folder, 'small', gpu, fabric)}",
        f"python={sys.executable}",
        "kubernetes.namespace=ml",
        "preflight=false",
        "limits={restarts: 2, grace_seconds: 60}",
    ]


def cpu_overrides() -> list[str]:
    """The same for our own engine, whose ranks take what a node has: these have processors alone, and no fabric."""
    return [
        *("machine=cpu", "fabric=null", f"python={sys.executable}", "kubernetes.namespace=ml", "preflight=false"),
        "limits={restarts: 2, grace_seconds: 60}",
        *(f"environment.TRAINSHED_{name}" for name in ("ROLL_CALL_SECONDS=20", "FAILURE_GRACE_SECONDS=5")),
    ]

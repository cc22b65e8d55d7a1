"""Jobs as the line would make them, by hand: small, and the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from trainshed.launch.job import CodeArchive, Job, JobFile, ServingSpec, Stage
from trainshed.recipe import Cluster, load_cluster
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import parse_yaml

NAME = "llama-1a2b3c4d"
RUN = "/data/runs/llama/1a2b3c4d"
RECIPE = "trainshed: 1\nname: llama\ntrain:\n  mode: pretrain\n  steps: 1000\n"
CODE = CodeArchive(
    "trainshed-0.1.0-0123456789ab.tar.xz", "0123456789ab" * 5 + "0123", b"\xfd7zXZ of the tests", "0.1.0"
)
MEGATRON_SCRIPT = '#!/usr/bin/env bash\nexec torchrun --node-rank "$NODE_RANK" --nnodes "$NNODES" pretrain_gpt.py\n'
CLUSTERS = ("gke-a3-mega", "gke-a3-ultra", "aks-nd-h100-v5", "eks-p4d", "eks-p5", "minio-mi300x-ray")
"""The shipped cluster files of this target."""


def cluster_of(body: dict[str, Any]) -> Cluster:
    """A cluster file with some keys; the others are the smallest that pods need."""
    smallest = {"name": "mine", "target": "kubernetes", "image": "registry/trainshed:1", "machine": "dgx-h100"}
    return validate(Cluster, parse_yaml(yaml.safe_dump(smallest | body), "mine.yaml"))


def stages_of(cluster: Cluster, engine: str = "torch", nodes: int | None = None) -> tuple[Stage, ...]:
    """The stages of a line: two on CPUs, one of them in parts, then the training."""
    foreign = {"script": "train.sh", "image": "nvcr.io/nvidia/nemo:25.09"} if engine != "torch" else {}
    gpus = 8 if cluster.machine is not None else 0
    return (
        Stage("fetch", cpus=8, memory="32Gi"),
        Stage("tokenise", parts=4, cpus=8, memory="32Gi"),
        Stage(
            "train",
            nodes=nodes or cluster.nodes.default,
            gpus_per_node=gpus,
            ranks_per_node=gpus or 1,
            restarts=3,
            preflight=True,
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if foreign else {},
            **foreign,
        ),
    )


def job_of(
    cluster: Cluster | str,
    *,
    stages: Sequence[Stage] | None = None,
    files: dict[str, str] | None = None,
    code: CodeArchive | None = CODE,
    name: str = NAME,
) -> Job:
    """A job on a cluster."""
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    steps = tuple(stages_of(found) if stages is None else stages)
    described = JobFile(name, RUN, steps, 300, "bf16", "0.1.0").to_text()
    given = {"recipe.yaml": RECIPE, "job.json": described} if files is None else files
    given |= {stage.script: MEGATRON_SCRIPT for stage in steps if stage.script is not None}
    return Job(name=name, run=RUN, cluster=found, stages=steps, files=given, code=code, steps=1000, grace_seconds=300)


def served(cluster: Cluster, *, script: bool = False, **serving: Any) -> tuple[Stage, ...]:
    """A line that ends with a server: ours on one GPU, or one that a script starts on eight."""
    words = ("serve", f"{RUN}/export", "--host", "0.0.0.0", "--name", "llama", "--grace", "120")
    foreign = {"script": "serve.sh", "image": "vllm/vllm-openai:v0.27.1", "gpus_per_node": 8} if script else {}
    asked = {"ready": "/health"} if script else {"words": words}
    gpus = 1 if cluster.machine is not None else 0
    serve = Stage("serve", **{"gpus_per_node": gpus, "restarts": 3} | foreign, serving=ServingSpec(**asked | serving))
    return (Stage("export", cpus=8, memory="32Gi"), serve)


def train_alone(**keys: Any) -> tuple[Stage, ...]:
    """A job of one stage, which needs no driver."""
    return (Stage("train", **{"nodes": 2, "gpus_per_node": 8, "ranks_per_node": 8, "restarts": 3} | keys),)

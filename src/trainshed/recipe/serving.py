"""`export` and `serve`: what becomes of the trained weights, and how they are served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainshed.recipe.registered import EngineArgument, choice_or_registered
from trainshed.recipe.section import (
    VARIABLE_PATTERN,
    NotNegativeInt,
    Port,
    PositiveInt,
    Problem,
    Quantity,
    Section,
    StoreAddress,
    Text,
)


class Export(Section):
    """What becomes of the trained weights; of a run with `train.lora`, its adapters become a folder of PEFT's."""

    format: Literal["hf", "megatron", "gguf"] = Field(
        "hf", description="Format of the exported weights: transformers', Megatron's, or llama.cpp's single file"
    )
    dtype: Literal["bf16", "fp32", "fp16", "fp8", "q8_0"] = Field(
        "bf16",
        description="Their dtype; `fp8` of hf (compressed-tensors, a scale for each row), `fp16` and `q8_0` of gguf",
    )
    merge: bool | None = Field(
        None, description="Of a run with `train.lora`: export the base with the adapters merged into it"
    )
    weights: Literal["trained", "ema"] = Field(
        "trained", description="The weights as trained, or those that `train.ema` has averaged"
    )
    to: StoreAddress | None = Field(
        None,
        description="Where they go; left out: `export` in the run's folder; hf://org/name publishes that on the Hub, "
        "and with `serve` a bucket gets a copy of it",
    )

    def problems(self) -> Iterator[Problem]:
        """A format has its dtypes, and the Hub its names."""
        if self.to is not None and self.to.startswith("hf://") and not _HUB_MODEL.fullmatch(self.to):
            yield Problem(
                ("to",), "weights are published as a model of the Hub", "write hf://org/name, without a revision"
            )
        if self.dtype not in EXPORT_DTYPES[self.format]:
            yield Problem(
                ("dtype",),
                f"{self.format} is not written in {self.dtype}",
                f"write {', '.join(EXPORT_DTYPES[self.format])}",
            )


_HUB_MODEL = re.compile(r"hf://(?!(?:datasets|spaces)/)[\w.-]+/[\w.-]+/?")
EXPORT_DTYPES = {
    "hf": ("bf16", "fp32", "fp8"),
    "megatron": ("bf16", "fp32"),
    "gguf": ("bf16", "fp16", "fp32", "q8_0"),
}
"""The dtypes that each format is written in."""


ADAPTER_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
"""No equals sign: servers are told NAME=ADDRESS."""
AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME_PATTERN)]
VariableName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]


class Serve(Section):
    """A server of the exported weights, started by the cluster after `export`."""

    engine: Annotated[str, choice_or_registered("serving engine", Literal["torch", "vllm"])] = Field(
        "torch", description="What answers: our own server, vLLM in its image, or one that a plugin registers"
    )
    gpus: NotNegativeInt = Field(1, description="GPUs of one replica, all on one node; 0: processors")
    replicas: PositiveInt = Field(1, description="How many servers share the requests (Kubernetes)")
    port: Port | None = Field(
        None,
        description="Port of the server; left out: 8000, and on Slurm, where jobs share nodes, one that follows from "
        "the job's id",
    )
    max_length: PositiveInt | None = Field(
        None, description="Tokens of prompt and answer together; left out: the model's own length"
    )
    max_sequences: PositiveInt | None = Field(
        None, description="How many questions are answered at once; left out: what the server's memory holds"
    )
    image: Text | None = Field(
        None,
        description="Container image of the server, best by digest; left out: the cluster's",
        examples=["vllm/vllm-openai@sha256:…"],
    )
    api_key: VariableName | None = Field(
        None,
        description="Name of a secret of the cluster file which every question must bring; left out: none is asked for",
        examples=["SERVE_KEY"],
    )
    adapters: Annotated[dict[AdapterName, StoreAddress], Field(min_length=1)] | None = Field(
        None,
        description="LoRA adapters over the served weights by the name that requests write as their model: PEFT's "
        "folders, or LoRA runs (torch)",
        examples=[{"support": "/shared/adapters/support"}],
    )
    args: dict[str, EngineArgument] = Field(
        default_factory=dict, description="Flags handed to vLLM as they are (checked against its list)"
    )
    cpus: PositiveInt | None = Field(
        None, description="CPUs of one replica; left out: the cluster's `limits.cpu_stage_cpus` on processors"
    )
    memory: Quantity | None = Field(
        None,
        description="Memory of one replica; left out: the cluster's `limits.cpu_stage_memory` on processors",
        examples=["64Gi"],
    )

    def problems(self) -> Iterator[Problem]:
        """Our own server is one process on at most one GPU; flags are vLLM's."""
        if self.engine == "torch":
            if self.gpus > 1:
                yield Problem(
                    ("gpus",),
                    f"the torch server is one process on one GPU, and {self.gpus} are asked for",
                    "write `engine: vllm` to spread a model over several, or `gpus: 1`",
                )
            if self.args:
                yield Problem(
                    ("args",), "the torch server takes no `args`: its options are keys of the recipe", "delete it"
                )
        elif self.gpus == 0 and self.engine == "vllm":
            yield Problem(("gpus",), "vLLM serves on GPUs here", "write `gpus: 1` or more, or `engine: torch`")
        if self.engine == "vllm":
            for name, address in (self.adapters or {}).items():
                if "://" in address and (not address.startswith("hf://") or "@" in address):
                    yield Problem(
                        ("adapters", name),
                        "vLLM reads adapters from a path, or from the Hub without a revision",
                        "fetch it to a path that its node mounts",
                    )

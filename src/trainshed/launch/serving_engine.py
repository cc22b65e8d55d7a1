"""The servers that `serve.engine` can name, and the base class of one that a plugin brings.

Our own server is started by `trainshed serve`. Any other one is a command in an image or environment of its own, which
reads the exported weights (Hugging Face's format, with the tokenizer beside them).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from trainshed.engines.launch import PROGRAMS
from trainshed.launch import megatron_api
from trainshed.launch.vllm import vllm_command
from trainshed.plugins import Registry
from trainshed.recipe import Recipe
from trainshed.recipe.section import Problem


class ServingEngine(ABC):
    """A server that is not ours: its command, and how it is asked whether it serves."""

    ready: ClassVar[str] = "/health"
    """The path that answers once the weights are loaded."""
    startup_seconds: ClassVar[int] = 0
    """What it takes to start besides reading the weights: compiling, capturing graphs."""
    key_variable: ClassVar[str | None] = None
    """The variable it reads the key from that every request must bring; None: it knows no keys."""
    serves_adapters: ClassVar[bool] = False
    """Whether `command` honours `serve.adapters`."""

    @abstractmethod
    def command(self, recipe: Recipe, folder: str, *, drain_seconds: int) -> list[str]:
        """Return the command that serves the weights in a folder; `--port N` is added to it.

        It must honour what `recipe.serve` says: gpus, max_length, max_sequences and args.
        """

    def job_files(self) -> dict[str, str]:
        """Return further files that a job needs, by name; the folders they are in are on PYTHONPATH."""
        return {}

    def job_arguments(self) -> list[str]:
        """Return arguments that `command` gets in a job, where `job_files` are."""
        return []

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        """Yield what the recipe asks for and this server cannot do, with paths such as ("serve", "args", "x")."""
        return iter(())


class VllmServer(ServingEngine):
    """vLLM."""

    # It compiles and captures its graphs before it answers: minutes for a large model.
    startup_seconds = 600
    key_variable = "VLLM_API_KEY"
    serves_adapters = True

    def command(self, recipe: Recipe, folder: str, *, drain_seconds: int) -> list[str]:
        """Return `vllm serve`."""
        return vllm_command(recipe, folder, drain_seconds=drain_seconds)

    def job_files(self) -> dict[str, str]:
        """Return what answers Megatron's clients."""
        file = Path(megatron_api.__file__)
        return {f"{PROGRAMS}/{file.name}": file.read_text(encoding="utf-8")}

    def job_arguments(self) -> list[str]:
        """Return how vLLM takes it in."""
        return ["--middleware", f"{Path(megatron_api.__file__).stem}.{megatron_api.MegatronApi.__name__}"]


SERVING_ENGINES: Registry[Any] = Registry(
    "serving engine", {"torch": "trainshed.serve.http.server:serve_http", "vllm": VllmServer}
)
"""By name: a `ServingEngine`, but for our own server."""


def serving_engine(name: str) -> ServingEngine:
    """Return a server that is not ours."""
    return SERVING_ENGINES.find(name)()

"""vLLM as a server: its command, and `serve.args` checked against its flags (`vllm-flags-VERSION.json`)."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainshed.recipe import Recipe
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error

VllmFlagKind = Literal["switch", "int", "float", "text", "json", "ints"]
"""switch: `--x` or `--no-x`; json: a mapping written as text; ints: several whole numbers after one flag."""

VLLM_VERSION = "0.27.1"
"""The version that the flags are of; `--shutdown-timeout`, with which a server drains, exists since 0.18."""
# Flags that Trainshed sets, with the recipe's key for each.
_FLAGS_OF_THE_RECIPE = {
    "--model": "export",
    "--served-model-name": "name",
    "--tensor-parallel-size": "serve.gpus",
    "--pipeline-parallel-size": "serve.gpus",
    "--data-parallel-size": "serve.replicas",
    "--host": None,
    "--port": "serve.port",
    "--max-model-len": "serve.max_length",
    "--max-num-seqs": "serve.max_sequences",
    "--shutdown-timeout": None,
    "--enable-lora": "serve.adapters",
    "--lora-modules": "serve.adapters",
    "--max-loras": "serve.adapters",
    "--middleware": None,
}
_KIND_TEXT = {
    "switch": "true or false",
    "int": "a whole number",
    "float": "a number",
    "text": "text",
    "json": "JSON in quotes",
    "ints": "a list of whole numbers",
}


@dataclass(frozen=True)
class VllmFlag:
    """One flag of `vllm serve`."""

    option: str
    kind: VllmFlagKind
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        return f"one of {', '.join(self.choices)}" if self.choices else _KIND_TEXT[self.kind]

    def to_arguments(self, value: Any) -> list[str] | None:
        """Return the arguments that set it; None if it does not take the value."""
        if self.kind == "switch":
            if not isinstance(value, bool):
                return None
            return [self.option if value else f"--no-{self.option.removeprefix('--')}"]
        values = value if self.kind == "ints" else [value]
        if not isinstance(values, list | tuple) or not values or not all(self._accepts(item) for item in values):
            return None
        if self.kind == "ints":
            return [self.option, *map(str, values)]
        # One argument, so that a value which begins with a dash is not taken for a flag.
        return [f"{self.option}={value}"]

    def _accepts(self, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        if self.kind in ("int", "ints"):
            return isinstance(value, int)
        if self.kind == "float":
            return isinstance(value, int | float)
        if self.kind == "json":
            return isinstance(value, str) and _is_json(value)
        return isinstance(value, str) and (not self.choices or value in self.choices)


def vllm_command(recipe: Recipe, folder: str, *, drain_seconds: int) -> list[str]:
    """Return `vllm serve` for an exported folder, without its port; raises one error with all wrong `serve.args`."""
    serve = recipe.serve
    assert serve is not None
    command = ["vllm", "serve", folder, "--served-model-name", recipe.name, "--host", "0.0.0.0"]
    command += ["--tensor-parallel-size", str(serve.gpus), "--shutdown-timeout", str(drain_seconds)]
    if serve.max_length is not None:
        command += ["--max-model-len", str(serve.max_length)]
    if serve.max_sequences is not None:
        command += ["--max-num-seqs", str(serve.max_sequences)]
    if serve.adapters:
        # Of as many adapters as there are, in one batch; vLLM would otherwise take one after the other.
        command += ["--enable-lora", "--max-loras", str(len(serve.adapters)), "--lora-modules"]
        command += [f"{name}={address.removeprefix('hf://')}" for name, address in serve.adapters.items()]
    return [*command, *_serve_arguments(recipe, serve.args)]


@cache
def vllm_flags() -> dict[str, VllmFlag]:
    """Return the flags that `serve.args` may have."""
    document = json.loads(Path(__file__).with_name(f"vllm-flags-{VLLM_VERSION}.json").read_text(encoding="utf-8"))
    return {
        option: VllmFlag(option, flag["kind"], tuple(flag.get("choices", ())))
        for option, flag in document["flags"].items()
    }


def _serve_arguments(recipe: Recipe, args: dict[str, Any]) -> list[str]:
    arguments: list[str] = []
    problems: list[Problem] = []
    for name, value in args.items():
        option = f"--{name.lstrip('-').replace('_', '-')}"
        path = ("serve", "args", name)
        flag = vllm_flags().get(option)
        if flag is None:
            problems.append(_unknown_flag(path, option))
            continue
        if value is None:
            continue
        flag_arguments = flag.to_arguments(value)
        if flag_arguments is None:
            problems.append(Problem(path, f"`{value}` is not what {option} takes", f"write {flag.expected}"))
        else:
            arguments += flag_arguments
    if problems:
        raise recipe_error(problems, recipe.places)
    return arguments


def _unknown_flag(path: tuple[str, ...], option: str) -> Problem:
    if option in _FLAGS_OF_THE_RECIPE:
        key = _FLAGS_OF_THE_RECIPE[option]
        return Problem(path, f"`{option}` is set by Trainshed", f"delete it and write `{key}`" if key else "delete it")
    if option == "--trust-remote-code":
        return Problem(path, "code that comes with weights is never run", "delete it")
    near = difflib.get_close_matches(option, vllm_flags(), n=1, cutoff=0.6)
    return Problem(
        path,
        f"`{option}` is none of the flags of vLLM {VLLM_VERSION} that are known here",
        f"did you mean {near[0].removeprefix('--')}?" if near else "delete it",
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

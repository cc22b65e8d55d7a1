"""Starting another engine: what it is asked to train, what it needs, and the script that starts it on a node.

An adapter (`megatron/`, `nemo/`, `torchtune/`) turns an `EngineTask` into an `EngineLaunch`; `build_launch` picks it
by the recipe. An adapter does not import its framework, and the same task always gives the same bytes.

Tokens, tokenizer and base weights are ready only after the data is prepared. The stage before training stores them
under fixed names in the run's folder (`EngineInput`).

`launcher_script` is torchrun with static ranks in the engine's stock image. Its exit code is torchrun's, so a failed
training is a failed job; after a requested stop it is 128 + signal. It needs bash and coreutils, and nothing of
Trainshed. Every name and value in it is quoted: none can become a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainshed.catalog import Gpu
from trainshed.errors import InputError, RecipeError
from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe

EngineInput = Literal["data-args", "data-prefix", "tokenizer", "base-megatron", "base-hf"]
"""What a CPU stage leaves under `<run>/engine/` for the engine:

data-args       data.json: Megatron's --per-split-data-args-path, {"train": [w, prefix, …], "valid": …, "test": …}
data-prefix     data_prefix.txt: NeMo's `model.data.data_prefix` as one Hydra value
tokenizer       tokenizer/: the tokenizer's files
base-megatron   base/: the base weights as a Megatron `torch_dist` checkpoint, with their verdict
base-hf         base/: the base weights as Hugging Face safetensors
"""


@dataclass(frozen=True)
class EngineSite:
    """Where a foreign engine runs; paths are those that its processes see."""

    run_folder: str
    """The run's folder in the store."""
    job_folder: str
    """The folder of the job's files (`EngineLaunch.files`)."""
    nodes: int
    gpus_per_node: int
    image: str | None = None
    sharp: bool = False
    vendor: Literal["nvidia", "amd"] = "nvidia"

    @property
    def input_folder(self) -> str:
        """The folder with what earlier stages made for the engine."""
        return f"{self.run_folder}/engine"


@dataclass(frozen=True)
class EngineTask:
    """A recipe on one layout, ready to be rendered for another engine."""

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    length: int | None
    """In steps; None where `train.epochs` says it, which torchtune alone takes: it counts its data itself."""
    site: EngineSite

    @property
    def steps(self) -> int:
        """The length in steps, for engines that must be told it."""
        assert self.length is not None, "`epochs` is refused before it is rendered for an engine that counts steps"
        return self.length


@dataclass(frozen=True)
class CpuStage:
    """Work in the engine's image that needs no GPU (building an index), done before GPUs are asked for."""

    name: str
    argv: tuple[str, ...]


NODE_NUMBER = "{node}"


@dataclass(frozen=True)
class EngineLaunch:
    """How to start an engine: on every node torchrun starts `program` with `arguments` on every GPU."""

    program: str
    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files of the job, by their name in the job's folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[EngineInput, ...] = ()
    """What earlier stages leave in the run's folder for it."""
    late_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments whose value is read from a file when the job starts: `{"++model.data.data_prefix=": "/run/…txt"}`."""
    node_arguments: tuple[str, ...] = ()
    """Arguments in which `NODE_NUMBER` stands for the number of the node: files that each node writes for itself."""
    cpu_stages: tuple[CpuStage, ...] = ()
    """What is done before it starts."""
    is_module: bool = False
    """`program` is a Python module (`-m`), not a file."""
    notes: tuple[str, ...] = ()
    """What was chosen, and where this engine differs from what the recipe suggests."""


def build_launch(task: EngineTask, *, gpu: Gpu | None = None) -> EngineLaunch:
    """Return how the engine that a recipe names is started; `gpu` is what it would run on, where that is known."""
    recipe = task.recipe
    if recipe.train.precision == "fp8" and gpu is not None and gpu.dense_tflops.fp8 is None:
        raise RecipeError(
            f"{recipe.engine.name} in fp8 needs GPUs that have it, and {gpu.name} has not",
            where=recipe.where("train.precision"),
            hint="write precision: bf16, or run it on an H100 or newer",
        )
    # Imported here: none of them needs what another one does.
    match recipe.engine.name:
        case "megatron":
            from trainshed.engines.megatron.launch import megatron_launch

            return megatron_launch(task)
        case "nemo":
            from trainshed.engines.nemo.launch import nemo_launch

            return nemo_launch(task)
        case "torchtune":
            from trainshed.engines.torchtune.launch import torchtune_launch

            return torchtune_launch(task)
    raise RecipeError(
        f"{recipe.engine.name} is our own engine: it needs no adapter",
        where=recipe.where("engine.name"),
        hint="engine: megatron, nemo or torchtune",
    )


_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Ranks get the signal themselves: torchrun would kill them 30 seconds after its own, in the middle of a checkpoint.
# Both signals reach them as TERM, the one that engines know. While there are no ranks yet, torchrun is stopped.
_SIGNAL_HANDLER = """\
torchrun=
requested=
interrupted=
stop() {
  [[ -n $torchrun ]] || exit "$1"
  interrupted=1
  requested=$1
  local ranks
  ranks=$(cat "/proc/$torchrun/task/$torchrun/children" 2>/dev/null || true)
  # shellcheck disable=SC2086 # one word per rank
  kill -TERM ${ranks:-"$torchrun"} 2>/dev/null || true
}
trap 'stop 143' TERM
trap 'stop 138' USR1"""

# A signal ends `wait` early, and what it returns then is not the exit code: ask again.
_WAIT_LOOP = """\
while true; do
  interrupted=
  code=0
  wait "$torchrun" || code=$?
  [[ -n $interrupted ]] || break
done
exec {log}>&-
wait "$tee" || true
exit "${requested:-$code}"
"""


def launcher_script(launch: EngineLaunch, site: EngineSite, *, python: str = "python3") -> str:
    """Return the script that every node runs; `python` is the one that has the engine.

    It reads NODE_RANK (or what Slurm and Kubernetes call it), MASTER_ADDR and MASTER_PORT, and TRAINSHED_ATTEMPT. The
    log goes to stdout and to `<run>/logs/attempt-NNNN/node-NNNNN.log`.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "set -euo pipefail",
            *_identity_lines(site),
            *_environment_lines(launch),
            *_argument_lines(launch),
            _SIGNAL_HANDLER,
            'exec {log}> >(trap "" TERM USR1 INT; exec tee -a "$file")',
            "tee=$!",
            *_torchrun_lines(launch, site, python),
            "torchrun=$!",
            _WAIT_LOOP,
        ]
    )


def _identity_lines(site: EngineSite) -> Iterator[str]:
    yield "node=${NODE_RANK:-${TRAINSHED_NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}"
    yield "attempt=${TRAINSHED_ATTEMPT:-}"
    yield "[[ -n $attempt || ! ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || attempt=$((${SLURM_RESTART_COUNT:-0} + 1))"
    # Checked before bash counts with them: arithmetic would run a command that hides in a variable.
    yield '[[ $node =~ ^[0-9]+$ ]] || { echo "NODE_RANK is no number: ${node:-not set}" >&2; exit 2; }'
    yield '[[ $attempt =~ ^[0-9]+$ ]] || { echo "TRAINSHED_ATTEMPT is no number: $attempt" >&2; exit 2; }'
    yield ': "${MASTER_ADDR:?the address of node 0 is not set}" "${MASTER_PORT:?the port of node 0 is not set}"'
    yield f"folder={shlex.quote(f'{site.run_folder}/logs')}/$(printf 'attempt-%04d' \"$((10#$attempt))\")"
    yield 'mkdir -p "$folder"'
    yield "file=$folder/$(printf 'node-%05d.log' \"$((10#$node))\")"


def _environment_lines(launch: EngineLaunch) -> Iterator[str]:
    for name, value in launch.environment.items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise InputError(f"`{name}` is not the name of a variable", hint="letters, digits and underscores")
        yield f"export {name}={shlex.quote(value)}"


def _argument_lines(launch: EngineLaunch) -> Iterator[str]:
    yield "arguments=("
    yield from (f"  {shlex.quote(word)}" for word in launch.arguments)
    yield ")"
    for start, file in launch.late_arguments.items():
        yield f"late=$(cat {shlex.quote(file)})"
        # `key=` and its value are one word, `--key` and its value two.
        between = "" if start.endswith("=") else " "
        yield f'arguments+=({shlex.quote(start)}{between}"$late")'
    for word in launch.node_arguments:
        before, after = (shlex.quote(part) for part in word.split(NODE_NUMBER))
        yield f'arguments+=({before}"$((10#$node))"{after})'


def _torchrun_lines(launch: EngineLaunch, site: EngineSite, python: str) -> Iterator[str]:
    words = [
        shlex.quote(python),
        "-m torch.distributed.run",
        f"--nnodes {site.nodes}",
        '--node-rank "$node"',
        '--master-addr "$MASTER_ADDR"',
        '--master-port "$MASTER_PORT"',
        f"--nproc-per-node {site.gpus_per_node}",
    ]
    yield " \\\n  ".join([*words, *(["--module"] if launch.is_module else [])]) + " \\"
    yield f'  {shlex.quote(launch.program)} "${{arguments[@]}}" >&"$log" 2>&1 &'
